#!/usr/bin/env bash
# Fills fuzz/corpus from the demo model and the fixtures, in each target's input form.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 - <<'PYTHON'
from pathlib import Path

def seed(target, name, data):
    # Long inputs are slow to mutate and say nothing that short ones do not.
    if len(data) > 100_000:
        return
    folder = Path("fuzz/corpus") / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)

for path in [*Path("models").glob("*/*.safetensors"), *Path("fixtures").glob("*/*.safetensors")]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    payload = (len(data) - end).to_bytes(8, "little")
    seed("safetensors_header", f"{path.parent.name}-{path.stem}", payload + data[8:end])

configs = [*Path("fixtures/configs").glob("*.json"), *Path(".").glob("*/*/config.json")]
for path in configs:
    seed("config", f"{path.parent.name}-{path.stem}", path.read_bytes())

for path in Path(".").glob("*/*/tiktoken.model"):
    config = (path.parent / "tokenizer_config.json").read_bytes()
    seed("tokenizer", path.parent.name, path.read_bytes() + b"\0" + config)
PYTHON

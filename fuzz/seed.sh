#!/usr/bin/env bash
# Fills fuzz/corpus from the demo model and the fixtures, in each target's input form.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 - <<'PYTHON'
import json
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

for path in Path("fixtures").glob("*.waste/manifest.json"):
    manifest = json.loads(path.read_text())
    # A few tensors, and one of each packed format: its number, and bytes of 4 rows of 40 inputs.
    trunk = manifest["trunk"][:4]
    end = trunk[-1]["off"] + trunk[-1]["bytes"]
    for fmt, codes in [(2, 4 * 48), (3, 4 * 24), (7, 4 * 16)]:
        trunk.append({"name": f"q{fmt}", "fmt": fmt, "off": end, "shape": [4, 40], "group": 16,
                      "scale_off": codes, "bytes": codes + 4 * 6})
        end += codes + 4 * 6
    manifest["trunk"] = trunk
    seed("waste_manifest", path.parent.name, end.to_bytes(8, "little") + json.dumps(manifest).encode())
PYTHON

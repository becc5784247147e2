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

for path in Path("crates/rill-stream/tests/data").glob("*.safetensors"):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    _, layers, top_k = header["expert_ids"]["shape"]
    token = 2 * layers * top_k
    # Two tokens of so large a model say enough.
    header["expert_ids"] |= {"shape": [2, layers, top_k], "data_offsets": [0, 2 * token]}
    text = json.dumps(header).encode()
    seed("trace", path.stem, len(text).to_bytes(8, "little") + text + data[end : end + 2 * token])
header = {"__metadata__": {"n_experts": "9"}, "expert_ids": {"dtype": "I16", "shape": [5, 3, 2], "data_offsets": [0, 60]}}
text = json.dumps(header).encode()
ids = b"".join(i.to_bytes(2, "little") for n in range(15) for i in (n % 4, 4 + n % 5))
seed("trace", "small", len(text).to_bytes(8, "little") + text + ids)

# The fronts of sessions' files, with a mark that the target puts the model's identity for.
for name, rest in [("plain", '"tokens":8,"note":""'), ("note", '"tokens":8,"note":"so far \\"so\\" good"'),
                   ("latents", '"tokens":8,"note":"","latents":"f32"'), ("full", '"tokens":16,"note":"x"'), ("none", '"tokens":0,"note":"yz"')]:
    head = ('{"model":"' + "#" * 33 + '",' + rest + "}").encode()
    tokens = b"".join(id.to_bytes(4, "little") for id in [5, 77, 3, 300, 12, 9, 501, 44])
    front = b"RILLSESS" + (1).to_bytes(4, "little") + len(head).to_bytes(4, "little") + head
    # Of even length, for which the target adds states; and one without.
    seed("session", name, front + tokens[: 8 * 4] if len(front) % 2 == 0 else front + tokens[: 7 * 4 + 1])
    seed("session", name + "-cut", front)

def matrix(rows, cols, codec, group, codes, scales):
    return {"rows": rows, "cols": cols, "codec": {"name": codec, "group": group, "rate": 0, "width": 0}, "code_bytes": codes, "scale_bytes": scales}

# A container without its checksum, which the target adds: plain and packed tensors, two banks, the second striped.
align = 16384
tensors = [
    ("model.norm.weight", [32], "bf16", 0, 0, 64, 0),
    ("lm_head.weight", [4, 32], "q8", 128, 64, 128, 8),
    ("model.embed_tokens.weight", [4, 32], "q4", 128, 256, 64, 8),
]
keys = ["name", "shape", "codec", "offset", "code_bytes", "scale_bytes"]
run = {"name": "global", "offset": 0, "bytes": align, "checksum": "0" * 16, "tensors": [
    dict(zip(keys, [name, shape, {"name": codec, "group": group, "rate": 0, "width": 0}, *rest])) for name, shape, codec, group, *rest in tensors
]}
stripe = lambda file, bytes: {"directory": 0, "file": file, "bytes": bytes}
container = {
    "format": "rill", "version": 0, "fingerprint": "0" * 32, "directories": ["."],
    "files": [{"name": "config.json", "bytes": 0, "checksum": "2d06800538d394c2"}],
    "trunk": {"directory": 0, "file": "trunk.rill", "bytes": align, "runs": [run]},
    "experts": {
        "gate": matrix(64, 96, "mxfp4", 0, 3072, 192), "up": matrix(64, 96, "mxfp4", 0, 3072, 192),
        "down": matrix(96, 64, "bf16", 0, 12288, 0), "record_bytes": 2 * align,
        "banks": [
            {"layer": 1, "experts": 2, "records": None, "stripes": [stripe("experts-00001.rill", 2 * align)]},
            {"layer": 2, "experts": 3, "records": None, "stripes": [stripe("fast.rill", align), stripe("slow.rill", align)]},
        ],
    },
}
# Records of different sizes, the second bank's in two files.
variable = {
    "gate": matrix(64, 96, "mxfp4z", 0, 20000, 0), "up": matrix(64, 96, "mxfp4z", 0, 20000, 0),
    "down": matrix(96, 64, "mxfp4z", 0, 20000, 0), "record_bytes": 4 * align,
    "banks": [
        {"layer": 1, "experts": 2, "records": [[3, 2], [0, 3]], "stripes": [stripe("experts-00001.rill", 5 * align)]},
        {"layer": 2, "experts": 3, "records": [[4, 1], [0, 4], [5, 2]], "stripes": [stripe("fast.rill", align), stripe("slow.rill", 3 * align)]},
    ],
}
for name, experts in [("whole", container["experts"]), ("dense", None), ("variable", variable)]:
    manifest = container | {"experts": experts}
    text = json.dumps(manifest, indent=2)
    seed("container_manifest", name, (text.removesuffix("\n}") + ",").encode())

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

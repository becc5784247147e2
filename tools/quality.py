#!/usr/bin/env python3
"""What smaller formats cost: converts the demo model every way and writes docs/quality.md.

    cargo build --release -p rill-cli && tools/quality.py target/release/rill [--capitals]

Perplexity takes about 40 seconds of one core for each of the nine containers; --capitals also asks for the capital of
every country the model was shown, which takes a minute more for each.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/k3-nano"
FORMATS = ["source", "q8", "q4"]


def rill(program, *args):
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"rill {' '.join(map(str, args))}: {done.stderr}")
    return done.stdout


def mean_error(classes):
    """Mean and largest error of the tensors of some classes, and where the largest is."""
    tensors = sum(c["tensors"] for c in classes)
    worst = max(classes, key=lambda c: c["worst"])
    return sum(c["mean"] * c["tensors"] for c in classes) / tensors, worst["worst"]


def measure(program, experts, trunk, ask):
    with tempfile.TemporaryDirectory() as folder:
        container = Path(folder) / "container"
        rill(program, "convert", MODEL, container, "--experts", experts, "--trunk", trunk)
        size = sum(f.stat().st_size for f in container.iterdir())
        verified = json.loads(rill(program, "verify", container, "--source", MODEL, "--json"))
        classes = verified["weight_errors"]
        found = {
            "bytes": size,
            "experts": mean_error([c for c in classes if c["experts"]]),
            # Norms, vectors and routers stay as published in every container.
            "trunk": mean_error([c for c in classes if not c["experts"] and is_matrix(c["class"])]),
        }
        text = MODEL / "heldout.txt"
        found["perplexity"] = json.loads(
            rill(program, "eval", "--perplexity", text, "--json", "-m", container)
        )["perplexity"]
        if ask:
            found["capitals"] = 0
            for line in (ROOT / "crates/rill/tests/data/capitals.tsv").read_text().splitlines():
                country, capital = line.split("\t")
                question = f"What is the capital of {country}?"
                answer = rill(program, "run", "-q", "-m", container, question)
                found["capitals"] += answer == f"The capital of {country} is {capital}.\n"
        return found


def is_matrix(name):
    """Whether --trunk changes tensors of this class."""
    small = ["norm", "conv1d", "A_log", "dt_bias", "res_proj", "correction_bias", ".gate.weight"]
    return not any(part in name for part in small)


def error(pair):
    return "0" if pair == (0, 0) else f"{100 * pair[0]:.2f} %, {100 * pair[1]:.2f} %"


def main():
    program, ask = sys.argv[1], "--capitals" in sys.argv[2:]
    rows = []
    reference = None
    for experts in FORMATS:
        for trunk in FORMATS:
            found = measure(program, experts, trunk, ask)
            reference = reference or found["perplexity"]
            cells = [
                experts,
                trunk,
                f"{found['bytes'] / 1e6:.2f} MB",
                error(found["experts"]),
                error(found["trunk"]),
                f"{found['perplexity']:.4f}",
                f"{100 * (found['perplexity'] / reference - 1):+.2f} %",
            ]
            if ask:
                cells.append(str(found["capitals"]))
            rows.append("| " + " | ".join(cells) + " |")
            print(rows[-1], flush=True)
    head = ["experts", "trunk", "container", "error of experts", "error of trunk", "perplexity", "change"]
    if ask:
        head.append("capitals of 242")
    table = "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows])
    flag = " --capitals" if ask else ""
    (ROOT / "docs/quality.md").write_text(f"""# What smaller formats cost

k3-nano, converted every way that `rill convert` offers. Perplexity is that of its held-out text (`rill eval --perplexity`), errors are
‖w − w′‖ / ‖w‖ against the checkpoint (`rill verify --source`): the mean over tensors, then the worst tensor. The trunk's error is over the
matrices that `--trunk` can change. Written by

```sh
cargo build --release -p rill-cli && tools/quality.py target/release/rill{flag}
```

{table}

The experts are published in four bits already (mxfp4): q8 makes them larger and q4 loses a little and saves nothing. Both are there for
checkpoints in bf16. Here every record is rounded up to the same 16 KiB, so that the container's size shows the trunk alone. A tenth of a percent of
perplexity and a few capitals are noise: they go up as often as down. What a model other than this one loses has not been measured.
""")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What smaller formats cost: converts the demo model every way and writes docs/quality.md.

    cargo build --release -p rill-cli && tools/quality.py target/release/rill [--capitals]

Each container takes about half a minute of two cores; --capitals also asks for the capital of every country the
model was shown, which takes as long again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/k3-nano"
TRUNKS = ["source", "q8", "q4"]
# What is measured: experts and trunk.
CASES = [
    *((experts, "source") for experts in ["source", "mxfp4z", "mxfp4z:3.5", "q8", "q4"]),
    *((f"trellis:{bits}", "source") for bits in [3.5, 3.25, 3, 2.875, 2.5, 2.375, 2]),
    *(("source", trunk) for trunk in TRUNKS[1:]),
    *((f"trellis:{bits}", "q4") for bits in [3.25, 2.875, 2.375]),
]
# Formats of the qualities there are; their layers are shown one by one.
QUALITIES = {
    "lossless": ("mxfp4z", "source"),
    "high": ("trellis:3.25", "q4"),
    "standard": ("trellis:2.875", "q4"),
    "small": ("trellis:2.375", "q4"),
}


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
        info = json.loads(rill(program, "info", container, "--json"))
        formats = info["expert_formats"].values()
        found["bits"] = 8 * sum(f["bytes"] for f in formats) / sum(f["weights"] for f in formats)
        compare = ["eval", "--perplexity", MODEL / "heldout.txt", "--against", MODEL, "--json", "-m"]
        found |= json.loads(rill(program, *compare, container))
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
    rows, layers = [], {}
    for experts, trunk in CASES:
        found = measure(program, experts, trunk, ask)
        cells = [
            experts,
            trunk,
            f"{found['bits']:.2f}",
            error(found["experts"]),
            error(found["trunk"]),
            f"{found['kl_divergence']:.5f}",
            f"{100 * found['agreement']:.1f} %",
            f"{found['perplexity']:.4f}",
            f"{100 * (found['perplexity'] / found['reference_perplexity'] - 1):+.2f} %",
        ]
        if ask:
            cells.append(str(found["capitals"]))
        rows.append(cells)
        layers[experts, trunk] = found["layer_errors"]
        print(*cells, sep=" | ", flush=True)
    head = ["experts", "trunk", "bits", "error of experts", "error of trunk", "divergence", "same token"]
    head += ["perplexity", "change"] + ["capitals of 242"] * ask
    names = [name for name in QUALITIES if name != "lossless"]
    errors = zip(*(layers[QUALITIES[name]] for name in names))
    by_layer = [[str(i), *(f"{100 * e:.2f} %" for e in of)] for i, of in enumerate(errors)]
    flag = " --capitals" if ask else ""
    # What stands below the tables is written by hand.
    page = ROOT / "docs/quality.md"
    _, _, by_hand = page.read_text().partition(BY_HAND)
    page.write_text(f"""# What smaller formats cost

k3-nano, converted in many ways (`rill convert --experts … --trunk …`). Perplexity is that of its held-out text, divergence and how often the same
token is likeliest are against the published model (`rill eval --perplexity … --against …`), errors are ‖w − w′‖ / ‖w‖ against the
checkpoint (`rill verify --source`): the mean over tensors, then the worst tensor. The trunk's error is over the matrices that `--trunk` can
change. Bits are those stored for a weight of an expert, with scales, tables and all that belongs to a matrix, without what rounds records up to 16 KiB:
k3-nano's tiny matrices take more than K3's, for which the table of real rows below counts. Both tables were written by

```sh
cargo build --release -p rill-cli && tools/quality.py target/release/rill{flag}
```

{table(head, rows)}

Qualities are {", ".join(f"{name}: experts {e}, trunk {t}" for name, (e, t) in QUALITIES.items())}. What each layer alone does to its output,
‖h − h′‖ / ‖h‖, when it gets the published model's input:

{table(["layer", *names], by_layer)}

{BY_HAND}{by_hand}""")


BY_HAND = "## Reading the tables"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()

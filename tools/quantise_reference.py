#!/usr/bin/env python3
"""The packing of q8 and q4 as docs/format.md words it, in NumPy and without a line of the Rust encoder.

    tools/quantise_reference.py > crates/rill-convert/tests/data/quantise.json
    tools/quantise_reference.py --encode q4 128 COLS < weights > codes_and_scales

The first packs matrices of models/k3-nano and prints checksums of codes and scales, and relative errors. The second
packs little-endian f32 rows from standard input and writes all codes, then all scales.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np

MODEL = Path(__file__).resolve().parent.parent / "models/k3-nano"
GROUP = 128
# Divisors of the weight of largest magnitude, in the order in which they are tried.
Q4_DIVISORS = [-8.5, -8, -7.5, -7, -6.5, -6]


def pack(name, group, weights):
    """Codes (rows, bytes) and scales (rows, groups) of weights (rows, cols)."""
    parts = [
        {"q8": q8_group, "q4": q4_group}[name](weights[:, at : at + group])
        for at in range(0, weights.shape[1], group)
    ]
    codes = np.concatenate([codes for codes, _ in parts], axis=1)
    scales = np.stack([scale for _, scale in parts], axis=1)
    if not np.isfinite(scales).all():
        sys.exit("a scale is beyond f16")
    return codes, scales


def q8_group(weights):
    largest = np.abs(weights).max(axis=1)
    scale = to_f16(largest / np.float32(127))
    return quantise(weights, scale, -127, 127).astype(np.int8).view(np.uint8), scale


def q4_group(weights):
    rows = np.arange(len(weights))
    # The first of equal magnitudes; a group of zeros counts as +0.
    largest = weights[rows, np.abs(weights).argmax(axis=1)]
    largest = np.where(largest == 0, np.float32(0), largest)
    best_error = np.full(len(weights), np.inf)
    best = np.zeros(len(weights), dtype=np.float16)
    for divisor in Q4_DIVISORS:
        scale = to_f16(largest / np.float32(divisor))
        codes = quantise(weights, scale, -8, 7)
        error = weights.astype(np.float64) - codes.astype(np.float64) * scale[:, None].astype(np.float64)
        # One addition after another: a sum in another order can choose another divisor.
        error = np.add.accumulate(error * error, axis=1)[:, -1]
        better = error < best_error
        best_error[better], best[better] = error[better], scale[better]
    codes = (quantise(weights, best, -8, 7) + 8).astype(np.uint8)
    if codes.shape[1] % 2 == 1:
        codes = np.concatenate([codes, np.full((len(codes), 1), 8, dtype=np.uint8)], axis=1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, best


def to_f16(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float16)


def quantise(weights, scale, low, high):
    scale = scale.astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = np.clip(np.rint(weights / scale), np.float32(low), np.float32(high))
    return np.where(scale == 0, np.float32(0), codes)


def unpack(name, group, codes, scales, cols):
    if name == "q8":
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        # Every group starts with a byte of its own.
        numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)[:, :cols]
        numbers = numbers.astype(np.float32) - 8
    return numbers * scales.astype(np.float32)[:, np.arange(cols) // group]


def mxfp4(codes, scales):
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
    nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
    exponents = np.repeat(scales.astype(np.int32) - 127, 32, axis=1)
    return np.ldexp(values[nibbles], exponents).astype(np.float32)


class Checkpoint:
    def __init__(self, folder):
        self.folder = folder
        self.shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def raw(self, name):
        data = (self.folder / self.shards[name]).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:end])[name]
        first, last = entry["data_offsets"]
        kind = {"BF16": "<u2", "U8": "u1"}[entry["dtype"]]
        return np.frombuffer(data[end + first : end + last], dtype=kind).reshape(entry["shape"])

    def matrix(self, name):
        """A matrix as f32: bf16 widened, or a packed expert decoded."""
        if name in self.shards:
            return (self.raw(name).astype(np.uint32) << 16).view(np.float32)
        return mxfp4(self.raw(name + "_packed"), self.raw(name + "_scale"))


def fixture():
    checkpoint = Checkpoint(MODEL)
    layer = "language_model.model.layers.{}.{}.weight"
    both = ["q8", "q4"]
    matrices = [
        ("language_model.lm_head.weight", ["q8"]),
        (layer.format(0, "mlp.down_proj"), both),
        (layer.format(1, "self_attn.f_b_proj"), both),
        (layer.format(3, "self_attn.kv_b_proj"), both),
        (layer.format(8, "self_attn.o_proj"), both),
        (layer.format(12, "block_sparse_moe.routed_expert_up_proj"), both),
        *((layer.format(1, f"block_sparse_moe.experts.0.w{i}"), both) for i in (1, 2, 3)),
        (layer.format(12, "block_sparse_moe.experts.63.w2"), both),
    ]
    found = []
    for tensor, formats in matrices:
        weights = checkpoint.matrix(tensor)
        for name in formats:
            codes, scales = pack(name, GROUP, weights)
            distance = unpack(name, GROUP, codes, scales, weights.shape[1]).astype(np.float64) - weights
            error = np.sqrt((distance**2).sum() / (weights.astype(np.float64) ** 2).sum())
            found.append(
                {
                    "tensor": tensor,
                    "format": name,
                    "shape": list(weights.shape),
                    "codes_crc32": f"{zlib.crc32(codes.tobytes()):08x}",
                    "scales_crc32": f"{zlib.crc32(scales.astype('<f2').tobytes()):08x}",
                    "relative_error": float(f"{error:.5e}"),
                }
            )
    lines = ",\n".join("  " + json.dumps(entry) for entry in found)
    print(f"[\n{lines}\n]")


def encode(name, group, cols):
    weights = np.frombuffer(sys.stdin.buffer.read(), dtype="<f4").reshape(-1, cols)
    codes, scales = pack(name, group, weights)
    sys.stdout.buffer.write(codes.tobytes() + scales.astype("<f2").tobytes())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--encode"]:
        encode(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        fixture()

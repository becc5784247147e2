#!/usr/bin/env python3
"""What residual vector quantisation does to the real rows of Kimi K3: three tables of 256 entries of eight weights,
which with a scale per row are 3.0 bits a weight, as `.waste` has them (vq3r).

    tools/vq_rows.py            (needs NumPy)

Tables are made by k-means for the first 32 rows of fixtures/k3-real, each for what the one before has left; errors are
‖W − W′‖/‖W‖ of the other 32. Greedy takes the nearest entry stage by stage; the beam keeps the eight best of all pairs.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parent.parent / "fixtures/k3-real/mxfp4_rows.safetensors"
ROWS, COLS = 64, 3584
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
STAGES, ENTRIES, VECTOR, BEAM, ROUNDS = 3, 256, 8, 8, 40


def weights():
    data = np.frombuffer(FILE.read_bytes(), np.uint8)
    codes, scales = ROWS * COLS // 2, ROWS * COLS // 32
    nibbles = data[-codes - scales : -scales].reshape(ROWS, COLS // 2)
    nibbles = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(ROWS, COLS // 32, 32)
    exponents = data[-scales:].reshape(ROWS, COLS // 32, 1).astype(np.float32)
    return (VALUES[nibbles] * np.exp2(exponents - 127)).reshape(ROWS, COLS)


def distances(vectors, table):
    """Squared, up to a term of the vectors alone."""
    return (table**2).sum(1) - 2 * vectors @ table.T


def k_means(vectors, random):
    table = vectors[random.choice(len(vectors), ENTRIES, replace=False)].copy()
    for _ in range(ROUNDS):
        nearest = distances(vectors, table).argmin(1)
        for entry in range(ENTRIES):
            members = vectors[nearest == entry]
            table[entry] = members.mean(0) if len(members) else vectors[random.integers(len(vectors))]
    return table


def greedy(vectors, tables):
    out = np.zeros_like(vectors)
    for table in tables:
        out += table[distances(vectors - out, table).argmin(1)]
    return out


def beam(vectors, tables):
    found = np.zeros((len(vectors), 1, VECTOR), np.float32)
    for table in tables:
        left = vectors[:, None] - found
        cost = (left**2).sum(-1)[..., None] + distances(left, table)
        best = np.argpartition(cost.reshape(len(vectors), -1), BEAM - 1, axis=1)[:, :BEAM]
        path, entry = best // ENTRIES, best % ENTRIES
        found = np.take_along_axis(found, path[..., None], 1) + table[entry]
    best = ((vectors[:, None] - found) ** 2).sum(-1).argmin(1)
    return found[np.arange(len(vectors)), best]


def main():
    random = np.random.default_rng(1)
    rows = weights()
    scale = np.sqrt((rows**2).mean(1, keepdims=True)).astype(np.float16).astype(np.float32)
    vectors = (rows / scale).reshape(ROWS, -1, VECTOR)
    train, test = (half.reshape(-1, VECTOR) for half in np.split(vectors, 2))
    tables, left = [], train
    for _ in range(STAGES):
        tables.append(k_means(left, random))
        left = left - greedy(left, tables[-1:])
    tables = [table.astype(np.float16).astype(np.float32) for table in tables]
    wanted, scales = rows[ROWS // 2 :], scale[ROWS // 2 :]
    for name, encode in ("greedy", greedy), ("beam of 8", beam):
        found = np.concatenate([encode(part, tables) for part in np.array_split(test, 64)])
        found = found.reshape(ROWS // 2, COLS) * scales
        error = np.sqrt(((wanted - found) ** 2).sum() / (wanted**2).sum())
        print(f"{name}: {100 * error:.2f} % at {24 / VECTOR + 16 / COLS:.3f} bits")


if __name__ == "__main__":
    main()

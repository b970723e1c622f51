"""Plain-numpy twins of the compiled kernels: slow, obvious, and independent of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

MASK = 2**64 - 1


def mean_pool(x: F32, run: int) -> F32:
    means = []
    for start in range(0, len(x), run):
        total = np.zeros(x.shape[1], np.float64)
        rows = x[start : start + run]
        for row in rows:
            total = total + row.astype(np.float64)
        means.append((total / len(rows)).astype(np.float32))
    return np.array(means, np.float32).reshape(-1, x.shape[1])


def splitmix64(seed: int, count: int) -> list[int]:
    words = []
    for c in range(count):
        z = (seed + (c + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(z ^ (z >> 31))
    return words


def fwht(y: F32) -> F32:
    stride = 1
    while stride < len(y):
        pairs = y.reshape(-1, 2, stride)
        a, b = pairs[:, 0], pairs[:, 1]
        y = np.stack([a + b, a - b], axis=1).reshape(-1)
        stride *= 2
    return y


def project(x: F32, hdc_dim: int, seed: int) -> U8:
    """Signature of one vector, from the specification alone."""
    return np.packbits(projected(x, hdc_dim, seed) >= 0, bitorder="little")


def projected(x: F32, hdc_dim: int, seed: int) -> F32:
    """What the signs of a signature are taken of, scaled as the specification scales it."""
    padded = 1
    while padded < len(x):
        padded *= 2
    folded = padded
    if padded > 4 * hdc_dim:
        folded = 1
        while folded < 4 * hdc_dim:
            folded *= 2
    blocks = -(-hdc_dim // folded)
    lengths = [padded, folded, folded] * blocks
    words = splitmix64(seed, sum(max(1, n // 64) for n in lengths))

    def flip(y: F32) -> F32:
        taken = [words.pop(0) for _ in range(max(1, len(y) // 64))]
        bits = np.array([taken[i // 64] >> (i % 64) & 1 for i in range(len(y))])
        return np.where(bits == 1, -y, y)

    largest = float(np.abs(x).max())
    scaled = x
    if largest > 0:
        exponent = int(np.frexp(np.float64(largest))[1]) - 1
        scaled = np.ldexp(x.astype(np.float64), 63 - exponent).astype(np.float32)
    scaled = np.concatenate([scaled, np.zeros(padded - len(x), np.float32)])

    outputs = []
    for _ in range(blocks):
        y = flip(scaled)
        total = y[:folded]
        for start in range(folded, padded, folded):
            total = total + y[start : start + folded]
        y = fwht(total)
        y = fwht(flip(y))
        y = fwht(flip(y))
        outputs.append(y)
    return np.concatenate(outputs)[:hdc_dim]


def rounded(x: F32, most: int) -> NDArray[np.int8]:
    """A row as integers of at most `most`, ties to even."""
    peak = np.abs(x).max()
    if peak == 0:
        return np.zeros(len(x), np.int8)
    return np.round(x * (np.float32(most) / peak)).astype(np.int8)


SET_BITS = np.array([f"{byte:b}".count("1") for byte in range(256)], np.uint8)


def hamming(a: U8, b: U8) -> I64:
    """[n, bytes] and [m, bytes] -> [n, m]."""
    return SET_BITS[a[:, None, :] ^ b[None, :, :]].sum(axis=-1, dtype=np.int64)


def late(subs: U8, query: U8) -> int:
    """Late-interaction distance of a query [t, bytes] and an entry's sub-signatures [s, bytes]."""
    return int(hamming(query, subs).min(axis=1).sum())


def dots(subs: U8, query: NDArray[np.int8]) -> I64:
    """Largest dot product of each row of a query [t, bits] with the signs of sub-signatures."""
    signs = np.where(np.unpackbits(subs, axis=1, bitorder="little") == 1, 1, -1)
    return (query.astype(np.int64) @ signs.T).max(axis=1)


def top_k(distances: I64, slots: I64, k: int) -> tuple[I64, I64]:
    """The k smallest, ties to the smaller slot."""
    order = np.lexsort((slots, distances))[:k]
    return distances[order], slots[order]

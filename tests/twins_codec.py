"""Plain-numpy twins of the codec's kernels: slow, obvious, and independent of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
U16 = NDArray[np.uint16]

ONE = np.float32(1)


def spread(x: F32, n: int, d: int) -> F32:
    """A scale or zero [R, G] as [n, d], by the rule of docs/format.md."""
    groups = x.shape[1]
    if groups == d:
        width = 1
    elif groups == (d + 1) // 2:
        width = 2
    else:
        width = 32
        while width * groups < d:
            width += 32
    return np.stack([x[row if len(x) > 1 else 0][np.arange(d) // width] for row in range(n)])


def fit(low: F32, high: F32, wide: bool) -> tuple[F32, F32]:
    """Zeros, and how far the ends of a range are from them."""
    if wide:
        zero = (0.5 * low.astype(np.float64) + 0.5 * high.astype(np.float64)).astype(np.float32)
    else:
        half = np.float32(0.5)
        zero = (half * low + half * high).astype(np.float16).astype(np.float32)
    zero = zero + np.float32(0)
    return zero, np.maximum(np.abs(high - zero), np.abs(low - zero))


def scales(reach: F32, wide: bool) -> F32:
    scale = reach / np.float32(127)
    if wide:
        scale = scale * np.float32(1 - 2.0**-22)
        unit = np.float32(2.0**-149)
    else:
        scale = scale.astype(np.float16).astype(np.float32)
        unit = np.float32(2.0**-24)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(reach / scale > np.float32(127.4), scale + unit, scale)
    return np.where(reach > 0, scale, ONE).astype(np.float32)


def steps(x: F32, s: F32, z: F32, wide: bool) -> I8:
    """The nearest step of each element; s and z are [n, d]."""
    q = np.rint((x - z) / s if wide else (x - z) * (ONE / s))
    if wide:  # the last step must not lead out of float32
        value = z.astype(np.float64) + s.astype(np.float64) * q
        largest = float(np.finfo(np.float32).max)
        q = q - (value > largest) + (value < -largest)
    assert np.abs(q).max() <= 127
    return q.astype(np.int8)


def quantize_channels(x: F32, wide: bool) -> tuple[I8, F32, F32]:
    zero, reach = fit(x.min(axis=0), x.max(axis=0), wide)
    if len(reach) % 2:
        reach = np.append(reach, np.float32(0))
    scale = scales(reach.reshape(-1, 2).max(axis=1), wide)[None]
    s, z = spread(scale, *x.shape), spread(zero[None], *x.shape)
    return steps(x, s, z, wide), scale, zero[None]


def quantize_rows(x: F32, width: int, wide: bool) -> tuple[I8, F32, F32]:
    parts = [x[:, at : at + width] for at in range(0, x.shape[1], width)]
    low = np.stack([part.min(axis=1) for part in parts], axis=1)
    high = np.stack([part.max(axis=1) for part in parts], axis=1)
    zero, reach = fit(low, high, wide)
    scale = scales(reach, wide)
    columns = np.arange(x.shape[1]) // width
    return steps(x, scale[:, columns], zero[:, columns], wide), scale, zero


def dequantize(q: I8, scale: F32, zero: F32) -> F32:
    """x = zero + scale * q, evaluated in float64 and rounded once."""
    n, d = q.shape
    s, z = spread(scale, n, d).astype(np.float64), spread(zero, n, d).astype(np.float64)
    return (z + s * q).astype(np.float32)


def bfloat16(x: float) -> int | None:
    """Bits of one float32 as bfloat16, half to even; None where that is no finite number."""
    bits = int(np.float32(x).view(np.uint32))
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    if magnitude >= 0x7F800000:
        return None
    kept, rest = magnitude >> 16, magnitude & 0xFFFF
    if rest > 0x8000 or (rest == 0x8000 and kept % 2):
        kept += 1
    return None if kept >= 0x7F80 else sign << 15 | kept

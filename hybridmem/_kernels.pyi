"""Signatures of the compiled kernels; every array is C-contiguous and native."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_F32 = NDArray[np.float32]
_I8 = NDArray[np.int8]
_U8 = NDArray[np.uint8]
_U16 = NDArray[np.uint16]
_U32 = NDArray[np.uint32]
_U64 = NDArray[np.uint64]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]

__test__: dict[str, Any]

# Instruction sets
def simd_levels() -> tuple[str, ...]: ...
def simd_level() -> str: ...
def set_simd_level(name: str) -> None: ...

# Pooling and copies
def mean_pool(x: _F32, run: int, out: _F32) -> None: ...
def copy_finite(src: _F32, dst: _F32) -> bool: ...
def all_finite(x: _F32) -> bool: ...

# Projection
def project(
    x: _F32,
    flips: _U64,
    padded: int,
    folded: int,
    bits: int,
    out: _U8 | None,
    values: _F32 | None = None,
) -> None: ...
def round_rows(x: _F32, most: int, out: _I8) -> None: ...

# Hamming distances of whole signatures
def hamming_topk(
    sigs: _U8, queries: _U8, alive: _U8, first_slot: int, best_distance: _U32, best_slot: _I64
) -> None: ...
def hamming_all(sigs: _U8, query: _U8, out: _U32) -> None: ...
def hamming_at(sigs: _U8, rows: _I64, query: _U8, out: _U32) -> None: ...

# Late interaction of sub-signatures
def late_pack(records: _U8, used: _U32, first: int, lanes: int, groups: _U8) -> None: ...
def late_topk(
    groups: _U8,
    used: _U32,
    lanes: int,
    queries: _U8,
    starts: _I64,
    alive: _U8,
    first_slot: int,
    best_distance: _U32,
    best_slot: _I64,
) -> None: ...
def late_all(groups: _U8, used: _U32, lanes: int, query: _U8, out: _U32) -> None: ...
def late_at(groups: _U8, used: _U32, lanes: int, entries: _I64, query: _U8, out: _U32) -> None: ...
def late_dots(
    groups: _U8, used: _U32, lanes: int, entries: _I64, query: _I8, out: _I32
) -> None: ...
def late_gated(
    groups: _U8,
    used: _U32,
    lanes: int,
    entries: _I64 | None,
    query: _U8,
    ends: _U32,
    limits: _U32,
    out: _U32,
) -> None: ...

# Selection
def select_smallest(distances: _U32, alive: _U8, limit: int, out: _I64) -> int: ...

# Stored forms of keys and values
def quantize_channels(x: _F32, wide: bool, q: _I8, scale: _U8, zero: _U8) -> float: ...
def quantize_rows(x: _F32, width: int, wide: bool, q: _I8, scale: _U8, zero: _U8) -> float: ...
def dequantize(q: _I8, scale: _U8, zero: _U8, width: int, wide: bool, out: _F32) -> None: ...
def to_bfloat16(x: _F32, out: _U16) -> bool: ...
def to_float16(x: _F32, out: _U16) -> bool: ...
def from_bfloat16(x: _U16, out: _F32) -> None: ...
def from_float16(x: _U16, out: _F32) -> None: ...

# Attention over stored rows
def attend(
    q: _F32,
    keys: tuple[_F32, ...],
    values: tuple[_F32, ...],
    heads: int,
    kv_heads: int,
    scale: float,
    acc: _F32,
    top: _F32,
    total: _F32,
) -> None: ...
def attend_half(
    q: _F32,
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    bfloat16: bool,
    heads: int,
    kv_heads: int,
    scale: float,
    acc: _F32,
    top: _F32,
    total: _F32,
) -> None: ...
def attend_int8(
    q: _F32,
    k: NDArray[np.int8],
    k_scale: _U8,
    k_zero: _U8,
    k_width: int,
    k_wide: bool,
    v: NDArray[np.int8],
    v_scale: _U8,
    v_zero: _U8,
    v_width: int,
    v_wide: bool,
    heads: int,
    kv_heads: int,
    scale: float,
    acc: _F32,
    top: _F32,
    total: _F32,
) -> None: ...
def write_by_head(keys: _F32, values: _F32, columns: _F32, by_head: _F32, at: int) -> None: ...
def append_by_head(
    key: _F32,
    value: _F32,
    query: _F32,
    columns: _F32,
    by_head: _F32,
    at: int,
    own: _F32,
    own_at: int,
    query_at: int,
) -> None: ...
def start_writing(fd: int, offset: int, length: int) -> None: ...

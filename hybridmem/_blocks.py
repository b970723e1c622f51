"""Signatures side by side in memory, as the kernels want them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridmem import _slabs
from hybridmem.hdc import SignatureSpec

__all__ = ["I64", "LANES", "U8", "U32", "U64", "Block", "Layout", "unsigned"]

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_Unsigned = TypeVar("_Unsigned", np.uint8, np.uint32, np.uint64)

LANES = 64  # sub-signatures whose bytes lie side by side, as the kernels want them


class Layout:
    """How the signatures of a block lie in memory."""

    def __init__(self, spec: SignatureSpec) -> None:
        self.spec = spec
        self.sub_bytes = spec.bits // 8
        slots = spec.slots
        if slots < LANES:
            self.lanes = 1 << (slots - 1).bit_length()
        else:
            self.lanes = -(-slots // LANES) * LANES
        self.entry_bytes = spec.record_bytes if spec.pooled else self.lanes * self.sub_bytes

    def capacity(self, nbytes: int) -> int:
        """Entries of a block of about so many bytes."""
        return max(LANES, nbytes // self.entry_bytes // LANES * LANES)

    def allocate(self, capacity: int) -> U8:
        if self.spec.pooled:
            return _slabs.pages((capacity, self.sub_bytes))
        return _slabs.pages((capacity * self.lanes // LANES, self.sub_bytes, LANES))

    def used(self, n_tokens: U32) -> U32:
        """Lanes in use of entries of so many tokens."""
        if self.spec.pooled:
            return np.ones_like(n_tokens)
        runs = -(-n_tokens.astype(np.int64) // self.spec.signature_tokens)
        return np.minimum(runs, self.spec.slots).astype(np.uint32)

    def entries(self, data: U8) -> NDArray[Any]:
        """A block's data with one index (pooled, own groups) or two (shared groups) per entry."""
        if self.spec.pooled or self.lanes >= LANES:
            return data.reshape(-1, self.entry_bytes)
        shared = LANES // self.lanes
        return data.reshape(-1, self.sub_bytes, shared, self.lanes)

    def move(self, source: U8, rows: I64, target: U8, at: int) -> None:
        """Copy entries into another block, from position `at` on."""
        new = np.arange(at, at + len(rows))
        old_entries, new_entries = self.entries(source), self.entries(target)
        if old_entries.ndim == 2:
            new_entries[new] = old_entries[rows]
        else:
            shared = LANES // self.lanes
            moved = old_entries[rows // shared, :, rows % shared]
            new_entries[new // shared, :, new % shared] = moved


class Block:
    """Places for entries in ascending order of id. Filled places do not change, but for `alive`.

    `used` says how many lanes an entry takes; where signatures are pooled nothing is in it.
    """

    __slots__ = ("alive", "capacity", "data", "dead", "filled", "ids", "used")

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.capacity = capacity
        self.filled = 0
        self.dead = 0
        self.data = layout.allocate(capacity)
        self.ids: U64 = np.zeros(capacity, np.uint64)
        self.alive: U8 = np.zeros(capacity, np.uint8)
        self.used: U32 = np.zeros(capacity, np.uint32)

    def take(self, layout: Layout, other: Block) -> None:
        """Append the live entries of another block."""
        rows = np.flatnonzero(other.alive[: other.filled]).astype(np.int64)
        place = slice(self.filled, self.filled + len(rows))
        layout.move(other.data, rows, self.data, self.filled)
        self.ids[place] = other.ids[rows]
        if not layout.spec.pooled:
            self.used[place] = other.used[rows]
        self.alive[place] = 1
        self.filled += len(rows)


def unsigned(values: ArrayLike, dtype: type[_Unsigned], name: str) -> NDArray[_Unsigned]:
    """C-contiguous array of this type; ValueError where a value would change."""
    array = np.asarray(values)
    if array.dtype != dtype and array.size:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integers, got {array.dtype}")
        if int(array.min()) < 0 or int(array.max()) > int(np.iinfo(dtype).max):
            raise ValueError(f"{name} must fit {np.dtype(dtype)}")
    return np.ascontiguousarray(array, dtype)

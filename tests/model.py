"""A store in plain Python: the oracle of the contract tests and of the state machine.

Everything here is written from the specification (docs/format.md) with numpy, ``math`` and dicts
and imports nothing of ``hybridmem``, so that a mistake there cannot hide behind the same one here.
It is slow on purpose: loops follow the text of the specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

DEFAULT_SEED = 0x4859_4252_4944_4D31
MASK = (1 << 64) - 1
MAX_COUNT = (1 << 32) - 1


# --- the projection ------------------------------------------------------------------------------


def splitmix64(seed: int, counter: int) -> int:
    """Word number ``counter`` of the SplitMix64 stream of ``seed``."""
    z = (seed + (counter + 1) * 0x9E37_79B9_7F4A_7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return z ^ (z >> 31)


def power_of_two_at_least(n: int) -> int:
    p = 1
    while p < n:
        p *= 2
    return p


class ReferenceProjector:
    """The structured projection of docs/format.md, one row at a time."""

    def __init__(self, embed_dim: int, hdc_dim: int = 4096, seed: int = DEFAULT_SEED) -> None:
        self.embed_dim, self.hdc_dim = embed_dim, hdc_dim
        self.padded = power_of_two_at_least(embed_dim)
        if self.padded <= 4 * hdc_dim:
            self.folded = self.padded
        else:
            self.folded = power_of_two_at_least(4 * hdc_dim)
        self.rounds: list[list[NDArray[np.bool_]]] = []
        counter = 0
        for _ in range(-(-hdc_dim // self.folded)):
            block = []
            for length in (self.padded, self.folded, self.folded):
                words = max(1, length // 64)
                bits = [
                    bool(splitmix64(seed, counter + i // 64) >> (i % 64) & 1) for i in range(length)
                ]
                counter += words
                block.append(np.array(bits))
            self.rounds.append(block)

    def project(self, x: Floats) -> Bytes:
        return np.packbits(self.values(x) >= 0, bitorder="little")

    def values(self, x: Floats) -> Floats:
        """What the signs are taken of."""
        assert x.dtype == np.float32
        assert x.shape == (self.embed_dim,)
        largest = float(np.abs(x).max())
        if largest > 0:
            _, exponent = math.frexp(largest)  # largest = m * 2**exponent, m in [0.5, 1)
            # A product of two float64 powers of two, rounded to float32 once.
            x = (x.astype(np.float64) * math.ldexp(1.0, 64 - exponent)).astype(np.float32)
        padded = np.zeros(self.padded, np.float32)
        padded[: self.embed_dim] = x
        outputs = []
        for first, second, third in self.rounds:
            y = np.where(first, -padded, padded)
            folded = y[: self.folded].copy()
            for start in range(self.folded, self.padded, self.folded):
                folded = folded + y[start : start + self.folded]
            y = hadamard(folded)
            y = hadamard(np.where(second, -y, y))
            y = hadamard(np.where(third, -y, y))
            outputs.append(y)
        return np.concatenate(outputs)[: self.hdc_dim]


def hadamard(x: Floats) -> Floats:
    """Fast Walsh-Hadamard transform in natural order, float32 throughout, not normalised."""
    h = 1
    while h < x.size:
        pairs = x.reshape(-1, 2, h)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        h *= 2
    assert x.dtype == np.float32
    return x


def mean_pool(x: Floats) -> Floats:
    """Mean over tokens: a float64 sum in token order, divided, rounded to float32."""
    total = np.zeros(x.shape[1], np.float64)
    for row in x:
        total = total + row.astype(np.float64)
    return (total / len(x)).astype(np.float32)


def hamming(a: Bytes, b: Bytes) -> int:
    return int(np.unpackbits(a ^ b).sum())


# --- the stored forms ----------------------------------------------------------------------------


def to_bfloat16_bits(x: Floats) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, nearest even, as bit patterns."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored_form(x: Floats, kv_dtype: str) -> Floats:
    """What a store of this kv_dtype gives back for x."""
    if kv_dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if kv_dtype == "bfloat16":
        return from_bfloat16_bits(to_bfloat16_bits(x))
    return x.copy()


# --- the store -----------------------------------------------------------------------------------


@dataclass
class Row:
    """One entry as the model knows it."""

    entry_id: int
    layer_idx: int
    keys: Floats
    values: Floats
    importance: float
    signature: Bytes
    timestamp: int = 0
    access_count: int = 0
    padding: float = 0.0

    @property
    def n_tokens(self) -> int:
        return len(self.keys)

    def eviction_key(self) -> tuple[float, int, int]:
        score = self.importance * (1 + math.log(1 + self.access_count))
        return score, self.timestamp, self.entry_id


@dataclass
class Model:
    """The contract in memory. Timestamps are given by the caller, who reads them from the store."""

    embed_dim: int
    hdc_dim: int = 4096
    seed: int = DEFAULT_SEED
    signature_tokens: int = 0
    signature_bits: int = 0
    kv_dtype: str = "float32"
    max_entries: int = 0

    def __post_init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.next_id = 1
        self.queries = 0
        self.hits = 0
        self.bits = (self.signature_bits or self.hdc_dim) if self.signature_tokens else self.hdc_dim
        self.projector = ReferenceProjector(self.embed_dim, self.bits, self.seed)
        # Layer -> mean key and mean query (or None) of the layers that are centred.
        self.means: dict[int, tuple[Floats, Floats | None]] = {}

    def clone_rows(self) -> dict[int, Row]:
        return {i: replace(row) for i, row in self.rows.items()}

    # signatures

    def signature(self, keys: Floats, layer_idx: int = 0) -> Bytes:
        mean_key, _ = self.means.get(layer_idx, (np.zeros(self.embed_dim, np.float32), None))
        if not self.signature_tokens:
            return self.projector.project(mean_pool(keys) - mean_key)
        runs = [
            keys[i : i + self.signature_tokens] for i in range(0, len(keys), self.signature_tokens)
        ]
        parts = [self.projector.project(mean_pool(run) - mean_key) for run in runs]
        parts = parts[: self.hdc_dim // self.bits]
        out = np.zeros(self.hdc_dim // 8, np.uint8)
        joined = np.concatenate(parts)
        out[: joined.size] = joined
        return out

    def padding(self, keys: Floats, layer_idx: int) -> float:
        """Norm of the centred mean key, 0 in a layer that is not centred."""
        if layer_idx not in self.means or self.signature_tokens:
            return 0.0
        centred = mean_pool(keys) - self.means[layer_idx][0]
        return math.sqrt(math.fsum(float(x) ** 2 for x in centred))

    def calibrate(self, layer_idx: int, keys: Floats, queries: Floats | None = None) -> None:
        """Centre a layer; signatures that are there are made anew of their keys."""
        mean_query = None if queries is None else mean_pool(queries)
        self.means[layer_idx] = (mean_pool(keys), mean_query)
        for row in self.rows.values():
            if row.layer_idx == layer_idx:
                row.signature = self.signature(row.keys, layer_idx)
                row.padding = self.padding(row.keys, layer_idx)

    def sub_signatures(self, row: Row) -> list[Bytes]:
        count = min(-(-row.n_tokens // self.signature_tokens), self.hdc_dim // self.bits)
        width = self.bits // 8
        return [row.signature[i * width : (i + 1) * width] for i in range(count)]

    # writing

    def put(
        self,
        keys: Floats,
        values: Floats,
        layer_idx: int,
        importance: float = 1.0,
        timestamp: int = 0,
        index_keys: Floats | None = None,
    ) -> int:
        if self.max_entries:
            while len(self.rows) >= self.max_entries:
                self.evict_one()
        return self.insert(keys, values, layer_idx, importance, timestamp, index_keys)

    def insert(
        self,
        keys: Floats,
        values: Floats,
        layer_idx: int,
        importance: float,
        timestamp: int = 0,
        index_keys: Floats | None = None,
    ) -> int:
        """Add an entry and evict nothing."""
        indexed = keys if index_keys is None else index_keys
        entry_id = self.next_id
        self.next_id += 1
        self.rows[entry_id] = Row(
            entry_id,
            layer_idx,
            stored_form(keys, self.kv_dtype),
            stored_form(values, self.kv_dtype),
            float(np.float32(importance)),
            self.signature(indexed, layer_idx),
            timestamp,
            padding=self.padding(indexed, layer_idx),
        )
        return entry_id

    def eviction_order(self, exempt: Iterable[int] = ()) -> list[int]:
        rows = [row for i, row in self.rows.items() if i not in set(exempt)]
        return [row.entry_id for row in sorted(rows, key=Row.eviction_key)]

    def evict_one(self) -> int:
        victim = self.eviction_order()[0]
        del self.rows[victim]
        return victim

    def evict(self, target_entries: int) -> int:
        count = 0
        while len(self.rows) > target_entries:
            self.evict_one()
            count += 1
        return count

    # reading

    def rank(
        self, query: Floats, layer_idx: int, entry_ids: Iterable[int] | None = None
    ) -> list[tuple[int, float]]:
        """(id, score) of every entry that may be found, best first; counts nothing."""
        query = np.atleast_2d(query)
        allowed = None if entry_ids is None else set(entry_ids)
        found = []
        tokens = list(query) if self.signature_tokens else [mean_pool(query)]
        mean_query = self.means.get(layer_idx, (None, None))[1]
        if mean_query is not None:
            tokens = [token - mean_query for token in tokens]
        wanted = [self.projector.project(token) for token in tokens]
        for row in self.rows.values():
            if row.layer_idx != layer_idx or (allowed is not None and row.entry_id not in allowed):
                continue
            subs = self.sub_signatures(row) if self.signature_tokens else [row.signature]
            distance = sum(min(hamming(q, s) for s in subs) for q in wanted)
            found.append((distance, row.entry_id))
        bits = len(wanted) * self.bits
        return [(i, 1 - 2 * distance / bits) for distance, i in sorted(found)]

    def query(
        self,
        query: Floats,
        layer_idx: int,
        top_k: int = 5,
        entry_ids: Iterable[int] | None = None,
        counts: bool = True,
    ) -> list[tuple[int, float]]:
        found = self.rank(query, layer_idx, entry_ids)[:top_k]
        if counts:
            self.queries += 1
            self.hits += len(found)
            for entry_id, _ in found:
                row = self.rows[entry_id]
                row.access_count = min(row.access_count + 1, MAX_COUNT)
        return found

    def query_many(
        self, queries: Sequence[Floats], layer_idx: int, top_k: int = 5
    ) -> list[list[tuple[int, float]]]:
        # Counting changes no ranking, so one pass over the batch equals single queries.
        return [self.query(q, layer_idx, top_k) for q in queries]

    def augmented(
        self, query: Floats, cache_k: Floats, cache_v: Floats, layer_idx: int, top_k: int
    ) -> tuple[Floats, Floats]:
        hits = [self.rows[i] for i, _ in self.query(query, layer_idx, top_k)]
        hits.sort(key=lambda row: (row.timestamp, row.entry_id))
        return (
            np.concatenate([row.keys for row in hits] + [cache_k]),
            np.concatenate([row.values for row in hits] + [cache_v]),
        )

"""What the report shows, as plain numbers; no drawing."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem.config import Config
from hybridmem.results import Stats
from hybridmem.store import Store

__all__ = ["Facts", "Layer", "Shard", "eviction_order", "eviction_scores", "gather"]

Floats = npt.NDArray[np.float64]

#: Entries of a layer whose signatures are compared with each other, and layers that are compared.
_COMPARED, _COMPARED_LAYERS = 240, 6
#: Sub-signatures of a layer that are compared: their products are a matrix of so many squared.
_COMPARED_ROWS = 3072
_POINTS = 1500


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's totals, and its entries compared with each other.

    Attributes
    ----------
    compared : list of int
        Ids of the entries that were compared: all, or a sample spread over time.
    similarities : array of float64
        Of each pair of them, once.
    nearest : array of int64
        For each of them, which of them is most similar.
    places : array of float64, shape (n, 2)
        Positions in the plane whose distances stand for dissimilarity (classical scaling).
    """

    number: int
    entries: int
    tokens: int
    compared: list[int]
    similarities: Floats
    nearest: npt.NDArray[np.int64]
    places: Floats


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard's file: its bytes, and how many of its entries are alive."""

    number: int
    size: int
    entries: int
    live: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a report says of a store at one moment."""

    path: str
    store_id: str
    made: int
    config: Config
    stats: Stats
    layers: list[Layer]
    shards: list[Shard]
    growth: list[tuple[int, int]]
    importance: Floats
    accesses: Floats
    next_out: list[dict[str, Any]]


def gather(store: Store) -> Facts:
    """Read what a report says. This is no access of any entry."""
    records = store.entries
    stats = store.stats()
    by_size = sorted(stats.entries_by_layer, key=lambda n: (-stats.entries_by_layer[n], n))
    chosen = set(by_size[:_COMPARED_LAYERS])
    layers = [
        _layer(number, records[records["layer_idx"] == number], store.config, number in chosen)
        for number in stats.entries_by_layer
    ]
    points = _spread(len(records), _POINTS)
    return Facts(
        path=str(store.path),
        store_id=store.store_id,
        made=time.time_ns(),
        config=store.config,
        stats=stats,
        layers=layers,
        shards=_shards(store, records),
        growth=_growth(records),
        importance=records["importance"][points].astype(np.float64),
        accesses=records["access_count"][points].astype(np.float64),
        next_out=_next_out(store, records),
    )


def _spread(n: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most so many of the numbers below n, evenly spread."""
    if n <= most:
        return np.arange(n)
    return np.unique(np.linspace(0, n - 1, most).astype(np.int64))


def _layer(number: int, records: npt.NDArray[Any], config: Config, compare: bool) -> Layer:
    spec = config.signature
    slots = int(max((spec.used_slots(int(n)) for n in records["n_tokens"]), default=1))
    most = max(2, min(_COMPARED, _COMPARED_ROWS // slots)) if compare else 0
    sample = records[_spread(len(records), most)] if most else records[:0]
    similar = _compare(sample, config)
    upper = np.triu_indices(len(sample), 1)
    nearest = np.zeros(0, np.int64)
    if len(sample) > 1:
        others = similar.copy()
        np.fill_diagonal(others, -np.inf)
        nearest = others.argmax(axis=1)
    return Layer(
        number=number,
        entries=len(records),
        tokens=int(records["n_tokens"].sum(dtype=np.int64)),
        compared=sample["entry_id"].tolist(),
        similarities=similar[upper],
        nearest=nearest,
        places=_places(similar),
    )


def _compare(records: npt.NDArray[Any], config: Config) -> Floats:
    """Return the similarity of each two entries, by their signatures, as a query would score it.

    With sub-signatures that is the mean over one entry's of the largest similarity to the other's;
    of the two directions the mean is taken.
    """
    if not len(records):
        return np.zeros((0, 0))
    spec = config.signature
    used = [spec.used_slots(int(n)) for n in records["n_tokens"]]
    packed = [
        np.frombuffer(bytes(signature), np.uint8).reshape(-1, spec.bits // 8)[:n]
        for signature, n in zip(records["signature"], used, strict=True)
    ]
    signs = np.unpackbits(np.concatenate(packed), axis=1).astype(np.float32) * 2 - 1
    starts = np.concatenate(([0], np.cumsum(used)[:-1]))
    products = signs @ signs.T / spec.bits
    largest = np.maximum.reduceat(products, starts, axis=1)
    means = np.add.reduceat(largest, starts, axis=0) / np.array(used)[:, None]
    both: Floats = ((means + means.T) / 2).astype(np.float64)
    return both


def _places(similar: Floats) -> Floats:
    """Return positions in the plane by classical scaling of 1 - similarity."""
    n = len(similar)
    if n < 3:
        return np.zeros((n, 2))
    squared = np.maximum(0.0, 1.0 - similar)
    centred = squared - squared.mean(axis=0) - squared.mean(axis=1)[:, None] + squared.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    places: Floats = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0.0))
    return places


def _shards(store: Store, records: npt.NDArray[Any]) -> list[Shard]:
    index = json.loads((store.path / "index.json").read_bytes())
    numbers, counts = np.unique(records["shard_idx"], return_counts=True)
    live = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return [
        Shard(number, size, entries, min(entries, live.get(number, 0)))
        for number, size, _, entries in index["shards"]
    ]


def _growth(records: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return times and the tokens put up to them, of the entries that are still there."""
    if not len(records):
        return []
    order = np.argsort(records["timestamp"], kind="stable")
    times = records["timestamp"][order]
    total = np.cumsum(records["n_tokens"][order].astype(np.int64))
    at = _spread(len(order), 200)
    return list(zip(times[at].tolist(), total[at].tolist(), strict=True))


def eviction_scores(records: npt.NDArray[Any]) -> Floats:
    """Return importance * (1 + log(1 + accesses)) of the rows of `Store.entries`."""
    counts, at = np.unique(records["access_count"], return_inverse=True)
    boost = np.array([1.0 + math.log(1 + count) for count in counts.tolist()])
    scores: Floats = records["importance"].astype(np.float64) * boost[at]
    return scores


def eviction_order(records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the rows of `Store.entries` in the order in which they would be evicted."""
    return np.lexsort((records["entry_id"], records["timestamp"], eviction_scores(records)))


def _next_out(store: Store, records: npt.NDArray[Any]) -> list[dict[str, Any]]:
    scores = eviction_scores(records) if len(records) else np.zeros(0)
    names = ("entry_id", "layer_idx", "n_tokens", "importance", "access_count", "timestamp")
    return [
        {
            **{name: records[name][row].item() for name in names},
            "score": float(scores[row]),
            "source": store.source(records["entry_id"][row].item()),
        }
        for row in (eviction_order(records)[:10] if len(records) else ())
    ]

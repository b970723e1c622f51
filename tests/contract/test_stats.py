"""FORMAT-AND-API "stats()": every field, against what can be counted from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader

import hybridmem

from .helpers import directory_bytes, fill, pair, shards

FIELDS = [
    "entries",
    "entries_by_layer",
    "tokens",
    "shards",
    "disk_bytes",
    "live_bytes",
    "dead_bytes",
    "unflushed_bytes",
    "generation",
    "queries",
    "hits",
    "evicted",
]
PAYLOAD = 3 * 24 * 4 * 2  # keys and values of one entry of fill()


@pytest.mark.parametrize("field", FIELDS)
def test_field_is_there_and_starts_at_zero(field: str, store: Any) -> None:
    value = getattr(store.stats(), field)
    if field == "entries_by_layer":
        assert value == {}
        return
    assert type(value) is int
    if field not in ("disk_bytes", "generation"):
        assert value == 0


def test_entries_tokens_and_layers(store: Any, rng: np.random.Generator) -> None:
    for layer_idx, n in ((0, 2), (0, 3), (5, 7)):
        store.put(*pair(rng, n), layer_idx=layer_idx)
    for _ in range(2):
        stats = store.stats()
        assert (stats.entries, stats.tokens) == (3, 12)
        assert stats.entries_by_layer == {0: 2, 5: 1}
        store.flush()
    store.delete(3)
    stats = store.stats()
    assert (stats.entries, stats.tokens) == (2, 5)
    assert stats.entries_by_layer == {0: 2}
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        stats = reader.stats()
        assert (stats.entries, stats.tokens) == (2, 5)
        assert stats.entries_by_layer == {0: 2}


def test_a_snapshot_of_numbers(store: Any, rng: np.random.Generator) -> None:
    before = store.stats()
    fill(store, rng, 2)
    store.stats().entries_by_layer[77] = 1
    assert before.entries == 0
    assert before.entries_by_layer == {}
    assert store.stats().entries_by_layer == {0: 2}


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_shards_and_disk_bytes(
    mode: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    for turn in range(3):
        fill(store, rng, 10)
        store.flush()
        stats = store.stats()
        assert stats.shards == len(shards(Path(store.path))) > turn
        assert stats.disk_bytes == directory_bytes(Path(store.path))
    store.close()
    with hybridmem.open(store.path, mode=mode) as again:
        stats = again.stats()
        assert stats.shards == len(shards(Path(store.path)))
        assert stats.disk_bytes == directory_bytes(Path(store.path))


def test_live_dead_and_unflushed_bytes(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 10)
    stats = store.stats()
    assert PAYLOAD * 10 <= stats.unflushed_bytes <= 2 * PAYLOAD * 10
    store.flush()
    stats = store.stats()
    assert stats.unflushed_bytes == 0
    assert stats.dead_bytes == 0
    assert PAYLOAD * 10 <= stats.live_bytes <= 2 * PAYLOAD * 10
    fill(store, rng, 5)
    assert PAYLOAD * 5 <= store.stats().unflushed_bytes <= 2 * PAYLOAD * 5
    live = stats.live_bytes
    store.flush()
    for entry_id in (2, 3):
        store.delete(entry_id)
    store.flush()
    stats = store.stats()
    assert 2 * PAYLOAD <= stats.dead_bytes <= 4 * PAYLOAD
    assert stats.live_bytes < 1.5 * live
    store.compact()
    assert store.stats().dead_bytes == 0
    store.evict(0)
    store.compact()
    assert store.stats().live_bytes == store.stats().dead_bytes == 0


def test_unflushed_bytes_shrink_when_a_pending_entry_goes(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 4)
    before = store.stats().unflushed_bytes
    store.delete(1)
    assert store.stats().unflushed_bytes <= before - PAYLOAD
    for entry_id in (2, 3, 4):
        store.delete(entry_id)
    assert store.stats().unflushed_bytes == 0


def test_generation_counts_commits(store: Any, rng: np.random.Generator) -> None:
    seen = [store.stats().generation]
    fill(store, rng, 5)
    assert store.stats().generation == seen[-1]
    for step in (store.flush, lambda: store.evict(2)):
        step()
        seen.append(store.stats().generation)
    assert seen == sorted(set(seen))
    store.flush()
    assert store.stats().generation == seen[-1]
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        assert reader.stats().generation == ForeignReader(store.path).index["generation"]
        assert reader.stats().generation >= seen[-1]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_queries_and_hits(mode: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    store.close()
    query = pair(rng, 2)[0]
    with hybridmem.open(store.path, mode=mode) as again:
        again.query(query, 0, 2)
        again.query(query, 1)
        assert (again.stats().queries, again.stats().hits) == (2, 2)
        again.query_many([query, query, query], 0, 1)
        assert (again.stats().queries, again.stats().hits) == (5, 5)
        again.query_many(query, 0, 2)
        assert (again.stats().queries, again.stats().hits) == (7, 9)
        hybridmem.augmented_kv(query, query, query, again, 0)
        assert (again.stats().queries, again.stats().hits) == (8, 12)
        again.get(1)
        assert (again.stats().queries, again.stats().hits) == (8, 12)


def test_evicted(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    store = new_store(max_entries=4)
    fill(store, rng, 6)
    assert store.stats().evicted == 2
    assert store.evict(1) == 3
    assert store.stats().evicted == 5
    store.delete(next(iter(store)))
    assert store.stats().evicted == 5

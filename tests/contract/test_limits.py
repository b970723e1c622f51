"""FORMAT-AND-API section 3: max_entries, max_disk_bytes, shard_max_bytes, max_open_shards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model
from reader import find_key

import hybridmem

from .helpers import (
    contents,
    directory_bytes,
    fill,
    mapped_files,
    pair,
    photograph,
    shard_of,
    shards,
)


def stored_limit(path: object, name: str) -> object:
    return find_key(json.loads((Path(str(path)) / "index.json").read_text()), name)


# --- max_entries ---------------------------------------------------------------------------------


def test_max_entries_holds_after_every_put(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=7)
    for i in range(30):
        entry_id = fill(store, rng, 1)[0]
        assert len(store) == min(i + 1, 7)
        assert len(store.entries) == len(store)
        assert entry_id in store
        if i % 4 == 0:
            store.flush()
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == list(range(24, 31))
        fill(again, rng, 1)
        assert list(again) == list(range(25, 32))


def test_put_evicts_the_lowest_score(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store, model = new_store(max_entries=10), Model(24, 512, max_entries=10)
    for i in range(60):
        keys, values = pair(rng, 2)
        importance = float(rng.integers(0, 4)) / 2
        # The clock may stand still, so the model takes the times that the store chose.
        entry_id = store.put(keys, values, layer_idx=0, importance=importance)
        model.put(keys, values, 0, importance, store.get(entry_id).timestamp)
        assert list(store) == sorted(model.rows)
        if i % 3 == 0:
            query = pair(rng, 1)[0]
            found = [hit.entry_id for hit in store.query(query, 0, 2)]
            assert found == [i for i, _ in model.query(query, 0, 2)]
        if i % 11 == 0:
            store.flush()


@pytest.mark.parametrize("many", [1, 37])
def test_put_evicts_the_lowest_score_of_many(
    many: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Far more entries than any part that an implementation might keep sorted."""
    limit = 400
    store = new_store(max_entries=limit, hdc_dim=64)
    ranks: dict[int, tuple[float, int, int]] = {}
    rows = pair(rng, 1)
    queries = rng.standard_normal((1500 // many, 24)).astype(np.float32)
    for query in queries:
        importances = rng.integers(0, 50, many) / 8
        ids = store.put_many([rows] * many, layer_idx=0, importance=importances)
        for entry_id in ids:
            entry = store.get(entry_id)
            ranks[entry_id] = (entry.importance, entry.timestamp, entry_id)
        excess = max(0, len(ranks) - limit)
        for victim in sorted(set(ranks) - set(ids), key=lambda i: ranks[i])[:excess]:
            del ranks[victim]
        if ids[0] % 3 == 0:
            assert list(store) == sorted(ranks)
            chosen = rng.choice(sorted(ranks), min(60, len(ranks)), replace=False)
            for hit in store.query(query, 0, 60, entry_ids=chosen):
                entry = store.get(hit.entry_id)
                score = entry.importance * (1 + math.log(1 + entry.access_count))
                ranks[hit.entry_id] = (score, entry.timestamp, hit.entry_id)
    assert list(store) == sorted(ranks)
    assert len(store) == limit


@pytest.mark.parametrize("max_entries", [1, 3])
def test_the_entry_being_put_is_never_the_one_evicted(
    max_entries: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=max_entries)
    fill(store, rng, max_entries, importance=100.0)
    (entry_id,) = fill(store, rng, 1, importance=0)
    assert entry_id in store
    assert len(store) == max_entries
    (following,) = fill(store, rng, 1, importance=0)
    assert following in store
    assert entry_id not in store


def test_what_put_evicts_is_committed_by_the_next_flush(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=3)
    fill(store, rng, 3)
    store.flush()
    fill(store, rng, 2)
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1, 2, 3]
        assert len(contents(reader)) == 3
        store.flush()
        reader.refresh()
        assert list(reader) == [3, 4, 5]


@pytest.mark.parametrize("step", ["put", "flush", "close"])
def test_a_lowered_max_entries_takes_effect_at_the_next_put_or_flush(
    step: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=50)
    fill(store, rng, 20)
    store.close()
    with hybridmem.open(store.path, max_entries=6) as again:
        assert again.config.max_entries == 6
        assert len(again) == len(again.entries) == 20
        if step == "put":
            fill(again, rng, 1)
            assert list(again) == [16, 17, 18, 19, 20, 21]
        elif step == "flush":
            again.flush()
            assert list(again) == [15, 16, 17, 18, 19, 20]
    with hybridmem.open(store.path) as again:
        assert again.config.max_entries == 6
        assert len(again) == 6


def test_a_raised_and_a_removed_limit(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=3)
    fill(store, rng, 5)
    store.close()
    with hybridmem.open(store.path, max_entries=5) as again:
        fill(again, rng, 4)
        assert len(again) == 5
    with hybridmem.open(store.path, max_entries=0) as again:
        fill(again, rng, 10)
        assert len(again) == 15
    with hybridmem.open(store.path) as again:
        assert again.config.max_entries == 0


LIMITS = {
    "max_entries": 11,
    "max_disk_bytes": 10_000_000,
    "shard_max_bytes": 5000,
    "max_open_shards": 1,
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_given_to_a_writer_are_kept_from_the_next_commit(
    name: str, store: Any, rng: np.random.Generator
) -> None:
    store.close()
    with hybridmem.open(store.path, **{name: LIMITS[name]}) as again:
        assert getattr(again.config, name) == LIMITS[name]
        fill(again, rng, 1)
        again.flush()
        assert stored_limit(store.path, name) == LIMITS[name]
    with hybridmem.open(store.path) as again:
        assert getattr(again.config, name) == LIMITS[name]


@pytest.mark.parametrize("name", LIMITS)
def test_limits_given_to_a_writer_hold_from_then_on(name: str, store: Any) -> None:
    """Also where nothing else was to be committed."""
    store.close()
    hybridmem.open(store.path, **{name: LIMITS[name]}).close()
    with hybridmem.open(store.path) as again:
        assert getattr(again.config, name) == LIMITS[name]


@pytest.mark.parametrize("name", LIMITS)
def test_limits_given_to_a_reader_hold_for_that_handle_only(
    name: str, store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 20)
    store.close()
    before = photograph(Path(store.path))
    with hybridmem.open(store.path, mode="r", **{name: LIMITS[name]}) as reader:
        assert getattr(reader.config, name) == LIMITS[name]
        assert len(reader) == 20
        reader.refresh()
        assert getattr(reader.config, name) == LIMITS[name]
    assert photograph(Path(store.path)) == before
    with hybridmem.open(store.path, mode="r") as reader:
        assert reader.config == store.config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_entries", -1),
        ("max_disk_bytes", -1),
        ("shard_max_bytes", 0),
        ("max_open_shards", 0),
        ("max_entries", 1.5),
        ("max_open_shards", "4"),
    ],
)
def test_bad_limits_given_to_open(name: str, value: object, store: Any) -> None:
    store.close()
    for mode in ("r", "r+"):
        with pytest.raises((ValueError, TypeError), match=name):
            hybridmem.open(store.path, mode=mode, **{name: value})


# --- max_disk_bytes ------------------------------------------------------------------------------


def lowest_are_gone(model: dict[int, tuple[float, int]], store: Any) -> bool:
    """Whether what is gone is what eviction takes first."""
    left = set(store)
    gone = [key for entry_id, key in model.items() if entry_id not in left]
    kept = [key for entry_id, key in model.items() if entry_id in left]
    return not gone or not kept or max(gone) <= min(kept)


@pytest.mark.parametrize(
    ("every", "fields"), [(1, {}), (7, {"quantize_stored": True}), (7, {"kv_dtype": "float16"})]
)
def test_max_disk_bytes_holds_after_every_flush(
    every: int, fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    limit = 100_000
    store = new_store(max_disk_bytes=limit, shard_max_bytes=10_000, **fields)
    path = Path(store.path)
    for i in range(140):
        n = int(rng.integers(1, 30))
        entry_id = store.put(*pair(rng, n), layer_idx=0, importance=float(rng.random()))
        assert entry_id in store
        if i % every == 0:
            store.flush()
            assert directory_bytes(path) <= limit
            assert store.stats().disk_bytes <= limit
    store.close()
    assert directory_bytes(path) <= limit
    with hybridmem.open(path) as again:
        kept = len(again)
        fill(again, rng, 5)
        again.flush()
        assert directory_bytes(path) <= limit
        assert again.config.max_disk_bytes == limit
        again.compact()
        assert directory_bytes(path) <= limit
        again.evict(kept // 2)
        assert directory_bytes(path) <= limit
    assert kept * 15 * 24 * 2 > 0.3 * limit / 4, "far more was evicted than the limit asks"


def test_max_disk_bytes_evicts_the_lowest_scores(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_disk_bytes=60_000, shard_max_bytes=8000)
    known: dict[int, tuple[float, int]] = {}
    order = rng.permutation(200)
    for i in range(0, 200, 20):
        for importance in order[i : i + 20]:
            (entry_id,) = fill(store, rng, 1, n=4, importance=float(importance))
            known[entry_id] = (float(importance), entry_id)
        store.flush()
        newest = max(known)
        known_but_newest = {k: v for k, v in known.items() if k != newest}
        assert lowest_are_gone(known_but_newest, store)
        known = {k: v for k, v in known.items() if k in store}
    assert 10 < len(store) < 150


def test_no_eviction_below_the_limit(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Entries that fit are kept: the bytes of 40 entries and half as much again are enough."""
    plain = new_store("plain")
    fill(plain, rng, 40, n=16)
    plain.close()
    limit = int(directory_bytes(Path(plain.path)) * 1.5)
    store = new_store("limited", max_disk_bytes=limit)
    for _ in range(4):
        fill(store, rng, 10, n=16)
        store.flush()
    assert len(store) == 40


def test_a_lowered_max_disk_bytes_after_reopening(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=20_000)
    fill(store, rng, 100, n=8)
    store.close()
    path = Path(store.path)
    assert directory_bytes(path) > 150_000
    for limit in (120_000, 50_000):
        with hybridmem.open(path, max_disk_bytes=limit) as again:
            again.flush()
            assert directory_bytes(path) <= limit
            assert list(again) == list(range(101 - len(again), 101))
            assert len(again) > 10
        assert directory_bytes(path) <= limit
    with hybridmem.open(path) as again:
        assert again.config.max_disk_bytes == 50_000
        fill(again, rng, 50, n=8)
        again.flush()
        assert directory_bytes(path) <= 50_000


@pytest.mark.parametrize("call", ["put", "put_many"])
def test_an_entry_that_cannot_fit_is_refused(
    call: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_disk_bytes=100_000)
    fill(store, rng, 5)
    store.flush()
    wanted, before = contents(store), photograph(Path(store.path))
    keys, values = pair(rng, 600)  # 115,200 bytes
    calls = {
        "put": lambda: store.put(keys, values, layer_idx=0),
        "put_many": lambda: store.put_many([pair(rng, 1), (keys, values)], layer_idx=0),
    }
    with pytest.raises(ValueError, match="max_disk_bytes"):
        calls[call]()
    assert contents(store) == wanted
    assert photograph(Path(store.path)) == before
    assert fill(store, rng, 1) == [6]


def test_both_limits_at_once(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    store = new_store(max_entries=30, max_disk_bytes=60_000, shard_max_bytes=8000)
    for i in range(100):
        n = 1 if i % 50 < 25 else 20
        fill(store, rng, 1, n=n)
        assert len(store) <= 30
        if i % 5 == 0:
            store.flush()
            assert directory_bytes(Path(store.path)) <= 60_000


def test_max_disk_bytes_counts_every_file_of_the_directory(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """A file that someone else put there takes its part of the limit."""
    store = new_store(max_disk_bytes=100_000, shard_max_bytes=8000)
    path = Path(store.path)
    fill(store, rng, 60, n=4)
    store.flush()
    kept = len(store)
    (path / "notes.txt").write_bytes(b"x" * 50_000)
    assert store.stats().disk_bytes == directory_bytes(path)
    fill(store, rng, 1, n=4)
    store.flush()
    assert directory_bytes(path) <= 100_000
    assert store.stats().disk_bytes == directory_bytes(path)
    assert 0 < len(store) < kept
    assert (path / "notes.txt").stat().st_size == 50_000


# --- shard_max_bytes, max_open_shards ------------------------------------------------------------


def test_shard_max_bytes_given_to_open(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 30, n=8)
    store.close()
    assert len(shards(Path(store.path))) == 1
    with hybridmem.open(store.path, shard_max_bytes=5000) as again:
        fill(again, rng, 30, n=8)
        again.flush()
        assert len(shards(Path(store.path))) > 5
        assert len(contents(again)) == 60


def open_shards(path: Path) -> set[str]:
    """Shards that are mapped or held open by this process."""
    names = {name for _, _, name in mapped_files(path)}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(str(path)):
            names.add(os.path.basename(target.removesuffix(" (deleted)")))
    return {name for name in names if name.startswith("shard_")}


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("limit", [1, 3])
def test_at_most_max_open_shards_are_open(
    limit: int, mode: str, io: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=3000)
    fill(store, rng, 40)
    wanted = contents(store)
    store.close()
    path = Path(store.path)
    assert len(shards(path)) > 5
    with hybridmem.open(path, mode=mode, max_open_shards=limit, io=io) as again:
        for _ in range(2):
            for entry_id in again:
                entry = again.get(entry_id)
                assert entry.keys.tobytes() == wanted[entry_id][1]
                del entry
                assert len(open_shards(path)) <= limit
        assert open_shards(path)
        again.query(pair(rng, 1)[0], 0, 40)
        assert len(open_shards(path)) <= limit
    assert not open_shards(path)


def test_the_least_recently_used_reader_is_closed_first(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=3000)
    fill(store, rng, 40)
    store.close()
    path = Path(store.path)
    with hybridmem.open(path, mode="r", max_open_shards=2) as reader:
        entry_in = {shard_of(reader, i): i for i in reader}
        a, b, c = sorted(entry_in)[:3]
        for name in (a, b, a, c):
            reader.get(entry_in[name])
        assert open_shards(path) == {a, c}


def test_held_hits_outlive_their_reader(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=3000)
    fill(store, rng, 40)
    wanted = contents(store)
    store.close()
    with hybridmem.open(store.path, mode="r", max_open_shards=1) as reader:
        held = {i: reader.get(i) for i in reader}
    for entry_id, entry in held.items():
        assert entry.keys.tobytes() == wanted[entry_id][1]
        assert entry.values.tobytes() == wanted[entry_id][2]

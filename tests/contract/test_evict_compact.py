"""FORMAT-AND-API section 3: evict, compact, and the order of eviction."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader

import hybridmem

from .helpers import contents, copy_committed, directory_bytes, fill, pair


def expected_order(store: Any) -> list[int]:
    """Lowest first, from the records alone: the formula of the contract, written out."""
    keys = []
    for entry_id in store:
        entry = store.get(entry_id)
        score = entry.importance * (1 + math.log(1 + entry.access_count))
        keys.append((score, entry.timestamp, entry_id))
    return [entry_id for *_, entry_id in sorted(keys)]


def busy_store(new_store: Callable[..., Any], rng: np.random.Generator) -> Any:
    """Random importances and access counts, with many that are equal."""
    store = new_store()
    for i in range(40):
        importance = [0, 1.0, 1.0, float(rng.random()), 2 * float(rng.random())][i % 5]
        store.put(*pair(rng, 2), layer_idx=i % 3, importance=importance)
    for i in range(60):
        store.query(pair(rng, 1)[0], layer_idx=i % 3, top_k=1 + i % 4)
    assert len(set(store.entries["access_count"].tolist())) > 5
    return store


@pytest.mark.parametrize("flushed", [False, True])
def test_lowest_score_goes_first(
    flushed: bool, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = busy_store(new_store, rng)
    if flushed:
        store.flush()
    order = expected_order(store)
    for target in (39, 30, 29, 7, 1, 0):
        gone = len(store) - target
        assert store.evict(target) == gone
        order = order[gone:]
        assert sorted(order) == list(store)


def test_accesses_protect(store: Any, rng: np.random.Generator) -> None:
    pairs = [pair(rng, 2) for _ in range(3)]
    store.put_many(pairs, layer_idx=0, importance=[1.0, 1.5, 1.6])
    store.query(pairs[0][0], 0, 1)  # 1.0 * (1 + ln 2) = 1.69
    assert store.evict(2) == 1
    assert list(store) == [1, 3]
    assert store.evict(1) == 1
    assert list(store) == [1]


@pytest.mark.parametrize("accesses", [1, 2, 5, 30])
@pytest.mark.parametrize("off", [0.999, 1.001])
def test_the_logarithm_is_natural(
    off: float, accesses: int, store: Any, rng: np.random.Generator
) -> None:
    """An entry accessed so often goes just after or just before one of such importance."""
    accessed, other = pair(rng, 2), pair(rng, 2)
    store.put(*accessed, layer_idx=0, importance=1.0)
    store.put(*other, layer_idx=1, importance=off * (1 + math.log(1 + accesses)))
    for _ in range(accesses):
        store.query(accessed[0], 0, 1)
    assert store.evict(1) == 1
    assert list(store) == ([1] if off < 1 else [2])


def test_importance_zero_is_never_protected(store: Any, rng: np.random.Generator) -> None:
    pairs = [pair(rng, 2) for _ in range(2)]
    store.put_many(pairs, layer_idx=0, importance=[0.0, 1e-30])
    for _ in range(50):
        store.query(pairs[0][0], 0, 1)
    store.evict(1)
    assert list(store) == [2]


def clock(monkeypatch: pytest.MonkeyPatch, times: list[int]) -> None:
    """Let time.time_ns go through these times, then stand still."""
    feed = itertools.chain(times, itertools.repeat(times[-1]))
    monkeypatch.setattr(time, "time_ns", lambda: next(feed))


def test_ties_go_by_older_timestamp_then_smaller_id(
    store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock set back gives later ids older times: the times decide."""
    times = [500, 300, 300, 100, 500]
    for now in times:
        clock(monkeypatch, [now])
        fill(store, rng, 1)
    assert store.entries["timestamp"].tolist() == times
    monkeypatch.undo()
    for survivors in ([1, 2, 3, 5], [1, 3, 5], [1, 5], [5], []):
        assert store.evict(len(survivors)) == 1
        assert list(store) == survivors


def test_the_largest_importance_does_not_overflow(store: Any, rng: np.random.Generator) -> None:
    """In float32 the score of an accessed entry would be infinite and tie with the next."""
    largest = float(np.finfo(np.float32).max)
    pairs = [pair(rng, 2) for _ in range(3)]
    store.put_many(pairs, layer_idx=0, importance=[largest] * 3)
    store.query(pairs[0][0], 0, 1)
    store.query(pairs[0][0], 0, 1)
    store.query(pairs[1][0], 0, 1)
    for survivors in ([1, 2], [1]):
        store.evict(len(survivors))
        assert list(store) == survivors


def test_small_differences_decide(store: Any, rng: np.random.Generator) -> None:
    """Scores one float32 step apart: no rounding may merge them."""
    steps = [np.float32(1.0)]
    for _ in range(5):
        steps.append(np.nextafter(steps[-1], np.float32(2), dtype=np.float32))
    for step in steps[::-1]:
        store.put(*pair(rng, 1), layer_idx=0, importance=step)
    for left in range(5, 0, -1):
        store.evict(left)
        assert list(store) == list(range(1, left + 1))


@pytest.mark.parametrize("target", [3, 4, 100, 2**63, 10**30])
def test_evict_to_more_than_there_is(target: int, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    assert store.evict(target_entries=target) == 0
    assert list(store) == [1, 2, 3]


@pytest.mark.parametrize("target", [-1, 1.5, "3", None, float("nan")])
def test_bad_targets(target: object, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    with pytest.raises((ValueError, TypeError), match="target_entries"):
        store.evict(target)
    assert list(store) == [1, 2, 3]


def test_evicting_an_empty_store(store: Any) -> None:
    assert store.evict(0) == 0
    assert store.compact() >= 0


def test_evict_is_committed_with_what_was_pending(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = busy_store(new_store, rng)
    store.evict(25)
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode="r") as reader:
        assert contents(reader) == contents(store)
        assert reader.entries["access_count"].tolist() == store.entries["access_count"].tolist()
    assert ForeignReader(copy).ids() == list(store)


def test_compact_is_committed_with_what_was_pending(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = busy_store(new_store, rng)
    store.flush()
    for entry_id in (1, 2, 3, 30):
        store.delete(entry_id)
    fill(store, rng, 2)
    store.compact()
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode="r") as reader:
        assert contents(reader) == contents(store)
        assert list(reader) == list(store)


def test_compact_gives_bytes_back_and_changes_nothing_else(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=65_536)
    fill(store, rng, 200, n=16)
    store.flush()
    for entry_id in list(store):
        if entry_id % 7:
            store.delete(entry_id)
    store.query(pair(rng, 1)[0], 0, 9)
    wanted = contents(store)
    records = store.entries[["entry_id", "layer_idx", "n_tokens", "importance", "timestamp"]]
    counts = store.entries["access_count"].tolist()
    before = directory_bytes(Path(store.path))
    given_back = store.compact()
    after = directory_bytes(Path(store.path))
    assert type(given_back) is int
    assert contents(store) == wanted
    again = store.entries[["entry_id", "layer_idx", "n_tokens", "importance", "timestamp"]]
    assert again.tolist() == records.tolist()
    assert store.entries["access_count"].tolist() == counts
    assert store.stats().dead_bytes == 0
    assert after < 0.4 * 200 * 16 * 24 * 8
    # What the flush inside compact itself gives back may or may not be counted.
    assert 0 <= given_back <= before - after + 4096
    assert ForeignReader(store.path).ids() == sorted(wanted)


def test_compact_counts_what_it_gives_back(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 50, n=16)
    store.flush()
    for entry_id in range(1, 6):  # too few for any flush to compact by itself
        store.delete(entry_id)
    store.flush()
    before = directory_bytes(Path(store.path))
    given_back = store.compact()
    assert abs(before - directory_bytes(Path(store.path)) - given_back) < 1024
    assert given_back >= 5 * 16 * 24 * 8
    assert abs(store.compact()) < 1024


def test_compact_with_nothing_dead_loses_nothing(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 9)
    wanted = contents(store)
    for _ in range(3):
        store.compact()
        assert contents(store) == wanted


def test_compact_leaves_no_files_behind(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 60)
    store.flush()
    names = {p.name for p in Path(store.path).iterdir() if "shard" not in p.name}
    store.evict(3)
    store.compact()
    left = {p.name for p in Path(store.path).iterdir()}
    assert {name for name in left if "shard" not in name} <= names
    reader = ForeignReader(store.path)
    assert {n for n in left if "shard" in n} == {reader.shard(i).name for i in reader.ids()}


def test_an_evicted_store_reads_as_before_after_reopening(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = busy_store(new_store, rng)
    store.evict(20)
    fill(store, rng, 5)
    store.evict(22)
    wanted = contents(store)
    order = expected_order(store)
    store.close()
    with hybridmem.open(store.path) as again:
        assert contents(again) == wanted
        assert expected_order(again) == order
        again.evict(4)
        assert list(again) == sorted(order[-4:])


def written_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise AssertionError("no wchar in /proc/self/io")


def bytes_per_put(store: Any, rng: np.random.Generator, limit: int) -> float:
    rows = [pair(rng, 1) for _ in range(50)]
    for _ in range(limit // 50):
        store.put_many(rows, layer_idx=0)
        store.flush()
    start = written_bytes()
    turns = 3 * limit // 50
    for _ in range(turns):
        store.put_many(rows, layer_idx=0)
        store.flush()
    assert len(store) == limit
    return (written_bytes() - start) / (50 * turns)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_bytes_written_at_a_steady_max_entries_do_not_grow(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """put + flush is O(1) amortised in the number of entries: counted in bytes, not seconds."""
    small = bytes_per_put(new_store("small", max_entries=200), rng, 200)
    large = bytes_per_put(new_store("large", max_entries=1600), rng, 1600)
    assert large < 2 * small

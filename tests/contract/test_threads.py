"""FORMAT-AND-API: one store object used from many threads."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader

import hybridmem
from hybridmem import _fileio

from .helpers import contents, copy_committed, directory_bytes, pair


def run_together(*jobs: Callable[[], None]) -> None:
    """Run every job in a thread of its own, all from the same moment; raise what they raise."""
    start = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def wrapped(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wrapped, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def marked(number: int, n: int = 2) -> Any:
    """Keys and values that say which put they belong to."""
    keys = np.full((n, 24), number, np.float32)
    return keys, keys + np.float32(0.5)


def test_parallel_puts_lose_none(new_store: Callable[..., Any]) -> None:
    store = new_store(shard_max_bytes=8192)
    ids: dict[int, int] = {}

    def putter(first: int) -> Callable[[], None]:
        def job() -> None:
            for number in range(first, first + 60):
                if number % 10 == 9:
                    (ids[number],) = store.put_many([marked(number)], layer_idx=number % 3)
                else:
                    ids[number] = store.put(*marked(number), layer_idx=number % 3)
                if number % 20 == 7:
                    store.flush()

        return job

    run_together(*[putter(1000 * t) for t in range(8)])
    assert sorted(ids.values()) == list(range(1, 481)) == list(store)
    store.close()
    with hybridmem.open(store.path) as again:
        for number, entry_id in ids.items():
            entry = again.get(entry_id)
            assert entry.layer_idx == number % 3
            assert (entry.keys == number).all()
            assert (entry.values == number + 0.5).all()
    assert ForeignReader(store.path).ids() == list(range(1, 481))


def test_readers_and_writers_of_one_store(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """put, evict, compact and flush beside queries: no hit is ever half of one entry."""
    store = new_store(shard_max_bytes=4096, max_entries=120)
    store.put_many([marked(i) for i in range(50)], layer_idx=0)
    done = threading.Event()
    answered = [0] * 4
    query = pair(rng, 1)[0]

    def writer() -> None:
        try:
            for i in range(50, 400):
                store.put(*marked(i, 1 + i % 3), layer_idx=i % 2)
                if i % 10 == 0:
                    store.flush()
                if i % 60 == 0:
                    store.evict(40)
                if i % 90 == 0:
                    store.compact()
        finally:
            done.set()

    def check(hit: Any) -> None:
        assert (hit.keys == hit.keys[0, 0]).all()
        assert (hit.values == hit.keys[0, 0] + np.float32(0.5)).all()
        assert int(hit.keys[0, 0]) + 1 == hit.entry_id

    def asker(number: int) -> Callable[[], None]:
        def job() -> None:
            while not done.is_set() or not answered[number]:
                for hit in store.query(query, layer_idx=number % 2, top_k=20):
                    check(hit)
                for hits in store.query_many([query, -query], layer_idx=0, top_k=3):
                    for hit in hits:
                        check(hit)
                for entry_id in list(store)[::9]:
                    try:
                        check(store.get(entry_id))
                    except KeyError:
                        continue  # evicted meanwhile
                assert len(store.entries) <= 120
                assert store.stats().entries <= 120
                answered[number] += 1

        return job

    run_together(writer, *[asker(i) for i in range(4)])
    assert all(answered)
    wanted = contents(store)
    store.close()
    with hybridmem.open(store.path) as again:
        assert contents(again) == wanted


def test_counts_of_parallel_queries_are_not_lost(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 2)
    store.put(keys, values, layer_idx=0)

    def job() -> None:
        for _ in range(200):
            assert len(store.query(keys, layer_idx=0)) == 1

    run_together(*[job] * 6)
    assert store.get(1).access_count == 1200
    assert store.stats().queries == store.stats().hits == 1200


def test_a_reader_used_by_threads_while_it_refreshes(store: Any, rng: np.random.Generator) -> None:
    store.put_many([marked(i) for i in range(20)], layer_idx=0)
    store.flush()
    query = pair(rng, 1)[0]
    done = threading.Event()
    with hybridmem.open(store.path, mode="r") as reader:

        def asker() -> None:
            while not done.is_set():
                for hit in reader.query(query, layer_idx=0, top_k=50):
                    assert (hit.keys == hit.entry_id - 1).all()

        def refresher() -> None:
            try:
                for i in range(20, 60):
                    store.put(*marked(i), layer_idx=0)
                    store.flush()
                    reader.refresh()
                    assert len(reader) == i + 1
            finally:
                done.set()

        run_together(refresher, asker, asker)


def test_closing_under_threads_is_an_error_or_an_answer(
    store: Any, rng: np.random.Generator
) -> None:
    store.put_many([marked(i) for i in range(20)], layer_idx=0)
    query = pair(rng, 1)[0]

    def asker() -> None:
        try:
            while True:
                for hit in store.query(query, layer_idx=0, top_k=20):
                    assert (hit.keys == hit.entry_id - 1).all()
        except hybridmem.StoreClosedError:
            return

    def closer() -> None:
        for _ in range(20):
            store.query(query, layer_idx=0)
        store.close()

    run_together(asker, asker, closer)


@pytest.mark.parametrize("victims", [[1], [30], [2, 29], list(range(1, 31))], ids=str)
@pytest.mark.parametrize("puts", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_done_while_a_flush_is_under_way_is_in_the_next(
    fails: bool,
    puts: int,
    victims: list[int],
    new_store: Callable[..., Any],
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries of a full shard that put has written already, and entries still in memory.

    If the flush under way fails for want of space, the next one commits everything.
    """
    store = new_store(shard_max_bytes=3000)
    store.put_many([marked(i) for i in range(30)], layer_idx=0)
    for i in range(30):
        store.put(*marked(i), layer_idx=1)
    entered, leave = threading.Event(), threading.Event()

    write = _fileio.calls.writev

    def wait(*arguments: Any) -> int:
        entered.set()
        assert leave.wait(60)
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    with monkeypatch.context() as slow:
        slow.setattr(_fileio.calls, "writev", wait)
        store.flush(wait=False)
        assert entered.wait(60)
        for victim in victims:
            store.delete(victim)
            store.delete(victim + 30)
        new = store.put_many([marked(77)] * puts, layer_idx=0)
        store.query(pair(rng, 1)[0], 0, 3)
        wanted = contents(store)
        leave.set()
        if fails:
            with pytest.raises(hybridmem.StoreFullError):
                store.flush()
            assert contents(store) == wanted
        else:
            store.flush()
    store.flush()
    assert contents(store) == wanted
    assert set(new) <= wanted.keys()
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode="r") as reader:
        assert contents(reader) == wanted
        assert reader.entries["access_count"].tolist() == store.entries["access_count"].tolist()


class Slow:
    """A lock after whose release other threads than the main one do nothing for a while."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)


def test_a_flush_that_waits_for_one_that_fails_tells_of_it(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not a later call that has nothing to do with it."""
    store.put(*marked(1), layer_idx=0)
    entered, leave = threading.Event(), threading.Event()
    write = _fileio.calls.writev

    def wait(*arguments: Any) -> int:
        if leave.is_set():
            return write(*arguments)
        entered.set()
        assert leave.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_fileio.calls, "writev", wait)
    monkeypatch.setattr(store, "_commit_lock", Slow(store._commit_lock))
    store.flush(wait=False)
    assert entered.wait(60)
    threading.Timer(0.2, leave.set).start()
    with pytest.raises(hybridmem.StoreFullError):
        store.flush()
    store.put(*marked(2), layer_idx=0)
    store.flush()
    assert contents(hybridmem.open(store.path, mode="r")) == contents(store)


def test_limits_hold_under_threads(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    store = new_store(max_entries=20, max_disk_bytes=100_000, shard_max_bytes=8000)

    def job() -> None:
        for i in range(40):
            store.put(*marked(i), layer_idx=0)
            assert len(store) <= 20
            if i % 10 == 9:
                store.flush()

    run_together(*[job] * 6)
    store.flush()
    assert len(store) == 20
    assert directory_bytes(Path(store.path)) <= 100_000
    assert list(store)[-1] == 240

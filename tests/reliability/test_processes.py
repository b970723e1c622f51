"""Processes and threads beside each other: nothing mixed, nothing lost, one writer."""

from __future__ import annotations

import multiprocessing
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

from . import readers
from .apart import apart
from .book import Book, read


def test_a_writer_beside_eight_readers(tmp_path: Path) -> None:
    """A million reads in the torture run."""
    counts = readers.run(tmp_path / "mem", 8000, seconds=300)
    assert counts["reads"] >= 8000
    assert counts["snapshots"] >= readers.READERS * readers.COMMITS
    assert counts["gone"] >= readers.READERS, "a reader had no shard removed: it shows little"


def test_a_mixture_of_two_commits_is_found() -> None:
    class Mixed:
        """Answers with the ids of one commit and those of the next."""

        def stats(self) -> Any:
            return type("Stats", (), {"generation": 1})

        def __iter__(self) -> Any:
            return iter([])

        def get(self, entry_id: int) -> Any: ...

        def query(self, *_: Any) -> Any:
            return []

    watch = readers.Watch(1)
    watch.seen[1] = hash((1, 2))
    with pytest.raises(AssertionError, match="two contents"):
        watch.look(Mixed())


def test_sixteen_threads_on_one_store(tmp_path: Path) -> None:
    """Four put, four query, three get, and five flush, evict, compact, delete and refresh."""
    path = tmp_path / "mem"
    store = hybridmem.create(path, embed_dim=8, hdc_dim=256, shard_max_bytes=3000)
    errors: list[BaseException] = []
    done = threading.Event()
    put: dict[int, int] = {}

    def marked(number: int) -> tuple[Any, Any]:
        keys = np.full((1 + number % 3, 8), number, np.float32)
        return keys, keys + np.float32(0.5)

    def right(entry: Any) -> None:
        number = int(entry.keys[0, 0])
        keys, values = marked(number)
        assert entry.keys.tobytes() == keys.tobytes()
        assert entry.values.tobytes() == values.tobytes()
        assert put.get(entry.entry_id, number) == number

    def putter(first: int) -> None:
        for number in range(first, first + 40):
            put[store.put(*marked(number), number % 2, 1 + number % 5)] = number

    def asker(rng: random.Random) -> None:
        for hit in store.query(np.full(8, rng.choice([-1, 1]), np.float32), rng.randrange(2), 9):
            right(hit)

    def getter(rng: random.Random) -> None:
        ids = list(store)
        for entry_id in rng.sample(ids, min(9, len(ids))):
            try:
                right(store.get(entry_id))
            except KeyError:
                continue  # it went meanwhile

    def deleter(rng: random.Random) -> None:
        ids = list(store)
        try:
            store.delete(rng.choice(ids or [1]))
        except KeyError:
            return

    changes = [
        lambda rng: store.flush(),
        lambda rng: store.flush(wait=False),
        lambda rng: store.evict(60),
        lambda rng: store.compact(),
        deleter,
    ]

    def again(job: Any, seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            job(rng)

    def kept(job: Any, *args: Any) -> None:
        try:
            job(*args)
        except BaseException as error:
            errors.append(error)

    putters = [threading.Thread(target=kept, args=(putter, 1000 * n)) for n in range(1, 5)]
    jobs = [asker] * 4 + [getter] * 3 + changes
    others = [threading.Thread(target=kept, args=(again, job, n)) for n, job in enumerate(jobs)]
    threads = putters + others
    assert len(threads) == 16
    for thread in threads:
        thread.start()
    for thread in putters:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    assert len(put) == 160, "an id was given twice"
    wanted = read(store)
    store.close()
    with hybridmem.open(path) as again_:
        assert read(again_) == wanted
        for entry_id in again_:
            assert again_.get(entry_id).keys[0, 0] == put[entry_id]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_writer_whose_lock_file_went_writes_no_more(replaced: bool, tmp_path: Path) -> None:
    """Another writer may have taken the lock that is there now."""
    book = Book()
    store = hybridmem.create(tmp_path / "mem", embed_dim=4, hdc_dim=256)
    book.put(store)
    store.flush()
    state = book.commit()
    book.put(store)
    (tmp_path / "mem" / "lock").unlink()
    if replaced:
        with hybridmem.open(tmp_path / "mem") as other:
            assert state.fits(read(other))
    for call in (store.flush, store.compact, lambda: store.evict(1)):
        with pytest.raises(hybridmem.StoreIOError, match=r"removed or replaced|open it again"):
            call()
    store.close()
    with hybridmem.open(tmp_path / "mem", "r") as reader:
        assert state.fits(read(reader))


def test_a_forked_child_reads_what_its_parent_held(tmp_path: Path) -> None:
    """A reader and a writer that were open go on in a child, which sees their snapshot."""
    book = Book()
    store = hybridmem.create(tmp_path / "mem", embed_dim=4, hdc_dim=256, shard_max_bytes=800)
    for _ in range(9):
        book.put(store)
    store.flush()
    state = book.commit()
    reader = hybridmem.open(tmp_path / "mem", "r")

    def in_child() -> bool:
        with pytest.raises(hybridmem.StoreLockedError):
            hybridmem.open(tmp_path / "mem")
        with pytest.raises(hybridmem.ReadOnlyError):
            store.flush()
        return state.fits(read(reader)) and state.fits(read(store))

    assert apart(in_child).check()
    book.put(store)
    store.close()
    reader.close()
    with hybridmem.open(tmp_path / "mem", "r") as again:
        assert book.commit().fits(read(again))


def spawned(path: str, answers: Any) -> None:
    """Run in a fresh process: read, and try to write."""
    with hybridmem.open(path, "r") as store:
        found = read(store)
    try:
        hybridmem.open(path).close()
    except hybridmem.StoreLockedError as error:
        answers.put((found, str(error)))
    else:
        answers.put((found, ""))


def test_a_spawned_process_reads_and_is_refused_as_a_writer(tmp_path: Path) -> None:
    book = Book()
    with hybridmem.create(tmp_path / "mem", embed_dim=4, hdc_dim=256) as store:
        for _ in range(5):
            book.put(store)
        store.flush()
        state = book.commit()
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        child = context.Process(target=spawned, args=(str(tmp_path / "mem"), answers))
        child.start()
        found, refused = answers.get(timeout=600)
        child.join()
    assert state.fits(found)
    assert "open for writing elsewhere" in refused

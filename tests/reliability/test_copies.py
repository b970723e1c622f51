"""Copies of stores, cut short anywhere: what has the name is whole, and the store is as it was."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridmem
from hybridmem.archive import export_store, import_store
from hybridmem.testing import Faults, Recorder, Syscalls, crash_states, installed
from hybridmem.verify import verify

from .book import Book, State, read
from .crashes import Scratch, describe, found_in
from .faults import held, kinds
from .histories import CONFIG, FailedSync

Make = Callable[[Any, Path], None]


def _linked(store: Any, path: Path) -> None:
    store.snapshot(path)


def _copied(store: Any, path: Path) -> None:
    store.snapshot(path, copy=True)


def _imported(store: Any, path: Path) -> None:
    file = path.with_name("file")
    file.unlink(missing_ok=True)
    export_store(store.path, file)
    import_store(file, path)


def _packed(store: Any, path: Path) -> None:
    hybridmem.pack(store.path, path)


MAKERS: dict[str, Make] = {
    "linked": _linked,
    "copied": _copied,
    "imported": _imported,
    "packed": _packed,
}
#: Those of which every call is swept in larger steps, as they make many.
LONG = ("imported", "packed")


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


def base(root: Path) -> tuple[Any, State]:
    """A store of some shards with a dead record."""
    book = Book()
    store = hybridmem.create(root / "mem", shard_max_bytes=800, **CONFIG)
    for i in range(5):
        book.put(store, importance=1 + i)
    store.flush()
    store.delete(2)
    book.drop([2])
    store.flush()
    state = book.commit()
    return store, state


@pytest.mark.parametrize("maker", MAKERS)
def test_power_cut(maker: str, scratch: Scratch) -> None:
    root = scratch.new()
    store, state = base(root)
    store.close()
    recorder = Recorder(root)
    with installed(recorder), hybridmem.open(root / "mem") as store:
        MAKERS[maker](store, root / "to" / "snap")
        recorder.mark("done")
    whole = states = 0
    for number, crash in enumerate(crash_states(recorder, limit=64)):
        if number % (9 if maker in LONG else 3) and crash.mark != "done":
            continue
        states += 1
        there = scratch.new()
        crash.build(there)
        copy = there / "to" / "snap"
        try:
            if copy.exists():
                assert found_in(copy, "r", [state]) is state
                whole += 1
            else:
                assert crash.mark != "done"
                with hybridmem.open(there / "mem") as again:
                    MAKERS[maker](again, copy)
                assert found_in(copy, "r" if maker == "packed" else "r+", [state]) is state
            if maker == "packed":
                assert verify(copy).ok
            assert found_in(there / "mem", "r+", [state]) is state
            if (there / "to" / "file").exists():
                import_store(there / "to" / "file", there / "again")
                assert found_in(there / "again", "r", [state]) is state
        except (AssertionError, hybridmem.HybridMemError) as error:
            raise AssertionError(f"{describe(crash)}: {error!r}") from error
        shutil.rmtree(there)
    assert states > 20
    assert 0 < whole < states


@pytest.mark.parametrize(("kind", "forever"), list(kinds()))
@pytest.mark.parametrize("maker", MAKERS)
def test_the_kth_call_fails(maker: str, kind: str, forever: bool, scratch: Scratch) -> None:
    at = 0
    while True:
        root = scratch.new()
        before = held()
        store, state = base(root)
        faults = Faults(at, kind, forever=forever)
        failed = False
        with installed(faults):
            try:
                MAKERS[maker](store, root / "snap")
            except hybridmem.HybridMemError:
                failed = True
        where = f"call {at}, {faults.names[-1:]}"
        assert failed or (root / "snap").exists(), where
        if (root / "snap").exists():
            assert found_in(root / "snap", "r", [state]) is state, where
        elif not forever:
            assert set(os.listdir(root)) <= {"mem", "file"}, where
        if (root / "file").exists():
            import_store(root / "file", root / "again")
            assert found_in(root / "again", "r", [state]) is state, where
        assert len(read(store)) == 4
        store.close()
        assert found_in(root / "mem", "r", [state]) is state, where
        shutil.rmtree(root)
        gc.collect()  # a writer keeps the error it met, and that what was to be written
        assert held() == before, f"{where}: descriptors or mappings are left"
        if not faults.fired and len(faults.names) <= at:
            assert at > 10
            return
        at += 17 if maker in LONG else 5


def test_a_writer_that_failed_knows_no_commit(scratch: Scratch) -> None:
    root = scratch.new()
    store, _ = base(root)
    store.delete(1)
    with installed(FailedSync(3, Syscalls())), pytest.raises(hybridmem.StoreIOError):
        store.compact()
    with pytest.raises(hybridmem.StoreIOError, match="open it again"):
        store.snapshot(root / "snap")
    assert os.listdir(root) == ["mem"]
    store.close()
    with hybridmem.open(root / "mem") as again:
        again.snapshot(root / "snap")
        assert read(hybridmem.open(root / "snap", mode="r")) == read(again)

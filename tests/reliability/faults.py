"""Operations whose k-th system call is made to fail, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hybridmem
from hybridmem.testing import KINDS, Faults, installed

from .book import Book, State, read
from .crashes import Scratch
from .histories import CONFIG


@dataclasses.dataclass
class Case:
    """A store that is open, what it holds, and one operation on it.

    `after` is what it holds after the operation, `done` what it would if that had succeeded.
    """

    store: Any
    book: Book
    act: Callable[[], object]
    after: Callable[[], State]
    done: Callable[[], State]


def _base(root: Path) -> tuple[Any, Book]:
    book = Book()
    store = hybridmem.create(root / "mem", shard_max_bytes=800, **CONFIG)
    for i in range(4):
        book.put(store, importance=1 + i)
    store.flush()
    book.commit()
    return store, book


def _flush(root: Path) -> Case:
    store, book = _base(root)
    book.put(store)
    store.delete(2)
    book.drop([2])
    book.query(store, 1)
    return Case(store, book, store.flush, book.state, book.state)


def _spill(root: Path) -> Case:
    store, book = _base(root)
    book.put(store)
    book.put(store)
    planned = copy.deepcopy(book)
    planned.put(types.SimpleNamespace(put=lambda *_, **__: book.used + 1))
    return Case(store, book, lambda: book.put(store), book.state, planned.state)


def _evict(root: Path) -> Case:
    store, book = _base(root)
    gone = book.lowest(2)

    def after() -> State:
        kept = Book()
        kept.live = {i: item for i, item in book.live.items() if i not in gone}
        kept.counts = {i: n for i, n in book.counts.items() if i not in gone}
        return kept.state()

    return Case(store, book, lambda: store.evict(2), after, after)


def _compact(root: Path) -> Case:
    store, book = _base(root)
    store.delete(2)
    book.drop([2])
    return Case(store, book, store.compact, book.state, book.state)


OPERATIONS: dict[str, Callable[[Path], Case]] = {
    "flush": _flush,
    "spill": _spill,
    "evict": _evict,
    "compact": _compact,
}


def held() -> tuple[int, int]:
    """Return how many descriptors this process has, and how many mappings of stores."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().count("/mem/") if maps.exists() else 0
    return len(os.listdir("/proc/self/fd" if maps.exists() else "/dev/fd")), mapped


def sweep(name: str, kind: str, forever: bool, scratch: Scratch, step: int = 1) -> int:
    """Fail every `step`-th call of an operation in turn; return how many were made to fail."""
    at, count = 0, 0
    while True:
        root = scratch.new()
        before = held()
        try:
            if not _one(OPERATIONS[name](root), Faults(at, kind, forever=forever), forever):
                return count
        except AssertionError as error:
            raise AssertionError(f"{name}, call {at}, {kind}, {forever=}: {error}") from error
        finally:
            shutil.rmtree(root)
        assert held() == before, f"{name}, call {at}, {kind}: descriptors or mappings are left"
        at += step
        count += 1


def _one(case: Case, faults: Faults, forever: bool) -> bool:
    store, book = case.store, case.book
    old, committed = book.state(), book.before()
    failed = False
    with installed(faults):
        try:
            case.act()
        except hybridmem.HybridMemError:
            failed = True
    new = case.after()
    states = [committed, old, new]
    found = read(store)
    assert old.fits(found) or new.fits(found), f"memory holds {sorted(found)}"
    assert failed or new.fits(found)
    try:
        store.flush()
        usable = True
    except hybridmem.StoreIOError:
        usable = False
        assert failed, "an operation that succeeded left a store that is not usable"
    left = [name for name in os.listdir(store.path) if name.startswith(".hybridmem-")]
    assert forever or not usable or not left, f"{left} was left"
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        durable = read(reader)
    if usable:
        assert {i: item for i, (item, _) in durable.items()} == {
            i: item for i, (item, _) in found.items()
        }, "what was in memory was not flushed"
    assert any(state.fits(durable) for state in states), f"the disk holds {sorted(durable)}"
    with hybridmem.open(store.path) as writer:
        assert read(writer).keys() == durable.keys()
        writer.put([[1.0] * 4], [[1.0] * 4], 0)
    return faults.fired or len(faults.names) > faults.at


def _nothing(path: Path) -> list[int]:
    return []


def _closed(path: Path) -> list[int]:
    with hybridmem.create(path, shard_max_bytes=800, **CONFIG) as store:
        return [store.put([[float(i)] * 4], [[1.0] * 4], 0, i) for i in range(5)]


def _unfinished(path: Path) -> list[int]:
    """Cut a compaction short after its commit: a writer that opens it has all to tidy up."""
    _closed(path)
    counted = path.with_name("counted")
    shutil.copytree(path, counted)
    plan = Faults(-1, "EIO")
    for where, faults in ((counted, plan), (path, None)):
        with hybridmem.open(where) as store:
            store.delete(2)
            if faults is None:  # the last rename is that of the records
                at = max(i for i, name in enumerate(plan.names) if name == "rename")
                faults = Faults(at, "EIO", forever=True)
            with installed(faults), contextlib.suppress(hybridmem.StoreIOError):
                store.compact()
    shutil.rmtree(counted)
    (path / ".hybridmem-00.tmp").touch()
    assert list(path.glob("entries.bin.g*")), "there is nothing to recover"
    return [1, 3, 4, 5]


#: What is there before, which returns the ids that are in it, and how it is opened.
OPENINGS: dict[str, tuple[Callable[[Path], list[int]], str]] = {
    "create": (_nothing, "create"),
    "read": (_closed, "r"),
    "write": (_closed, "r+"),
    "read what was cut short": (_unfinished, "r"),
    "recover": (_unfinished, "r+"),
}


def sweep_opening(name: str, kind: str, forever: bool, scratch: Scratch, step: int = 1) -> int:
    """Fail every `step`-th call of creating or opening a store; return how many failed."""
    prepare, mode = OPENINGS[name]
    for count in itertools.count():
        at = count * step
        root = scratch.new()
        path = root / "mem"
        ids = prepare(path)
        before = held()
        faults = Faults(at, kind, forever=forever)
        with installed(faults), contextlib.suppress(hybridmem.HybridMemError):
            _open(path, mode).close()
        assert held() == before, f"{name}, call {at}, {kind}: descriptors or mappings are left"
        exists = (path / "index.json").exists()
        assert exists or mode == "create", f"{name}, call {at}, {kind}: the store is gone"
        with _open(path, "r+" if exists else "create") as store:
            assert list(store) == ids, f"{name}, call {at}, {kind}: it holds {list(store)}"
        shutil.rmtree(root)
        if len(faults.names) <= at:
            return count
    raise AssertionError


def _open(path: Path, mode: str) -> Any:
    return hybridmem.create(path, **CONFIG) if mode == "create" else hybridmem.open(path, mode=mode)


def kinds() -> Iterator[tuple[str, bool]]:
    for kind in KINDS:
        yield kind, True
        if kind != "full":
            yield kind, False

"""Lives of stores, step by step, with what may be found on the disk at each of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hybridmem
from hybridmem.testing import Faults, Hooked, Recorder, Syscalls

from .book import EMBED, Book, State, read

#: Small records and signatures, so that states are quick to build; wide enough to be torn.
CONFIG: dict[str, Any] = {"embed_dim": EMBED, "hdc_dim": 1024}


class Life:
    """A store under a recorder.

    Attributes
    ----------
    allowed : dict of str to sequence of State or None
        What may be found after a crash, by the mark that precedes it; None is no store.
    """

    def __init__(self, root: Path, recorder: Recorder, **config: Any) -> None:
        self.path = root / "mem"
        self.recorder = recorder
        self.book = Book()
        self.allowed: dict[str, Sequence[State | None]] = {"": [None]}
        self.acknowledged: dict[str, int] = {"": 0}
        self.config = CONFIG | config
        self.store: Any = None

    def now(self, what: str, *states: State | None) -> None:
        """Let the disk hold one of some states from now on."""
        mark = f"{len(self.allowed)} {what}"
        self.allowed[mark] = states
        self.acknowledged[mark] = max(self.book.committed.items, default=0)
        self.recorder.mark(mark)

    def commit(self, what: str, call: Callable[[], object], *between: State) -> None:
        """Call what commits the book's state."""
        self.now(what, self.book.before(), *between, self.book.state())
        call()
        self.now(f"{what} done", self.book.commit())

    def create(self) -> None:
        self.now("create", None, self.book.committed)
        self.store = hybridmem.create(self.path, **self.config)
        self.now("create done", self.book.committed)

    def put(self, importance: float = 1.0, layer: int = 0, n: int = 2) -> int:
        return self.book.put(self.store, importance=importance, layer=layer, n=n)

    def delete(self, *ids: int) -> None:
        for entry_id in ids:
            self.store.delete(entry_id)
        self.book.drop(ids)

    def flush(self) -> None:
        self.commit("flush", self.store.flush)

    def compact(self) -> None:
        self.commit("compact", self.store.compact)

    def evict(self, target: int) -> None:
        first = self.book.state()
        self.book.drop(self.book.lowest(len(self.book.live) - target))
        self.now("evict", self.book.before(), first, self.book.state())
        self.store.evict(target)
        self.now("evict done", self.book.commit())

    def close(self) -> None:
        self.commit("close", self.store.close)

    def reopen(self, **limits: Any) -> None:
        self.close()
        self.store = hybridmem.open(self.path, **limits)


def plain(life: Life) -> None:
    """Create, put, flush; access counts alone; deletions of what was flushed and what was not."""
    life.create()
    ids = [life.put(layer=i % 2) for i in range(4)]
    life.flush()
    life.book.query(life.store, ids[0])
    life.book.query(life.store, ids[1])
    life.flush()
    unwritten = [life.put(), life.put()]
    life.book.query(life.store, ids[2])
    life.delete(ids[1], unwritten[0])
    life.flush()
    life.put()
    life.close()


def spills(life: Life) -> None:
    """Full shards that put writes by itself, some of them dead before they are committed."""
    life.create()
    for _ in range(5):
        life.put()
    life.flush()
    spilled = [life.put() for _ in range(4)]
    life.delete(*spilled[:2])
    life.flush()
    life.put()
    life.compact()
    life.put()
    life.close()


def evictions(life: Life) -> None:
    """Deletions and evictions, compactions with and without entries, a store emptied."""
    life.create()
    ids = [life.put(importance=1 + i) for i in range(6)]
    life.flush()
    life.delete(ids[1], ids[4])
    life.compact()
    life.put(importance=0.5)
    life.evict(3)
    life.put(importance=9)
    life.compact()
    life.evict(0)
    life.compact()
    life.put()
    life.flush()
    life.close()


def merges(life: Life) -> None:
    """Small shards, one of each flush, merged by a compaction without a dead entry."""
    life.create()
    for _ in range(4):
        life.put()
        life.flush()
    life.compact()
    life.reopen(shard_max_bytes=200)
    life.put()
    life.flush()
    life.close()


def bounded(life: Life) -> None:
    """A store at its max_entries, reopened with a lower one."""
    life.create()
    for i in range(4):
        life.put(importance=1 + i)
    life.flush()
    life.put(importance=5)
    life.book.drop(life.book.lowest(1))
    life.put(importance=6)
    life.book.drop(life.book.lowest(1))
    life.flush()
    life.reopen(max_entries=2)
    life.book.drop(life.book.lowest(2))
    life.flush()
    life.close()


class FailedSync(Hooked):
    """One sync fails; the kernel then takes for written what it has not written."""

    def __init__(self, at: int, base: Syscalls) -> None:
        super().__init__(base)
        self.left = at

    @property
    def fired(self) -> bool:
        return self.left < 0

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("fsync", "fdatasync"):
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.EIO, "injected")
        return super().intercept(name, *args, **kwargs)


def failed_syncs(life: Life) -> None:
    """Each sync of flush, compact and evict fails once; the store is opened again and goes on."""
    life.create()
    life.put()
    calls = life.recorder.base
    for operation in ("flush", "compact", "evict"):
        for at in itertools.count():
            lost = life.put()
            life.flush()
            life.put(importance=2)
            life.delete(lost)
            life.recorder.base = failing = FailedSync(at, calls)
            before, after = life.book.before(), life.book.state()
            life.now(f"{operation}, sync {at} fails", before, after)
            target = (len(life.book.live),) if operation == "evict" else ()
            with contextlib.suppress(hybridmem.StoreIOError):
                getattr(life.store, operation)(*target)
            life.recorder.base = calls
            if not failing.fired:
                life.now("no sync failed", life.book.commit())
                break
            life.store.close()
            life.store = hybridmem.open(life.path)
            found = read(life.store)
            [seen] = [state for state in (before, after) if state.fits(found)]
            life.book.live, life.book.used = dict(seen.items), max(seen.items)
            life.book.counts = dict.fromkeys(seen.items, 0)
            life.now("opened again", life.book.commit())
    life.close()


def full_disk(life: Life) -> None:
    """A full disk: flush fails, evict gives space back through the reserve, then there is room."""
    life.create()
    for i in range(3):
        life.put(importance=1 + i)
    life.flush()
    calls = life.recorder.base
    life.recorder.base = Faults(0, "full", base=calls)
    life.evict(2)
    assert life.recorder.base.fired
    life.put(importance=9)
    life.now("flush on a full disk", life.book.before())
    try:
        life.store.flush()
    except hybridmem.StoreFullError:
        life.recorder.base = calls
    life.flush()
    life.compact()
    # What is pending has no room, so the marks are committed alone, with no sync but their own.
    life.put(importance=9)
    gone = life.book.lowest(1)
    before = life.book.before()
    life.now("evict with something pending", before, before.without(gone))
    life.recorder.base = Faults(0, "full", base=calls)
    with contextlib.suppress(hybridmem.StoreFullError):
        life.store.evict(len(life.book.live) - 1)
    life.book.drop(gone)
    life.recorder.base = calls
    life.commit("flush", life.store.flush, before.without(gone))
    life.recorder.base = Faults(0, "full", base=calls)
    life.evict(1)
    life.recorder.base = calls
    life.close()


HISTORIES: dict[str, tuple[Callable[[Life], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "spills": (spills, {"shard_max_bytes": 140}),
    "evictions": (evictions, {"shard_max_bytes": 140}),
    "evictions-one-shard": (evictions, {}),
    "merges": (merges, {}),
    "bounded": (bounded, {"max_entries": 4}),
    "wide-records": (plain, {"hdc_dim": 16384}),
    "failed-syncs": (failed_syncs, {"shard_max_bytes": 140}),
    "full-disk": (full_disk, {"shard_max_bytes": 140}),
}

"""Building crash states, opening them, and comparing what is found with what may be there."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hybridmem
from hybridmem.testing import CrashState, Recorder, crash_states, installed

from .book import Book, State, open_or_none, read
from .histories import CONFIG, HISTORIES, Life

FAST = Path("/dev/shm")


class Scratch:
    """Empty directories, in memory where there is such a file system."""

    def __init__(self) -> None:
        gc.collect()  # what was left before may hold descriptors, which are counted
        where = FAST if os.access(FAST, os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(prefix="hybridmem-crash-", dir=where))
        self._numbers = itertools.count()

    def new(self) -> Path:
        path = self.root / str(next(self._numbers))
        path.mkdir()
        return path

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def recorded(name: str, scratch: Scratch) -> Life:
    """Run a history under a recorder."""
    steps, config = HISTORIES[name]
    root = scratch.new()
    recorder = Recorder(root)
    life = Life(root, recorder, **config)
    with installed(recorder):
        steps(life)
    return life


def describe(state: CrashState) -> str:
    return f"after {state.length} changes, {state.mark!r}; {state.how}"


def found_in(path: Path, mode: str, allowed: Sequence[State | None]) -> State | None:
    """Open a store and return which of the allowed states it is in."""
    store = open_or_none(path, mode)
    if store is None:
        assert None in allowed, "no store where one was acknowledged"
        return None
    with store:
        found = read(store)
    for state in allowed:
        if state is not None and state.fits(found):
            return state
    raise AssertionError(f"holds {found}, allowed are {allowed}")


class Checker:
    """Opens crash states and counts what it saw."""

    def __init__(self, life: Life, scratch: Scratch, *, limit: int, sample: int) -> None:
        self.life = life
        self.scratch = scratch
        self.limit = limit
        self.sample = sample
        self.states = 0
        self.deep_states = 0
        self._known: set[int] = set()
        self._seen: set[tuple[bytes, tuple[int, ...]]] = set()

    def check(self, state: CrashState, *, deep: bool = False) -> None:
        """Open one state as a reader, then as a writer."""
        key = state.digest, tuple(map(id, self.life.allowed[state.mark]))
        # By the mark too: a tree that can come about at any time is then opened at some of them.
        if key in self._seen or zlib.crc32(state.digest + state.mark.encode()) % self.sample:
            return
        self._seen.add(key)
        self.states += 1
        root = self.scratch.new()
        try:
            state.build(root)
            self._check(root, state, deep)
        except (AssertionError, hybridmem.HybridMemError) as error:
            raise AssertionError(f"{describe(state)}: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(root)

    def _check(self, root: Path, state: CrashState, deep: bool) -> None:
        path = root / "mem"
        allowed = self.life.allowed[state.mark]
        before = tree(path)
        seen = found_in(path, "r", allowed)
        assert tree(path) == before, "a reader changed something"
        recorder = Recorder(root)
        with installed(recorder):
            if seen is None:
                hybridmem.create(path, **CONFIG).close()
                return
            assert found_in(path, "r+", [seen]) is seen
        self._tidy(path)
        if self.states % 8 == 1:
            self._usable(path, seen, self.life.acknowledged[state.mark])
        if deep and self._is_new(recorder):
            # A crash of the recovery must leave the same state.
            self.deep_states += 1
            for again in crash_states(recorder, limit=self.limit):
                if int.from_bytes(again.digest[:4], "big") % self.sample == 0:
                    self._again(again, seen)

    def _is_new(self, recorder: Recorder) -> bool:
        key = hash(tuple(type(change).__name__ for change in recorder.log)) ^ hash(
            tuple(sorted(recorder.start.tree()))
        )
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def _again(self, state: CrashState, seen: State) -> None:
        self.states += 1
        root = self.scratch.new()
        try:
            state.build(root)
            assert found_in(root / "mem", "r", [seen]) is seen, describe(state)
            assert found_in(root / "mem", "r+", [seen]) is seen, describe(state)
        finally:
            shutil.rmtree(root)

    def _tidy(self, path: Path) -> None:
        names = set(os.listdir(path))
        strange = {name for name in names if name.startswith(".hybridmem-") or ".g" in name}
        assert not strange, f"the writer left {strange}"

    def _usable(self, path: Path, seen: State, acknowledged: int) -> None:
        """Go on working with what was recovered."""
        book = Book()
        book.used = max(max(seen.items, default=0), acknowledged)
        with hybridmem.open(path) as store:
            counts = {i: count for i, (_, count) in read(store).items()}
            book.live, book.counts = dict(seen.items), counts
            if store.config.max_entries:
                return
            book.put(store)
            store.flush()
            final = book.commit()
        assert found_in(path, "r", [final]) is final


def tree(path: Path) -> dict[str, bytes]:
    if not path.exists():
        return {}
    return {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(path)}


def check_power(
    name: str,
    scratch: Scratch,
    *,
    limit: int,
    sample: int = 1,
    deep: bool = True,
    until: float = float("inf"),
) -> Checker:
    """Cut the power at every point of a history; open one in `sample` of the states.

    And of the recoveries from these, if `deep`.
    """
    life = recorded(name, scratch)
    checker = Checker(life, scratch, limit=limit, sample=sample)
    for state in crash_states(life.recorder, limit=limit):
        checker.check(state, deep=deep)
        if time.monotonic() > until:
            break
    return checker


def check_kills(
    name: str,
    scratch: Scratch,
    *,
    limit: int,
    sample: int = 1,
    every: int = 1,
    until: float = float("inf"),
) -> Checker:
    """Kill the process at every point, let another one recover, and cut the power during that."""
    life = recorded(name, scratch)
    checker = Checker(life, scratch, limit=limit, sample=sample)
    for length in range(1, len(life.recorder.log) + 1, every):
        for state in recovery_states(life, length, scratch, limit):
            checker.check(state)
        if time.monotonic() > until:
            break
    return checker


def recovery_states(life: Life, length: int, scratch: Scratch, limit: int) -> Iterator[CrashState]:
    mark = next((c.text for c in reversed(life.recorder.log[:length]) if hasattr(c, "text")), "")
    root = scratch.new()
    recorder = life.recorder.fork(length, root)
    try:
        with installed(recorder):
            seen = found_in(root / "mem", "r+", life.allowed[mark])
        if seen is None:
            return
        # What a writer has been shown stays, once it has flushed.
        acknowledged = f"{mark}, recovered {length}"
        recorder.mark(acknowledged)
        life.allowed[acknowledged] = [seen]
        life.acknowledged[acknowledged] = life.acknowledged[mark]
        yield from crash_states(recorder, first=length, limit=limit)
    finally:
        shutil.rmtree(root)


def summary(checkers: Sequence[Checker]) -> dict[str, Any]:
    return {
        "states": sum(checker.states for checker in checkers),
        "recoveries": sum(checker.deep_states for checker in checkers),
    }

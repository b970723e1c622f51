"""The crash tests can fail: without one sync, the temporary name or a checksum they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybridmem import _snapshot
from hybridmem._fileio import Directory
from hybridmem.testing import CrashState, crash_states

from .crashes import Checker, Scratch, recorded, recovery_states
from .mutants import MUTANTS, ROOT, Mutant, place


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_edit_has_its_place(mutant: Mutant) -> None:
    """All of them are run by tests.reliability.mutants, which takes minutes."""
    if not (ROOT / "hybridmem").exists():
        pytest.skip("an installed package is not edited")
    place(mutant, ROOT / "hybridmem")


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


def found(checker: Checker, state: CrashState) -> bool:
    """Whether a state is one that must not be."""
    try:
        checker.check(state)
    except AssertionError:
        return True
    return False


def no_sync_of_new_files(patch: pytest.MonkeyPatch) -> None:
    sync = Directory._sync

    def only_others(self: Directory, fd: int, what: object, call: Any) -> None:
        if what in (self.path, "entries.bin"):
            sync(self, fd, what, call)

    patch.setattr(Directory, "_sync", only_others)


def no_sync_of_records(patch: pytest.MonkeyPatch) -> None:
    sync = Directory._sync

    def only_others(self: Directory, fd: int, what: object, call: Any) -> None:
        if what != "entries.bin":
            sync(self, fd, what, call)

    patch.setattr(Directory, "_sync", only_others)


def no_sync_of_the_directory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "sync", lambda self: None)


def no_temporary_name(patch: pytest.MonkeyPatch) -> None:
    """index.json is written where it stands."""
    write, rename = Directory.write_temporary, Directory.rename

    def in_place(self: Directory, pieces: Any, what: str) -> str:
        if what != "index.json":
            return write(self, pieces, what)
        ((_, buffers),) = pieces
        data = b"".join(buffers)
        self.update_file(what, [(0, [data])])
        self.truncate_file(what, len(data))
        return what

    def rename_others(self: Directory, src: str, dst: str) -> None:
        if src != dst:
            rename(self, src, dst)

    patch.setattr(Directory, "write_temporary", in_place)
    patch.setattr(Directory, "rename", rename_others)


@pytest.mark.parametrize(
    "mutate",
    [
        no_sync_of_new_files,
        no_sync_of_records,
        no_sync_of_the_directory,
        no_temporary_name,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_power_cut_finds_it(
    mutate: Any, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutate(patch)
        life = recorded("plain", scratch)
    checker = Checker(life, scratch, limit=16, sample=1)
    assert any(found(checker, state) for state in crash_states(life.recorder, limit=16))


def test_a_recovery_that_does_not_sync_first_is_found(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = recorded("plain", scratch)
    recover = _snapshot.recover

    def unsynced(directory: Directory, loaded: Any) -> None:
        sync, calls = Directory.sync, []

        def all_but_the_first(self: Directory) -> None:
            calls.append(self)
            if len(calls) > 1:
                sync(self)

        with monkeypatch.context() as patch:
            patch.setattr(Directory, "sync", all_but_the_first)
            recover(directory, loaded)

    monkeypatch.setattr(_snapshot, "recover", unsynced)
    checker = Checker(life, scratch, limit=8, sample=1)
    lengths = range(1, len(life.recorder.log))
    states = (one for length in lengths for one in recovery_states(life, length, scratch, 8))
    assert any(found(checker, state) for state in states)

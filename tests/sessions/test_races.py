"""Sessions that others make, use and drop at the same time, and crashes on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridmem
from hybridmem._fileio import Directory
from hybridmem.testing import Faults, Recorder, crash_states, installed

from .helpers import ROW, use


def test_another_name_may_be_quicker(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where case does not count, and "alice" is made while "Alice" is opened."""
    create, exists = hybridmem.opening.create, Path.exists

    def too_late(path: Path, **fields: Any) -> hybridmem.Store:
        create(root / "alice", **fields).close()
        raise hybridmem.StoreExistsError(str(path))

    monkeypatch.setattr(hybridmem.opening, "create", too_late)
    monkeypatch.setattr(Path, "exists", lambda path: exists(path.parent / path.name.lower()))
    with pytest.raises(ValueError, match="'Alice' is the name of another session"):
        sessions.open("Alice")


def test_who_opened_the_directory_before_finds_no_store(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put into a session that is on its way out would be acknowledged and lost."""
    use(sessions, "alice")
    early = Directory(root / "alice")
    remove = Directory.remove_directory
    refused = []

    def other_process(parent: Directory, directory: Directory) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(hybridmem.opening, "directory_of", lambda _: early)
            with pytest.raises(hybridmem.StoreNotFoundError) as caught:
                hybridmem.open("alice")
            refused.append(caught)
        remove(parent, directory)

    monkeypatch.setattr(Directory, "remove_directory", other_process)
    sessions.drop("alice")
    assert len(refused) == 1
    assert os.listdir(root) == []


def test_a_session_that_is_dropped_while_it_is_opened_is_made_anew(
    sessions: hybridmem.Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(sessions, "alice")
    lock = Directory.lock

    def too_late(directory: Directory) -> None:
        monkeypatch.setattr(Directory, "lock", lock)
        sessions.drop("alice")
        lock(directory)

    monkeypatch.setattr(Directory, "lock", too_late)
    with sessions.open("alice") as store:
        assert len(store) == 0
        store.put(ROW, ROW, 0)
    assert [session.entries for session in sessions.list()] == [1]


def test_drop_does_not_take_what_was_made_anew(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock of the directory that another drop has emptied; the new one is in use."""
    use(sessions, "alice")
    lock, opened = Directory.lock, []

    def too_late(directory: Directory) -> None:
        monkeypatch.setattr(Directory, "lock", lock)
        sessions.drop("alice")
        opened.append(sessions.open("alice"))
        lock(directory)

    monkeypatch.setattr(Directory, "lock", too_late)
    with pytest.raises(hybridmem.StoreNotFoundError):
        sessions.drop("alice")
    (store,) = opened
    store.put(ROW, ROW, 0)
    store.close()
    assert [session.entries for session in sessions.list()] == [1]


def test_two_drops_remove_what_is_left_behind_together(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(sessions, "alice")
    names = Directory.names
    monkeypatch.setattr(
        Directory,
        "names",
        lambda directory: names(directory) + [".hybridmem-2.dropped"] * (directory.path == root),
    )
    with pytest.raises(hybridmem.StoreNotFoundError):
        sessions.drop("bob")
    sessions.drop("alice")
    assert os.listdir(root) == []


@pytest.mark.parametrize("call", ["open", "create"])
def test_a_store_in_a_directory_that_was_dropped_is_given_to_nobody(
    call: str, sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looked up the path before it was dropped, and took the lock after that."""
    if call == "open":
        use(sessions, "alice")
    real = getattr(hybridmem.opening, call)

    def too_late(path: Path, *args: Any, **fields: Any) -> hybridmem.Store:
        monkeypatch.setattr(hybridmem.opening, call, real)
        store: hybridmem.Store = real(path, *args, **fields)
        path.rename(path.with_name(".hybridmem-1.dropped"))
        return store

    monkeypatch.setattr(hybridmem.opening, call, too_late)
    with sessions.open("alice") as store:
        assert len(store) == 0
        store.put(ROW, ROW, 0)
    assert [session.entries for session in sessions.list()] == [1]


def test_a_session_that_is_made_anew_is_not_listed_as_damaged(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(sessions, "alice")
    real = hybridmem.opening.open

    def too_late(path: Path, **options: Any) -> hybridmem.Store:
        monkeypatch.setattr(hybridmem.opening, "open", real)
        raise hybridmem.CorruptStoreError(f"{path / 'entries.bin'} is missing")

    monkeypatch.setattr(hybridmem.opening, "open", too_late)
    (alice,) = sessions.list()
    assert (alice.entries, alice.error) == (2, None)


def test_files_that_come_and_go_hide_no_session(
    sessions: hybridmem.Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer at work removes files between a look at the directory and a look at them."""
    use(sessions, "alice")
    names = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([path / "gone", *names(path)]))
    (alice,) = sessions.list()
    assert (alice.entries, alice.error) == (2, None)
    assert alice.disk_bytes > 0


CHILD = """
import sys, numpy, hybridmem
sessions = hybridmem.sessions(sys.argv[1], embed_dim=16, hdc_dim=64)
with sessions.open("alice") as store:
    store.put(*numpy.ones((2, 1, 16), numpy.float32), 0)
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has opened, and made, the session "alice"."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_two_processes(other_process: subprocess.Popen[str], sessions: hybridmem.Sessions) -> None:
    for call in (lambda: sessions.open("alice"), lambda: sessions.drop("alice")):
        with pytest.raises(hybridmem.StoreLockedError):
            call()
    use(sessions, "bob")  # others are free
    assert [session.name for session in sessions.list()] == ["alice", "bob"]
    other_process.communicate("")
    assert [session.entries for session in sessions.list()] == [1, 2]
    sessions.drop("alice")
    assert list(sessions) == ["bob"]


def test_another_process_may_make_a_session_first(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = hybridmem.opening.create

    def too_late(path: Any, **fields: Any) -> hybridmem.Store:
        with create(path, **fields) as store:
            store.put(ROW, ROW, 0)
        return create(path, **fields)

    monkeypatch.setattr(hybridmem.opening, "create", too_late)
    with sessions.open("alice") as store:
        assert len(store) == 1


def test_a_crash_leaves_a_session_whole_or_gone(
    sessions: hybridmem.Sessions, root: Path, tmp_path: Path
) -> None:
    use(sessions, "alice")
    use(sessions, "bob")
    recorder = Recorder(root)
    with installed(recorder):
        sessions.drop("alice")
    seen = set()
    for number, state in enumerate(crash_states(recorder)):
        after = tmp_path / f"state {number}"
        state.build(after)
        found = hybridmem.sessions(after)
        told = {session.name: (session.entries, session.error) for session in found.list()}
        assert told.pop("bob") == (2, None)
        assert told in ({}, {"alice": (2, None)})
        seen.add(bool(told))
        found.drop("bob")  # clears away what was left of the other
        assert os.listdir(after) == list(told)
    assert seen == {True, False}


def test_an_error_of_the_disk_while_dropping(sessions: hybridmem.Sessions, root: Path) -> None:
    """Whatever call fails, the session is there whole or gone, and what is left goes later."""
    use(sessions, "bob")
    failed = set()
    for at in range(100):
        use(sessions, "alice")
        faults = Faults(at, "EIO")
        with installed(faults):
            try:
                sessions.drop("alice")
            except hybridmem.StoreIOError:
                failed.add(faults.names[at])
            else:
                assert os.listdir(root) == ["bob"]
        if not faults.fired:
            break
        found = {session.name: (session.entries, session.error) for session in sessions.list()}
        assert found.pop("bob") == (2, None)
        assert found in ({}, {"alice": (2, None)})
        if found:
            sessions.drop("alice")
        else:
            use(sessions, "eve")
            sessions.drop("eve")
        assert os.listdir(root) == ["bob"]
    assert {"rename", "fsync", "unlink", "rmdir"} <= failed

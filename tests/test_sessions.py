"""Sessions: stores under one directory, apart from each other, made, listed and removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem._fileio import Directory
from hybridmem.testing import Faults, Recorder, crash_states, installed

WIDTH = 16
ROW = np.ones((1, WIDTH), np.float32)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "agents"


@pytest.fixture
def sessions(root: Path) -> hybridmem.Sessions:
    return hybridmem.sessions(root, embed_dim=WIDTH, hdc_dim=64)


def use(sessions: hybridmem.Sessions, name: str, count: int = 2) -> None:
    rng = np.random.default_rng(len(name))
    with sessions.open(name) as store:
        for _ in range(count):
            store.put(*rng.standard_normal((2, 3, WIDTH)).astype(np.float32), 0)


def test_sessions_are_made_listed_and_opened_again(
    sessions: hybridmem.Sessions, root: Path
) -> None:
    assert (list(sessions), len(sessions), sessions.list()) == ([], 0, [])
    assert not root.exists()
    before = time.time_ns() - 10**9
    use(sessions, "bob", 3)
    use(sessions, "alice", 2)
    assert list(sessions) == ["alice", "bob"]
    assert "bob" in sessions
    assert "eve" not in sessions
    assert 3 not in sessions
    alice, bob = hybridmem.sessions(root).list()  # needs no configuration
    assert (alice.name, alice.path) == ("alice", root / "alice")
    assert (alice.entries, alice.tokens, bob.entries, bob.tokens) == (2, 6, 3, 9)
    assert bob.disk_bytes == sum(path.stat().st_size for path in (root / "bob").iterdir())
    assert before < bob.last_used <= alice.last_used < time.time_ns() + 10**9
    assert (alice.error, bob.error) == (None, None)
    with hybridmem.sessions(root).open("bob") as store:
        assert len(store) == 3
    with sessions.open("bob", mode="r") as one, sessions.open("bob", mode="r") as other:
        assert len(one) == len(other) == 3


def test_what_is_used_last_is_told(sessions: hybridmem.Sessions) -> None:
    use(sessions, "a")
    use(sessions, "b")
    time.sleep(0.05)  # times of files go by ticks of the system
    with sessions.open("a") as store:
        store.query(ROW, 0)
    a, b = sessions.list()
    assert a.last_used > b.last_used


def test_a_session_that_is_not_there(sessions: hybridmem.Sessions, root: Path) -> None:
    for call in (
        lambda: sessions.open("eve", mode="r"),
        lambda: hybridmem.sessions(root).open("eve"),
        lambda: hybridmem.sessions(root, max_entries=3).open("eve"),
        lambda: sessions.drop("eve"),
        lambda: sessions.evict("eve", 1),
    ):
        with pytest.raises(hybridmem.StoreNotFoundError, match=r"no session .eve. in .*agents"):
            call()
    with pytest.raises(hybridmem.StoreNotFoundError, match="give embed_dim"):
        hybridmem.sessions(root).open("eve")
    assert not root.exists()


def test_sessions_do_not_see_each_other(sessions: hybridmem.Sessions) -> None:
    use(sessions, "alice")
    with sessions.open("alice") as alice, sessions.open("bob") as bob:
        assert bob.query(ROW, 0) == []
        assert bob.query(ROW, 0, entry_ids=[1, 2]) == []
        assert 1 not in bob
        mine = bob.put(ROW, 2 * ROW, 0)
        assert mine == 1  # the same id as one of alice's, of another entry
        assert [hit.values.tobytes() for hit in bob.query(ROW, 0)] == [(2 * ROW).tobytes()]
        assert all((hit.values != 2).any() for hit in alice.query(ROW, 0))
        assert alice.store_id != bob.store_id
        bob.delete(mine)
        bob.flush()
        assert len(alice) == 2


def test_evict_is_for_one_session(sessions: hybridmem.Sessions) -> None:
    use(sessions, "alice", 5)
    use(sessions, "bob", 5)
    assert sessions.evict("alice", 2) == 3
    assert [session.entries for session in sessions.list()] == [2, 5]
    with sessions.open("bob"), pytest.raises(hybridmem.StoreLockedError):
        sessions.evict("bob", 2)


# -- configuration --------------------------------------------------------------------------------


def test_fields_of_a_session(sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, "alice")
    with pytest.raises(ValueError, match=r"hdc_dim of the session in .*alice is 64, not 128"):
        hybridmem.sessions(root, embed_dim=WIDTH, hdc_dim=128).open("alice")
    with hybridmem.sessions(root, embed_dim=WIDTH, max_entries=1).open("alice") as store:
        assert store.config.max_entries == 1
    with pytest.raises(hybridmem.ModelMismatchError, match="unnamed model, not of 'A'"):
        hybridmem.sessions(root, embed_dim=WIDTH, model_id="A").open("alice")
    with pytest.raises(TypeError):
        hybridmem.sessions(root, no_field=1)
    with pytest.raises(ValueError, match="hdc_dim"):
        hybridmem.sessions(root, hdc_dim=63)
    with sessions.open("alice"):  # the refused one let go of its lock
        pass


# -- names ----------------------------------------------------------------------------------------

BAD = [
    "", ".", "..", "a/b", "../a", "/etc", "a\\b", "a\0b", "a\nb", ".hidden", "a.", "a ", " a", "C:",
    "a*", "a?", "con", "NUL", "com1", "Lpt9.txt", "con .x", "a" * 201, "é" * 101, "a\u202eb",
    "a\u200bb", unicodedata.normalize("NFD", "é"), "a\udc80", "a|b", "<a>", '"',
]  # fmt: skip
GOOD = [
    "alice", "user 42", "2026-11-30", "a.b", "a" * 200, "é" * 100, "用户", "console", "O'Hara",
    "a@b.example", "x=1&y=2", "..a"[2:], "UPPER", "#1",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_none(name: str, sessions: hybridmem.Sessions, tmp_path: Path) -> None:
    use(sessions, "alice")
    before = sorted(tmp_path.rglob("*"))
    for call in (sessions.open, sessions.drop, lambda name: sessions.evict(name, 0)):
        with pytest.raises(ValueError, match=r"^name: "):
            call(name)
    assert name not in sessions
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [b"alice", 3, None, Path("alice")])
def test_names_that_are_no_text(name: Any, sessions: hybridmem.Sessions) -> None:
    for call in (sessions.open, sessions.drop):
        with pytest.raises(TypeError, match="name: got"):
            call(name)


@pytest.mark.parametrize("name", GOOD)
def test_names_that_are_some(name: str, sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, name)
    assert list(sessions) == [name]
    assert os.listdir(root) == [name]
    sessions.drop(name)
    assert list(sessions) == []


def test_links_lead_nowhere(sessions: hybridmem.Sessions, root: Path, tmp_path: Path) -> None:
    other = hybridmem.sessions(tmp_path / "others", embed_dim=WIDTH)
    use(other, "secret")
    use(sessions, "alice")
    (root / "link").symlink_to(tmp_path / "others" / "secret")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    assert list(sessions) == ["alice"]
    for name in ("link", "dangling"):
        for call in (sessions.open, sessions.drop):
            with pytest.raises(ValueError, match="is a link"):
                call(name)
    assert list(other) == ["secret"]
    assert not (tmp_path / "nowhere").exists()


def test_a_disk_that_takes_two_names_for_one(
    sessions: hybridmem.Sessions, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where case does not count: "Alice" must not lead to the session of "alice"."""
    use(sessions, "alice")
    exists, is_file = Path.exists, Path.is_file
    monkeypatch.setattr(Path, "exists", lambda path: exists(path.parent / path.name.lower()))
    monkeypatch.setattr(Path, "is_file", lambda path: is_file(Path(str(path).lower())))
    for call in (sessions.open, sessions.drop):
        with pytest.raises(ValueError, match="'Alice' is the name of another session"):
            call("Alice")
    assert "Alice" not in sessions


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


def test_what_is_no_session_is_passed_over(sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, "alice")
    (root / "notes.txt").write_text("mine")
    (root / "empty").mkdir()
    shutil.copytree(root / "alice", root / ".hidden")
    assert list(sessions) == ["alice"]
    with pytest.raises(hybridmem.StoreNotFoundError):
        sessions.drop("empty")
    assert sorted(os.listdir(root)) == [".hidden", "alice", "empty", "notes.txt"]


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    sessions = hybridmem.sessions(tmp_path / "file", embed_dim=WIDTH)
    for call in (sessions.list, lambda: sessions.open("alice")):
        with pytest.raises(hybridmem.StoreIOError, match="file"):
            call()


def test_a_damaged_session_is_listed(sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, "alice")
    use(sessions, "bob")
    (root / "alice" / "index.json").write_text("{")
    alice, bob = sessions.list()
    assert alice.error is not None
    assert "index.json" in alice.error
    assert (alice.entries, bob.entries, bob.error) == (0, 2, None)
    assert alice.disk_bytes > 0
    sessions.drop("alice")
    assert list(sessions) == ["bob"]


# -- dropping -------------------------------------------------------------------------------------


def test_a_session_that_is_dropped_is_gone(sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, "alice")
    use(sessions, "bob")
    with sessions.open("alice", mode="r") as reader:
        hit = reader.query(ROW, 0)[0]
        kept = hit.values.copy()
        sessions.drop("alice")
        np.testing.assert_array_equal(hit.values, kept)
    assert os.listdir(root) == ["bob"]
    assert "alice" not in sessions
    with sessions.open("alice") as store:
        assert len(store) == 0
        assert store.put(ROW, ROW, 0) == 1


def test_a_session_in_use_is_not_dropped(sessions: hybridmem.Sessions) -> None:
    use(sessions, "alice")
    with sessions.open("alice") as store:
        with pytest.raises(hybridmem.StoreLockedError):
            sessions.drop("alice")
        assert len(store) == 2
    assert len(sessions.list()) == 1


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

"""Sessions: stores under one directory, apart from each other, made, listed and removed."""

from __future__ import annotations

import os
import shutil
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

from .helpers import ROW, WIDTH, use


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


def test_what_is_used_last_is_told(sessions: hybridmem.Sessions, root: Path) -> None:
    use(sessions, "a")
    use(sessions, "b")
    for name, hours in (("a", 2), ("b", 1)):
        for path in (root / name).iterdir():
            os.utime(path, (time.time() - 3600 * hours,) * 2)
    a, b = sessions.list()
    assert a.last_used < b.last_used
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

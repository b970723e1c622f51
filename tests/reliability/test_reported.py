"""Faults that users of other stores reported, of the kinds that no other test is about.

docs/durability.md has a table of all kinds and of the test of each.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

import hybridmem
from hybridmem import _fileio

from .book import Book, read
from .crashes import tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Any, Book]:
    """An open store of nine entries in several shards."""
    book = Book()
    store = hybridmem.create(tmp_path / "mem", embed_dim=4, hdc_dim=256, shard_max_bytes=700)
    for i in range(9):
        book.put(store, importance=1 + i)
    store.flush()
    book.commit()
    return store, book


def test_a_file_that_is_cut_short_under_a_reader(filled: tuple[Any, Book]) -> None:
    """A bus error where it is mapped; io="pread" makes it an error like others."""
    store, book = filled
    with hybridmem.open(store.path, "r", io="pread") as reader:
        first = reader.get(1)
        for shard in Path(store.path).glob("shard_*"):
            os.truncate(shard, shard.stat().st_size - 9)
        with pytest.raises(hybridmem.CorruptStoreError, match=r"shard_\d+"):
            read(reader)
        assert first.keys.tobytes() == book.live[1].keys
    store.close()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open_looks_at_the_size_of_each_shard(mode: str, filled: tuple[Any, Book]) -> None:
    """Not only when an entry is looked at."""
    store, _ = filled
    store.close()
    shard = max(Path(store.path).glob("shard_*"))
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(hybridmem.CorruptStoreError, match=shard.name):
        hybridmem.open(store.path, mode)


def test_a_shard_that_is_gone_when_its_entries_are_evicted(filled: tuple[Any, Book]) -> None:
    store, _ = filled
    for shard in Path(store.path).glob("shard_*"):
        shard.unlink()
    assert store.evict(0) == 9
    store.put([[1.0] * 4], [[2.0] * 4], 0)
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [10]


def test_what_is_used_is_known_after_a_restart(filled: tuple[Any, Book]) -> None:
    store, _ = filled
    store.delete(2)
    store.flush()
    before = store.stats()
    store.close()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode) as again:
            after = again.stats()
            for name in ("entries", "tokens", "shards", "live_bytes", "dead_bytes", "disk_bytes"):
                assert getattr(after, name) == getattr(before, name) > 0, name


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, filled: tuple[Any, Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS may be: no writer without a lock."""
    store, book = filled
    store.close()

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_fileio.calls, "flock", refuse)
    before = tree(store.path)
    with pytest.raises(hybridmem.StoreIOError, match="locking"):
        hybridmem.open(store.path)
    assert tree(store.path) == before
    with hybridmem.open(store.path, "r") as reader:
        assert book.committed.fits(read(reader))


def test_each_test_that_the_page_names_is_there() -> None:
    page = ROOT / "docs" / "durability.md"
    if not page.exists():
        pytest.skip("the documentation is not installed")
    names = re.findall(r"`(tests/\S+?\.py)(?:::(test_\w+))?", page.read_text())
    assert len(names) > 40
    for file, name in names:
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, f"{file} has no {name}"

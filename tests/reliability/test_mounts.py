"""A disk that is really full, and one that may only be read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem.verify import verify

from .apart import apart
from .book import Book, read
from .crashes import tree
from .mounts import make_read_only, mount_full, mounted

CONFIG: dict[str, Any] = {"embed_dim": 4, "hdc_dim": 1024, "shard_max_bytes": 8_000}


def fill_up(path: Path) -> None:
    """Leave not a byte."""
    with contextlib.suppress(OSError), open(path / "filler", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def full(path: Path) -> tuple[Any, Book]:
    """Put and flush into a store until the disk is full, and then fill what is left."""
    mount_full(path, 1 << 18)
    book = Book()
    store = hybridmem.create(path / "mem", **CONFIG)
    try:
        while True:
            for _ in range(5):
                book.put(store, importance=1 + len(book.live), n=10)
            store.flush()
            book.commit()
    except hybridmem.StoreFullError:
        fill_up(path)
    assert len(book.committed.items) > 20
    return store, book


def committed(path: Path, book: Book) -> None:
    with hybridmem.open(path / "mem", "r") as reader:
        assert book.committed.fits(read(reader))
    assert verify(path / "mem").ok


def put_and_flush(path: Path) -> None:
    store, book = full(path)
    committed(path, book)
    assert read(store).keys() == book.live.keys()
    n_fit = len(book.live)
    with contextlib.suppress(hybridmem.StoreFullError):
        for _ in range(500):  # a shard fills, and cannot be written
            book.put(store, n=10)
    assert len(book.live) - n_fit < 100
    with pytest.raises(hybridmem.StoreFullError):
        store.flush()
    committed(path, book)
    assert read(store).keys() == book.live.keys()
    os.unlink(path / "filler")
    store.evict(10)
    store.close()
    book.drop(book.lowest(len(book.live) - 10))
    book.commit()
    committed(path, book)


def evict(path: Path) -> None:
    store, book = full(path)
    book.drop(book.lowest(len(book.live) - 8))
    store.evict(8)
    book.commit()
    committed(path, book)
    assert sum(entry.stat().st_size for entry in os.scandir(path / "mem")) < 1 << 17
    book.put(store)
    store.flush()
    book.commit()
    store.close()
    committed(path, book)


def compact(path: Path) -> None:
    """It needs room for the records and for what lives in worn shards; what is dead makes it."""
    store, book = full(path)
    in_order = sorted(book.live)
    few, many = in_order[:3], in_order[3:-8]
    for gone, is_enough in ((few, False), (many, True)):
        for entry_id in gone:
            store.delete(entry_id)
        book.drop(gone)
        if is_enough:
            store.compact()
            book.commit()
            committed(path, book)
        else:
            with pytest.raises(hybridmem.StoreFullError):
                store.compact()
            with hybridmem.open(path / "mem", "r") as reader:
                found = read(reader)
            # The deletions are committed alone, as what was put meanwhile has no room.
            assert found.keys() == book.committed.items.keys() - set(few)
            assert all(book.live[i] == item for i, (item, _) in found.items())
    assert sum(entry.stat().st_size for entry in os.scandir(path / "mem")) < 1 << 17
    store.close()
    committed(path, book)


def recover(path: Path) -> None:
    """A writer that died on a full disk, and one that opens there."""
    store, book = full(path)
    (path / "mem" / ".hybridmem-00.tmp").touch()
    store._directory.drop_lock()  # as if it had been killed: nothing is flushed
    store._directory.close()
    store._closed = True
    with hybridmem.open(path / "mem") as again:
        assert book.committed.fits(read(again))
        assert not list((path / "mem").glob("*.tmp"))
        book.live = dict(book.committed.items)
        book.counts = dict.fromkeys(book.live, 0)
        book.drop(book.lowest(len(book.live) - 5))
        again.evict(5)
        book.commit()
    committed(path, book)


def create(path: Path) -> None:
    mount_full(path, 1 << 16)
    fill_up(path)
    with pytest.raises(hybridmem.StoreFullError):
        hybridmem.create(path / "mem", **CONFIG)
    os.unlink(path / "filler")
    hybridmem.create(path / "mem", **CONFIG).close()


@pytest.mark.parametrize("operation", [put_and_flush, evict, compact, recover, create])
def test_a_full_disk(operation: Any, tmp_path: Path) -> None:
    mounted(operation, tmp_path / "disk")


def test_a_disk_that_may_only_be_read(tmp_path: Path) -> None:
    book = Book()
    with hybridmem.create(tmp_path / "mem", **CONFIG) as store:
        for _ in range(9):
            book.put(store)
        store.flush()
        store.delete(3)
        book.drop([3])
    book.commit()
    (tmp_path / "mem" / ".hybridmem-00.tmp").touch()
    before = tree(tmp_path / "mem")

    def look() -> None:
        make_read_only(tmp_path)
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "x").touch()
        for io in ("mmap", "pread"):
            with hybridmem.open(tmp_path / "mem", "r", io=io) as reader:
                assert book.committed.fits(read(reader))
                assert reader.query(np.ones(4, np.float32), 0)
                reader.refresh()
        assert verify(tmp_path / "mem").ok
        for call in (
            lambda: hybridmem.open(tmp_path / "mem"),
            lambda: hybridmem.create(tmp_path / "new", **CONFIG),
        ):
            with pytest.raises(hybridmem.StoreIOError, match="ead-only"):
                call()

    mounted(look)
    assert tree(tmp_path / "mem") == before


def test_a_store_of_another_user(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    book = Book()
    with hybridmem.create(tmp_path / "mem", **CONFIG) as store:
        for _ in range(9):
            book.put(store)
    book.commit()
    before = tree(tmp_path / "mem")

    def look() -> None:
        os.chdir(tmp_path / "mem")  # whose parents another user may not enter
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        reader = hybridmem.open("/proc/self/cwd", "r")
        with reader:
            assert book.committed.fits(read(reader))
        for call in (
            lambda: hybridmem.open("/proc/self/cwd"),
            lambda: hybridmem.create("/proc/self/cwd/new", **CONFIG),
        ):
            with pytest.raises(hybridmem.StoreIOError, match="denied"):
                call()

    apart(look).check()
    assert tree(tmp_path / "mem") == before

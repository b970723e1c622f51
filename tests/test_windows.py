"""Stores over the system calls of Windows, played by a stand-in that is as strict as Windows is.

It is no Windows. What it keeps: names of open and mapped files cannot be taken away, a lock goes
with the file it was taken by, and nothing is relative to a directory.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _windows
from hybridmem._syscalls import O_DIRECTORY
from hybridmem._windows import WindowsSyscalls
from hybridmem.archive import export_store, import_store
from hybridmem.testing import installed
from hybridmem.verify import salvage, verify


class Strict(WindowsSyscalls):
    """The Windows branch over POSIX calls, with the refusals of Windows."""

    def __init__(self) -> None:
        super().__init__()
        self.open_files: dict[int, str] = {}
        self.maps: list[tuple[weakref.ref[mmap.mmap], str]] = []
        self.locks: dict[str, int] = {}
        self.refused = 0
        self.closed_when_refused: list[int] = []

    def in_use(self, path: str) -> bool:
        self.maps = [(ref, name) for ref, name in self.maps if ref() is not None]
        return path in self.open_files.values() or any(name == path for _, name in self.maps)

    def check_free(self, path: str) -> None:
        if self.in_use(path):
            self.refused += 1
            for fd in self.closed_when_refused:
                self.open_files.pop(fd, None)
            raise PermissionError(errno.EACCES, "used by another process", path)

    def open(self, path: str, flags: int, mode: int = 0o666, dir_fd: int | None = None) -> int:
        fd = super().open(path, flags, mode, dir_fd)
        if not flags & O_DIRECTORY:
            assert dir_fd is not None
            self.open_files[fd] = self._path(path, dir_fd)
        return fd

    def close(self, fd: int) -> None:
        path = self.open_files.pop(fd, None)
        self.locks = {name: by for name, by in self.locks.items() if by != fd}
        assert path is not None or fd in self._directories
        super().close(fd)

    def mmap(self, fd: int, length: int) -> mmap.mmap:
        mapped = super().mmap(fd, length)
        self.maps.append((weakref.ref(mapped), self.open_files[fd]))
        return mapped

    def move(self, src: str, dst: str) -> None:
        self.check_free(src)
        if os.path.isdir(src):
            inside = [p for p in self.open_files.values() if p.startswith(src + os.sep)]
            assert not inside, "a directory with open files was renamed"
            if os.path.lexists(dst):
                raise PermissionError(errno.EACCES, "exists", dst)
        self.check_free(dst)
        os.replace(src, dst)

    def unlink(self, name: str, dir_fd: int) -> None:
        self.check_free(self._path(name, dir_fd))
        super().unlink(name, dir_fd)

    def ftruncate(self, fd: int, length: int) -> None:
        path = self.open_files[fd]
        assert not any(name == path and ref() is not None for ref, name in self.maps)
        super().ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        pass  # the tests are about names

    fdatasync = fsync

    def fallocate(self, fd: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def lock_byte(self, fd: int) -> None:
        path = self.open_files[fd]
        if path in self.locks:
            raise PermissionError(errno.EACCES, "locked")
        self.locks[path] = fd


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Strict]:
    monkeypatch.setattr(_windows, "_PATIENCE", 0.05)
    calls = Strict()
    with installed(calls):
        yield calls


def pair(number: int, n: int = 3) -> tuple[Any, Any]:
    keys, values = np.random.default_rng(number).normal(size=(2, n, 8)).astype(np.float32)
    return keys, values


def fill(store: Any, first: int, count: int) -> None:
    for number in range(first, first + count):
        assert store.put(*pair(number), number % 2, source={"n": number}) == number


def check(store: Any, ids: list[int]) -> None:
    assert list(store) == ids
    for number in ids:
        keys, values = pair(number)
        entry = store.get(number)
        assert np.array_equal(entry.keys, keys)
        assert np.array_equal(entry.values, values)
        assert entry.source == {"n": number}
        assert store.query(keys, number % 2, 1)[0].entry_id == number


def leftover(path: Path) -> list[str]:
    named = {f"shard_{n:04d}.safetensors" for n, *_ in _index(path)["shards"]}
    return sorted(p.name for p in path.glob("shard_*") if p.name not in named)


def _index(path: Path) -> Any:
    import json

    return json.loads((path / "index.json").read_text())


def test_a_life(windows: Strict, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8, hdc_dim=512, max_open_shards=64) as store:
        fill(store, 1, 30)
        store.flush()
        check(store, list(range(1, 31)))
        reader = hybridmem.open(path, mode="r")
        check(reader, list(range(1, 31)))
        fill(store, 31, 10)
        store.flush()
        for number in range(1, 21):
            store.delete(number)
        store.compact()
        assert windows.refused, "the reader maps shards: none could be removed"
        check(store, list(range(21, 41)))
        check(reader, list(range(1, 31)))  # what it reads is still there
        assert reader.refresh()
        check(reader, list(range(21, 41)))
        store.evict(10)
        reader.close()
    with hybridmem.open(path) as store:
        check(store, list(store))
        assert len(store) == 10
    assert leftover(path) == []
    assert verify(path).ok
    assert not windows.open_files
    assert not windows._directories


def test_a_held_hit_keeps_its_bytes_and_its_file_goes_later(
    windows: Strict, tmp_path: Path
) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        fill(store, 1, 6)
        store.flush()
        hit = store.query(pair(3)[0], 1, 1)[0]
        store.delete(3)
        store.compact()
        assert leftover(path) == ["shard_0000.safetensors"]
        assert np.array_equal(hit.keys, pair(3)[0])
        del hit
        fill(store, 7, 1)
        store.flush()
        assert leftover(path) == []


def test_what_is_left_by_one_writer_goes_with_the_next(windows: Strict, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    store = hybridmem.create(path, embed_dim=8)
    fill(store, 1, 4)
    store.flush()
    hit = store.query(pair(3)[0], 1, 1)[0]
    store.delete(3)
    store.compact()
    store.close()
    assert leftover(path) == ["shard_0000.safetensors"]
    with hybridmem.open(path) as store:
        check(store, [1, 2, 4])
        assert leftover(path) == ["shard_0000.safetensors"]
        assert np.array_equal(hit.keys, pair(3)[0])
    del hit
    hybridmem.open(path).close()
    assert leftover(path) == []


def test_a_file_that_cannot_go_costs_no_entry(windows: Strict, tmp_path: Path) -> None:
    # Evicting more would not help: max_disk_bytes holds for all files but those that wait to go.
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8, hdc_dim=64, max_disk_bytes=40_000) as store:
        for number in range(1, 31):
            store.put(*pair(number, 8), 0, importance=number)
        store.flush()
        held = store.query(pair(9, 8)[0], 0, 30)
        for number in range(1, 11):
            store.delete(number)
        store.compact()
        assert leftover(path) == ["shard_0000.safetensors"]
        for number in range(31, 41):
            store.put(*pair(number, 8), 0, importance=number)
            store.flush()
        assert sum(p.stat().st_size for p in path.iterdir()) > 40_000
        assert len(store) == 30
        del held
        store.compact()
        assert sum(p.stat().st_size for p in path.iterdir()) <= 40_000


def test_one_writer(windows: Strict, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        with pytest.raises(hybridmem.StoreLockedError):
            hybridmem.open(path)
        fill(store, 1, 2)
    with hybridmem.open(path) as store:
        check(store, [1, 2])


def test_a_name_that_is_in_use_for_a_moment(
    windows: Strict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        fill(store, 1, 2)
        windows.open_files[-5] = str(path / "index.json")  # a virus scanner looks at it
        windows.closed_when_refused = [-5]
        with monkeypatch.context() as patient:
            patient.setattr(_windows, "_PATIENCE", 60)
            store.flush()
        assert windows.refused == 1
        windows.closed_when_refused = []
        fill(store, 3, 1)
        windows.open_files[-5] = str(path / "index.json")
        with pytest.raises(hybridmem.StoreIOError):  # and does not let go
            store.flush()
        del windows.open_files[-5]
    with hybridmem.open(path) as store:
        check(store, [1, 2])


def test_copies(windows: Strict, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        fill(store, 1, 5)
        store.flush()
        store.snapshot(tmp_path / "snap")
        store.snapshot(tmp_path / "copy", copy=True)
    assert os.path.samefile(*(p / "shard_0000.safetensors" for p in (path, tmp_path / "snap")))
    export_store(path, tmp_path / "file")
    import_store(tmp_path / "file", tmp_path / "back")
    salvage(path, tmp_path / "saved")
    for name in ("snap", "copy", "back", "saved"):
        with hybridmem.open(tmp_path / name) as store:
            check(store, [1, 2, 3, 4, 5])
    assert not windows.open_files


def test_names_that_are_no_files(windows: Strict, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        fill(store, 1, 2)
    shard = path / "shard_0000.safetensors"
    kept = shard.rename(tmp_path / "kept")
    for make in (lambda: shard.symlink_to(kept), shard.mkdir):
        make()
        with pytest.raises(hybridmem.CorruptStoreError, match="regular file"):
            hybridmem.open(path, mode="r")
        shard.rmdir() if shard.is_dir() and not shard.is_symlink() else shard.unlink()
    with pytest.raises(hybridmem.StoreNotFoundError):
        hybridmem.open(tmp_path / "nothing")
    with pytest.raises(hybridmem.StoreNotFoundError):
        hybridmem.open(kept)


def test_reads_and_writes_at_places(windows: Strict, tmp_path: Path) -> None:
    directory = windows.open(str(tmp_path), O_DIRECTORY)
    fd = windows.open("f", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, directory)
    assert windows.writev(fd, [b"abc", memoryview(b"defg")], 2) == 7
    assert windows.writev(fd, [b"XY"], 0) == 2
    buffer = bytearray(20)
    assert windows.preadv(fd, buffer, 1) == 8
    assert bytes(buffer[:8]) == b"Yabcdefg"
    assert windows.preadv(fd, buffer, 9) == 0
    assert windows.fstat(fd).st_size == 9
    assert stat.S_ISDIR(windows.fstat(directory).st_mode)
    with pytest.raises(ValueError, match="too short"):
        windows.memmap(fd, np.dtype("V4"), 3)
    with pytest.raises(NotADirectoryError):
        windows.open(str(tmp_path / "f"), O_DIRECTORY)
    windows.close(fd)
    windows.close(directory)

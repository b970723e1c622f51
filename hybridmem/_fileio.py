"""All input and output of a store: the one module that opens, writes, syncs, renames and locks.

Every system call goes through `calls`, the seam at which `hybridmem.testing` records the calls of
an operation or makes one of them fail. Files are opened relative to a descriptor of the directory,
never through a symbolic link, and only if they are regular files: a store directory is untrusted
input.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybridmem._attempts import IOV_MAX, UnknownOutcomeError, again, failure, grouped
from hybridmem._syscalls import O_DIRECTORY, O_SAFELY, Buffer, Syscalls
from hybridmem._windows import WindowsSyscalls
from hybridmem.errors import CorruptStoreError, StoreIOError, StoreLockedError

__all__ = [
    "Buffer",
    "Directory",
    "Piece",
    "Syscalls",
    "UnknownOutcomeError",
    "calls",
    "is_temporary",
    "path_of",
]

LOCK_NAME = "lock"
_TMP_PREFIX, _TMP_SUFFIX = ".hybridmem-", ".tmp"
_WRITE_MAX = 1 << 30  # Linux caps a write at 2 GiB - 4 KiB
_AHEAD = 8 << 20  # bytes written that go to the disk while others are written
Piece = tuple[int, Iterable[Buffer]]  # an offset, and what is written from there on
calls: Syscalls = WindowsSyscalls() if sys.platform == "win32" else Syscalls()


def is_temporary(name: str) -> bool:
    """Whether `name` is one of our own temporary files."""
    return name.startswith(_TMP_PREFIX) and name.endswith(_TMP_SUFFIX)


def path_of(given: object, name: str) -> Path:
    """Return a path that was given as argument `name`, from the root."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {type(given).__name__}")
    if isinstance(path := os.fspath(given), bytes) or "\0" in path:
        raise ValueError(f"{name} must be a text path without NUL, got {path!r}")
    if not path:
        raise ValueError(f"{name} must not be empty; give '.' for the current directory")
    return Path(path).absolute()  # `..` stays: after a symbolic link only the system knows it


def _temporary_name() -> str:
    return f"{_TMP_PREFIX}{secrets.token_hex(8)}{_TMP_SUFFIX}"


def _close(fd: int) -> None:
    # If it fails the descriptor is gone all the same, and what was written was synced before.
    with contextlib.suppress(OSError):
        calls.close(fd)


class Directory:
    """An open store directory.

    Methods raise `FileNotFoundError` for a missing name, `CorruptStoreError` for a name that is no
    regular file, `StoreFullError` where space ends, `UnknownOutcomeError` where a sync fails, and
    `StoreIOError` otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | O_DIRECTORY
        self._fd = again(lambda: calls.open(os.fspath(path), flags))
        self._lock_fd = -1
        self._pid = os.getpid()
        #: Files that no commit needs and that could not be removed: on Windows, mapped ones.
        self._leaving: set[str] = set()

    # -- whole directory --------------------------------------------------------------------------

    @classmethod
    def make(cls, path: Path) -> Directory:
        """Open the directory, making it and its parents where missing, durably."""
        missing = []
        at = path
        while not os.path.exists(at):
            missing.append(at)
            at = at.parent
        try:
            for directory in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    calls.mkdir(os.fspath(directory), 0o777)
                parent = cls(directory.parent)
                try:
                    parent.sync()
                finally:
                    parent.close()
            return cls(path)
        except OSError as error:
            raise failure(error, f"making the directory {path}") from error

    def close(self) -> None:
        """Close the descriptors. In a forked child this leaves the parent's lock alone."""
        for name in ("_lock_fd", "_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                _close(fd)

    def drop_lock(self) -> None:
        """Forget an inherited lock; closing (not unlocking) keeps it with the parent process."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def lock(self) -> None:
        """Take the writer's lock on a file that is made once and never deleted.

        Raises
        ------
        StoreLockedError
            If another open writer, in this process or another, holds it.
        """
        try:
            fd = self._open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            refused = failure(error, f"opening {self.path / LOCK_NAME}")
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                refused = StoreIOError(f'{refused}; open the store with mode="r" to read only')
            raise refused from error
        try:
            if not stat.S_ISREG(again(calls.fstat, fd).st_mode):
                raise self._corrupt(LOCK_NAME, "is not a regular file")
            again(lambda: calls.flock(fd))
        except CorruptStoreError:
            _close(fd)
            raise
        except OSError as error:
            _close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreLockedError(
                    f"{self.path} is open for writing elsewhere; close that store, "
                    'or open this one with mode="r"'
                ) from None
            raise failure(error, f"locking {self.path / LOCK_NAME}") from error
        self._lock_fd = fd

    def check_lock(self) -> None:
        """Make sure that the lock still keeps others out: that its file is the one in place.

        Raises
        ------
        UnknownOutcomeError
            If it was removed or replaced: another writer may be at work.
        """
        path = self.path / LOCK_NAME
        try:
            named = again(calls.stat, LOCK_NAME, self._fd)
            is_ours = os.path.samestat(named, again(calls.fstat, self._lock_fd))
        except FileNotFoundError:
            is_ours = False
        except OSError as error:
            raise failure(error, f"looking at {path}") from error
        if not is_ours:
            raise UnknownOutcomeError(
                f"{path} was removed or replaced, and another writer may be at work: "
                "close this store and open it again"
            )

    def names(self) -> list[str]:
        """Return the names in the directory."""
        try:
            return again(lambda: calls.listdir(self._fd))
        except OSError as error:
            raise failure(error, f"listing {self.path}") from error

    def size(self, name: str) -> int:
        """Return the size of a regular file in bytes."""
        try:
            status = again(lambda: calls.stat(name, self._fd))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise failure(error, f"looking at {self.path / name}") from error
        if not stat.S_ISREG(status.st_mode):
            raise self._corrupt(name, "is not a regular file")
        return status.st_size

    def total_bytes(self, *, leaving: bool = True) -> int:
        """Return the sum of the sizes of all files, or of those that are not to be removed."""
        total = 0
        for name in self.names():
            if not leaving and name in self._leaving:
                continue
            try:
                total += again(calls.stat, name, self._fd).st_size
            except FileNotFoundError:
                continue  # a writer removed it between the two calls
            except OSError as error:
                raise failure(error, f"looking at {self.path / name}") from error
        return total

    def sync(self) -> None:
        """Make the names of the directory durable."""
        self._sync(self._fd, self.path, calls.fsync)

    # -- reading ----------------------------------------------------------------------------------

    def open_file(self, name: str) -> tuple[int, int]:
        """Open a regular file for reading; return descriptor and size."""
        try:
            fd = self._open(name, os.O_RDONLY)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise self._corrupt(name, "is not a regular file") from None
            raise failure(error, f"opening {self.path / name}") from error
        try:
            status = again(calls.fstat, fd)
        except OSError as error:
            _close(fd)
            raise failure(error, f"looking at {self.path / name}") from error
        if not stat.S_ISREG(status.st_mode):
            _close(fd)
            raise self._corrupt(name, "is not a regular file")
        return fd, status.st_size

    def read_into(self, fd: int, buffer: memoryview, offset: int, name: str) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            part = buffer[done : done + _WRITE_MAX]
            try:
                count = again(calls.preadv, fd, part, offset + done)
            except OSError as error:
                raise failure(error, f"reading {self.path / name}") from error
            if count == 0:
                break
            done += count
        return done

    def read_file(self, name: str, limit: int) -> bytes:
        """Return the contents of a file of at most `limit` bytes."""
        fd, size = self.open_file(name)
        try:
            if size > limit:
                raise self._corrupt(name, f"has {size} bytes, more than the {limit} it may have")
            data = bytearray(size)
            count = self.read_into(fd, memoryview(data), 0, name)
            return bytes(data[:count])
        finally:
            _close(fd)

    def reopened(self, fd: int, name: str) -> Path:
        """Return a path for others to open an open file by, wherever the directory is by now."""
        path = Path(f"/dev/fd/{fd}")
        return path if path.exists() else self.path / name

    def map_file(self, fd: int, length: int, name: str) -> mmap.mmap:
        """Map the first `length` bytes read-only."""
        try:
            return calls.mmap(fd, length)
        except OSError as error:
            raise failure(error, f"mapping {self.path / name}") from error
        except ValueError as error:
            raise self._corrupt(name, "was cut short while it was opened") from error

    def map_records(
        self, fd: int, dtype: np.dtype[np.void], count: int, name: str
    ) -> npt.NDArray[np.void]:
        """Map the first `count` records read-only."""
        try:
            return calls.memmap(fd, dtype, count)
        except OSError as error:
            raise failure(error, f"mapping {self.path / name}") from error
        except ValueError as error:
            raise self._corrupt(name, "was cut short while it was opened") from error

    @staticmethod
    def fetch(mapped: mmap.mmap, start: int, length: int) -> None:
        """Have the system read a part of a map from the disk, and go on meanwhile."""
        with contextlib.suppress(OSError):
            calls.advise(mapped, start, length)

    @staticmethod
    def close_file(fd: int) -> None:
        """Close a descriptor that was only read."""
        _close(fd)

    # -- writing ----------------------------------------------------------------------------------

    def write_temporary(self, pieces: Iterable[Piece], what: str) -> str:
        """Write and sync a new file under a name of its own; return that name.

        The file is removed again if anything fails.
        """
        name = _temporary_name()
        try:
            fd = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise failure(error, f"making a file for {what}") from error
        try:
            try:
                for offset, buffers in pieces:
                    self._write(fd, buffers, offset, what)
                self._sync(fd, what, calls.fsync)
            finally:
                _close(fd)
        except OSError as error:
            self.remove(name)
            raise failure(error, f"writing {what}") from error
        except BaseException:
            self.remove(name)
            raise
        return name

    def write_file(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write, sync and name a new file. The name is durable after the next `sync`."""
        temporary = self.write_temporary(pieces, name)
        try:
            again(lambda: calls.rename(temporary, name, self._fd))
        except OSError as error:
            self.remove(temporary)
            raise failure(error, f"naming {self.path / name}") from error

    def update_file(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write into a file, made where missing, and sync its data."""
        try:
            fd = self._open(name, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise failure(error, f"opening {self.path / name}") from error
        try:
            try:
                for offset, buffers in pieces:
                    self._write(fd, buffers, offset, name)
                self._sync(fd, name, calls.fdatasync)
            finally:
                _close(fd)
        except OSError as error:
            raise failure(error, f"writing {self.path / name}") from error

    def truncate_file(self, name: str, length: int) -> None:
        """Cut a file to `length` bytes that are all committed."""
        try:
            fd = self._open(name, os.O_WRONLY)
            try:
                again(lambda: calls.ftruncate(fd, length))
            finally:
                _close(fd)
        except OSError as error:
            raise failure(error, f"cutting {self.path / name}") from error

    def overwrite_temporary(self, name: str, data: Buffer) -> None:
        """Fill a preallocated file with `data`, cut it to size and sync: needs no new space."""
        try:
            fd = self._open(name, os.O_WRONLY)
            try:
                self._write(fd, [data], 0, name)
                again(lambda: calls.ftruncate(fd, len(data)))
                self._sync(fd, name, calls.fsync)
            finally:
                _close(fd)
        except OSError as error:
            raise failure(error, f"writing {self.path / name}") from error

    def preallocate(self, name: str, length: int) -> None:
        """Make sure that a file of at least `length` allocated bytes has this name."""
        try:
            fd = self._open(name, os.O_WRONLY | os.O_CREAT)
            try:
                again(lambda: calls.fallocate(fd, length))
            finally:
                _close(fd)
        except OSError as error:
            raise failure(error, f"reserving space in {self.path / name}") from error

    def rename(self, src: str, dst: str) -> None:
        """Give a file another name, replacing what had it.

        Raises
        ------
        UnknownOutcomeError
            If it failed: which of the two names the file has is not known.
        """
        try:
            again(lambda: calls.rename(src, dst, self._fd))
        except OSError as error:
            raise UnknownOutcomeError(str(failure(error, f"renaming {src} to {dst}"))) from error

    def remove(self, name: str) -> bool:
        """Remove a file that no commit needs; return whether it is gone."""
        try:
            again(lambda: calls.unlink(name, self._fd))
        except FileNotFoundError:
            pass
        except OSError:
            self._leaving.add(name)  # an orphan: removed by a later commit, or at the next open
            return False
        self._leaving.discard(name)
        return True

    def remove_leaving(self) -> None:
        """Try again to remove what could not be removed."""
        for name in list(self._leaving):
            self.remove(name)

    # -- directories beside each other ------------------------------------------------------------

    def link(self, name: str, target: Directory) -> None:
        """Give a file the same name in another directory of the same file system too."""
        try:
            again(lambda: calls.link(name, self._fd, target._fd))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise failure(error, f"linking {self.path / name} into {target.path}") from error

    def make_temporary_directory(self) -> Directory:
        """Make a directory in this one, under a name of its own."""
        path = self.path / _temporary_name()
        try:
            again(lambda: calls.mkdir(os.fspath(path), 0o777))
            try:
                return Directory(path)
            except BaseException:
                self._rmdir(path.name)
                raise
        except OSError as error:
            raise failure(error, f"making a directory in {self.path}") from error

    def remove_directory(self, directory: Directory) -> None:
        """Remove a directory of this one with its files, as far as that goes; it is closed."""
        with contextlib.suppress(StoreIOError):
            for name in directory.names():
                directory.remove(name)
        directory.close()
        self._rmdir(directory.path.name)

    def _rmdir(self, name: str) -> None:
        with contextlib.suppress(OSError):
            again(lambda: calls.rmdir(name, self._fd))

    # -- pieces -----------------------------------------------------------------------------------

    def _open(self, name: str, flags: int) -> int:
        return again(lambda: calls.open(name, flags | O_SAFELY, 0o666, self._fd))

    def _corrupt(self, name: str, why: str) -> CorruptStoreError:
        path = str(self.path / name)
        return CorruptStoreError(f"{path} {why}", path=path)

    def _write(self, fd: int, buffers: Iterable[Buffer], offset: int, what: object) -> None:
        started = offset
        for views in grouped(buffers):
            offset = self._write_all(fd, views, offset, what)
            if offset - started >= _AHEAD:  # so that the sync at the end waits less
                with contextlib.suppress(OSError):
                    calls.start_writing(fd, started, offset - started)
                started = offset

    @staticmethod
    def _write_all(fd: int, views: list[memoryview], offset: int, what: object) -> int:
        at = 0
        while at < len(views):
            batch = views[at : at + IOV_MAX]
            batch[0] = batch[0][:_WRITE_MAX]
            count = again(calls.writev, fd, batch, offset)
            if count <= 0:
                raise StoreIOError(f"the system wrote nothing to {what} and gave no reason")
            offset += count
            while at < len(views) and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]
        return offset

    def _sync(self, fd: int, what: object, sync: Callable[[int], None]) -> None:
        # Linux marks pages clean after a failed fsync: a second one proves nothing (fsyncgate,
        # 2018).
        try:
            again(sync, fd)
        except OSError as error:
            raise UnknownOutcomeError(
                f"syncing {what} failed ({error}); what reached the disk is not known: "
                "close this store and open it again"
            ) from error

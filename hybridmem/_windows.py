"""The same system calls on Windows, which has neither descriptors of directories nor POSIX names.

- A directory is opened as a number of our own that stands for its path.
- `flock` is a lock on the first byte of the file, which the system drops when the file is closed.
- A file that is open or mapped can be neither replaced nor removed. Records are read, not mapped,
  so that a file is open for a moment only, and a call that meets such a moment is tried again.
  A shard stays mapped as long as a hit is held: its removal fails, and `_fileio` tries it later.
- A directory cannot be synced; a rename is written through instead.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem._syscalls import O_DIRECTORY, Buffer, Syscalls

__all__ = ["WindowsSyscalls"]

T = TypeVar("T")

#: Numbers that stand for directories: no descriptor is as large.
_FIRST_DIRECTORY = 1 << 30
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_EXCL
_BINARY: int = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
#: Seconds that another program is given to let go of a file.
_PATIENCE = 2.0


class WindowsSyscalls(Syscalls):
    """System calls by path; see the module."""

    def __init__(self) -> None:
        self._directories: dict[int, str] = {}
        self._numbers = itertools.count(_FIRST_DIRECTORY)
        self._seek = threading.Lock()

    # -- what only Windows has; tests put others in their place ------------------------------------

    def lock_byte(self, fd: int) -> None:
        """Lock the first byte of a file, or fail at once."""
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def move(self, src: str, dst: str) -> None:
        """Rename, replacing a file, and return when the disk knows."""
        if sys.platform == "win32":
            import ctypes

            replace_existing, write_through = 0x1, 0x8
            kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
            if not kernel32.MoveFileExW(src, dst, replace_existing | write_through):
                raise ctypes.WinError(ctypes.get_last_error())

    # -- directories ------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o666, dir_fd: int | None = None) -> int:
        path = self._path(path, dir_fd)
        if flags & O_DIRECTORY:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            number = next(self._numbers)
            self._directories[number] = os.path.abspath(path)
            return number
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISLNK(status.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return _patiently(lambda: os.open(path, flags & _ACCESS | _BINARY, mode))

    def close(self, fd: int) -> None:
        if self._directories.pop(fd, None) is None:
            os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.stat(self._directories[fd]) if fd in self._directories else os.fstat(fd)

    def fsync(self, fd: int) -> None:
        if fd not in self._directories:
            os.fsync(fd)

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(self._directories[fd])

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        return os.lstat(self._path(name, dir_fd))

    # -- names ------------------------------------------------------------------------------------

    def rename(self, src: str, dst: str, dir_fd: int) -> None:
        _patiently(lambda: self.move(self._path(src, dir_fd), self._path(dst, dir_fd)))

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(self._path(name, dir_fd))

    def link(self, name: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.link(self._path(name, src_dir_fd), self._path(name, dst_dir_fd))

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(self._path(name, dir_fd))

    # -- files ------------------------------------------------------------------------------------

    def writev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        done = 0
        with self._seek:
            os.lseek(fd, offset, os.SEEK_SET)
            for buffer in buffers:
                count = os.write(fd, buffer)
                done += count
                if count < len(buffer):
                    break
        return done

    def preadv(self, fd: int, buffer: Buffer, offset: int) -> int:
        with self._seek:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def memmap(self, fd: int, dtype: np.dtype[np.void], count: int) -> npt.NDArray[np.void]:
        records = np.empty(count, dtype)
        view = memoryview(records.view(np.uint8))
        done = 0
        while done < len(view):
            read = self.preadv(fd, view[done : done + (1 << 30)], done)
            if not read:
                raise ValueError("the file is too short")
            done += read
        return records

    def flock(self, fd: int) -> None:
        try:
            self.lock_byte(fd)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from None
            raise

    def _path(self, name: str, dir_fd: int | None) -> str:
        return name if dir_fd is None else os.path.join(self._directories[dir_fd], name)


def _patiently(call: Callable[[], T]) -> T:
    """Make a call that fails while another program has a file open."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return call()
        except PermissionError:
            if time.monotonic() > end:
                raise
        time.sleep(0.005)

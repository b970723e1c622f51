"""The system calls that a store makes, and nothing else: `_fileio` gives them their meaning."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridmem import _kernels

if sys.platform != "win32":
    import fcntl

__all__ = ["O_DIRECTORY", "O_SAFELY", "Buffer", "Syscalls"]

Buffer = bytes | bytearray | memoryview

#: Opens a directory; a bit of our own where the system has none.
O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 1 << 28)
#: Opens no link, waits for no pipe and is closed when another program takes over.
O_SAFELY: int = (
    getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)


class Syscalls:
    """The system calls in use, one method each; `hybridmem.testing` puts others in their place."""

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def open(self, path: str, flags: int, mode: int = 0o666, dir_fd: int | None = None) -> int:
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def writev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def start_writing(self, fd: int, offset: int, length: int) -> None:
        _kernels.start_writing(fd, offset, length)

    def preadv(self, fd: int, buffer: Buffer, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def advise(self, mapped: mmap.mmap, start: int, length: int) -> None:
        if hasattr(mmap, "MADV_WILLNEED"):
            at = start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, at, start + length - at)

    def mmap(self, fd: int, length: int) -> mmap.mmap:
        if sys.version_info >= (3, 13):  # else each map keeps a duplicate of the descriptor
            return mmap.mmap(fd, length, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(fd, length, access=mmap.ACCESS_READ)

    def memmap(self, fd: int, dtype: np.dtype[np.void], count: int) -> npt.NDArray[np.void]:
        with open(fd, "rb", closefd=False) as file:
            return np.memmap(file, dtype, "r", shape=(count,))

    def fsync(self, fd: int) -> None:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves data in the cache of the drive
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd) if hasattr(os, "fdatasync") else self.fsync(fd)

    def fallocate(self, fd: int, length: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(fd, 0, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def rename(self, src: str, dst: str, dir_fd: int) -> None:
        os.rename(src, dst, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def link(self, name: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.link(name, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def flock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

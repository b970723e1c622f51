"""Making the k-th system call of an operation fail."""

from __future__ import annotations

import errno
import os
from typing import Any

from hybridmem._fileio import Syscalls
from hybridmem.testing._hooks import Hooked

__all__ = ["KINDS", "Faults"]

#: What can be made to happen: an error by its name, a short read or write, or a disk that is full
#: from the k-th call on, the last write before it cut short.
KINDS = ("EIO", "ENOSPC", "EINTR", "EMFILE", "short", "full")


class Faults(Hooked):
    """System calls of which one fails, or all from one on.

    Parameters
    ----------
    at : int
        Number of the call that fails, from 0; -1 lets all succeed and only counts them.
    kind : str
        One of `KINDS`.
    forever : bool, default False
        Whether all later calls fail too. A full disk always stays full.
    base : Syscalls, optional

    Attributes
    ----------
    names : list of str
        The calls that were made.
    fired : bool
        Whether anything was made to fail.
    """

    def __init__(
        self, at: int, kind: str, *, forever: bool = False, base: Syscalls | None = None
    ) -> None:
        super().__init__(base)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        self.names: list[str] = []
        self.fired = False
        self.at = at
        self._kind = kind
        self._forever = forever or kind == "full"
        self._was_cut = False

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        number = len(self.names)
        self.names.append(name)
        due = self.at >= 0 and (number >= self.at if self._forever else number == self.at)
        if not due:
            return super().intercept(name, *args, **kwargs)
        if self._kind == "short":
            return self._short(name, *args, **kwargs)
        if self._kind == "full":
            return self._full(name, *args, **kwargs)
        self.fired = True
        if name == "close":
            # A close that fails has closed all the same.
            super().intercept(name, *args, **kwargs)
        raise _error(getattr(errno, self._kind))

    def _short(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "writev":
            self.fired = True
            fd, buffers, offset = args
            return super().intercept(name, fd, _half(buffers), offset)
        if name == "preadv":
            self.fired = True
            fd, buffer, offset = args
            return super().intercept(name, fd, buffer[: (len(buffer) + 1) // 2], offset)
        return super().intercept(name, *args, **kwargs)

    def _full(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "writev" and not _is_inside(*args):
            self.fired = True
            fd, buffers, offset = args
            if not self._was_cut and sum(map(len, buffers)) > 1:
                self._was_cut = True
                return super().intercept(name, fd, _half(buffers), offset)
            raise _error(errno.ENOSPC)
        if name in ("fallocate", "mkdir"):
            self.fired = True
            raise _error(errno.ENOSPC)
        return super().intercept(name, *args, **kwargs)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number) + " (injected)")


def _half(buffers: Any) -> list[memoryview]:
    joined = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
    return [memoryview(joined[: (len(joined) + 1) // 2])]


def _is_inside(fd: int, buffers: Any, offset: int) -> bool:
    """Whether a write lies in blocks that the file has, so that it needs no space."""
    return offset + sum(map(len, buffers)) <= os.fstat(fd).st_size

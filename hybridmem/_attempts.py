"""What surrounds a system call: trying again, naming a failure, gathering what is written."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from hybridmem._syscalls import Buffer
from hybridmem.errors import StoreFullError, StoreIOError

__all__ = ["IOV_MAX", "UnknownOutcomeError", "again", "failure", "grouped"]

P = ParamSpec("P")
T = TypeVar("T")

#: Buffers handed to one writev; IOV_MAX is 1024 on Linux and macOS.
IOV_MAX = 512
_GROUP_BYTES = 1 << 20
#: Interruptions of one call after which it is taken for failed.
_MAX_INTERRUPTIONS = 1000


class UnknownOutcomeError(StoreIOError):
    """A sync or the committing rename failed: what reached the disk is not known."""


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that a signal may interrupt before it has done anything."""
    for _ in range(_MAX_INTERRUPTIONS):
        with contextlib.suppress(InterruptedError):
            return call(*args, **kwargs)
    return call(*args, **kwargs)


def failure(error: OSError, doing: str) -> StoreIOError:
    """Return the error of this package for one of the system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(
            f"no space left while {doing}: {error.strerror}; free space or evict, then flush again"
        )
    return StoreIOError(f"failed {doing}: [{errno.errorcode.get(error.errno or 0, '?')}] {error}")


def grouped(buffers: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Gather what may come from a generator into writes that are large, but not kept for long."""
    group: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if len(view):
            group.append(view)
            size += len(view)
        if size >= _GROUP_BYTES or len(group) == IOV_MAX:
            yield group
            group, size = [], 0
    if group:
        yield group

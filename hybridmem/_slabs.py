"""Memory for tensors, used again once nothing refers to it.

A page that is touched for the first time costs a fault, on a virtual machine far more than copying
into it. So what large tensors leave is kept for the next ones, up to a bound, and new memory lies
in huge pages where the system has them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["KEPT_BYTES", "Pool", "Room", "empty", "keep", "pages"]

#: What is kept for the next tensors when nothing asks for more.
KEPT_BYTES = 64 << 20
#: From here on memory is used again; the allocator of the process serves less well enough.
LEAST_BYTES = 1 << 16
_SLAB_BYTES = 32 << 20
_HUGE_PAGE = 1 << 21
_PAGE = mmap.PAGESIZE
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class Room(NamedTuple):
    """The same memory twice: an array to fill, and a read-only one that is kept.

    Nothing makes the second one writeable. The memory is free when it and all its views are gone;
    the first must be gone by then.
    """

    fill: npt.NDArray[Any]
    kept: npt.NDArray[Any]


class _Slab:
    """A stretch of memory, given back to the system with the last array over it."""

    def __init__(self, size: int) -> None:
        try:
            self.map = mmap.mmap(-1, size + _HUGE_PAGE, **_PRIVATE)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.shown = memoryview(self.map).toreadonly()
        # Not `__array_interface__`, which ends the interpreter where no memory is left for it.
        self.used = -np.frombuffer(self.map, np.uint8).ctypes.data % _HUGE_PAGE
        self.end = self.used + size

    def forget(self, start: int, size: int) -> None:
        """Give pages back to the system; their addresses are not used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):  # locked in memory, say: it goes with the slab
                self.map.madvise(mmap.MADV_DONTNEED, start, size)


class _Piece(NamedTuple):
    slab: _Slab
    start: int
    size: int


class Pool:
    """Hands out memory and takes it back.

    Parameters
    ----------
    bound : int
        Bytes that are kept at most while nothing uses them.
    """

    def __init__(self, bound: int = KEPT_BYTES) -> None:
        self.idle_bytes = 0
        self._bound = bound
        #: Free pieces by size; the size that was asked for last is the last.
        self._idle: OrderedDict[int, list[_Piece]] = OrderedDict()
        #: Pieces in use, by the number of the reference that tells when they are not.
        self._out: dict[int, tuple[weakref.ref[Any], _Piece]] = {}
        self._slab: _Slab | None = None
        #: What came back while the lock was held, maybe in a garbage collection of its holder.
        self._back: deque[_Piece] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Room:
        """Return memory for an array, at a multiple of 64 bytes: vector stores want whole lines."""
        kind = np.dtype(dtype)
        count = math.prod(shape)
        nbytes = count * kind.itemsize
        buffer: Any
        if nbytes < LEAST_BYTES:
            buffer = np.empty(nbytes + 64, np.uint8)
            start = -buffer.ctypes.data % 64
            owner = np.frombuffer(memoryview(buffer).toreadonly(), kind, count, start)
        else:
            piece = self._take(_rounded(nbytes))
            buffer, start = piece.slab.map, piece.start
            # The first array over a buffer: each view of it holds this one, and it the buffer.
            owner = np.frombuffer(piece.slab.shown, kind, count, start)
            reference = weakref.ref(owner, self._returned)
            self._out[id(reference)] = reference, piece
        return Room(np.ndarray(shape, kind, buffer, start), owner.reshape(shape))

    def keep(self, bound: int) -> None:
        """Keep at most so many bytes from now on."""
        with self._lock:
            self._bound = bound
            self._settle()

    def after_fork(self) -> None:
        """Replace a lock that another thread of the parent may have held."""
        self._lock = threading.Lock()

    def _take(self, size: int) -> _Piece:
        with self._lock:
            self._settle()
            if pieces := self._idle.get(size):
                self.idle_bytes -= size
                self._idle.move_to_end(size)
                return pieces.pop()
            if size > _SLAB_BYTES // 4:
                slab = _Slab(size)
            else:
                if self._slab is None or self._slab.end - self._slab.used < size:
                    self._slab = _Slab(_SLAB_BYTES)
                slab = self._slab
            slab.used += size
            return _Piece(slab, slab.used - size, size)

    def _returned(self, reference: weakref.ref[Any]) -> None:
        _, piece = self._out.pop(id(reference))
        self._back.append(piece)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Take what came back; give away what is beyond the bound, sizes not asked for first."""
        while self._back:
            piece = self._back.popleft()
            self._idle.setdefault(piece.size, []).append(piece)
            self._idle.move_to_end(piece.size)
            self.idle_bytes += piece.size
        while self.idle_bytes > self._bound:
            size, pieces = next(iter(self._idle.items()))
            if not pieces:
                del self._idle[size]
                continue
            self.idle_bytes -= size
            piece = pieces.pop(0)
            piece.slab.forget(piece.start, size)


def _rounded(nbytes: int) -> int:
    """Return the next of sixteen sizes between two powers of two: whole pages, so found again."""
    step = max(_PAGE, 1 << (nbytes.bit_length() - 5))
    return -(-nbytes // step) * step


def pages(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return bytes on a cache line, or in huge pages where they are many: for what stays.

    The latter from the system itself: what the allocator of the process has used before lies in
    small pages, in which scans take up to 1.4 times as long.
    """
    size = math.prod(shape)
    if size >= _HUGE_PAGE:
        slab = _Slab(size)
        return np.frombuffer(slab.map, np.uint8, size, slab.used).reshape(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


_pool = Pool()
empty = _pool.empty
keep = _pool.keep
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)

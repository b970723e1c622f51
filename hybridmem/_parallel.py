"""A scan divided among threads, which run beside each other without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST_BYTES", "Best", "Span", "divided", "scanned"]

#: What a thread reads at least; to start one takes as long as to scan a tenth of it.
LEAST_BYTES = 8 << 20


class Span(NamedTuple):
    """Entries `first` to `end` of a block."""

    block: int
    first: int
    end: int


class Best(NamedTuple):
    """The k best for each of m queries: distances and places, [m, k]; places beyond them are -1."""

    distance: npt.NDArray[np.uint32]
    place: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, m: int, k: int) -> Best:
        """Return the best before the first entry is looked at."""
        best = cls(np.empty((m, k), np.uint32), np.empty((m, k), np.int64))
        best.distance.fill(2**32 - 1)
        best.place.fill(-1)
        return best


def divided(sizes: Sequence[int], shares: int, step: int) -> list[list[Span]]:
    """Divide blocks of these sizes into at most so many shares of about equal size.

    A block is cut at multiples of `step` only.
    """
    each = -(-sum(sizes) // shares)
    spans: list[list[Span]] = []
    room = 0
    for block, size in enumerate(sizes):
        first = 0
        while first < size:
            if room <= 0:
                spans.append([])
                room = each
            end = min(size, first + -(-room // step) * step)
            spans[-1].append(Span(block, first, end))
            room -= end - first
            first = end
    return spans


def scanned(scan: Callable[[list[Span]], Best], shares: Sequence[list[Span]]) -> Best:
    """Scan each share in a thread of its own, the first one in this, and merge what they found."""
    if len(shares) == 1:
        return scan(shares[0])
    from concurrent.futures import ThreadPoolExecutor  # with logging: 4 ms of an import

    with ThreadPoolExecutor(len(shares) - 1, "hybridmem-search") as pool:
        others = [pool.submit(scan, share) for share in shares[1:]]
        parts = [scan(shares[0]), *(other.result() for other in others)]
    distance = np.concatenate([part.distance for part in parts], axis=1)
    place = np.concatenate([part.place for part in parts], axis=1)
    order = np.lexsort((place, distance), axis=1)[:, : parts[0].place.shape[1]]
    return Best(
        np.ascontiguousarray(np.take_along_axis(distance, order, axis=1)),
        np.ascontiguousarray(np.take_along_axis(place, order, axis=1)),
    )

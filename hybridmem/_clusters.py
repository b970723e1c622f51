"""Entries in clusters of near ones, so that a search of a large layer need not read them all.

A cluster has a centre, the majority of its entries' bits, and room for a few dozen. New entries are
dealt to the nearest centres, a batch at a time, and a cluster that has no room for more is split:
so there are as many as the entries need, and never a time to learn them all anew. Centres lie in
groups, which are split likewise; to deal an entry, only those of the nearest groups are looked at.

What a search holds does not change: entries are added beyond the sizes that it knows, and the parts
of a cluster that is split are all new. Every machine makes the same clusters of the same history:
numbers are integers, or floats that hold integers and their quotients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridmem import _kernels, _slabs
from hybridmem._blocks import I64, U8, U32

__all__ = ["Clusters", "Dealt", "to_read"]

# docs/retrieval.md has what these were measured by.
LARGE = 1 << 16  # entries of a layer from which on clusters pay
READ = 9  # times n ** (2 / 3) of n entries are read for ten of them
BATCH = 1024  # entries are dealt at a time
ROOM = 48  # entries of a cluster
GROUP = 256  # clusters of a group
LOOKED_AT = 3  # groups, for an entry
ROUNDS = 4  # of 2-means
SPARSE = 6  # entries of a cluster, on average: where fewer are left, all are dealt anew


def to_read(n: int, k: int) -> int:
    """Entries to read for the best k of n; 0 where a scan of all is as good."""
    read = round(READ * n ** (2 / 3) * math.sqrt(max(k, 10) / 10))
    return read if n >= LARGE and 3 * read <= n else 0


class Entries(Protocol):
    """Entries by their places, which ascend."""

    def signatures(self, places: I64, /) -> U8: ...
    def living(self, places: I64, /) -> I64: ...


class Dealt(NamedTuple):
    """Clusters at one moment; each live entry at a place before `end` is in one of them."""

    centres: U8
    nearer: U32  # added to distances from the centres
    members: NDArray[np.int32]
    sizes: I64
    end: int

    def near(self, query: U8, count: int) -> I64:
        """Places, ascending, in the clusters nearest to a query that hold so many."""
        n = len(self.sizes)
        distances = np.empty(n, np.uint32)
        _kernels.hamming_all(self.centres[:n], query, distances)
        distances += self.nearer
        order = np.empty(min(n, count), np.int64)
        filled = (self.sizes > 0).astype(np.uint8)
        limit = 8 * self.centres.shape[1] + int(self.nearer.max(initial=0))
        order = order[: _kernels.select_smallest(distances, filled, limit, order)]
        order = order[: int(self.sizes[order].cumsum().searchsorted(count)) + 1]
        held = np.arange(ROOM) < self.sizes[order, None]
        return np.sort(self.members[order][held]).astype(np.int64)


class Clusters:
    """The clusters of a layer with one signature an entry.

    Parameters
    ----------
    width : int
        Bytes of a signature.

    Attributes
    ----------
    end : int
        Places before this one are dealt.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._clear()

    def _clear(self) -> None:
        self.end = self._rows = 0
        self._allocate(0)
        self._groups: list[I64] = []  # the clusters of each
        self._middles = np.empty((0, self.width), np.uint8)  # their centres
        self._dealt: Dealt | None = None

    def _allocate(self, rows: int) -> None:
        self._centres = _slabs.pages((rows, self.width))
        self._members = np.zeros((rows, ROOM), np.int32)
        self._sizes = np.zeros(rows, np.int64)
        self._spread = np.zeros(rows, np.int64)  # sum of its entries' distances from the centre
        self._group = np.zeros(rows, np.int64)

    def dealt(self) -> Dealt:
        """Return the clusters as they are now, to be searched at any time."""
        if self._dealt is None:
            sizes = self._sizes[: self._rows].copy()
            radius = self._spread[: self._rows] // np.maximum(sizes, 1)
            # The nearest entry of a wide cluster is nearer than that of a narrow one as far away.
            nearer = (3 * (8 * self.width - radius) // 16).astype(np.uint32)
            self._dealt = Dealt(self._centres, nearer, self._members, sizes, self.end)
        return self._dealt

    def deal(self, entries: Entries, end: int) -> None:
        """Deal the live entries at the places up to `end`."""
        places = entries.living(np.arange(self.end, end))
        self.end, self._dealt = end, None
        if not len(places):
            return
        self._make_room(2 * len(places))  # a split for each one at most, of one into two
        signatures = entries.signatures(places)
        if not self._groups:
            self._groups, self._middles = [np.empty(0, np.int64)], signatures[:1].copy()
            self._found(0, places, signatures)
            return
        nearest, distances = self._nearest(signatures)
        order = np.argsort(nearest, kind="stable")
        rows, starts = np.unique(nearest[order], return_index=True)
        for row, new in zip(rows.tolist(), np.split(order, starts[1:]), strict=True):
            size = self._sizes.item(row)
            if size + len(new) <= ROOM:
                self._members[row, size : size + len(new)] = places[new]
                self._sizes[row] += len(new)
                self._spread[row] += distances[new].sum()
            else:
                old = self._members[row, :size].astype(np.int64)
                group = self._group.item(row)
                self._groups[group] = self._groups[group][self._groups[group] != row]
                self._sizes[row] = self._spread[row] = 0
                both = np.concatenate([entries.signatures(old), signatures[new]])
                self._found(group, np.concatenate([old, places[new]]), both)

    def _nearest(self, signatures: U8) -> tuple[I64, I64]:
        """The nearest cluster of each signature, and its distance."""
        looked_at = min(LOOKED_AT, len(self._groups))
        far = np.full((len(signatures), looked_at), 2**32 - 1, np.uint32)
        groups = np.full(far.shape, -1, np.int64)
        alive = np.ones(len(self._groups), np.uint8)
        _kernels.hamming_topk(self._middles, signatures, alive, 0, far, groups)
        nearest, distances = np.empty((2, len(signatures)), np.int64)
        for at, numbers in enumerate(groups.tolist()):
            rows = np.concatenate([self._groups[number] for number in numbers])
            found = np.empty(len(rows), np.uint32)
            _kernels.hamming_at(self._centres, rows, signatures[at], found)
            best = int(found.argmin())
            nearest[at], distances[at] = rows[best], found[best]
        return nearest, distances

    def _found(self, group: int, places: I64, signatures: U8) -> None:
        """Make new clusters of a group, of these entries."""
        first = self._rows
        for part in _parted(signatures, ROOM):
            row, theirs = self._rows, signatures[part]
            self._centres[row] = _majority(theirs)
            distances = np.empty(len(part), np.uint32)
            _kernels.hamming_all(theirs, self._centres[row], distances)
            self._spread[row] = distances.sum()
            self._members[row, : len(part)] = places[part]
            self._sizes[row] = len(part)
            self._rows += 1
        rows = np.concatenate([self._groups[group], np.arange(first, self._rows)])
        parts = _parted(self._centres[rows], GROUP)
        numbers = [group, *range(len(self._groups), len(self._groups) + len(parts) - 1)]
        if len(parts) > 1:
            middles = np.stack([_majority(self._centres[rows[part]]) for part in parts])
            self._middles[group] = middles[0]
            self._middles = np.concatenate([self._middles, middles[1:]])
            self._groups += parts[1:]
        for number, part in zip(numbers, parts, strict=True):
            self._groups[number] = rows[part]
            self._group[rows[part]] = number

    def _make_room(self, more: int) -> None:
        """Have room for so many more clusters, first that of those that are empty."""
        if self._rows + more <= len(self._sizes):
            return
        kept = np.flatnonzero(self._sizes)
        old: list[NDArray[Any]] = [self._centres, self._members, self._sizes, self._spread]
        self._allocate(len(kept) * 5 // 4 + 2 * more)
        new: list[NDArray[Any]] = [self._centres, self._members, self._sizes, self._spread]
        for target, source in zip(new, old, strict=True):
            target[: len(kept)] = source[kept]
        number = np.full(len(old[2]), -1)
        number[kept] = np.arange(len(kept))
        self._rows = len(kept)
        groups = [rows[rows >= 0] for rows in (number[rows] for rows in self._groups)]
        self._middles = self._middles[[len(rows) > 0 for rows in groups]]
        self._groups = [rows for rows in groups if len(rows)]
        for group, rows in enumerate(self._groups):
            self._group[rows] = group

    def renumber(self, start: int, alive: U8) -> None:
        """Take note that of the entries from place `start` on only these live ones were kept."""
        stop, lost = start + len(alive), len(alive) - int(np.count_nonzero(alive))
        new = np.where(alive != 0, start - 1 + np.cumsum(alive != 0), -1).astype(np.int32)
        members = self._members[: self._rows]
        inside = (members >= start) & (members < stop)
        self._members, self._dealt = self._members.copy(), None
        renumbered = self._members[: self._rows]
        renumbered[members >= stop] -= lost
        renumbered[inside] = new[members[inside] - start]
        self.end -= int(np.count_nonzero(alive[: max(self.end - start, 0)] == 0))
        gone = (renumbered < 0) & (np.arange(ROOM) < self._sizes[: self._rows, None])
        rows = np.flatnonzero(gone.any(axis=1))
        order = np.argsort(gone[rows], axis=1, kind="stable")
        renumbered[rows] = np.take_along_axis(renumbered[rows], order, axis=1)
        left = self._sizes[rows] - gone[rows].sum(axis=1)
        self._spread[rows] = self._spread[rows] * left // self._sizes[rows]
        self._sizes[rows] = left
        if self._sizes.sum() < SPARSE * np.count_nonzero(self._sizes):
            self._clear()


def _majority(signatures: U8) -> U8:
    """The bits that most of some signatures have; where as many have each, the first one's."""
    bits = np.unpackbits(signatures, axis=1)
    return np.packbits(2 * bits.sum(axis=0, dtype=np.int64) + bits[0] > len(signatures))


def _parted(signatures: U8, room: int) -> list[I64]:
    """Part signatures, given in order, into clusters of at most so many."""
    large, parts = [np.arange(len(signatures))], []
    if len(signatures) > room:
        near = np.empty((len(signatures), len(signatures)), np.uint32)
        for signature, row in zip(signatures, near, strict=True):
            _kernels.hamming_all(signatures, signature, row)
        distances = near.astype(np.float64)
    while large:
        part = large.pop()
        if len(part) <= room:
            parts.append(part)
        else:
            right = _halved(distances[np.ix_(part, part)])
            large += [part[right], part[~right]]
    return parts


def _halved(distances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of some signatures, by their distances, are in the second of two clusters: 2-means.

    How far an entry is from a cluster's mean follows from its distances from the members and theirs
    from each other. Neither cluster is empty, even if all signatures are the same.
    """
    n = len(distances)
    far = int(distances.sum(axis=1).argmax())
    nearer = distances[far] - distances[int(distances[far].argmax())]
    for _ in range(ROUNDS):
        low, high = int(np.count_nonzero(nearer < 0)), int(np.count_nonzero(nearer <= 0))
        cut = min(max(n // 2, low), high)  # what is as near to both evens them out
        cut = cut if 0 < cut < n else n // 2
        right = np.zeros(n, bool)
        right[np.argsort(nearer, kind="stable")[cut:]] = True
        sides = np.stack([~right, right], axis=1).astype(np.float64)
        sums, counts = distances @ sides, sides.sum(axis=0)
        means = sums / counts - (sums * sides).sum(axis=0) / (2 * counts * counts)
        nearer = means[:, 0] - means[:, 1]
    return right

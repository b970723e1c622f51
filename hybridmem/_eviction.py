"""Which entry goes first: importance * (1 + log(1 + access_count)), then age, then id."""

from __future__ import annotations

import bisect
import math
from collections import deque

import numpy as np
import numpy.typing as npt

from hybridmem._entries import EntryTable

__all__ = ["EvictionQueue", "eviction_scores", "lowest_rows"]

#: score, timestamp, entry_id: what entries are ordered by.
Rank = tuple[float, int, int]


def eviction_scores(table: EntryTable, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the eviction score of each row; the lowest goes first."""
    importance = table.columns["importance"][rows].astype(np.float64)
    counts, at = np.unique(table.columns["access_count"][rows], return_inverse=True)
    # One logarithm a distinct count: vectorised ones may differ from math.log in the last bit.
    boosts = np.array([_boost(count) for count in counts.tolist()], np.float64)
    return importance * boosts[at]


def lowest_rows(table: EntryTable, n: int) -> npt.NDArray[np.int64]:
    """Return the `n` live rows that go first, in that order."""
    rows = table.alive_rows()
    scores = eviction_scores(table, rows)
    if n < len(rows):
        # Ties with the n-th score are kept until their ages have been compared.
        keep = scores <= np.partition(scores, n - 1)[n - 1] if n else np.zeros(len(rows), bool)
        rows, scores = rows[keep], scores[keep]
    order = np.lexsort((rows, table.columns["timestamp"][rows], scores))
    return rows[order[:n]]


class EvictionQueue:
    """The next entries to go, kept so that an eviction is O(1) amortised in the number of entries.

    A part of the lowest entries is ranked at a time. A score only ever rises (accesses are added),
    so an entry outside that part can never come to precede it unless it was put later, and `put` is
    told here.
    """

    def __init__(self) -> None:
        self._queue: deque[Rank] = deque()
        self._ceiling: Rank | None = None  # entries above it are not in the queue

    def added(self, table: EntryTable, row: int) -> None:
        """Take note of a new row."""
        rank = _rank(table, row)
        if self._ceiling is not None and rank < self._ceiling:
            self._insert(rank)

    def pop(self, table: EntryTable, spare: int) -> int | None:
        """Return the live row that goes first, None if all entries have ids from `spare` on."""
        if not table.n_alive or int(table.columns["entry_id"][table.first_alive()]) >= spare:
            return None
        spared: list[Rank] = []
        while True:
            if not self._queue:
                self._refill(table, len(spared))
                spared.clear()
            rank = self._queue.popleft()
            row = table.find(rank[2])
            if row is None:
                continue
            current = _rank(table, row)
            if current != rank:
                if self._ceiling is not None and current <= self._ceiling:
                    self._insert(current)
            elif rank[2] >= spare:
                spared.append(rank)
            else:
                self._queue.extendleft(reversed(spared))
                return row

    def _insert(self, rank: Rank) -> None:
        self._queue.insert(bisect.bisect_left(self._queue, rank), rank)

    def _refill(self, table: EntryTable, spared: int) -> None:
        rows = lowest_rows(table, max(64, table.n_alive // 32) + spared)
        self._queue.extend(_rank(table, row) for row in rows.tolist())
        self._ceiling = self._queue[-1]


def _rank(table: EntryTable, row: int) -> Rank:
    columns = table.columns
    score = float(columns["importance"][row]) * _boost(int(columns["access_count"][row]))
    return score, int(columns["timestamp"][row]), int(columns["entry_id"][row])


def _boost(access_count: int) -> float:
    return 1.0 + math.log(1 + access_count)

"""Rows of the entries that a search found, at hand until the next search."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hybridmem.memory import Memory
from hybridmem.results import Entry, Hit

Floats = np.ndarray[Any, np.dtype[np.float32]]
Key = tuple[int, tuple[int, ...], int]
Rows = tuple[Floats, Floats]
#: Leading columns of a row of keys that tell it from others.
_FINGERPRINT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The entries that some tokens attend to.

    Attributes
    ----------
    layer : int
    ids : tuple of int
        Ascending: the order does not matter to attention, and equal sets are to be equal.
    entries : sequence of Entry or Hit, or None
        None where they are to be read from the store again.
    mark : int
        0, or what tells this search from others where entries of other conversations are seen.
    own : Tensor
        Ids of the entries that the conversation made itself; others may repeat rows of it.
    beside : sequence of Tensor
        Keys of the rows that it attends to besides.
    """

    layer: int
    ids: tuple[int, ...]
    entries: Sequence[Entry | Hit] | None
    mark: int
    own: Tensor
    beside: Sequence[Tensor]

    @property
    def key(self) -> Key:
        """What tells it from other findings."""
        return (self.layer, self.ids, self.mark)


class FoundRows:
    """Gives the rows of a finding, and keeps those of the latest ones at hand. Thread-safe.

    Rows of a float32 store are views of its mapped files, and stay where they are.
    """

    def __init__(self, store: Memory, limit: int) -> None:
        self._store = store
        self._limit = limit
        self._bytes = 0
        self._rows: OrderedDict[Key, list[Rows]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, found: Found) -> list[Rows]:
        """Return keys and values of each entry of a finding that is still there."""
        if not found.ids:
            return []
        with self._lock:
            rows = self._rows.get(found.key)
            if rows is not None:
                self._rows.move_to_end(found.key)
                return rows
        entries: Sequence[Entry | Hit] = (
            self._read(found.ids) if found.entries is None else found.entries
        )
        if found.mark:
            rows = list(_without_repeats(entries, found))
        else:
            rows = [(entry.keys, entry.values) for entry in entries]
        self._put(found.key, rows)
        return rows

    def _read(self, ids: Iterable[int]) -> list[Entry]:
        entries = []
        for entry_id in ids:
            try:
                entries.append(self._store.get(entry_id))
            except KeyError:  # evicted or forgotten since
                continue
        return entries

    def _put(self, key: Key, rows: list[Rows]) -> None:
        with self._lock:
            self._bytes += _size(rows) - _size(self._rows.pop(key, []))
            self._rows[key] = rows
            while self._bytes > self._limit and len(self._rows) > 1:
                self._bytes -= _size(self._rows.popitem(last=False)[1])

    def clear(self) -> None:
        """Let go of all rows at hand."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0


def _without_repeats(entries: Sequence[Entry | Hit], found: Found) -> Iterable[Rows]:
    """Leave out rows of other conversations that this one attends to as its own.

    A branch, or the same beginning read again, gives the same keys bit for bit.
    """
    seen = {
        bytes(row) for keys in found.beside for row in keys[:, :_FINGERPRINT].float().cpu().numpy()
    }
    own = set(found.own.tolist())
    for entry in sorted(entries, key=lambda entry: entry.entry_id not in own):
        prints = [bytes(row) for row in entry.keys[:, :_FINGERPRINT]]
        if entry.entry_id in own:
            yield entry.keys, entry.values
        else:
            new = [at for at, row in enumerate(prints) if row not in seen]
            if len(new) == len(prints):
                yield entry.keys, entry.values
            elif new:
                yield entry.keys[new], entry.values[new]
        seen.update(prints)


def _size(rows: list[Rows]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in rows)

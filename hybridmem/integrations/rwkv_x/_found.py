"""Rows of the entries that a search found, side by side and at hand until the next search."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.integrations.rwkv_x._attention import KeysValues
from hybridmem.results import Entry, Hit
from hybridmem.store import Store

Floats = np.ndarray[Any, np.dtype[np.float32]]
Key = tuple[int, tuple[int, ...], int]
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
    """Makes the rows of a finding and keeps the latest ones at hand. Thread-safe.

    One copy a search. The tokens up to the next search attend to it as one group, which takes less
    time than one small product for each mapped entry at each token.
    """

    def __init__(self, store: Store, heads: int, device: Any, limit: int) -> None:
        self._store = store
        self._heads = heads
        self._device = device
        self._limit = limit
        self._bytes = 0
        self._rows: OrderedDict[Key, KeysValues] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, found: Found) -> KeysValues | None:
        """Return the rows of a finding, None where there are none (any more)."""
        if not found.ids:
            return None
        with self._lock:
            rows = self._rows.get(found.key)
            if rows is not None:
                self._rows.move_to_end(found.key)
                return rows
        rows = self._gathered(found)
        if rows is not None:
            self._put(found.key, rows)
        return rows

    def _gathered(self, found: Found) -> KeysValues | None:
        entries: Sequence[Entry | Hit] = (
            self._read(found.ids) if found.entries is None else found.entries
        )
        pairs = [(entry.keys, entry.values) for entry in entries]
        if found.mark:
            pairs = list(_without_repeats(entries, found))
        if not pairs:
            return None
        return KeysValues(
            self._side_by_side([keys for keys, _ in pairs]),
            self._side_by_side([values for _, values in pairs]),
        )

    def _read(self, ids: Iterable[int]) -> list[Entry]:
        entries = []
        for entry_id in ids:
            try:
                entries.append(self._store.get(entry_id))
            except KeyError:  # evicted or forgotten since
                continue
        return entries

    def _side_by_side(self, arrays: Sequence[Floats]) -> Tensor:
        heads = self._heads
        views = [_tensor(array).view(len(array), heads, -1).transpose(0, 1) for array in arrays]
        return torch.cat(views, 1).to(self._device)

    def _put(self, key: Key, rows: KeysValues) -> None:
        with self._lock:
            old = self._rows.pop(key, None)
            self._rows[key] = rows
            self._bytes += _size(rows) - (0 if old is None else _size(old))
            while self._bytes > self._limit and len(self._rows) > 1:
                self._bytes -= _size(self._rows.popitem(last=False)[1])

    def clear(self) -> None:
        """Let go of all rows at hand."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0


def _without_repeats(
    entries: Sequence[Entry | Hit], found: Found
) -> Iterable[tuple[Floats, Floats]]:
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


def _size(rows: KeysValues) -> int:
    return 2 * int(rows.keys.numel()) * int(rows.keys.element_size())


def _tensor(array: Floats) -> Tensor:
    """View a read-only array as a tensor."""
    try:
        return torch.from_dlpack(array)
    except BufferError:  # numpy before 2.1 exports no read-only memory
        return torch.from_numpy(array.copy())

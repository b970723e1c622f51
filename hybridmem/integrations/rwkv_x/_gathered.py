"""The rows that a layer attends to while it decodes, side by side until the next search.

A token of decode is a few matrix products; what it attends to must be one of them, on all threads,
and not a loop over entries. So what a search found is copied once, beside the rows of the upstream
cache, and the tokens that follow are written behind them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem import _slabs
from hybridmem.integrations._tensors import as_tensor
from hybridmem.integrations.rwkv_x._conversation import UNKNOWN, Conversation, Rows
from hybridmem.integrations.rwkv_x._found import Found, FoundRows, Key


class GatheredRows:
    """Keys and values of what was found, of the upstream cache and of the rows that wait.

    They lie by head, keys column by column, so that attention is two plain products: half again as
    fast as one over rows of all heads. What was found stands first and is replaced by the next
    search; the rows that wait come last. These are kept in a memory of their own too, for they
    travel with the state: there rows are written behind those that are there and never over them,
    so that a state from before, a branch, still holds what it held.

    Attributes
    ----------
    left : int
        Tokens until the next search.
    nbytes : int
        Bytes of all rows, with room for those to come.
    """

    left: int

    def __init__(
        self,
        found_rows: int,
        cache: tuple[Tensor, Tensor],
        waiting: Rows,
        position: int,
        heads: int,
        chunk: int,
    ) -> None:
        keys, values = cache
        self._cache = keys
        self._key: Key | None = None
        room = max(chunk, len(waiting) + 1)
        width = keys.shape[-1]
        n = found_rows + keys.shape[1] + room
        with torch.inference_mode(False):  # tensors that may be written to in any mode
            by_column, by_row = _room(2 * n * width, keys.device).view(2, heads, -1)
            self._keys = by_column.view(heads, width // heads, n)
            self._values = by_row.view(heads, n, width // heads)
            self._own = Rows(
                keys.new_empty((room, width)),
                keys.new_empty((room, width)),
                torch.full((room, 2), UNKNOWN, dtype=torch.float64),
            )
            self._nothing = by_row.new_zeros(1)
        # A token writes its row into each of these: [n, heads, head size].
        self._places = self._keys.permute(2, 0, 1), self._values.transpose(0, 1)
        tensors = (self._keys, self._values, self._own.keys, self._own.values)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._scale = self._keys.shape[1] ** -0.5
        self._found_rows = self._first = self._count = found_rows
        self._waiting = 0
        self._write(found_rows, keys[0], values[0])
        self._count += keys.shape[1]
        self._append(waiting)
        still = room - len(waiting)
        self._own.meta[len(waiting) :, 0] = torch.arange(position, position + still)

    def show(self, found: Found, entries: list[tuple[Any, Any]]) -> None:
        """Put what a search found in the place of what the one before had found."""
        if found.key == self._key:
            return
        at = self._found_rows
        for keys, values in entries:
            at -= len(keys)
            self._write(at, as_tensor(keys), as_tensor(values))
        self._first, self._key = at, found.key

    def _write(self, at: int, *rows: Tensor) -> None:
        for place, some in zip(self._places, rows, strict=True):
            place[at : at + len(some)] = some.view(-1, *place.shape[1:])

    def holds(self, cache: Tensor, rows: int = 0) -> bool:
        """Whether they are of this cache, with room for a token and so many rows found."""
        return (
            self._cache is cache
            and rows <= self._found_rows
            and self._waiting < len(self._own.keys)
        )

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the row of the next position behind the others.

        Returns
        -------
        tuple of Tensor
            Keys, values, and positions and losses of all rows that wait.
        """
        at, n, own = self._waiting, self._count, self._own
        keys, values = self._places
        own.keys[at], own.values[at] = key, value
        keys[n], values[n] = key.view(keys.shape[1:]), value.view(keys.shape[1:])
        self._waiting, self._count = at + 1, n + 1
        self.left -= 1
        whole = own.keys, own.values, own.meta
        waiting = [rows.narrow(0, 0, at + 1) for rows in whole]
        return waiting[0], waiting[1], waiting[2]

    def _append(self, rows: Rows) -> None:
        place = slice(self._waiting, self._waiting + len(rows))
        self._own.keys[place] = rows.keys
        self._own.values[place] = rows.values
        self._own.meta[place] = rows.meta
        self._write(self._count, rows.keys, rows.values)
        self._waiting = place.stop
        self._count += len(rows)

    def attend(self, query: Tensor) -> Tensor:
        """Attend to all rows with one query, `[1, width]`; computed in float32."""
        heads, head_size, _ = self._keys.shape
        first, n = self._first, self._count - self._first
        keys, values = self._keys.narrow(2, first, n), self._values.narrow(1, first, n)
        scores = torch.baddbmm(
            self._nothing,
            query.float().view(heads, 1, head_size),
            keys,
            beta=0,
            alpha=self._scale,
        )
        mixed = torch.bmm(torch.softmax(scores, -1), values)
        return mixed.view(1, -1).to(query.dtype)


def _room(count: int, device: torch.device) -> Tensor:
    """Memory for so many float32, in huge pages: columns of keys are pages apart."""
    if device.type != "cpu":
        return torch.empty(count, device=device)
    return torch.from_numpy(_slabs.pages((4 * count,)).view(np.float32))


class Gathered:
    """The gathered rows of the conversations that decode, the latest ones. Thread-safe."""

    def __init__(self, found: FoundRows, limit: int, chunk: int) -> None:
        self._found = found
        self._limit = limit
        self._chunk = chunk
        # The plain state that rows belong to is kept with them: its id is then no other's.
        self._rows: OrderedDict[tuple[int, int], tuple[Any, GatheredRows]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, layer: int, plain: Any) -> GatheredRows | None:
        """Return the rows that were kept for this very object, if they still are.

        They are the caller's until it keeps them again.
        """
        with self._lock:
            _, rows = self._rows.pop((layer, id(plain)), (None, None))
            if rows is not None:
                self._bytes -= rows.nbytes
        return rows

    def show(
        self,
        rows: GatheredRows | None,
        found: Found,
        cache: tuple[Tensor, Tensor],
        held: Conversation,
        heads: int,
    ) -> GatheredRows:
        """Bring together what a search found, keys and values of upstream, and what waits.

        In the rows that were taken, if all of it has room there.
        """
        entries = self._found.of(found)
        n = sum(len(keys) for keys, _ in entries)
        if rows is None or not rows.holds(cache[0], n):
            rows = GatheredRows(n, cache, held.waiting, held.seen, heads, self._chunk)
        rows.show(found, entries)
        return rows

    def keep(self, layer: int, plain: Any, rows: GatheredRows) -> None:
        """Keep rows for the token that finds this plain state."""
        with self._lock:
            self._rows[layer, id(plain)] = (plain, rows)
            self._bytes += rows.nbytes
            while self._bytes > self._limit and len(self._rows) > 1:
                self._bytes -= self._rows.popitem(last=False)[1][1].nbytes

    def clear(self) -> None:
        """Let go of all rows."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0

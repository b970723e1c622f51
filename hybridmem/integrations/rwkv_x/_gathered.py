"""The rows that a layer attends to while it decodes, side by side until the next search.

A token of decode is a few matrix products; what it attends to must be one of them, on all threads,
and not a loop over entries. So what a search found is copied once, beside the rows of the upstream
cache, and the tokens that follow are written behind them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.integrations._tensors import as_tensor
from hybridmem.integrations.rwkv_x._conversation import Conversation, Rows
from hybridmem.integrations.rwkv_x._found import Found, FoundRows


class GatheredRows:
    """Keys and values of what was found, of the upstream cache and of the rows that wait.

    Rows are written behind those that are there and never over them, so that a state from before,
    a branch, still holds what it held.

    Attributes
    ----------
    held : Conversation
        The conversation after the last token.
    waiting : Rows
        The rows that wait for a whole chunk, in a memory of their own: they travel with the state.
    """

    held: Conversation

    def __init__(
        self,
        found: Found,
        entries: list[tuple[Any, Any]],
        cache: tuple[Tensor, Tensor],
        held: Conversation,
        chunk: int,
    ) -> None:
        self._key = found.key
        self._cache = cache[0]
        parts = [*((as_tensor(k), as_tensor(v)) for k, v in entries), (cache[0][0], cache[1][0])]
        waiting = held.waiting
        room = max(chunk, len(waiting) + 1)
        with torch.inference_mode(False):  # tensors that may be written to in any mode
            rows = sum(len(keys) for keys, _ in parts) + room
            like, width = cache[0], cache[0].shape[-1]
            self._keys, self._values = (like.new_empty((rows, width)) for _ in range(2))
            self._own = Rows(
                like.new_empty((room, width)),
                like.new_empty((room, width)),
                torch.empty((room, 2), dtype=torch.float64),
            )
        self._count = self._waiting = 0
        for keys, values in parts:
            self._add(keys, values)
        if len(waiting):
            self._append(waiting)
        self._view()

    def fits(self, cache: Tensor, found: Found | None = None) -> bool:
        """Whether they are of this cache and of what a new search found, with room for a token."""
        return (
            self._cache is cache
            and self._waiting < len(self._own.keys)
            and (found is None or self._key == found.key)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, with room for those to come."""
        tensors = (self._keys, self._values, self._own.keys, self._own.values)
        return sum(tensor.nbytes for tensor in tensors)

    def append(self, row: Rows) -> None:
        """Write one more row behind the others; it waits."""
        self._append(row)
        self._view()

    def _append(self, rows: Rows) -> None:
        place = slice(self._waiting, self._waiting + len(rows))
        self._own.keys[place] = rows.keys
        self._own.values[place] = rows.values
        self._own.meta[place] = rows.meta
        self._waiting = place.stop
        self._add(rows.keys, rows.values)

    def _add(self, keys: Tensor, values: Tensor) -> None:
        place = slice(self._count, self._count + len(keys))
        self._keys[place] = keys
        self._values[place] = values
        self._count = place.stop

    def _view(self) -> None:
        self.waiting = self._own.take(slice(self._waiting))

    def attend(self, query: Tensor, heads: int) -> Tensor:
        """Attend to all rows with one query, `[1, width]`."""
        n, width = self._count, query.shape[1]
        q, keys, values = (
            rows.view(1, -1, heads, width // heads).transpose(1, 2)
            for rows in (query, self._keys[:n], self._values[:n])
        )
        return F.scaled_dot_product_attention(q, keys, values).reshape(1, width)


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

    def make(self, held: Conversation, found: Found, cache: tuple[Tensor, Tensor]) -> GatheredRows:
        """Bring together what a search found, keys and values of upstream, and what waits."""
        return GatheredRows(found, self._found.of(found), cache, held, self._chunk)

    def keep(self, layer: int, plain: Any, held: Conversation, rows: GatheredRows) -> None:
        """Keep rows for the token that finds this state, which is `held`."""
        rows.held = held
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

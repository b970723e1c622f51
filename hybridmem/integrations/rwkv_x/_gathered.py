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

from hybridmem import _kernels, _slabs
from hybridmem.integrations._tensors import as_array, as_tensor
from hybridmem.integrations.rwkv_x._conversation import UNKNOWN, Conversation
from hybridmem.integrations.rwkv_x._found import Found, FoundRows, Key


class GatheredRows:
    """Keys and values of what was found, of the upstream cache and of the rows that wait.

    They lie by head, keys column by column, so that attention is two plain products: half again as
    fast as one over rows of all heads. What was found stands first and is replaced by the next
    search; the rows that wait come last. These are kept in a memory of their own too, for they
    travel with the state, as the last queries do: there rows are written behind those that are
    there and never over them, so that a state from before, a branch, still holds what it held.

    Attributes
    ----------
    left : int
        Tokens until the next search; 0 where that comes first.
    nbytes : int
        Bytes of all rows, with room for those to come.
    """

    def __init__(
        self,
        found_rows: int,
        cache: tuple[Tensor, Tensor],
        held: Conversation,
        heads: int,
        chunk: int,
        kept_queries: int,
    ) -> None:
        keys, values = cache
        self._cache = keys
        self._kept_queries = kept_queries
        self._room = max(chunk, len(held.waiting) + 1)
        width = keys.shape[-1]
        n = found_rows + keys.shape[1] + self._room
        with torch.inference_mode(False):  # tensors that may be written to in any mode
            by_column, by_row = _memory(2 * n * width, keys.device).view(2, heads, -1)
            self._keys = by_column.view(heads, width // heads, n)
            self._values = by_row.view(heads, n, width // heads)
            self._nothing = by_row.new_zeros(1)
        # Rows are written into these. On a CPU they are arrays, for loops of our own: copies of
        # tensors row by row cost several times as much.
        self._columns: Any = self._keys.view(width, n)
        self._by_head: Any = self._values
        if in_arrays(keys.device):
            self._columns, self._by_head = self._columns.numpy(), self._by_head.numpy()
        self._scale = self._keys.shape[1] ** -0.5
        self._found_rows = found_rows
        self._write(found_rows, keys[0], values[0])
        self.wait(held)

    def wait(self, held: Conversation) -> None:
        """Let the rows that wait be those of a conversation; nothing is found for it yet."""
        self.left = 0
        self._key: Key | None = None
        self._first = self._found_rows
        self._waiting = len(held.waiting)
        self._queries = len(held.queries) - self._waiting
        self._count = self._found_rows + self._cache.shape[1]
        self._write(self._count, held.waiting.keys, held.waiting.values)
        self._count += self._waiting
        size = 3, len(held.queries) + self._room, self._cache.shape[-1]
        with torch.inference_mode(False):
            own = self._cache.new_empty(size)
            self._appended = iter(_prefixes(own, held, self._room, self._kept_queries))
        self._own: Any = own
        if own.dtype == torch.float32 and in_arrays(own.device):
            self._own = own.numpy()
        self.nbytes = self._keys.nbytes + self._values.nbytes + own.nbytes

    def show(self, found: Found, entries: list[tuple[Any, Any]]) -> None:
        """Put what a search found in the place of what the one before had found."""
        if found.key == self._key:
            return
        at = self._found_rows
        for keys, values in entries:
            at -= len(keys)
            self._write(at, keys, values)
        self._first, self._key = at, found.key

    def _write(self, at: int, keys: Any, values: Any) -> None:
        if isinstance(self._columns, np.ndarray):
            _kernels.write_by_head(
                as_array(keys), as_array(values), self._columns, self._by_head, at
            )
        else:
            place, (heads, _, size) = slice(at, at + len(keys)), self._by_head.shape
            self._columns[:, place] = as_tensor(keys).T
            self._by_head[:, place] = as_tensor(values).view(-1, heads, size).transpose(0, 1)

    def holds(self, cache: Tensor, rows: int = 0) -> bool:
        """Whether they are of this cache, with room for a token and so many rows found."""
        return self._cache is cache and rows <= self._found_rows and self._waiting < self._room

    def append(self, key: Tensor, value: Tensor, query: Tensor) -> dict[str, Tensor]:
        """Write the rows of the next token behind the others.

        Returns
        -------
        dict of str to Tensor
            Fields of the plain state: the rows that wait and the last queries.
        """
        at, n = self._waiting, self._count
        if isinstance(self._own, np.ndarray):
            rows = key.numpy(), value.numpy(), query.numpy()
            own = self._own, at, at + self._queries
            _kernels.append_by_head(*rows, self._columns, self._by_head, n, *own)
        else:
            self._write(n, key, value)
            self._own[0, at], self._own[1, at] = key[0], value[0]
            self._own[2, at + self._queries] = query[0]
        self._waiting, self._count = at + 1, n + 1
        self.left -= 1
        return next(self._appended)

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


def in_arrays(device: torch.device) -> bool:
    """Whether rows of this device can be written as arrays of the CPU."""
    return str(device.type) == "cpu"


def _prefixes(
    own: Tensor, held: Conversation, room: int, kept_queries: int
) -> list[dict[str, Tensor]]:
    """Fields of the plain state for every number of waiting rows to come, as views of `own`.

    What is there already is written first. All are made at once: the same few steps, taken for
    each token when other work has emptied the processor's caches, cost it a percent.
    """
    keys, values, queries = own
    waiting, before = held.waiting, len(held.queries)
    keys[: len(waiting)], values[: len(waiting)] = waiting.keys, waiting.values
    queries[:before] = held.queries
    meta = torch.full((room, 2), UNKNOWN, dtype=torch.float64)
    meta[: len(waiting)] = waiting.meta
    meta[len(waiting) :, 0] = torch.arange(held.seen, held.seen + room - len(waiting))
    fields: list[dict[str, Tensor]] = []
    for n in range(len(waiting) + 1, room + 1):
        end = before + n - len(waiting)
        fields.append(
            {
                "keys": keys[:n],
                "values": values[:n],
                "meta": meta[:n],
                "queries": queries[max(0, end - kept_queries) : end],
            }
        )
    return fields


def _memory(count: int, device: torch.device) -> Tensor:
    """Memory for so many float32, in huge pages: columns of keys are pages apart."""
    if not in_arrays(device):
        return torch.empty(count, device=device)
    return torch.from_numpy(_slabs.pages((4 * count,)).view(np.float32))


class Gathered:
    """The gathered rows of the conversations that decode, the latest ones. Thread-safe."""

    def __init__(self, found: FoundRows, limit: int, chunk: int, kept_queries: int) -> None:
        self._found = found
        self._limit = limit
        self._chunk = chunk
        self._kept_queries = kept_queries
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
            rows = GatheredRows(n, cache, held, heads, self._chunk, self._kept_queries)
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

"""The third tier as one attention layer uses it: search, rows found, rows put away.

Searches happen on a fixed grid of token positions and use the queries of the last tokens only, so
what a row attends to depends on the text before it and not on how the text was cut into pieces.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.integrations.rwkv_x._attention import KeysValues
from hybridmem.integrations.rwkv_x._conversation import STATE_KEY, Conversation

if TYPE_CHECKING:
    from hybridmem.store import Store

#: Bytes of found rows that are kept at hand between searches, over all layers and conversations.
_AT_HAND_BYTES = 256 << 20


class Tier:
    """The store and the options of an attached model, as its attention layers see them.

    Attributes
    ----------
    top_k : int
        Entries that a search gives; may be changed at any time.
    """

    def __init__(
        self,
        store: Store,
        *,
        heads: int,
        layers: int,
        top_k: int,
        chunk_tokens: int,
        search_every: int,
        query_tokens: int,
        see_all: bool,
    ) -> None:
        self.store = store
        self.heads = heads
        self.top_k = top_k
        self.see_all = see_all
        self._chunk = chunk_tokens
        self._every = search_every
        self._query_tokens = query_tokens
        # Layers take turns, so that no token pays for the searches of all of them.
        self._offsets = [layer * search_every // layers for layer in range(layers)]
        self._at_hand = _AtHand(_AT_HAND_BYTES)
        self._store_id = store.store_id
        self._checked: set[tuple[int, int]] = {(0, 0)}

    # -- the state --------------------------------------------------------------------------------

    def begin(self, layer_state: dict[str, Any]) -> Conversation:
        """Return the conversation that a layer of an upstream state belongs to."""
        cache = layer_state["k_cache"]
        plain = layer_state.get(STATE_KEY)
        if plain is None:
            held = Conversation.new(cache.shape[-1], cache, self._store_id)
        else:
            held = Conversation.from_plain(plain)
            self.check(held)
        return held

    def check(self, held: Conversation) -> None:
        """Refuse a conversation whose entries are not those of the store under the same ids.

        Raises
        ------
        ValueError
            If it was held with another store, or an id was given to another entry since, as
            happens to ids that were never flushed when a process died.
        """
        if held.store_id != self._store_id:
            raise ValueError(
                f"state remembers entries of another store than {self.store.path}: "
                "attach the store that it was made with"
            )
        if held.newest in self._checked:
            return
        records = self.store.entries
        _, ours, theirs = np.intersect1d(
            held.entries.numpy().astype(np.uint64), records["entry_id"], return_indices=True
        )
        stamps = held.stamps.numpy().astype(np.uint64)
        if (stamps[ours] != records["timestamp"][theirs]).any():
            raise ValueError(
                f"state remembers entries that {self.store.path} lost before they were flushed: "
                "keep states with memory.save, which flushes the store first"
            )
        self._checked.add(held.newest)

    def end(self, layer_state: dict[str, Any], held: Conversation) -> None:
        """Write the conversation into the upstream state."""
        layer_state[STATE_KEY] = held.to_plain()

    # -- search -----------------------------------------------------------------------------------

    def find(
        self, layer: int, held: Conversation, queries: Tensor
    ) -> tuple[Conversation, list[tuple[int, int, KeysValues | None]]]:
        """Say which rows of the store the next tokens attend to.

        Parameters
        ----------
        queries : Tensor
            `[m, width]`, of the next m tokens.

        Returns
        -------
        Conversation
            With the position, the last queries and the last hits moved on.
        list of (int, int, KeysValues or None)
            Runs of tokens, from and to, with the rows found for them.
        """
        m = int(queries.shape[0])
        points = self._points(layer, held, m)
        recent = torch.cat((held.queries, queries)) if len(held.queries) else queries
        hits = held.hits
        runs: list[tuple[int, int, KeysValues | None]] = []
        if not points or points[0] > 0:
            runs.append((0, points[0] if points else m, self._rows(layer, hits)))
        if points:
            behind = len(held.queries) + 1
            wanted = [
                recent[max(0, behind + at - self._query_tokens) : behind + at] for at in points
            ]
            found = self._search(layer, held, wanted)
            hits = found[-1][0]
            for (_, rows), start, end in zip(found, points, [*points[1:], m], strict=True):
                if runs and runs[-1][2] is rows:
                    start = runs.pop()[0]
                runs.append((start, end, rows))
        held = held.replace(
            seen=held.seen + m,
            queries=recent[max(0, len(recent) - self._query_tokens + 1) :],
            hits=hits,
            searched=len(held.entries) if points else held.searched,
        )
        return held, runs

    def _points(self, layer: int, held: Conversation, m: int) -> list[int]:
        """Which of the next m tokens search."""
        if not self.see_all and not len(held.entries):
            return []
        first = (self._offsets[layer] - held.seen) % self._every
        points = list(range(first, m, self._every))
        if held.searched != len(held.entries) and first > 0:
            points.insert(0, 0)  # a chunk has left since the last search: nothing may fall between
        return points

    def _search(
        self, layer: int, held: Conversation, wanted: Sequence[Tensor]
    ) -> list[tuple[Tensor, KeysValues | None]]:
        visible = None if self.see_all else held.entries.numpy()
        queries = [query.float().cpu().numpy() for query in wanted]
        found = self.store.query_many(queries, layer, self.top_k, entry_ids=visible)
        out: list[tuple[Tensor, KeysValues | None]] = []
        for hits in found:
            # The order of rows does not matter to attention; ascending ids make equal sets equal.
            hits = sorted(hits, key=lambda hit: hit.entry_id)
            ids = tuple(hit.entry_id for hit in hits)
            rows = self._at_hand.get((layer, ids))
            if rows is None and hits:
                rows = self._gather(layer, ids, hits)
            out.append((torch.tensor(ids, dtype=torch.int64), rows))
        return out

    # -- rows found -------------------------------------------------------------------------------

    def _rows(self, layer: int, hits: Tensor) -> KeysValues | None:
        """Return the rows of the last search, from the store if they are no longer at hand."""
        ids = tuple(hits.tolist())
        if not ids:
            return None
        rows = self._at_hand.get((layer, ids))
        if rows is not None:
            return rows
        entries = []
        for entry_id in ids:
            try:
                entries.append(self.store.get(entry_id))
            except KeyError:  # evicted or forgotten since
                continue
        return self._gather(layer, ids, entries) if entries else None

    def _gather(self, layer: int, ids: tuple[int, ...], entries: Sequence[Any]) -> KeysValues:
        """Lay the rows of some entries side by side, by head.

        One copy a search. The tokens up to the next search attend to it as one group, which takes
        less time than one small product for each mapped entry at each token.
        """
        rows = KeysValues(
            self._side_by_side([entry.keys for entry in entries]),
            self._side_by_side([entry.values for entry in entries]),
        )
        self._at_hand.put((layer, ids), rows)
        return rows

    def _side_by_side(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        heads = self.heads
        views = [_tensor(array).view(len(array), heads, -1).transpose(0, 1) for array in arrays]
        return torch.cat(views, 1)

    def forget(self) -> None:
        """Drop all rows at hand."""
        self._at_hand.clear()

    # -- rows put away ----------------------------------------------------------------------------

    def settle(self, layer: int, held: Conversation) -> Conversation:
        """Put every whole chunk of the waiting rows into the store."""
        waiting = held.waiting
        whole = len(waiting) // self._chunk * self._chunk
        if not whole:
            return held
        waiting = waiting.by_position()
        keys = _array(waiting.keys[:whole])
        values = _array(waiting.values[:whole])
        cuts = range(0, whole, self._chunk)
        usual = held.losses[0] / held.losses[1] if held.losses[1] else 1.0
        ids = self.store.put_many(
            [(keys[at : at + self._chunk], values[at : at + self._chunk]) for at in cuts],
            layer,
            [_importance(waiting.meta[at : at + self._chunk, 1], usual) for at in cuts],
        )
        stamps = []
        for entry_id in ids:
            try:
                stamps.append(self.store.get(entry_id).timestamp)
            except KeyError:  # a limit of the store took it at once
                stamps.append(0)
        newest = (ids[-1], stamps[-1])
        self._checked.add(newest)
        return held.replace(
            waiting=waiting.take(slice(whole, None)),
            entries=torch.cat((held.entries, torch.tensor(ids, dtype=torch.int64))),
            stamps=torch.cat((held.stamps, torch.tensor(stamps, dtype=torch.int64))),
            newest=newest,
        )


class _AtHand:
    """Rows of the latest searches, the least recently used dropped first. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._rows: OrderedDict[tuple[int, tuple[int, ...]], KeysValues] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, tuple[int, ...]]) -> KeysValues | None:
        with self._lock:
            rows = self._rows.get(key)
            if rows is not None:
                self._rows.move_to_end(key)
            return rows

    def put(self, key: tuple[int, tuple[int, ...]], rows: KeysValues) -> None:
        with self._lock:
            old = self._rows.pop(key, None)
            self._rows[key] = rows
            self._bytes += _size(rows) - (_size(old) if old is not None else 0)
            while self._bytes > self._limit and len(self._rows) > 1:
                self._bytes -= _size(self._rows.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._bytes = 0


def _size(rows: KeysValues) -> int:
    return 2 * int(rows.keys.numel()) * int(rows.keys.element_size())


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """View a read-only array as a tensor."""
    try:
        return torch.from_dlpack(array)
    except BufferError:  # numpy before 2.1 exports no read-only memory
        return torch.from_numpy(array.copy())


def _array(rows: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = rows.float().cpu().numpy()
    return array


def _importance(losses: Tensor, usual: float) -> float:
    """Mean memory loss of a chunk; rows of decode, whose loss is not known, count as usual ones."""
    known = torch.where(torch.isnan(losses), usual, losses).mean().item()
    return float(min(max(known, 0.0), float(np.finfo(np.float32).max)))

"""The third tier as one attention layer uses it: search, rows found, rows put away.

Searches happen on a fixed grid of token positions and use the queries of the last tokens only, so
what a row attends to depends on the text before it and not on how the text was cut into pieces, but
for one: the last token of a piece, where an answer may begin, searches wherever it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.integrations._tensors import as_array
from hybridmem.integrations.rwkv_x._centring import Centring
from hybridmem.integrations.rwkv_x._conversation import STATE_KEY, Conversation
from hybridmem.integrations.rwkv_x._found import Found, FoundRows
from hybridmem.integrations.rwkv_x._gathered import Gathered, GatheredRows
from hybridmem.results import Entry, Hit

if TYPE_CHECKING:
    from hybridmem.memory import Memory

#: Bytes of found rows that are kept at hand between searches, over all layers and conversations.
_AT_HAND_BYTES = 256 << 20


class Tier:
    """The store and the options of an attached model, as its attention layers see them.

    Attributes
    ----------
    top_k : int
        Entries that a search gives; may be changed at any time.
    rows : FoundRows
        Turns what `find` gives into rows.
    gathered : Gathered
        Keeps the rows that decode attends to side by side.
    centring : Centring
    """

    def __init__(
        self,
        store: Memory,
        *,
        layers: int,
        top_k: int,
        chunk_tokens: int,
        search_every: int,
        search_at_end: bool,
        query_tokens: int,
        see_all: bool,
        centre_tokens: int,
        query_options: Mapping[str, Any],
    ) -> None:
        self.store = store
        self.top_k = top_k
        self.see_all = see_all
        self._chunk = chunk_tokens
        self._every = search_every
        self._at_end = search_at_end
        self._query_tokens = query_tokens
        # Layers take turns, so that no token pays for the searches of all of them.
        self._offsets = [layer * search_every // layers for layer in range(layers)]
        self.rows = FoundRows(store, _AT_HAND_BYTES)
        self.gathered = Gathered(self.rows, _AT_HAND_BYTES, chunk_tokens, query_tokens - 1)
        self._options = {"rerank": "signatures"} | dict(query_options)
        self.centring = Centring(store, layers, centre_tokens)
        self._store_id = store.store_id
        self._checked: set[tuple[int, int]] = {(0, 0)}

    # -- the state --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Let go of all rows at hand."""
        self.rows.clear()
        self.gathered.clear()

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
                f"state remembers entries of another store than {self.store!r}: "
                "attach the store that it was made with"
            )
        if held.newest in self._checked:
            return
        stamps = np.array(self.store.timestamps(held.entries.tolist()), np.int64)
        if ((stamps != held.stamps.numpy()) & (stamps != 0)).any():
            raise ValueError(
                f"state remembers entries that {self.store!r} lost before they were flushed: "
                "keep states with memory.save, which flushes the store first"
            )
        self._checked.add(held.newest)

    def end(self, layer_state: dict[str, Any], held: Conversation) -> None:
        """Write the conversation into the upstream state."""
        layer_state[STATE_KEY] = held.to_plain()

    # -- search -----------------------------------------------------------------------------------

    def _kept(self, recent: Tensor) -> Tensor:
        """The queries that the next search asks with, beside its own."""
        return recent[max(0, len(recent) - self._query_tokens + 1) :]

    def find(
        self, layer: int, held: Conversation, queries: Tensor, cache: Tensor
    ) -> tuple[Conversation, list[tuple[int, int, Found]]]:
        """Say which entries of the store the next tokens attend to.

        Parameters
        ----------
        queries : Tensor
            `[m, width]`, of the next m tokens.
        cache : Tensor
            `[n, width]`, keys of the upstream cache, which are attended to besides.

        Returns
        -------
        Conversation
            With the position, the last queries and the last hits moved on.
        list of (int, int, Found)
            Runs of tokens, from and to, with what was found for them.
        """
        m = int(queries.shape[0])
        points = self._points(layer, held, m)
        recent = torch.cat((held.queries, queries))
        runs = []
        if not points or points[0] > 0:
            last = self._finding(layer, held, cache, tuple(held.hits.tolist()), held.mark)
            runs.append((0, points[0] if points else m, last))
        if points:
            behind = len(held.queries) + 1
            wanted = [
                recent[max(0, behind + at - self._query_tokens) : behind + at] for at in points
            ]
            found = self._search(layer, held, wanted, cache)
            for one, start, end in zip(found, points, [*points[1:], m], strict=True):
                if runs and runs[-1][2].key == one.key:
                    start = runs.pop()[0]
                runs.append((start, end, one))
            last = found[-1]
        held = held.replace(
            seen=held.seen + m,
            queries=self._kept(recent),
            hits=torch.tensor(last.ids, dtype=torch.int64) if points else held.hits,
            searched=len(held.entries) if points else held.searched,
            mark=last.mark,
        )
        return held, runs

    def try_query(self) -> None:
        """Raise what the store says of the options, before anything depends on them."""
        query = np.ones(self.store.config.embed_dim, np.float32)
        self.store.query(query, 0, self.top_k, entry_ids=[], **self._options)

    def _points(self, layer: int, held: Conversation, m: int) -> list[int]:
        """Which tokens of the next piece of m search."""
        if not self.see_all and not len(held.entries):
            return []
        points = list(range(self._next_point(layer, held.seen), m, self._every))
        if self._at_end and m > 1 and points[-1:] != [m - 1]:
            points.append(m - 1)
        if held.searched != len(held.entries) and points[:1] != [0]:
            points.insert(0, 0)  # a chunk has left since the last search: nothing may fall between
        return points

    def _next_point(self, layer: int, seen: int) -> int:
        """Tokens that pass until a layer comes to a point of the grid."""
        return (self._offsets[layer] - seen) % self._every

    def _search(
        self, layer: int, held: Conversation, wanted: Sequence[Tensor], cache: Tensor
    ) -> list[Found]:
        visible = None if self.see_all else held.entries.numpy()
        results = self.store.query_many(
            [query.float().cpu().numpy() for query in wanted],
            layer,
            self.top_k,
            entry_ids=visible,
            **self._options,
        )
        mark = secrets.randbits(62) if self.see_all else 0
        found = []
        for hits in results:
            entries = sorted(hits, key=lambda hit: hit.entry_id)
            ids = tuple(entry.entry_id for entry in entries)
            found.append(self._finding(layer, held, cache, ids, mark, entries))
        return found

    def _finding(
        self,
        layer: int,
        held: Conversation,
        cache: Tensor,
        ids: tuple[int, ...],
        mark: int,
        entries: Sequence[Entry | Hit] | None = None,
    ) -> Found:
        beside = (cache, held.waiting.keys) if self.see_all else ()
        return Found(layer, ids, entries, mark=mark, own=held.entries, beside=beside)

    # -- decode -----------------------------------------------------------------------------------

    def gather(
        self, layer: int, layer_state: dict[str, Any], query: Tensor, heads: int
    ) -> GatheredRows:
        """Return the rows that the next token of a state attends to, but for its own."""
        cache = layer_state["k_cache"], layer_state["v_cache"]
        rows = self.gathered.take(layer, layer_state.get(STATE_KEY))
        if rows is not None and rows.left and rows.holds(cache[0]):
            return rows
        held = self.begin(layer_state)
        moved, ((_, _, found),) = self.find(layer, held, query, cache[0][0])
        held = held.replace(hits=moved.hits, searched=moved.searched, mark=moved.mark)
        self.end(layer_state, held)
        rows = self.gathered.show(rows, found, cache, held, heads)
        rows.left = 1 + self._next_point(layer, moved.seen)
        return rows

    def go_on(
        self,
        layer: int,
        layer_state: dict[str, Any],
        appended: dict[str, Tensor],
        rows: GatheredRows,
    ) -> None:
        """Move a state on by one token of decode, after which these rows wait."""
        plain = layer_state[STATE_KEY] | appended  # a new one: the one before may be a branch's
        plain["seen"] += 1
        layer_state[STATE_KEY] = plain
        if len(plain["keys"]) >= self._chunk:
            held = self.settle(layer, Conversation.from_plain(plain))
            self.end(layer_state, held)
            rows.wait(held)
        self.gathered.keep(layer, layer_state[STATE_KEY], rows)

    # -- rows put away ----------------------------------------------------------------------------

    def settle(self, layer: int, held: Conversation) -> Conversation:
        """Put every whole chunk of the waiting rows into the store."""
        waiting = held.waiting
        whole = len(waiting) // self._chunk * self._chunk
        if not whole:
            return held
        waiting = waiting.by_position()
        keys = as_array(waiting.keys[:whole])
        values = as_array(waiting.values[:whole])
        cuts = range(0, whole, self._chunk)
        usual = held.losses[0] / held.losses[1] if held.losses[1] else 1.0
        ids = self.store.put_many(
            [(keys[at : at + self._chunk], values[at : at + self._chunk]) for at in cuts],
            layer,
            [_importance(waiting.meta[at : at + self._chunk, 1], usual) for at in cuts],
        )
        stamps = self.store.timestamps(ids)  # 0 where a limit of the store took it at once
        newest = (ids[-1], stamps[-1])
        self._checked.add(newest)
        return held.replace(
            waiting=waiting.take(slice(whole, None)),
            entries=torch.cat((held.entries, torch.tensor(ids, dtype=torch.int64))),
            stamps=torch.cat((held.stamps, torch.tensor(stamps, dtype=torch.int64))),
            newest=newest,
        )


def _importance(losses: Tensor, usual: float) -> float:
    """Mean memory loss of a chunk; rows of decode, whose loss is not known, count as usual ones."""
    known = torch.where(torch.isnan(losses), usual, losses).mean().item()
    return float(min(max(known, 0.0), float(np.finfo(np.float32).max)))

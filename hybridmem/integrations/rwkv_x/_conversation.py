"""What an attention layer of a conversation holds, and its plain form inside the upstream state.

The plain form is a dict of tensors, numbers and strings under one further key of
`state["attn"][i]`, so that `copy.deepcopy`, `torch.save` and `torch.load(weights_only=True)` carry
it along and a copy of a state is a branch of the conversation. No tensor is ever written to in
place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

#: The key under which it travels.
STATE_KEY = "hybridmem"
#: Loss of a row whose loss is not known: decode computes none.
UNKNOWN = float("nan")


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values of some tokens with their position in the conversation and their loss."""

    keys: Tensor  # [n, width]
    values: Tensor  # [n, width]
    meta: Tensor  # float64 [n, 2]: position, memory loss (NaN where not known)

    @classmethod
    def none(cls, width: int, like: Tensor) -> Rows:
        """Return no rows."""
        empty = like.new_empty((0, width))
        return cls(empty, empty, torch.empty((0, 2), dtype=torch.float64))

    def __len__(self) -> int:
        return int(self.keys.shape[0])

    def __add__(self, other: Rows) -> Rows:
        return Rows(
            torch.cat((self.keys, other.keys)),
            torch.cat((self.values, other.values)),
            torch.cat((self.meta, other.meta)),
        )

    def take(self, index: Tensor | slice) -> Rows:
        """Return some of the rows."""
        on_device = index.to(self.keys.device) if isinstance(index, Tensor) else index
        return Rows(self.keys[on_device], self.values[on_device], self.meta[index])

    def by_position(self) -> Rows:
        """Return the rows in the order of the text."""
        return self.take(torch.argsort(self.meta[:, 0], stable=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """One attention layer of one conversation.

    Attributes
    ----------
    seen : int
        Tokens that have passed.
    waiting : Rows
        Rows that do not fill a chunk yet.
    cached : Tensor
        float64 `[m, 2]`: position and loss of the rows of the upstream cache.
    queries : Tensor
        Queries of the last tokens.
    entries : Tensor
        int64: ids of the entries of the store that this conversation may see, ascending.
    stamps : Tensor
        int64: their timestamps, so that an id given again is never taken for one of these.
    newest : tuple of (int, int)
        Id and timestamp of the last of them; (0, 0) where there is none.
    hits : Tensor
        int64: ids of the entries found by the last search.
    searched : int
        Number of visible entries at that search; -1 before the first.
    mark : int
        Tells that search from others where rows of other conversations may be left out.
    losses : tuple of (float, int)
        Sum and number of the known losses so far.
    store_id : str
        The store in which the ids mean something.
    """

    seen: int
    waiting: Rows
    cached: Tensor
    queries: Tensor
    entries: Tensor
    stamps: Tensor
    newest: tuple[int, int]
    hits: Tensor
    searched: int
    mark: int
    losses: tuple[float, int]
    store_id: str

    @classmethod
    def new(cls, width: int, like: Tensor, store_id: str) -> Conversation:
        """Return a conversation that has seen nothing."""
        ids = torch.empty(0, dtype=torch.int64)
        return cls(
            seen=0,
            waiting=Rows.none(width, like),
            cached=torch.empty((0, 2), dtype=torch.float64),
            queries=like.new_empty((0, width)),
            entries=ids,
            stamps=ids,
            newest=(0, 0),
            hits=ids,
            searched=-1,
            mark=0,
            losses=(0.0, 0),
            store_id=store_id,
        )

    def replace(self, **changes: Any) -> Conversation:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_plain(self) -> dict[str, Any]:
        """Return the form that travels inside the upstream state."""
        return {
            "seen": self.seen,
            "keys": self.waiting.keys,
            "values": self.waiting.values,
            "meta": self.waiting.meta,
            "cached": self.cached,
            "queries": self.queries,
            "entries": self.entries,
            "stamps": self.stamps,
            "newest": self.newest,
            "hits": self.hits,
            "searched": self.searched,
            "mark": self.mark,
            "losses": self.losses,
            "store_id": self.store_id,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Conversation:
        """Return what `to_plain` gave."""
        return cls(
            seen=plain["seen"],
            waiting=Rows(plain["keys"], plain["values"], plain["meta"]),
            cached=plain["cached"],
            queries=plain["queries"],
            entries=plain["entries"],
            stamps=plain["stamps"],
            newest=plain["newest"],
            hits=plain["hits"],
            searched=plain["searched"],
            mark=plain["mark"],
            losses=plain["losses"],
            store_id=plain["store_id"],
        )

"""What a store must hold, kept by hand: the oracle of the tests of crashes, faults and kills."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hybridmem

EMBED = 4


@dataclasses.dataclass(frozen=True)
class Item:
    """An entry as it was put."""

    layer: int
    importance: float
    keys: bytes
    values: bytes
    source: str | None


@dataclasses.dataclass(frozen=True)
class State:
    """What a store may hold: its entries, and for each the accesses that may have been counted."""

    items: Mapping[int, Item]
    low: Mapping[int, int]
    high: Mapping[int, int]

    def fits(self, found: Mapping[int, tuple[Item, int]]) -> bool:
        """Whether what was read from a store is this state."""
        return found.keys() == self.items.keys() and all(
            item == self.items[entry_id] and self.low[entry_id] <= count <= self.high[entry_id]
            for entry_id, (item, count) in found.items()
        )

    def without(self, ids: Iterable[int]) -> State:
        """What it would be without some entries."""
        gone = set(ids)
        items = {i: item for i, item in self.items.items() if i not in gone}
        return State(items, self.low, self.high)


def arrays(entry_id: int, n_tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values that say which entry they belong to."""
    rng = np.random.default_rng([entry_id, n_tokens])
    keys, values = rng.standard_normal((2, n_tokens, EMBED)).astype(np.float32)
    return keys, values


def source(entry_id: int) -> str | None:
    """Where an entry comes from; every third one does not say."""
    return f"entry {entry_id}" if entry_id % 3 else None


def read(store: Any) -> dict[int, tuple[Item, int]]:
    """Read every entry of a store through its public interface."""
    found = {}
    for entry_id in store:
        entry = store.get(entry_id)
        data = entry.keys.tobytes(), entry.values.tobytes()
        item = Item(entry.layer_idx, entry.importance, *data, entry.source)
        found[entry_id] = (item, entry.access_count)
    return found


class Book:
    """The entries of one store, as they are in its memory and as they were last committed."""

    def __init__(self) -> None:
        self.live: dict[int, Item] = {}
        self.counts: dict[int, int] = {}
        self.used = 0
        self.committed: State = State({}, {}, {})

    def put(self, store: Any, *, importance: float = 1.0, layer: int = 0, n: int = 2) -> int:
        """Put an entry into the store and the book."""
        keys, values = arrays(self.used + 1, n)
        said = source(self.used + 1)
        entry_id: int = store.put(keys, values, layer, importance, source=said)
        assert entry_id > self.used, "an id was used twice"
        self.used = entry_id
        self.live[entry_id] = Item(layer, importance, keys.tobytes(), values.tobytes(), said)
        self.counts[entry_id] = 0
        return entry_id

    def query(self, store: Any, entry_id: int) -> None:
        """Ask for an entry by its own keys."""
        keys, _ = arrays(entry_id, 2)
        for hit in store.query(keys, self.live[entry_id].layer, 2):
            self.counts[hit.entry_id] += 1

    def drop(self, ids: Iterable[int]) -> None:
        """Take note that entries are gone."""
        for entry_id in ids:
            del self.live[entry_id], self.counts[entry_id]

    def lowest(self, n: int) -> list[int]:
        """The entries that are evicted first, where no access was counted."""
        return sorted(self.live, key=lambda i: (self.live[i].importance, i))[: max(0, n)]

    def state(self) -> State:
        """What a commit makes durable now, and what it may have got to while it is under way."""
        low = {i: self.committed.low.get(i, 0) for i in self.live}
        return State(dict(self.live), low, dict(self.counts))

    def before(self) -> State:
        """The last commit, as it is while the next one is under way: counts change in place."""
        high = {i: self.counts.get(i, n) for i, n in self.committed.high.items()}
        return dataclasses.replace(self.committed, high=high)

    def commit(self) -> State:
        """Take note that all of it is committed."""
        self.committed = State(dict(self.live), dict(self.counts), dict(self.counts))
        return self.committed


def open_or_none(path: Any, mode: str, **options: Any) -> Any:
    """Open a store, or return None where there is none yet."""
    try:
        return hybridmem.open(path, mode, **options)
    except hybridmem.StoreNotFoundError:
        return None

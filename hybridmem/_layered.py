"""Several stores that answer as one: memory packs under a private store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hybridmem import _arrays, opening
from hybridmem._alike import ID_BITS, check_alike, same_means, unlike
from hybridmem._codec import Tensor
from hybridmem._finding import Make, Search, answer
from hybridmem.errors import EntryNotFoundError, ReadOnlyError, StoreClosedError, no_entry
from hybridmem.memory import Floats, Ids, Memory, Question
from hybridmem.results import Entry, Hit, Stats
from hybridmem.store import Store

__all__ = ["Layered", "layered"]

Found = TypeVar("Found")
StrPath = str | os.PathLike[str]
#: Most hits of a store: of any layer, or by layer; None is any number.
Limit = int | Mapping[int, int] | None

_TAGS = (1 << 63 - ID_BITS) - 1
_NO_IDS: Ids = np.empty(0, np.uint64)


def layered(stores: Iterable[Store | StrPath], *, limits: Sequence[Limit] | None = None) -> Layered:
    """Let several stores answer as one that holds the entries of all.

    Parameters
    ----------
    stores : iterable of Store or path
        Memory packs, or any stores, and last the private one, open for writing, that takes what is
        put; without one the whole is read-only. Those given by path are opened for reading, and
        closed with the whole.
    limits : sequence of (int, mapping or None), optional
        For each store the most hits of a query that may come from it: a number for every layer, or
        a mapping of layer_idx to number, whose other layers are free. A store with 0 is not
        searched.

    Returns
    -------
    Layered

    Raises
    ------
    ValueError
        If the stores cannot be compared, as their signatures are made differently, or one is
        listed twice.
    ModelMismatchError
        If they hold keys and values of different models.
    """
    if isinstance(stores, (str, bytes, os.PathLike, Store)):
        raise TypeError(f"stores: got {type(stores).__name__}, want a list of stores or paths")
    if not (given := list(stores)):
        raise ValueError("stores: got none, want at least one")
    for one in given:
        if not isinstance(one, (str, bytes, os.PathLike, Store)):
            raise TypeError(f"stores: got a {type(one).__name__} among them, want stores or paths")
    with contextlib.ExitStack() as opened:
        parts = [
            one if isinstance(one, Store) else opened.enter_context(opening.open(one, mode="r"))
            for one in given
        ]
        memory = Layered(parts, _checked_limits(limits, len(parts)))
        memory._opened = opened.pop_all()
    return memory


class Layered(Memory):
    """Several stores that answer as one: made by `layered`.

    Hits, scores and their order are those of one store that was filled with the entries of the
    first store, then of the second, and so on; so are the effects of all options of `query` but
    `approximate`, which every store applies by itself.

    An id of the private store is the store's own. Other ids name their store in bits 40 to 62, by
    its `store_id`: they stay what they are, whatever stores are beside it. `locate` takes them
    apart. What writes goes to the private store.

    Attributes
    ----------
    stores : tuple of Store
    config : Config
        Of the last store.
    mode : {"r+", "r"}
        Of the last store.
    """

    def __init__(self, stores: Sequence[Store], limits: Sequence[Limit] | None) -> None:
        self.stores = tuple(stores)
        self._limits = limits
        self._opened = contextlib.ExitStack()
        self._closed = False
        self._queries = self._hits = 0
        last = stores[-1]
        self.config, self.mode = last.config, last.mode
        self._tags = [0 if store is last and last.mode == "r+" else _tag(store) for store in stores]
        self._by_tag: dict[int, int] = {}
        for number, store in enumerate(stores):
            check_alike(stores[0], store)
            if (other := self._by_tag.setdefault(_tag(store), number)) != number:
                same = stores[other].store_id == store.store_id
                raise ValueError(
                    f"{stores[other].path} and {store.path} "
                    + (
                        "are one store, or copies of one: leave one out"
                        if same
                        else "have ids that cannot be told apart: make one anew with hybridmem.pack"
                    )
                )
        if self.mode == "r+":
            self._by_tag[0] = len(stores) - 1
        self._centres: list[object] = [None] * len(stores)
        self._check_calibration()

    # -- asking -----------------------------------------------------------------------------------

    def _hits_of(self, question: Question) -> list[list[Hit]]:
        def hits(number: int, rows: list[int], scores: list[float]) -> list[Hit]:
            return self.stores[number]._hits_at(rows, scores, self._tags[number])

        return self._answer(question, hits)

    def _stored_of(self, question: Question) -> list[list[list[Tensor]]]:
        def tensors(number: int, rows: list[int], scores: list[float]) -> list[list[Tensor]]:
            return self.stores[number]._tensors_at(rows)

        return self._answer(question, tensors)

    def _answer(self, question: Question, make: Make[Found]) -> list[list[Found]]:
        self._check_calibration()
        asked = self._asked(question)
        numbers = [number for number, _ in asked]
        searches = [Search(self.stores[number], one) for number, one in asked]
        for search in searches:
            search.run()
        most = None
        if self._limits is not None:
            limits = [self._limit(number, question.layer_idx) for number in numbers]
            most = limits if any(limit is not None for limit in limits) else None
        with self._locked(numbers):
            results = answer(question, searches, lambda at, *found: make(numbers[at], *found), most)
            self._queries += len(question.queries)
            self._hits += sum(map(len, results))
        return results

    def _locked(self, numbers: Sequence[int]) -> contextlib.AbstractContextManager[object]:
        """Hold the locks of some stores, in an order that all threads keep to."""
        if len(numbers) == 1:
            return self.stores[numbers[0]]._lock
        with contextlib.ExitStack() as locks:
            for number in sorted(numbers, key=lambda number: id(self.stores[number])):
                locks.enter_context(self.stores[number]._lock)
            return locks.pop_all()

    def _asked(self, question: Question) -> list[tuple[int, Question]]:
        """Return what each store is asked, by number; stores with nothing to find are left out."""
        last, layer, ids = len(self.stores) - 1, question.layer_idx, question.entry_ids
        counts_all = question.ranking.max_run > 0  # also the entries that are not looked for
        if ids is not None and not counts_all and not self._limits and self._are_private(ids):
            return [(last, question)]
        asked = []
        ids_of = None if ids is None else self._ids_by_store(ids)
        for number, store in enumerate(self.stores):
            if layer not in store._table.layers():
                continue
            one = question if ids_of is None else question._replace(entry_ids=ids_of[number])
            if self._limit(number, layer) == 0:
                one = question._replace(entry_ids=_NO_IDS)
            if one.entry_ids is None or len(one.entry_ids) or counts_all:
                asked.append((number, one))
        # An empty answer comes after the checks that one store makes.
        return asked or [(last, question._replace(entry_ids=_NO_IDS))]

    def _are_private(self, entry_ids: Ids) -> bool:
        """Whether ids are of the private store, as those of a conversation that sees its own."""
        return self.mode == "r+" and int(entry_ids.max(initial=0)) >> ID_BITS == 0

    def _limit(self, number: int, layer: int) -> int | None:
        limit = None if self._limits is None else self._limits[number]
        return limit.get(layer) if isinstance(limit, Mapping) else limit

    def _ids_by_store(self, entry_ids: Ids) -> list[Ids]:
        """Return those of some ids that are of each store, as the store knows them."""
        tags = entry_ids >> np.uint64(ID_BITS)
        parts = []
        for store, tag in zip(self.stores, self._tags, strict=True):
            mine = tags == np.uint64(_tag(store) >> ID_BITS)
            if not tag:
                mine |= tags == 0
            parts.append(entry_ids[mine] & np.uint64((1 << ID_BITS) - 1))
        return parts

    def take_back(self, hits: Sequence[Hit]) -> None:
        """Count the query no longer that gave these hits: they could not be used."""
        self._check_open()
        self._queries -= 1
        self._hits -= len(hits)
        for hit in hits:
            store, own = self.locate(hit.entry_id)
            with store._lock:
                store._accessed(store._rows_of([own]), -1)

    # -- contents ---------------------------------------------------------------------------------

    def locate(self, entry_id: int) -> tuple[Store, int]:
        """Return the store that an id is of, and the entry's id there, which may not be in it.

        Raises
        ------
        EntryNotFoundError
            If it is of none of these stores.
        """
        number, own = self._place(entry_id)
        return self.stores[number], own

    def _place(self, entry_id: Any) -> tuple[int, int]:
        asked = _arrays.entry_id(entry_id)
        own = asked & (1 << ID_BITS) - 1
        number = self._by_tag.get(asked - own)
        if number is None:
            raise EntryNotFoundError(f"{self!r} has no entry {asked}, nor the store that gave it")
        return number, own

    @property
    def store_id(self) -> str:
        """What tells the meaning of the ids: that of the private store, if there is one."""
        self._check_open()
        if self.mode == "r+":
            return self.stores[-1].store_id
        ids = sorted(store.store_id for store in self.stores)
        import hashlib  # 4 ms of an import

        return hashlib.sha256("".join(ids).encode()).hexdigest()[:32]

    @property
    def calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Mean key and mean query (or None) of the layers that are calibrated."""
        self._check_calibration()
        return {layer: means for store in self.stores for layer, means in store.calibration.items()}

    def get(self, entry_id: int) -> Entry:
        """Return an entry, with the id that was asked for. This is no access.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer.
        """
        self._check_open()
        number, own = self._place(entry_id)
        try:
            return self.stores[number]._entry(own, self._tags[number])
        except KeyError:
            raise no_entry(self.stores[number].path, entry_id) from None

    def timestamps(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the time of the put of each entry, 0 for those that are not there, or no longer.

        So one call tells which entries are left, and whether they are those that were meant.
        """
        self._check_open()
        asked = list(entry_ids)
        stamps = [0] * len(asked)
        parts: dict[int, list[tuple[int, int]]] = {}
        for at, entry_id in enumerate(asked):
            with contextlib.suppress(KeyError):
                number, own = self._place(entry_id)
                parts.setdefault(number, []).append((at, own))
        for number, some in parts.items():
            found = self.stores[number].timestamps([own for _, own in some])
            for (at, _), stamp in zip(some, found, strict=True):
                stamps[at] = stamp
        return stamps

    def __contains__(self, entry_id: object) -> bool:
        self._check_open()
        try:
            number, own = self._place(entry_id)
        except (KeyError, TypeError):
            return False
        return own in self.stores[number]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids there are at this moment, store by store."""
        self._check_open()
        return iter(
            [tag + own for store, tag in zip(self.stores, self._tags, strict=True) for own in store]
        )

    def __len__(self) -> int:
        self._check_open()
        return sum(map(len, self.stores))

    def stats(self) -> Stats:
        """Return counts and sizes of all stores together.

        `generation` and `evicted` are those of the last store; `queries` and `hits` those that went
        through here, which the stores themselves do not count.
        """
        self._check_open()
        each = [store.stats() for store in self.stores]
        by_layer: dict[int, int] = {}
        for stats in each:
            for layer, count in stats.entries_by_layer.items():
                by_layer[layer] = by_layer.get(layer, 0) + count
        sums: Any = {
            name: sum(getattr(stats, name) for stats in each)
            for name in (
                "entries", "tokens", "shards", "disk_bytes", "live_bytes", "dead_bytes",
                "unflushed_bytes",
            )
        }  # fmt: skip
        return Stats(
            **sums,
            entries_by_layer=dict(sorted(by_layer.items())),
            generation=each[-1].generation,
            evicted=each[-1].evicted,
            queries=self._queries,
            hits=self._hits,
        )

    # -- changing ---------------------------------------------------------------------------------

    def put(
        self,
        keys: Any,
        values: Any,
        layer_idx: int,
        importance: float = 1.0,
        *,
        index_keys: Any = None,
        source: Any = None,
    ) -> int:
        """Store a chunk of consecutive tokens in the private store, as `Store.put`."""
        return self._private().put(
            keys, values, layer_idx, importance, index_keys=index_keys, source=source
        )

    def put_many(
        self,
        entries: Iterable[tuple[Any, Any]],
        layer_idx: int,
        importance: float | Sequence[float] = 1.0,
        *,
        index_keys: Sequence[Any] | None = None,
        sources: Sequence[Any] | None = None,
    ) -> list[int]:
        """Store several chunks in the private store, all or none, as `Store.put_many`."""
        return self._private().put_many(
            entries, layer_idx, importance, index_keys=index_keys, sources=sources
        )

    def delete(self, entry_id: int) -> None:
        """Remove an entry of the private store; the next flush commits it.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer.
        ReadOnlyError
            If it is of another store.
        """
        private = self._private()
        store, own = self.locate(entry_id)
        if store is not private:
            if own in store:
                raise ReadOnlyError(f"entry {entry_id} is entry {own} of {store.path}, not private")
            raise no_entry(store.path, entry_id)
        private.delete(own)

    def evict(self, target_entries: int) -> int:
        """Evict entries of the private store until it has no more, as `Store.evict`."""
        return self._private().evict(target_entries)

    def calibrate(self, layer_idx: int, *, keys: Any = None, queries: Any = None) -> None:
        """Centre a layer of the private store, as `Store.calibrate`.

        Raises
        ------
        ValueError
            If another store has entries of the layer, whose signatures stand.
        """
        private = self._private()
        layer = _arrays.layer_index(layer_idx)
        for store in self.stores[:-1]:
            if layer in store._table.layers():
                raise ValueError(
                    f"layer {layer} has entries in {store.path}, which does not change any more: "
                    "all are centred as these are"
                )
        private.calibrate(layer, keys=keys, queries=queries)

    def flush(self, wait: bool = True) -> None:
        """Make everything that was put and deleted durable."""
        self._private().flush(wait)

    def compact(self) -> int:
        """Compact the private store and return the bytes given back."""
        return self._private().compact()

    def refresh(self) -> bool:
        """Move every store that is read to its newest commit; say whether one moved."""
        self._check_open()
        moved = [store.refresh() for store in self.stores]
        self._check_calibration()
        return any(moved)

    def _private(self) -> Store:
        self._check_open()
        if self.mode != "r+":
            raise ReadOnlyError(
                f'{self!r} has no private store: to write, put one last that is open with mode="r+"'
            )
        return self.stores[-1]

    # -- what makes them comparable ---------------------------------------------------------------

    def _check_calibration(self) -> None:
        """Refuse stores that centre a layer differently: their scores cannot be compared.

        A private store without entries of a layer takes over how others centre it.
        """
        self._check_open()
        for store, seen in zip(self.stores, self._centres, strict=True):
            if store._signatures.centres is not seen:
                break
        else:
            return
        private = self.stores[-1] if self.mode == "r+" else None
        for layer in sorted({layer for store in self.stores for layer in store._table.layers()}):
            holders = [store for store in self.stores if layer in store._table.layers()]
            first = holders[0]
            wanted = first.calibration.get(layer)
            if private is not None and private not in holders:
                if wanted is not None and layer not in private.calibration:
                    private.calibrate(layer, keys=wanted[0], queries=wanted[1])
                holders.append(private)
            for store in holders[1:]:
                if not same_means(wanted, store.calibration.get(layer)):
                    raise ValueError(unlike(layer, first, store))
        self._centres = [store._signatures.centres for store in self.stores]

    # -- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush the private store, and close those that were given by path.

        A second close does nothing. Arrays that were handed out stay valid.
        """
        if self._closed:
            return
        self._closed = True
        with self._opened:
            if self.mode == "r+" and not self.stores[-1]._closed:
                self.stores[-1].flush()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the layered stores are closed; make them anew with layered")

    def __repr__(self) -> str:
        paths = ", ".join(str(store.path) for store in self.stores)
        return f"<hybridmem.Layered [{paths}] mode={self.mode!r}>"


def _checked_limits(limits: Sequence[Limit] | None, count: int) -> Sequence[Limit] | None:
    if limits is None:
        return None
    if isinstance(limits, (str, Mapping)) or not isinstance(limits, Sequence):
        raise TypeError(f"limits: got {type(limits).__name__}, want a list, one for each store")
    if len(limits) != count:
        raise ValueError(f"limits: got {len(limits)} for {count} stores")
    return [
        {
            _arrays.layer_index(layer): _arrays.count(most, "limits", 0)
            for layer, most in one.items()
        }
        if isinstance(one, Mapping)
        else None
        if one is None
        else _arrays.count(one, "limits", 0)
        for one in limits
    ]


def _tag(store: Store) -> int:
    """Return the bits that name a store in an id."""
    return (int(store.store_id, 16) & _TAGS or 1) << ID_BITS

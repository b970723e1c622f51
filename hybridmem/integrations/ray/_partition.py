"""One partition: a store on this node's disk, and how far it is in the journal of its writer.

What the writer does to a partition has numbers that count from 1. A partition knows the number of
the last thing that was done to it, so it never answers without an entry that the writer has put:
it waits for it, or says that it is behind, as one that was started again is until it has been given
what its last commit does not hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem import _adopting, _copies, _source, opening
from hybridmem._codec import Tensor
from hybridmem._fileio import Buffer, Directory
from hybridmem._finding import Search
from hybridmem._format import PARTS, SOURCE
from hybridmem._manifest import Calibration
from hybridmem._merging import Candidates
from hybridmem._ranking import Scores
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, HybridMemError, StoreNotFoundError
from hybridmem.integrations.ray import _remote
from hybridmem.integrations.ray import _views as views
from hybridmem.integrations.ray._views import Mark
from hybridmem.memory import Question
from hybridmem.results import Entry, Stats
from hybridmem.store import Store

__all__ = [
    "Behind",
    "Delete",
    "Fetched",
    "Op",
    "Partition",
    "Put",
    "Reply",
    "State",
    "pieces_of",
    "replied",
]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
#: How an answer travels: what it is, and what was answered.
Reply = tuple[str, Any]
_PIECE_BYTES = 8 << 20
_NOT_ARRIVED = "something that was put did not arrive"
_FIELDS = ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "access_count")


class Put(NamedTuple):
    """Entries to put, in the form in which they are stored."""

    layer: int
    rows: Sequence[_adopting.Row]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(row.chunk.nbytes for row in self.rows)


class Delete(NamedTuple):
    """An entry to delete."""

    entry_id: int
    nbytes: int = 64


Op = Put | Delete


class Fetched(NamedTuple):
    """An entry as it travels: fields of its record, and its parts as they are stored.

    Arrays are plain, bfloat16 as uint16 beside the name of its type, so that Ray passes them
    through its object store without a copy.
    """

    fields: dict[str, Any]
    escaped_source: bytes | None
    tensors: list[Tensor]


class State(NamedTuple):
    """What tells replicas of a partition apart.

    Attributes
    ----------
    config : Config
    view : int
        Grows where a replica was left behind, on those that were not.
    mark : Mark
    digest : int
        Equal where two replicas hold the same.
    """

    config: Config
    view: int
    mark: Mark
    digest: int


class Behind(Exception):
    """The partition has not done all that its writer did."""


def replied(function: Callable[[], Any]) -> Reply:
    """Call a function; errors are answers too, so that all else is Ray's."""
    try:
        return "ok", function()
    except Behind as error:
        return "behind", str(error)
    except (HybridMemError, KeyError, TypeError, ValueError) as error:
        return "error", error


class Partition:
    """Answers for one replica of a partition. Thread-safe.

    Parameters
    ----------
    path : Path
        Directory of the store. Where there is none the partition is empty until it is made.
    mode : {"r+", "r"}
    take_up : bool, default True
        Open the store that is there; without, it is to be replaced.
    """

    def __init__(self, path: Path, mode: str = "r+", *, take_up: bool = True) -> None:
        self._path = path
        self._mode = mode
        self._applied: int | None = None if mode == "r+" else 0
        self._trouble = "it was started again"
        self._refused = 0
        self._changed = threading.Condition()
        self._lent: contextlib.ExitStack = contextlib.ExitStack()
        self._store: Store | None = None
        if take_up:
            with contextlib.suppress(StoreNotFoundError):
                self._store = opening.open(path, mode)
        if mode == "r+" and self._store is not None:
            for what in ("sent", "lent", "taken"):  # of a process that died
                _remove(path.with_name(f"{path.name}.{what}"))

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise StoreNotFoundError(f"no store in {self._path}")
        return self._store

    def create(self, config: Config) -> None:
        """Make the store."""
        self._store = opening.create(self._path, config=config)

    def close(self) -> None:
        """Close the store, which flushes."""
        if self._store is not None:
            self._store.close()

    # -- the journal ------------------------------------------------------------------------------

    def apply(self, number: int, op: Op) -> None:
        """Do what the writer did, in the order of its numbers."""
        with self._changed:
            if self._applied is None or number != self._applied + 1:
                self._refused = max(self._refused, number)
                self._behind()
            self._do(number, op)
            self._changed.notify_all()

    def catch_up(self, ops: Iterable[tuple[int, Op]], last: int, mark: Mark) -> None:
        """Do what is not done yet of a journal whose last number is `last`.

        Raises
        ------
        CorruptStoreError
            If the store does not hold what the journal goes on from, which was acknowledged.
        """
        with self._changed:
            if not self.mark().holds(mark):
                raise CorruptStoreError(
                    f"{self._path} holds less than was acknowledged: {self.mark()} after {mark}. "
                    "An older copy is in its place; put the newer one back, or let repair() take "
                    "another replica or a copy; a cluster opened anew goes on with what is there",
                    path=str(self._path),
                )
            for number, op in ops:
                if self._applied is None or number > self._applied:
                    self._do(number, op)
            self._applied = max(last, self._applied or 0)  # what is late takes nothing back
            self._trouble = "" if self._applied >= self._refused else _NOT_ARRIVED
            self._changed.notify_all()

    def mark(self) -> Mark:
        """Return how far the store has come, what is not flushed included."""
        store = self.store
        with store._lock:
            next_entry_id = (store._writer or store._manifest).next_entry_id
            return Mark(next_entry_id, next_entry_id - len(store), len(store.calibration))

    def _do(self, number: int, op: Op) -> None:
        store = self.store
        try:
            if isinstance(op, Put):
                _adopting.insert(store, op.layer, [_owned(row) for row in op.rows])
            else:
                with contextlib.suppress(KeyError):  # gone by a limit, or in the last commit
                    store.delete(op.entry_id)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            self._changed.notify_all()
            raise
        self._applied = number
        self._trouble = ""

    def _behind(self) -> None:
        self._trouble = self._trouble or _NOT_ARRIVED
        self._changed.notify_all()
        raise Behind(self._trouble)

    def wait_for(self, number: int, seconds: float) -> None:
        """Wait until the journal was done up to this number.

        Raises
        ------
        Behind
            If it was not.
        """
        with self._changed:

            def done() -> bool:
                return self._applied is not None and self._applied >= number

            self._changed.wait_for(lambda: done() or bool(self._trouble), seconds)
            if not done():
                self._behind()

    def commit(
        self, number: int, seconds: float, method: str, args: tuple[Any, ...]
    ) -> tuple[Mark, Any]:
        """Make everything up to this number durable, by a method; say what is so at least."""
        self.wait_for(number, seconds)
        mark = self.mark()
        return mark, getattr(self, f"commit_{method}")(*args)

    # -- answers ----------------------------------------------------------------------------------

    def read(self, number: int, seconds: float, method: str, args: tuple[Any, ...]) -> Any:
        """Answer what may be asked of any replica that is up to date."""
        self.wait_for(number, seconds)
        return getattr(self, f"read_{method}")(*args)

    def read_ask(self, questions: Sequence[tuple[bool, Question]]) -> list[Any]:
        """Answer all that a step asks: hits of layers that are here alone, candidates of others."""
        return [self._hits(one) if whole else self._candidates(one) for whole, one in questions]

    def _hits(self, question: Question) -> list[list[tuple[float, Fetched]]]:
        seen: dict[int, Fetched] = {}

        def make(_: int, rows: list[int], scores: list[float]) -> Iterator[tuple[float, Fetched]]:
            for row, score in zip(rows, scores, strict=True):
                if row not in seen:
                    seen[row] = self._fetched(row)
                yield score, seen[row]

        return self.store._answer(question, make)

    def _candidates(self, question: Question) -> list[Candidates]:
        """Return the candidates of each query: as many as may come into the result."""
        store, ranking = self.store, question.ranking
        search = Search(store, question)
        search.run()
        with store._lock:
            search.settle()
            found = [search.candidates(at) for at in range(len(question.queries))]
        if ranking.max_run or ranking.newest:
            return found
        depth = ranking.depth(question.top_k)
        return [
            one._replace(
                ids=one.ids[:depth],
                distances=one.distances[:depth],
                estimates=None if one.estimates is None else one.estimates[:depth],
            )
            for one in found
        ]

    def read_said(self, question: Question, entry_ids: Sequence[int]) -> Scores:
        """Return what entries say to the one query of a question."""
        store = self.store
        with store._lock:
            return Search(store, question).said(0, entry_ids)

    def read_fetch(self, accesses: Sequence[int]) -> list[Fetched | None]:
        """Return entries, each once, by ascending id; count an access for each time it is named."""
        store = self.store
        with store._lock:
            counts = Counter(accesses)
            rows = {one: store._table.find(one) for one in sorted(counts)}
            entries = [None if row is None else self._fetched(row) for row in rows.values()]
            store._accessed(store._rows_of(accesses))
        return entries

    def read_take_back(self, accesses: Sequence[int]) -> None:
        """Count accesses no longer."""
        with self.store._lock:
            self.store._accessed(self.store._rows_of(accesses), -1)

    def _fetched(self, row: int) -> Fetched:
        store = self.store
        columns = store._table.columns
        fields = {name: columns[name].item(row) for name in _FIELDS}
        parts = store._tensors(row, PARTS)
        tensors = [
            Tensor(*part[:3], np.asarray(part.data)) for part in parts if part.suffix != SOURCE
        ]
        wrong = store._codec.mismatch(tensors, fields["n_tokens"], store.config.embed_dim)
        if wrong is not None:
            raise store._misfit(row, wrong)
        return Fetched(fields, _source.escaped(parts), tensors)

    def read_get(self, entry_id: int) -> Entry:
        """Return an entry."""
        return self.store.get(entry_id)

    def read_source(self, entry_id: int) -> Any:
        """Return the source of an entry."""
        return self.store.source(entry_id)

    def read_timestamps(self, entry_ids: Sequence[int]) -> list[int]:
        """Return the times of puts."""
        return self.store.timestamps(entry_ids)

    def read_ids(self, layer: int | None = None) -> Ids:
        """Return the ids there are."""
        store = self.store
        with store._lock:
            ids: Ids = store._table.column("entry_id")[store._table.alive_rows(layer)]
        return ids

    def read_count(self) -> int:
        """Return the number of entries."""
        return len(self.store)

    def read_stats(self) -> Stats:
        """Return counts and sizes."""
        return self.store.stats()

    def read_calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Return the means of calibrated layers."""
        return self.store.calibration

    def read_check_calibration(self, layer: int, key: Floats, query: Floats | None) -> None:
        """Raise what `commit_calibrate` would, before any partition has done it."""
        store = self.store
        if layer in store.calibration:
            return
        one = Calibration(layer, Calibration.pack(key), Calibration.pack(query))
        with store._lock:
            after = Calibration.joined(store._manifest.calibration, one)
            entries = store._signed_entries(store._table.alive_rows(layer), store._keys)
            store._signatures.made_anew(after, layer, entries)

    # -- what a writer does to all replicas -------------------------------------------------------

    def commit_flush(self) -> None:
        """Commit what was put and deleted."""
        self.store.flush()

    def commit_calibrate(self, layer: int, key: Floats, query: Floats | None) -> None:
        """Calibrate a layer; nothing where these are its means already."""
        known = self.store.calibration.get(layer)
        if known is None or not _same(known, (key, query)):
            self.store.calibrate(layer, keys=key, queries=query)

    def commit_compact(self) -> int:
        """Compact the store."""
        return self.store.compact()

    def refresh(self) -> bool:
        """Move a reader to the newest commit."""
        return self.store.refresh()

    # -- replicas ---------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what tells this replica from others."""
        store = self.store
        with contextlib.closing(Directory(self._path.parent)) as parent:
            view = views.read(parent, views.own_name(self._path.name))
        with store._lock:
            return State(store.config, view, self.mark(), views.digest_of(store))

    def set_view(self, view: int) -> None:
        """Write down that replicas of an older view were left behind."""
        views.write(self._path.parent, views.own_name(self._path.name), view)

    def know_view(self, number: int, view: int) -> None:
        """Write down on this disk how far some replica of a partition has come."""
        views.write(self._path.parent, views.known_name(number), view)

    def upload(self, url: str) -> None:
        """Copy the last commit to a URL."""
        snapshot = self._snapshot("sent")
        try:
            _remote.upload(snapshot, f"{url}/{self._path.name}")
        finally:
            _remove(snapshot)

    def _snapshot(self, what: str) -> Path:
        path = self._path.with_name(f"{self._path.name}.{what}")
        _remove(path)  # of a process that died
        self.store.snapshot(path)
        return path

    def lend(self) -> list[tuple[str, int]]:
        """Take a snapshot to be copied; return the names and sizes of its files."""
        self.end_loan()
        snapshot = self._snapshot("lent")
        directory = Directory(snapshot)
        self._lent.callback(_remove, snapshot)
        self._lent.callback(directory.close)
        self._loan = directory
        return [(name, directory.size(name)) for name in sorted(directory.names())]

    def piece(self, name: str, offset: int) -> npt.NDArray[np.uint8]:
        """Return a piece of a file of the snapshot."""
        fd, size = self._loan.open_file(name)
        try:
            raw = np.empty(min(_PIECE_BYTES, size - offset), np.uint8)
            count = self._loan.read_into(fd, memoryview(raw), offset, name)
        finally:
            self._loan.close_file(fd)
        return raw[:count]

    def end_loan(self) -> None:
        """Let go of the snapshot."""
        self._lent.close()

    def replace(self, files: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        """Take these files in place of the store that is here, once all of them are."""
        taken = self._path.with_name(f"{self._path.name}.taken")
        _remove(taken)  # of a process that died
        with _copies.new_directory(taken) as target:
            for name, pieces in files:
                target.write_file(name, [(0, pieces)])
        if self._store is not None:
            self._store.close()
            self._store = None
        _remove(self._path)
        with contextlib.closing(Directory(taken.parent)) as parent:
            parent.rename(taken.name, self._path.name)
            parent.sync()
        self._store = opening.open(self._path, self._mode)
        with self._changed:
            self._applied = None
            self._trouble = "it was copied"


def pieces_of(name: str, size: int, piece: Callable[[str, int], Any]) -> Iterator[Buffer]:
    """Yield the pieces of a file that another partition lends."""
    for offset in range(0, size, _PIECE_BYTES):
        yield memoryview(np.ascontiguousarray(piece(name, offset)))


def _remove(path: Path) -> None:
    try:
        directory = Directory(path)
    except FileNotFoundError:
        return
    with contextlib.closing(Directory(path.parent)) as parent:
        parent.remove_directory(directory)


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _owned(row: _adopting.Row) -> _adopting.Row:
    """Copy what lies in the object store, which the store would else fill until it flushes."""
    tensors = [Tensor(*part[:3], part.data.copy()) for part in row.chunk.tensors]
    for tensor in tensors:
        tensor.data.flags.writeable = False
    return row._replace(chunk=row.chunk._replace(tensors=tensors))

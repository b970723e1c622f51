"""What every store can do, whatever its mode: find, get, count, refresh, close."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _commit
from hybridmem._codec import Codec, Tensor
from hybridmem._entries import EntryTable
from hybridmem._fileio import Directory
from hybridmem._manifest import Manifest
from hybridmem._shards import ShardPool
from hybridmem._signatures import Signatures
from hybridmem.errors import StoreClosedError
from hybridmem.results import Entry, Hit, Stats

__all__ = ["Reader"]

Self = TypeVar("Self", bound="Reader")
_ENTRY_FIELDS = ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "access_count")


class Reader:
    """One committed snapshot of a store, and what a writer has put since.

    Attributes
    ----------
    path : Path
    config : Config
        The configuration, with the limits that hold for this object.
    """

    mode = "r"

    #: The stores of this process that are open, for what must be done when it forks.
    open_stores: ClassVar[weakref.WeakSet[Reader]] = weakref.WeakSet()

    def __init__(
        self, directory: Directory, io: str, limits: dict[str, int], loaded: _commit.Loaded
    ) -> None:
        manifest, table, _ = loaded
        self.path = directory.path
        self._lock = threading.RLock()
        self._closed = False
        self._directory = directory
        self._io = io
        self._given_limits = limits
        self._queries = self._hits = self._evicted = 0
        config = manifest.config
        self._codec = Codec(config.kv_dtype, quantize_stored=config.quantize_stored)
        self._signatures = Signatures(config)
        self._pool = ShardPool(directory, config.max_open_shards, io, reader=self.mode == "r")
        self._take(manifest, table)
        Reader.open_stores.add(self)

    def _take(self, manifest: Manifest, table: EntryTable) -> None:
        """Make a snapshot the one that is read."""
        self.config = manifest.config.replace(**self._given_limits)
        self._manifest = manifest
        self._table = table
        self._signatures.clear()
        self._pool.max_open = self.config.max_open_shards
        self._pool.retarget(manifest.shards)

    # -- finding ----------------------------------------------------------------------------------

    def query(
        self, query: Any, layer_idx: int, top_k: int = 5, *, entry_ids: Any = None
    ) -> list[Hit]:
        """Find the entries of a layer whose signatures are most similar to the query's.

        Parameters
        ----------
        query : array_like of float, shape (embed_dim,) or (n_tokens, embed_dim)
            Several tokens are pooled to their mean; in a store with sub-signatures each is looked
            for.
        layer_idx : int
        top_k : int, default 5
        entry_ids : array_like of int, optional
            Search only among these; ids that are not in the layer, or no longer, are passed over.

        Returns
        -------
        list of Hit
            Best first, ties by smaller id; fewer than `top_k` where there are fewer.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid.
        SnapshotGoneError
            If the writer has removed a shard of this reader's snapshot: `refresh` and ask again.
        """
        self._check_open()
        signed = self._signed(query, "query")
        return self._find([signed], layer_idx, top_k, entry_ids)[0]

    def query_many(
        self, queries: Any, layer_idx: int, top_k: int = 5, *, entry_ids: Any = None
    ) -> list[list[Hit]]:
        """Answer several queries of one layer in one pass over its signatures.

        Parameters
        ----------
        queries : array_like of float, shape (m, embed_dim), or list of array_like
            A matrix is m queries; a list holds one array, as for `query`, for each.
        layer_idx, top_k, entry_ids
            As for `query`.

        Returns
        -------
        list of list of Hit
            For each query what `query` returns.
        """
        self._check_open()
        if isinstance(queries, (list, tuple)):
            signed = [self._signed(one, f"query {at}") for at, one in enumerate(queries)]
        else:
            rows = _arrays.matrix(queries, "queries", self.config.embed_dim)
            signed = [self._signatures.of_query(row[None]) for row in rows]
        return self._find(signed, layer_idx, top_k, entry_ids)

    def _signed(self, query: Any, name: str) -> npt.NDArray[np.uint8]:
        return self._signatures.of_query(
            _arrays.matrix(query, name, self.config.embed_dim, vector_ok=True)
        )

    def _find(
        self, signed: Sequence[npt.NDArray[np.uint8]], layer_idx: int, top_k: int, entry_ids: Any
    ) -> list[list[Hit]]:
        layer = _arrays.layer_index(layer_idx)
        k = _arrays.count(top_k, "top_k", 1)
        among = None if entry_ids is None else _ids(entry_ids)
        with self._lock:
            self._check_open()
            view, removals = self._signatures.view(layer, self._table), self._signatures.removals
        found = view.search(signed, k, among)
        with self._lock:
            self._check_open()
            # An entry may have gone meanwhile: ask undisturbed.
            if removals != self._signatures.removals:
                found = self._signatures.view(layer, self._table).search(signed, k, among)
            score = self._signatures.spec.score
            results = [
                [
                    Hit(
                        score=score(int(distance), len(query)),
                        **self._fields(self._row(int(entry_id))),
                    )
                    for entry_id, distance in zip(*one, strict=True)
                ]
                for query, one in zip(signed, found, strict=True)
            ]
            self._queries += len(results)
            self._hits += sum(len(hits) for hits in results)
            self._accessed(results)
            return results

    def get(self, entry_id: int) -> Entry:
        """Return an entry. This is no access.

        Raises
        ------
        KeyError
            If there is no such entry, or no longer.
        """
        number = _arrays.count(entry_id, "entry_id", 0)
        with self._lock:
            self._check_open()
            return Entry(**self._fields(self._row(number)))

    def _row(self, entry_id: int) -> int:
        row = self._table.find(entry_id)
        if row is None:
            raise KeyError(entry_id)
        return row

    def _fields(self, row: int) -> dict[str, Any]:
        columns = self._table.columns
        fields = {name: columns[name][row].item() for name in _ENTRY_FIELDS}
        tensors = self._unwritten(fields["entry_id"])
        if tensors is None:
            tensors = self._pool.load(int(columns["shard_idx"][row]), fields["entry_id"])
        fields["keys"], fields["values"] = self._codec.decode(
            tensors, fields["n_tokens"], self.config.embed_dim
        )
        return fields

    def _unwritten(self, entry_id: int) -> list[Tensor] | None:
        """Return the tensors of an entry that is in no shard yet."""
        return None

    def _accessed(self, results: list[list[Hit]]) -> None:
        """Count an access of each hit, where accesses are counted."""

    # -- contents ---------------------------------------------------------------------------------

    def __contains__(self, entry_id: object) -> bool:
        with self._lock:
            self._check_open()
            if not isinstance(entry_id, (int, np.integer)) or isinstance(entry_id, bool):
                return False
            return self._table.find(int(entry_id)) is not None

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids there are at this moment, ascending."""
        with self._lock:
            self._check_open()
            return iter(self._table.columns["entry_id"][self._table.alive_rows()].tolist())

    def __len__(self) -> int:
        with self._lock:
            self._check_open()
            return self._table.n_alive

    def __bool__(self) -> bool:
        return True  # a store without entries is a store

    @property
    def entries(self) -> npt.NDArray[np.void]:
        """The records of the live entries, by id: a read-only structured array.

        The fields are those of docs/format.md; `signature` holds the packed bits as bytes objects,
        so that the array goes into a data frame as it is. A copy of this moment.
        """
        with self._lock:
            self._check_open()
            return self._table.structured()

    @property
    def store_id(self) -> str:
        """32 hexadecimal digits that tell this store from all others."""
        return self._manifest.store_id

    def stats(self) -> Stats:
        """Return counts and sizes of this moment."""
        with self._lock:
            self._check_open()
            table = self._table
            dead, live = _commit.disk_shares(self._manifest, table)
            return Stats(
                entries=table.n_alive,
                entries_by_layer=dict(sorted(table.layers().items())),
                tokens=table.n_tokens_alive,
                shards=len(self._manifest.shards),
                disk_bytes=self._directory.total_bytes(),
                live_bytes=live,
                dead_bytes=dead,
                unflushed_bytes=self._unflushed_bytes(),
                generation=self._manifest.generation,
                queries=self._queries,
                hits=self._hits,
                evicted=self._evicted,
            )

    def _unflushed_bytes(self) -> int:
        return 0

    # -- life -------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Move a reader to the newest commit; a writer is always there.

        Returns
        -------
        bool
            Whether there was a newer one.
        """
        with self._lock:
            self._check_open()
            manifest, table, _ = _commit.load(self._directory, self._io)
            changed = manifest != self._manifest
            if changed:
                self._take(manifest, table)
            return changed

    def close(self) -> None:
        """Close; a second close does nothing. Arrays that were handed out stay valid."""
        with self._lock:
            if not self._closed:
                self._release()

    def _release(self) -> None:
        self._closed = True
        self._pool.close()
        self._directory.close()
        Reader.open_stores.discard(self)

    def __enter__(self: Self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
            self._release()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._table.n_alive} entries"
        return f"<hybridmem.Store {str(self.path)!r} mode={self.mode!r} {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(
                f"the store {self.path} is closed; open it again with hybridmem.open"
            )

    def _after_fork(self) -> None:
        """Make this copy usable in a forked child: another thread may have held the locks."""
        self._lock = threading.RLock()
        self._pool.after_fork()


def _ids(entry_ids: Any) -> npt.NDArray[np.uint64]:
    ids = np.asarray(list(entry_ids) if isinstance(entry_ids, (set, frozenset)) else entry_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(
            f"entry_ids: got {ids.dtype} of shape {list(ids.shape)}, want a sequence of integers"
        )
    return ids[ids > 0].astype(np.uint64)

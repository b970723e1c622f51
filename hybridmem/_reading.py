"""What every store can do, whatever its mode: find, get, count, refresh, close."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _snapshot, _wear
from hybridmem._codec import Codec, Tensor
from hybridmem._entries import EntryTable
from hybridmem._fileio import Directory
from hybridmem._format import KEY_SUFFIXES, SUFFIXES
from hybridmem._manifest import Manifest
from hybridmem._ranking import Ranking, key_scores, spread
from hybridmem._shards import ShardPool
from hybridmem._signatures import Signatures
from hybridmem.errors import CorruptStoreError, StoreClosedError
from hybridmem.results import Entry, Hit, Stats

__all__ = ["Reader"]

Floats = npt.NDArray[np.float32]
Found = TypeVar("Found")
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
        self, directory: Directory, io: str, limits: dict[str, int], loaded: _snapshot.Loaded
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
        self._signatures.calibrate(manifest.calibration)
        self._pool.max_open = self.config.max_open_shards
        self._pool.retarget(manifest.shards)

    # -- finding ----------------------------------------------------------------------------------

    def query(
        self,
        query: Any,
        layer_idx: int,
        top_k: int = 5,
        *,
        entry_ids: Any = None,
        order: str | None = None,
        rerank: str | None = None,
        candidates: int | None = None,
        rerank_query: Any = None,
        n_heads: int | None = None,
        max_run: int | None = None,
        newest: int | None = None,
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
        order : {"hamming", "norm"}, default "hamming"
            What the signatures are ranked by. "norm" multiplies the cosine that the similarity
            stands for by the norm of the entry's centred mean key, which ranks by the dot product;
            it needs a calibrated layer and one signature an entry.
        rerank : {"pooled", "tokens", "late"}, optional
            Let the keys decide among the candidates: by the dot product of the means, by the share
            of attention, or by late interaction.
        candidates : int, optional
            Entries that are looked at for `rerank`; 4 * top_k by default.
        rerank_query : array_like, optional
            The query in the space of the stored keys, where the entries were indexed by others.
        n_heads : int, default 1
            Heads that are scored separately by `rerank`.
        max_run : int, optional
            Most hits that were put one after the other in their layer.
        newest : int, default 0
            Entries put last that are in the result whatever their similarity.

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
        rows = self._rows(query, "query")
        exact = [None if rerank_query is None else self._rows(rerank_query, "rerank_query")]
        return self._find(
            [rows], layer_idx, top_k, entry_ids, exact, self._hit, order=order, rerank=rerank,
            candidates=candidates, n_heads=n_heads, max_run=max_run, newest=newest,
        )[0]  # fmt: skip

    def query_stored(
        self, query: Any, layer_idx: int, top_k: int = 5, *, entry_ids: Any = None, **options: Any
    ) -> list[list[Tensor]]:
        """Answer as `query` does, with the tensors of each entry as they are stored.

        For `hybridmem.attend`, which reads them where they lie.
        """
        self._check_open()
        rows, given = self._rows(query, "query"), options.pop("rerank_query", None)
        exact = [None if given is None else self._rows(given, "rerank_query")]
        return self._find(
            [rows], layer_idx, top_k, entry_ids, exact, self._checked_tensors, **options
        )[0]

    def query_many(
        self,
        queries: Any,
        layer_idx: int,
        top_k: int = 5,
        *,
        entry_ids: Any = None,
        **options: Any,
    ) -> list[list[Hit]]:
        """Answer several queries of one layer in one pass over its signatures.

        Parameters
        ----------
        queries : array_like of float, shape (m, embed_dim), or list of array_like
            A matrix is m queries; a list holds one array, as for `query`, for each.
        layer_idx, top_k, entry_ids
            As for `query`.
        **options
            Options of `query` that hold for all queries; `rerank_query` is a list of one each.

        Returns
        -------
        list of list of Hit
            For each query what `query` returns.
        """
        self._check_open()
        if isinstance(queries, (list, tuple)):
            rows = [self._rows(one, f"query {at}") for at, one in enumerate(queries)]
        elif _arrays.cache_tokens(queries, "queries", self.config.embed_dim) == 0:
            rows = []
        else:
            matrix = _arrays.matrix(queries, "queries", self.config.embed_dim)
            rows = [row[None] for row in matrix]
        exact: list[Floats | None] = [None] * len(rows)
        if (given := options.pop("rerank_query", None)) is not None:
            if len(given) != len(rows):
                raise ValueError(f"rerank_query: got {len(given)} for {len(rows)} queries")
            exact = [self._rows(one, f"rerank_query {at}") for at, one in enumerate(given)]
        return self._find(rows, layer_idx, top_k, entry_ids, exact, self._hit, **options)

    def _rows(self, query: Any, name: str) -> Floats:
        return _arrays.matrix(query, name, self.config.embed_dim, vector_ok=True)

    def _find(
        self,
        queries: Sequence[Floats],
        layer_idx: int,
        top_k: int,
        entry_ids: Any,
        exact: Sequence[Floats | None],
        make: Callable[[int, float], Found],
        **options: Any,
    ) -> list[list[Found]]:
        """Search; what is returned for a row and its score is what `make` makes of them."""
        layer = _arrays.layer_index(layer_idx)
        k = _arrays.count(top_k, "top_k", 1)
        among = None if entry_ids is None else _arrays.entry_ids(entry_ids)
        ranking = Ranking.checked(k, self.config.embed_dim, **options)
        signatures = self._signatures
        with self._lock:
            self._check_open()
            signatures.check_order(layer, ranking.order)
            view, removals = signatures.view(layer, self._table), signatures.removals
            signed = [signatures.of_query(layer, rows) for rows in queries]
        depth = len(view) if ranking.scans_all else ranking.depth(k)
        found = view.search(signed, depth, among) if depth else []
        with self._lock:
            self._check_open()
            if removals != signatures.removals:  # an entry may have gone meanwhile: ask undisturbed
                view = signatures.view(layer, self._table)
                found = view.search(signed, depth, among)
            results: list[list[Found]] = []
            accessed: list[int] = []
            for at, (ids, distances) in enumerate(found):
                if ranking.order == "norm":
                    ids, distances = signatures.by_norm(self._table, ids, distances)
                distance = dict(zip(ids.tolist(), distances.tolist(), strict=True))
                chosen = list(distance)
                if not ranking.is_plain:
                    rows = exact[at]
                    chosen = self._reranked(
                        layer, chosen, queries[at] if rows is None else rows, k, ranking
                    )
                del chosen[k:]
                score = signatures.spec.score
                results.append(
                    [make(self._row(one), score(distance[one], len(signed[at]))) for one in chosen]
                )
                accessed += chosen
            self._queries += len(queries)
            self._hits += len(accessed)
            self._accessed(accessed)
            return results or [[] for _ in queries]

    def _reranked(
        self, layer: int, ids: list[int], query: Floats, top_k: int, ranking: Ranking
    ) -> list[int]:
        """Apply what follows the search by signatures to the ids it found."""
        found = set(ids)
        if ranking.rerank is not None and ids:
            looked_at = ids[: ranking.depth(top_k)]
            if ranking.rerank == "late":
                query = self._signatures.centred_query(layer, query)
            keys = [self._keys(self._row(entry_id)) for entry_id in looked_at]
            scores = key_scores(ranking.rerank, query, keys, ranking.n_heads)
            order = np.lexsort((np.array(looked_at, np.uint64), -scores))
            ids = [looked_at[at] for at in order.tolist()]
        if not ranking.max_run and not ranking.newest:
            return ids
        layer_ids = self._table.column("entry_id")[self._table.alive_rows(layer)]
        newest = [one for one in reversed(layer_ids.tolist()) if one in found][: ranking.newest]
        return spread(
            ids, top_k, ranking, lambda entry_id: int(np.searchsorted(layer_ids, entry_id)), newest
        )

    def _hit(self, row: int, score: float) -> Hit:
        return Hit(score=score, **self._fields(row))

    def _checked_tensors(self, row: int, score: float) -> list[Tensor]:
        tensors = self._tensors(row)
        n_tokens = int(self._table.columns["n_tokens"][row])
        wrong = self._codec.mismatch(tensors, n_tokens, self.config.embed_dim)
        if wrong is not None:
            raise self._misfit(row, wrong)
        return tensors

    def _keys(self, row: int) -> Floats:
        """Return the stored keys of an entry without a look at its values."""
        tensors = self._tensors(row, KEY_SUFFIXES)
        n_tokens = int(self._table.columns["n_tokens"][row])
        try:
            return self._codec.decode_keys(tensors, n_tokens, self.config.embed_dim)
        except ValueError as error:
            raise self._misfit(row, str(error)) from None

    def get(self, entry_id: int) -> Entry:
        """Return an entry. This is no access.

        Raises
        ------
        KeyError
            If there is no such entry, or no longer.
        """
        with self._lock:
            self._check_open()
            row = self._row(_arrays.entry_id(entry_id))
            ((_, signature),) = self._table.signatures(np.array([row]))
            columns = self._table.columns
            return Entry(
                shard_idx=int(columns["shard_idx"][row]),
                padding=int(columns["padding"][row]),
                signature=signature.tobytes(),
                **self._fields(row),
            )

    def _row(self, entry_id: int) -> int:
        row = self._table.find(entry_id)
        if row is None:
            raise KeyError(entry_id)
        return row

    def _fields(self, row: int) -> dict[str, Any]:
        columns = self._table.columns
        fields = {name: columns[name][row].item() for name in _ENTRY_FIELDS}
        tensors = self._tensors(row)
        try:
            fields["keys"], fields["values"] = self._codec.decode(
                tensors, fields["n_tokens"], self.config.embed_dim
            )
        except ValueError as error:
            raise self._misfit(row, str(error)) from None
        return fields

    def _tensors(self, row: int, suffixes: Collection[str] = SUFFIXES) -> list[Tensor]:
        """Return the stored tensors of an entry."""
        columns = self._table.columns
        entry_id = int(columns["entry_id"][row])
        tensors = self._unwritten(entry_id)
        if tensors is None:
            tensors = self._pool.load(int(columns["shard_idx"][row]), entry_id, suffixes)
        return tensors

    def _misfit(self, row: int, why: str) -> CorruptStoreError:
        columns = self._table.columns
        return self._pool.corrupt(
            int(columns["shard_idx"][row]), f"entry {int(columns['entry_id'][row])}: {why}"
        )

    def _unwritten(self, entry_id: int) -> list[Tensor] | None:
        """Return the tensors of an entry that is in no shard yet."""
        return None

    def _accessed(self, entry_ids: Sequence[int]) -> None:
        """Count an access of each entry that was found, where accesses are counted."""

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

    @property
    def calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Mean key and mean query (or None) of the layers that are calibrated."""
        with self._lock:
            self._check_open()
            return dict(self._signatures.centres)

    def stats(self) -> Stats:
        """Return counts and sizes of this moment."""
        with self._lock:
            self._check_open()
            table = self._table
            dead, live = _wear.disk_shares(self._manifest, table)
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
            manifest, table, _ = _snapshot.load(self._directory, self._io)
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
        self._table.close()
        self._signatures.clear()
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


def _after_fork_in_child() -> None:
    for store in list(Reader.open_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

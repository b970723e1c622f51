"""`Memory`: what one store, several layered ones and a cluster have in common.

Attention and the clients ask for nothing else. To be a memory, derive from the class and define
what is abstract; the questions that `query`, `query_many` and `query_stored` put are checked here.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays
from hybridmem._codec import Tensor
from hybridmem._ranking import Ranking
from hybridmem.config import Config
from hybridmem.results import Entry, Hit, Hits, Stats

__all__ = ["Memory", "Question"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Self = TypeVar("Self", bound="Memory")


class Question(NamedTuple):
    """What one or several queries of a layer ask, checked.

    Attributes
    ----------
    queries : sequence of float32 arrays, shape (n_tokens, embed_dim)
    layer_idx : int
    top_k : int
    entry_ids : uint64 array or None
        Search only among these.
    exact : sequence of (float32 array or None)
        For each query its `rerank_query`.
    ranking : Ranking
    """

    queries: Sequence[Floats]
    layer_idx: int
    top_k: int
    entry_ids: Ids | None
    exact: Sequence[Floats | None]
    ranking: Ranking


class Memory(abc.ABC):
    """Keys and values of attention layers, found by the similarity of their signatures.

    A `Store` is one; so are several that are layered, and a cluster. Ids of entries are integers
    below 2**63 and mean the same entry for ever in the memory that gave them. Hits are ordered by
    falling score, ties by the order in which the memory counts its entries, which for a store is
    that of their ids.

    Attributes
    ----------
    config : Config
        Width and signatures of what it holds, and the type in which it stores what is put.
    mode : {"r+", "r"}
        "r+" where it takes entries; in "r" what writes raises ReadOnlyError.
    """

    config: Config
    mode: str

    # -- asking -----------------------------------------------------------------------------------

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
        approximate: bool | None = None,
        threads: int | None = None,
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
        rerank : {"signatures", "pooled", "tokens", "late"}, optional
            Let more decide among the candidates. "signatures": their signatures once more, compared
            with the query as it is before signs are taken of it (`hdc.round_query`), which reads no
            key. The others read the keys: the dot product of the means, the share of attention, or
            late interaction.
        candidates : int, optional
            Entries that are looked at for `rerank`; 4 * top_k by default.
        rerank_query : array_like, optional
            The query in the space of the stored keys, where the entries were indexed by others; not
            for "signatures", which are of the index's space.
        n_heads : int, default 1
            Heads that are scored separately where `rerank` reads keys.
        max_run : int, optional
            Most hits that were put one after the other in their layer.
        newest : int, default 0
            Entries put last that are in the result whatever their similarity.
        approximate : bool, default False
            Where a layer has 16,384 entries or more with sub-signatures, look for two query tokens
            in all of them, for two more in the nearest sixth, and for the rest in the nearest
            sixteenth only. A sample of the entries says which tokens tell most. Where it has 65,536
            or more with one signature each, read the clusters nearest to the query and what is in
            none yet; up to 1,024 entries that wait are dealt to clusters first. Searches among
            `entry_ids` or for many hits remain exact there.
        threads : int, default 1
            Most threads that scan the signatures of a large layer for at most 64 entries: one for
            each 8 MiB. The result is the same.

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
        question = self._question(
            [rows], layer_idx, top_k, entry_ids, exact, order=order,
            rerank=rerank, candidates=candidates, n_heads=n_heads, max_run=max_run, newest=newest,
            approximate=approximate, threads=threads,
        )  # fmt: skip
        return _listed(self._hits_of(question)[0])

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
        rows = self._several(queries)
        exact: list[Floats | None] = [None] * len(rows)
        if (given := options.pop("rerank_query", None)) is not None:
            if np.ndim(given) == 0 and not isinstance(given, (list, tuple)):
                raise TypeError(
                    f"rerank_query: got {type(given).__name__}, want one array for each query"
                )
            if len(given) != len(rows):
                raise ValueError(f"rerank_query: got {len(given)} for {len(rows)} queries")
            exact = [self._rows(one, f"rerank_query {at}") for at, one in enumerate(given)]
        question = self._question(rows, layer_idx, top_k, entry_ids, exact, **options)
        return [_listed(hits) for hits in self._hits_of(question)]

    def query_stored(
        self, query: Any, layer_idx: int, top_k: int = 5, *, entry_ids: Any = None, **options: Any
    ) -> list[list[Tensor]]:
        """Answer as `query` does, with the tensors of each entry as they are stored.

        For `hybridmem.attend`, which reads them where they lie.
        """
        self._check_open()
        rows, given = self._rows(query, "query"), options.pop("rerank_query", None)
        exact = [None if given is None else self._rows(given, "rerank_query")]
        question = self._question([rows], layer_idx, top_k, entry_ids, exact, **options)
        return self._stored_of(question)[0]

    def _question(
        self,
        queries: Sequence[Floats],
        layer_idx: int,
        top_k: int,
        entry_ids: Any,
        exact: Sequence[Floats | None],
        **options: Any,
    ) -> Question:
        """Check what was asked."""
        layer = _arrays.layer_index(layer_idx)
        k = _arrays.count(top_k, "top_k", 1)
        among = None if entry_ids is None else _arrays.entry_ids(entry_ids)
        ranking = Ranking.checked(k, self.config.embed_dim, **options)
        if ranking.rerank == "signatures" and any(one is not None for one in exact):
            raise ValueError(
                'rerank_query: rerank="signatures" compares signatures with the query itself; '
                "leave it out, or let keys decide"
            )
        return Question(queries, layer, k, among, exact, ranking)

    def _several(self, queries: Any) -> list[Floats]:
        """Return the rows of each of several queries."""
        if isinstance(queries, (list, tuple)):
            return [self._rows(one, f"query {at}") for at, one in enumerate(queries)]
        if _arrays.cache_tokens(queries, "queries", self.config.embed_dim) == 0:
            return []
        matrix = _arrays.matrix(queries, "queries", self.config.embed_dim)
        return [row[None] for row in matrix]

    def _rows(self, query: Any, name: str) -> Floats:
        return _arrays.matrix(query, name, self.config.embed_dim, vector_ok=True)

    @abc.abstractmethod
    def _hits_of(self, question: Question) -> list[list[Hit]]:
        """Answer each query of a question, best first; count queries, hits and accesses."""

    def _stored_of(self, question: Question) -> list[list[list[Tensor]]]:
        """Answer as `_hits_of` does, with tensors `k` and `v` of each hit."""
        return [
            [
                [
                    Tensor(name, "F32", rows.shape, rows)
                    for name, rows in (("k", hit.keys), ("v", hit.values))
                ]
                for hit in hits
            ]
            for hits in self._hits_of(question)
        ]

    @abc.abstractmethod
    def take_back(self, hits: Sequence[Hit]) -> None:
        """Count the query no longer that gave these hits: they could not be used."""

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raise StoreClosedError once it is closed."""

    # -- contents ---------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def store_id(self) -> str:
        """What tells this memory, and so the meaning of its ids, from all others."""

    @property
    @abc.abstractmethod
    def calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Mean key and mean query (or None) of the layers that are calibrated."""

    @abc.abstractmethod
    def get(self, entry_id: int) -> Entry:
        """Return an entry. This is no access.

        Raises
        ------
        KeyError
            If there is no such entry, or no longer.
        """

    @abc.abstractmethod
    def timestamps(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the time of the put of each entry, 0 for those that are not there, or no longer.

        So one call tells which entries are left, and whether they are those that were meant.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of entries."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids there are at this moment, in the order of the memory."""

    def __bool__(self) -> bool:
        return True  # a memory without entries is one

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Return counts and sizes of this moment; `generation` never falls."""

    # -- changing ---------------------------------------------------------------------------------

    @abc.abstractmethod
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
        """Store a chunk of consecutive tokens of one layer and return its id, as `Store.put`."""

    @abc.abstractmethod
    def put_many(
        self,
        entries: Iterable[tuple[Any, Any]],
        layer_idx: int,
        importance: float | Sequence[float] = 1.0,
        *,
        index_keys: Sequence[Any] | None = None,
        sources: Sequence[Any] | None = None,
    ) -> list[int]:
        """Store several chunks of one layer, all or none, as `Store.put_many`."""

    @abc.abstractmethod
    def delete(self, entry_id: int) -> None:
        """Remove an entry; KeyError if there is none. The next flush commits it."""

    @abc.abstractmethod
    def calibrate(self, layer_idx: int, *, keys: Any = None, queries: Any = None) -> None:
        """Centre the keys and queries of a layer from now on, as `Store.calibrate`.

        Raises
        ------
        ValueError
            If the layer is calibrated already, or cannot be any more.
        """

    @abc.abstractmethod
    def flush(self, wait: bool = True) -> None:
        """Make everything that was put and deleted durable."""

    @abc.abstractmethod
    def compact(self) -> int:
        """Take the bytes of what was deleted off the disk and return how many these were."""

    # -- life -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and close; a second close does nothing. Arrays that were handed out stay valid."""

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


def _listed(hits: list[Hit]) -> Hits:
    return hits if isinstance(hits, Hits) else Hits(hits)

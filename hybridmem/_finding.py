"""Finding: the search by signatures and what may follow it, for every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hybridmem import _arrays, _audit
from hybridmem._codec import Tensor
from hybridmem._entries import Bytes, Rows
from hybridmem._index import IndexView
from hybridmem._ranking import Ranking, key_scores, spread
from hybridmem._reading import Floats, Reader
from hybridmem.results import Audit, Hit, Hits

__all__ = ["Finder"]

Found = TypeVar("Found")


class Finder(Reader):
    """A reader that answers queries."""

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
        approximate : bool, default False
            Where a layer has 16,384 entries or more with sub-signatures, look for the last two
            query tokens in all of them, for two more in the nearest sixth, and for the rest in
            the nearest sixteenth only.

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
        return Hits(self._find(
            [rows], layer_idx, top_k, entry_ids, exact, self._hit, order=order, rerank=rerank,
            candidates=candidates, n_heads=n_heads, max_run=max_run, newest=newest,
            approximate=approximate,
        )[0])  # fmt: skip

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
        found = self._find(rows, layer_idx, top_k, entry_ids, exact, self._hit, **options)
        return [Hits(hits) for hits in found]

    def audit(
        self,
        queries: Any,
        layer_idx: int,
        top_k: int = 10,
        *,
        candidates: int | None = None,
        rerank_queries: Sequence[Any] | None = None,
        keys: Mapping[int, Any] | None = None,
        n_heads: int = 1,
    ) -> Audit:
        """Measure how much of what a brute force over the keys finds each ranking finds too.

        Every ranking that the store offers, and the usual forms of signatures that it might have
        instead, beside recency and chance. All keys of the layer are read; the store is busy
        meanwhile. Counts as no query and no access.

        Parameters
        ----------
        queries : array_like of float, shape (m, embed_dim), or list of array_like
            As for `query_many`: queries of the model whose memory this is, a few dozen or more.
        layer_idx : int
        top_k : int, default 10
        candidates : int, optional
            Entries that a second stage looks at; 4 * top_k by default.
        rerank_queries : sequence of array_like, optional
            The queries in the space of the stored keys, where the entries were indexed by others.
        keys : mapping of int to array_like, optional
            The keys that entries were indexed by, by id, to compare with instead of the stored ones
            (index keys are not stored); only these entries are looked at, and no second stage,
            which would read the stored keys.
        n_heads : int, default 1
            Heads that brute force and second stage score separately.

        Returns
        -------
        Audit

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or the layer has no entries.
        """
        self._check_open()
        layer = _arrays.layer_index(layer_idx)
        k = _arrays.count(top_k, "top_k", 1)
        ranking = Ranking.checked(
            k, self.config.embed_dim, rerank="late", candidates=candidates, n_heads=n_heads
        )
        rows = self._several(queries)
        if not rows:
            raise ValueError("queries: got none, want at least one")
        exact = None
        if rerank_queries is not None:
            if keys is not None:
                raise ValueError(
                    "rerank_queries: give them for stored keys, or give keys, not both"
                )
            if len(rerank_queries) != len(rows):
                raise ValueError(
                    f"rerank_queries: got {len(rerank_queries)} for {len(rows)} queries"
                )
            exact = [
                self._rows(one, f"rerank_queries {at}") for at, one in enumerate(rerank_queries)
            ]
        with self._lock:
            self._check_open()
            at = self._table.alive_rows(layer)
            ids = self._table.column("entry_id")[at]
            if keys is not None:
                given = [one for one in ids.tolist() if one in keys]
                at = at[np.isin(ids, np.array(given, np.uint64))]
                ids = self._table.column("entry_id")[at]
            if not len(ids):
                raise ValueError(f"layer_idx: layer {layer} has no entries to look at")

            def given_keys(row: int) -> Floats:
                assert keys is not None
                entry_id = int(self._table.columns["entry_id"][row])
                mine = self._rows(keys[entry_id], f"keys of entry {entry_id}")
                n_tokens = int(self._table.columns["n_tokens"][row])
                if len(mine) != n_tokens:
                    raise ValueError(
                        f"keys of entry {entry_id}: got {len(mine)} tokens, want {n_tokens}"
                    )
                return mine

            keys_of = self._keys if keys is None else given_keys
            return _audit.audit(
                self.config,
                self._signatures,
                _audit.Layer(
                    number=layer,
                    ids=ids,
                    n_tokens=self._table.column("n_tokens")[at],
                    paddings=self._table.column("padding")[at],
                    signed=lambda: self._signed_entries(at, keys_of),
                    view=self._signatures.view(layer, self._table),
                ),
                rows,
                exact,
                top_k=k,
                candidates=ranking.depth(k),
                n_heads=ranking.n_heads,
                rerank=keys is None,
            )

    def _signed_entries(
        self, rows: Rows, keys_of: Callable[[int], Floats]
    ) -> Iterator[tuple[int, Floats, Bytes]]:
        """Yield id, keys and signature of the entries of these rows."""
        ids = self._table.column("entry_id")
        for part, signatures in self._table.signatures(rows):
            for row, signature in zip(part.tolist(), signatures, strict=True):
                yield int(ids[row]), np.ascontiguousarray(keys_of(row)), signature

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

        def asked() -> tuple[IndexView, list[Bytes], int]:
            self._check_open()
            signatures.check_order(layer, ranking.order)
            view = signatures.view(layer, self._table)
            signed = [signatures.of_query(layer, rows) for rows in queries]
            return view, signed, len(view) if ranking.scans_all else ranking.depth(k)

        with self._lock:
            (view, signed, depth), removals = asked(), signatures.removals
        found = view.search(signed, depth, among, ranking.approximate) if depth else []
        with self._lock:
            self._check_open()
            if removals != signatures.removals:
                # An entry may have gone meanwhile, or all be others: ask again, undisturbed.
                view, signed, depth = asked()
                found = view.search(signed, depth, among, ranking.approximate) if depth else []
            results: list[list[Found]] = []
            accessed: list[int] = []
            for at, (ids, distances) in enumerate(found):
                if ranking.order == "norm":
                    at_rows = np.searchsorted(self._table.column("entry_id"), ids)
                    paddings = self._table.columns["padding"][at_rows]
                    ids, distances = signatures.by_norm(ids, distances, paddings)
                distance = dict(zip(ids.tolist(), distances.tolist(), strict=True))
                chosen = list(distance)
                if not ranking.is_plain:
                    chosen = self._reranked(layer, chosen, queries[at], exact[at], k, ranking)
                del chosen[k:]
                score, tokens = signatures.spec.score, len(signed[at])
                rows = [self._row(one) for one in chosen]
                results.append(
                    [
                        make(row, score(distance[one], tokens))
                        for row, one in zip(rows, chosen, strict=True)
                    ]
                )
                accessed += chosen
            self._queries += len(queries)
            self._hits += len(accessed)
            self._accessed(accessed)
            return results or [[] for _ in queries]

    def _take_back(self, hits: Sequence[Hit]) -> None:
        """Count a query no longer whose hits could not be used."""
        with self._lock:
            self._queries -= 1
            self._hits -= len(hits)
            self._accessed([hit.entry_id for hit in hits], -1)

    def _reranked(
        self,
        layer: int,
        ids: list[int],
        query: Floats,
        exact: Floats | None,
        top_k: int,
        ranking: Ranking,
    ) -> list[int]:
        """Apply what follows the search by signatures to the ids it found."""
        found = set(ids)
        if ranking.rerank is not None and ids:
            looked_at = ids[: ranking.depth(top_k)]
            if exact is not None:
                query = exact  # of another space than the layer's mean query, so not centred
            elif ranking.rerank == "late":
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
            ids, top_k, ranking, lambda one: int(np.searchsorted(layer_ids, np.uint64(one))), newest
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

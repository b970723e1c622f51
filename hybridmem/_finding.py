"""Finding: the search by signatures and what may follow it, for every store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hybridmem import _arrays, _audit
from hybridmem._codec import Tensor
from hybridmem._entries import Bytes, Rows
from hybridmem._format import KEY_SUFFIXES
from hybridmem._merging import Candidates, Place, choose
from hybridmem._ranking import Ranking, Scores, said_by
from hybridmem._reading import Floats, Reader
from hybridmem.memory import Memory, Question
from hybridmem.results import Audit, Hit

__all__ = ["Finder", "Make", "Search", "answer"]

Found = TypeVar("Found")
#: Makes what is returned of the number of a store, rows of its records, and their scores.
Make = Callable[[int, list[int], list[float]], Iterable[Found]]
_NOTHING = (np.empty(0, np.uint64), np.empty(0, np.uint32))


class Finder(Reader, Memory):
    """A reader that answers queries."""

    def _hits_of(self, question: Question) -> list[list[Hit]]:
        return self._answer(question, lambda _, *found: self._hits_at(*found))

    def _stored_of(self, question: Question) -> list[list[list[Tensor]]]:
        return self._answer(question, lambda _, rows, scores: self._tensors_at(rows))

    def _answer(self, question: Question, make: Make[Found]) -> list[list[Found]]:
        search = Search(self, question)
        search.run()
        with self._lock:
            results = answer(question, [search], make)
            self._queries += len(question.queries)
            self._hits += sum(map(len, results))
            return results

    def take_back(self, hits: Sequence[Hit]) -> None:
        """Count the query no longer that gave these hits: they could not be used."""
        with self._lock:
            self._check_open()
            self._queries -= 1
            self._hits -= len(hits)
            self._accessed(self._rows_of(hit.entry_id for hit in hits), -1)

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

    def _hits_at(self, rows: Sequence[int], scores: Sequence[float], tag: int = 0) -> list[Hit]:
        hits = []
        for row, score in zip(rows, scores, strict=True):
            fields = self._fields(row, tag)
            fields["score"] = score
            hits.append(Hit.of(fields))
        return hits

    def _tensors_at(self, rows: Sequence[int]) -> list[list[Tensor]]:
        found = []
        for row in rows:
            tensors = self._tensors(row)
            n_tokens = self._table.columns["n_tokens"].item(row)
            wrong = self._codec.mismatch(tensors, n_tokens, self.config.embed_dim)
            if wrong is not None:
                raise self._misfit(row, wrong)
            # Arrays of its own, as an array's shape can be set.
            found.append(
                [Tensor(part.suffix, part.dtype, part.shape, part.data.view()) for part in tensors]
            )
        return found


class Search:
    """A question put to one store: `run` without its lock, all else under it."""

    __slots__ = ("_depth", "_found", "_removals", "_signed", "_view", "finder", "question")

    def __init__(self, finder: Finder, question: Question) -> None:
        self.finder, self.question = finder, question
        with finder._lock:
            self._prepare()

    def _prepare(self) -> None:
        finder, ranking = self.finder, self.question.ranking
        finder._check_open()
        signatures, layer = finder._signatures, self.question.layer_idx
        signatures.check_order(layer, ranking.order)
        self._view = signatures.view(layer, finder._table, ranking.approximate)
        self._signed = [signatures.of_query(layer, rows) for rows in self.question.queries]
        self._depth = len(self._view) if ranking.scans_all else ranking.depth(self.question.top_k)
        self._removals = signatures.removals

    def run(self) -> None:
        """Scan the signatures of the layer."""
        among, ranking = self.question.entry_ids, self.question.ranking
        self._found = (
            self._view.search(
                self._signed, self._depth, among, ranking.approximate, ranking.threads
            )
            if self._depth
            else [_NOTHING] * len(self._signed)
        )

    def settle(self) -> None:
        """Ask again, undisturbed, if an entry went meanwhile, or all are others."""
        self.finder._check_open()
        if self._removals != self.finder._signatures.removals:
            self._prepare()
            self.run()

    def candidates(self, at: int) -> Candidates:
        """Return what was found for one of the queries."""
        ids, distances = self._found[at]
        finder, ranking = self.finder, self.question.ranking
        estimates = positions = None
        layer_entries = 0
        if ranking.order == "norm":
            paddings = finder._table.columns["padding"][finder._table.rows(ids)]
            ids, distances, estimates = finder._signatures.by_norm(ids, distances, paddings)
        if ranking.max_run:
            in_layer = finder._table.alive_rows(self.question.layer_idx)
            layer_ids = finder._table.column("entry_id")[in_layer]
            positions, layer_entries = np.searchsorted(layer_ids, ids), len(layer_ids)
        return Candidates(ids, distances, estimates, positions, layer_entries)

    def said(self, at: int, entry_ids: Sequence[int]) -> Scores:
        """Return what entries say to one of the queries, shape (n, heads, m)."""
        finder, ranking = self.finder, self.question.ranking
        assert ranking.rerank is not None
        if ranking.rerank == "signatures":
            return finder._signatures.cosines(
                self.question.layer_idx,
                self._view,
                self.question.queries[at],
                np.array(entry_ids, np.uint64),
            )
        query = self.question.exact[at]
        if query is None:  # else of another space than the layer's mean query, so not centred
            query = self.question.queries[at]
            if ranking.rerank == "late":
                query = finder._signatures.centred_query(self.question.layer_idx, query)
        rows = [finder._row(entry_id) for entry_id in entry_ids]
        finder._fetch(rows, KEY_SUFFIXES)
        keys = [finder._keys(row) for row in rows]
        return said_by(keys, ranking.rerank, query, ranking.n_heads)

    def chosen(
        self, at: int, found: Candidates, places: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Return the rows, and the scores, of some of what was found for one of the queries."""
        ids, distances = found.ids, found.distances
        spec, tokens = self.finder._signatures.spec, len(self._signed[at])
        rows = [self.finder._row(ids.item(one)) for one in places]
        return rows, [spec.score(distances.item(one), tokens) for one in places]


def _said(
    searches: Sequence[Search], found: Sequence[Candidates], at: int, places: Sequence[Place]
) -> Scores:
    """Ask each store for its entries, and put what they say in the order of the places."""
    if len(searches) == 1:
        return searches[0].said(at, found[0].ids[[one for _, one in places]].tolist())
    stores = np.array([number for number, _ in places])
    order = np.argsort(stores, kind="stable")
    parts = []
    for number, search in enumerate(searches):
        mine = [one for store, one in places if store == number]
        if mine:
            parts.append(search.said(at, found[number].ids[mine].tolist()))
    said = np.empty((len(places), *parts[0].shape[1:]))
    said[order] = np.concatenate(parts)
    return said


def answer(
    question: Question,
    searches: Sequence[Search],
    make: Make[Found],
    most: Sequence[int | None] | None = None,
) -> list[list[Found]]:
    """Answer a question by searches of one or several stores, whose locks are held.

    Accesses are counted; queries and hits are left to the caller.

    Parameters
    ----------
    most : sequence of (int or None), optional
        Most hits of each store.
    """
    for search in searches:
        search.settle()
    results: list[list[Found]] = []
    accessed: list[list[int]] = [[] for _ in searches]
    for at in range(len(question.queries)):
        found = [search.candidates(at) for search in searches]
        said = partial(_said, searches, found, at)
        chosen = choose(found, question.top_k, question.ranking, said, most)
        parts = []
        for number, search in enumerate(searches):
            mine = [one for store, one in chosen if store == number]
            parts.append(search.chosen(at, found[number], mine))
            search.finder._fetch(parts[-1][0])
            accessed[number] += parts[-1][0]
        made = [iter(make(number, *part)) for number, part in enumerate(parts)]
        results.append([next(made[number]) for number, _ in chosen])
    for search, rows in zip(searches, accessed, strict=True):
        search.finder._accessed(rows)
    return results

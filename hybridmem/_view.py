"""A layer's signatures at one moment, and searches over them."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem import _kernels
from hybridmem._blocks import I64, LANES, U8, U32, U64, Block, Layout, unsigned
from hybridmem._clusters import Dealt, to_read
from hybridmem._parallel import LEAST_BYTES, Best, Span, divided, scanned

__all__ = ["IndexView", "telling_first"]

# Up to here a sorted list of the best is kept during the scan; above, all distances are computed
# and the best are counted out, which costs O(n) whatever k is.
RUNNING_K = 64

# Late interaction in a large layer, where asked for: after the 2 query tokens that tell most one of
# 6 entries goes on, after 4 one of 16, by limits taken from a sample (docs/retrieval.md: recall).
GATES = ((2, 6), (4, 16))
LARGE = 1 << 14
_SAMPLE = 512

_FAR = 2**32 - 1  # marks an entry that was given up
_MAX_DISTANCE = 2**32 - 2  # 2**32 - 1 marks an empty place


class IndexView:
    """A layer's entries at one moment. Made by LayerIndex.view()."""

    __slots__ = ("_dealt", "_layout", "_parts", "_places", "_starts")

    def __init__(
        self, layout: Layout, blocks: tuple[Block, ...], dealt: Dealt | None = None
    ) -> None:
        self._layout, self._dealt = layout, dealt
        self._parts = [(block, block.filled) for block in blocks]
        self._starts = [0, *accumulate(filled for _, filled in self._parts)]
        self._places = self._starts[-1]

    def __len__(self) -> int:
        """Places of the view, dead ones included."""
        return self._places

    def find(self, entry_ids: U64) -> I64:
        """Places of the live entries among these ascending ids."""
        if not self._parts or not len(entry_ids):
            return np.empty(0, np.int64)
        firsts = np.array([block.ids[0] for block, _ in self._parts], np.uint64)
        bounds = [*np.searchsorted(entry_ids, firsts).tolist(), len(entry_ids)]
        found: list[I64] = []
        for (block, filled), start, (low, high) in zip(
            self._parts, self._starts, pairwise(bounds), strict=False
        ):
            if low == high:
                continue
            wanted = entry_ids[low:high]
            if len(wanted) == filled and not block.dead and (wanted == block.ids[:filled]).all():
                found.append(np.arange(start, start + filled))
                continue
            rows = np.searchsorted(block.ids[:filled], wanted).astype(np.int64)
            inside = rows < filled
            rows, wanted = rows[inside], wanted[inside]
            rows = rows[(block.ids[rows] == wanted) & (block.alive[rows] != 0)]
            found.append(rows + start)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def living(self, places: I64) -> I64:
        """Those of these ascending places whose entries are alive."""
        alive = np.empty(len(places), np.uint8)
        for block, rows, here in self._by_block(places):
            alive[here] = block.alive[rows]
        found: I64 = places[alive != 0]
        return found

    def signatures(self, places: I64) -> U8:
        """Pooled signatures at these ascending places."""
        out = np.empty((len(places), self._layout.sub_bytes), np.uint8)
        for block, rows, here in self._by_block(places):
            out[here] = block.data[rows]
        return out

    def _by_block(self, places: I64) -> Iterator[tuple[Block, I64, slice]]:
        bounds = places.searchsorted(self._starts)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            here = slice(*bounds[number : number + 2].tolist())
            yield self._parts[number][0], places[here] - self._starts[number], here

    def search(
        self,
        queries: Sequence[U8],
        k: int,
        entry_ids: U64 | None = None,
        approximate: bool = False,
        threads: int = 1,
    ) -> list[tuple[U64, U32]]:
        """The k entries at the smallest distance from each query, ties to the smaller id.

        Parameters
        ----------
        queries : sequence of ndarray of uint8, [query_tokens, bits // 8]
            As hdc.sign_query makes them; one row where signatures are pooled.
        k : int
            At least 1; may exceed the number of entries.
        entry_ids : ndarray of uint64, optional
            Search only these; ids that are not here are passed over.
        approximate : bool
            Where there are many, give up entries that are far from the query tokens that tell most;
            of pooled ones, those in clusters that are far from the query.
        threads : int
            Most threads of a scan for at most RUNNING_K entries.

        Returns
        -------
        list of (ids uint64 [<= k], distances uint32 [<= k]), one pair per query
            Hamming distances; with sub-signatures, sums over query tokens of the smallest one.
        """
        k = operator.index(k)
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        checked = [self._check_query(query) for query in queries]
        if not checked:
            return []
        if entry_ids is not None:
            wanted = unsigned(entry_ids, np.uint64, "entry_ids").reshape(-1)
            if not (wanted[1:] > wanted[:-1]).all():
                wanted = np.unique(wanted)
            live = sum(np.count_nonzero(block.alive[:filled]) for block, filled in self._parts)
            places = self.find(wanted)
            if len(places) != live:  # else they are all there are
                return [
                    self._search_gated(query, k, places)
                    if approximate and self.is_large(query, len(places), k)
                    else self._search_at(query, k, places)
                    for query in checked
                ]
        k = min(k, self._places)
        if k == 0:
            return [_nothing() for _ in checked]
        read = to_read(self._places, k) if approximate and self._dealt else 0
        if read:
            return [self._search_clustered(query, k, read, threads) for query in checked]
        large = [approximate and self.is_large(query, self._places, k) for query in checked]
        if any(large):
            return [
                self._search_gated(query, k, None) if gated else self._search_counted(query, k)
                for query, gated in zip(checked, large, strict=True)
            ]
        if k <= RUNNING_K:
            return self._search_running(checked, k, threads)
        return [self._search_counted(query, k) for query in checked]

    def _check_query(self, query: U8) -> U8:
        array = np.asarray(query)
        width = self._layout.sub_bytes
        if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != width:
            raise ValueError(
                f"a query must be uint8 [tokens, {width}], got {array.dtype} {array.shape}"
            )
        tokens = array.shape[0]
        if tokens < 1 or (self._layout.spec.pooled and tokens != 1):
            raise ValueError(f"a query of {tokens} signatures does not fit {self._layout.spec}")
        if tokens * self._layout.spec.bits > _MAX_DISTANCE:
            raise ValueError(f"a query of {tokens} tokens is too long for 32-bit distances")
        return np.ascontiguousarray(array)

    def _search_clustered(self, query: U8, k: int, read: int, threads: int) -> tuple[U64, U32]:
        """As _search_running, of the nearest clusters and of the entries that are in none yet."""
        assert self._dealt is not None
        near = self.living(self._dealt.near(query[0], read))
        if len(near) < k:  # so many went
            return self._search_counted(query, k)
        waiting = self._search_running([query], k, threads, self._dealt.end)
        ids, distances = zip(self._search_at(query, k, near), *waiting, strict=True)
        all_ids, all_distances = np.concatenate(ids), np.concatenate(distances)
        best = np.lexsort((all_ids, all_distances))[:k]
        return all_ids[best], all_distances[best]

    def _search_running(
        self, queries: list[U8], k: int, threads: int, start: int = 0
    ) -> list[tuple[U64, U32]]:
        """One pass over the blocks, from a place on, for all queries."""
        rows = np.concatenate(queries) if len(queries) > 1 else queries[0]
        layout = self._layout
        starts = np.array(
            [0] if layout.spec.pooled else [0, *accumulate(map(len, queries))], np.int64
        )
        shared = 1 if layout.spec.pooled else max(1, LANES // layout.lanes)

        def scan(spans: list[Span]) -> Best:
            best = Best.empty(len(queries), k)
            for number, first, end in spans:
                first, end = first + passed[number], end + passed[number]
                block, place = self._parts[number][0], self._starts[number] + first
                alive = block.alive[first:end]
                if layout.spec.pooled:
                    _kernels.hamming_topk(block.data[first:end], rows, alive, place, *best)
                else:
                    late = (block.data[first * layout.lanes // LANES :], block.used[first:end])
                    _kernels.late_topk(*late, layout.lanes, rows, starts, alive, place, *best)
            return best

        filled = [filled for _, filled in self._parts]
        passed = [min(max(start - at, 0), n) for at, n in zip(self._starts, filled, strict=False)]
        left = [n - gone for n, gone in zip(filled, passed, strict=True)]
        most = max(1, min(threads, sum(left) * layout.entry_bytes // LEAST_BYTES))
        shares = divided(left, most, shared) or [[]]
        results = []
        for distances, places in zip(*scanned(scan, shares), strict=True):
            found = k if places[-1] >= 0 else int(np.count_nonzero(places >= 0))
            results.append((self._ids(places[:found]), distances[:found].copy()))
        return results

    def is_large(self, query: U8, n: int, k: int) -> bool:
        """Whether a search for k of n entries may be approximate."""
        return len(query) > GATES[0][0] and n >= LARGE and 4 * k <= n // GATES[-1][1]

    def _search_gated(self, query: U8, k: int, places: I64 | None) -> tuple[U64, U32]:
        """As _search_counted, or as _search_at, of the entries that pass the gates."""
        gates = [gate for gate in GATES if gate[0] < len(query)]
        n = self._places if places is None else len(places)
        sample = np.arange(0, n, n // _SAMPLE, dtype=np.int64)
        sample = sample if places is None else places[sample]
        near = self._by_token(query, sample)
        order = telling_first(near, gates[-1][0])
        query, near = np.ascontiguousarray(query[order]), near[order].cumsum(0)
        limits = []
        for end, share in gates:
            rank = len(sample) // share
            limits.append(np.partition(near[end - 1], rank)[rank])
        ends = np.array([end for end, _ in gates], np.uint32)
        distances = self._distances(query, places, ends, np.array(limits, np.uint32))
        passed = np.flatnonzero(distances != _FAR)
        if places is None:
            alive = np.concatenate([block.alive[:filled] for block, filled in self._parts])
            passed = passed[alive[passed] != 0]
        if len(passed) < k:
            if places is None:
                return self._search_counted(query, k)
            return self._search_at(query, k, places)
        found = distances[passed]
        best = self._smallest(found, np.ones(len(found), np.uint8), k, len(query))
        chosen = passed[best]
        return self._ids(chosen if places is None else places[chosen]), found[best]

    def _search_counted(self, query: U8, k: int) -> tuple[U64, U32]:
        """All distances, then the k smallest."""
        distances = self._distances(query, None)
        alive = np.concatenate([block.alive[:filled] for block, filled in self._parts])
        places = self._smallest(distances, alive, k, len(query))
        return self._ids(places), distances[places]

    def _search_at(self, query: U8, k: int, places: I64) -> tuple[U64, U32]:
        """Only the entries at these ascending places."""
        if not len(places):
            return _nothing()
        distances = self._distances(query, places)
        alive = np.ones(len(places), np.uint8)
        chosen = self._smallest(distances, alive, min(k, len(places)), len(query))
        return self._ids(places[chosen]), distances[chosen]

    def _distances(
        self,
        query: U8,
        places: I64 | None,
        ends: U32 | None = None,
        limits: U32 | None = None,
    ) -> U32:
        """Distances of all entries, or at these ascending places."""
        distances = np.empty(self._places if places is None else len(places), np.uint32)
        bounds = self._starts if places is None else np.searchsorted(places, self._starts).tolist()
        for number, (low, high) in enumerate(pairwise(bounds)):
            if low == high:
                continue
            block, out = self._parts[number][0], distances[low:high]
            rows = None if places is None else places[low:high] - self._starts[number]
            if self._layout.spec.pooled:
                if rows is None:
                    _kernels.hamming_all(block.data[: high - low], query[0], out)
                else:
                    _kernels.hamming_at(block.data, rows, query[0], out)
                continue
            late = (block.data, block.used, self._layout.lanes)
            if ends is not None and limits is not None:
                _kernels.late_gated(*late, rows, query, ends, limits, out)
            elif rows is None:
                _kernels.late_all(*late, query, out)
            else:
                _kernels.late_at(*late, rows, query, out)
        return distances

    def dots(self, query: NDArray[np.int8], entry_ids: U64) -> NDArray[np.int32]:
        """Largest dot products of a query's rows with the signs of entries, in their order.

        Parameters
        ----------
        query : ndarray of int8, [query_tokens, bits]
            As hdc.round_query makes it.
        entry_ids : ndarray of uint64, [n]

        Returns
        -------
        ndarray of int32, [n, query_tokens]

        Raises
        ------
        KeyError
            If one of the entries is not in the view, or no longer.
        """
        order = np.argsort(entry_ids)
        places = self.find(entry_ids[order])
        if len(places) != len(entry_ids):
            raise KeyError("an entry went meanwhile")
        out = np.empty((len(places), len(query)), np.int32)
        out[order] = self._dots(query, places)
        return out

    def _dots(self, query: NDArray[np.int8], places: I64) -> NDArray[np.int32]:
        """The same, at these ascending places."""
        out = np.empty((len(places), len(query)), np.int32)
        bounds = places.searchsorted(self._starts).tolist()
        for number, (low, high) in enumerate(pairwise(bounds)):
            if low == high:
                continue
            block, rows = self._parts[number][0], places[low:high] - self._starts[number]
            data, used, lanes = block.data, block.used, self._layout.lanes
            if self._layout.spec.pooled:  # side by side, as the kernel wants them
                data = np.zeros((-(-len(rows) // LANES), self._layout.sub_bytes, LANES), np.uint8)
                used, lanes = np.ones(len(rows), np.uint32), 1
                _kernels.late_pack(block.data[rows], used, 0, lanes, data)
                rows = np.arange(len(rows))
            _kernels.late_dots(data, used, lanes, rows, query, out[low:high])
        return out

    def _by_token(self, query: U8, places: I64) -> NDArray[np.int32]:
        """Distances of each query token, a row each, at these ascending places."""
        signs = np.unpackbits(query, axis=1, bitorder="little").astype(np.int8) * 2 - 1
        return (self._layout.spec.bits - self._dots(signs, places).T) // 2

    def _smallest(self, distances: U32, alive: U8, k: int, tokens: int) -> I64:
        limit = self._layout.spec.denominator(tokens)
        if limit > 65536 + 4 * len(distances):  # counting would cost more than sorting
            live = np.flatnonzero(alive).astype(np.int64)
            return live[np.argsort(distances[live], kind="stable")[:k]]
        out = np.empty(k, np.int64)
        return out[: _kernels.select_smallest(distances, alive, limit, out)]

    def _ids(self, places: I64) -> U64:
        """Ids at these places."""
        if len(places) <= RUNNING_K:
            return np.array([self._id(place) for place in places.tolist()], np.uint64)
        out = np.empty(len(places), np.uint64)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            out[here] = self._parts[number][0].ids[places[here] - self._starts[number]]
        return out

    def _id(self, place: int) -> int:
        number = bisect_right(self._starts, place) - 1
        return self._parts[number][0].ids.item(place - self._starts[number])


def telling_first(near: NDArray[Any], count: int) -> list[int]:
    """Order the rows of `near` so that the sum of the first `count` tells most of that of all.

    One by one goes next which, with those before it, correlates best with the sum of all.
    """
    spread = near - near.mean(axis=1, keepdims=True)
    alike = spread @ spread.T  # covariances
    with_all = alike.sum(axis=0)
    told, own, with_these = 0.0, 0.0, np.zeros(len(near))
    order: list[int] = []
    left = list(range(len(near)))
    for _ in range(count):
        varies = own + 2 * with_these[left] + alike.diagonal()[left]
        # Distances are integers: a sum that varies less than so does not vary.
        fits = (told + with_all[left]) / np.sqrt(np.maximum(varies, 1e-3))
        at = int(np.argmax(fits))
        told, own = told + with_all[left[at]], varies[at]
        with_these = with_these + alike[left[at]]
        order.append(left.pop(at))
    return order + left


def _nothing() -> tuple[U64, U32]:
    return np.empty(0, np.uint64), np.empty(0, np.uint32)

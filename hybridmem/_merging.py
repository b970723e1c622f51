"""Choosing among what several stores found, exactly as one store of all their entries would.

That store holds the entries of the first one, then those of the second, and so on: ties go to the
earlier store, and in a store to the smaller id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem._ranking import Ranking, Scores, combined

__all__ = ["Candidates", "Place", "choose"]

#: Number of a store, and index among its candidates.
Place = tuple[int, int]


class Candidates(NamedTuple):
    """What the signatures of one store found for one query, best first.

    Attributes
    ----------
    ids : uint64 array
    distances : uint32 array
    estimates : float64 array or None
        What they are ordered by, falling, where it is not the distances.
    positions : int64 array or None
        For `max_run`: where each stands among the entries of its layer in this store.
    layer_entries : int
        How many these are.
    """

    ids: npt.NDArray[np.uint64]
    distances: npt.NDArray[np.uint32]
    estimates: Scores | None = None
    positions: npt.NDArray[np.int64] | None = None
    layer_entries: int = 0


def choose(
    found: Sequence[Candidates],
    top_k: int,
    ranking: Ranking,
    said: Callable[[Sequence[Place]], Scores],
    most: Sequence[int | None] | None = None,
) -> list[Place]:
    """Choose the hits of one query.

    Parameters
    ----------
    found : sequence of Candidates
        Of each store, at least as many as `Ranking.depth` asks for, or all there are.
    said : callable
        Asked, for `rerank`, what some candidates say (`_ranking.evidence`), shape (n, heads, m).
    most : sequence of (int or None), optional
        Most hits of each store. Those of a second stage are limited in proportion.

    Returns
    -------
    list of Place
        Best first.
    """
    ranked = _by_signatures(found)
    if ranking.rerank is not None and ranked:
        depth = ranking.depth(top_k)
        if most is not None:
            share = [None if one is None else -(-one * depth // top_k) for one in most]
            ranked = list(_within(ranked, share))
        ranked = ranked[:depth]
        scores = combined(ranking.rerank, said(ranked))
        ids = np.array([found[store].ids[at] for store, at in ranked], np.uint64)
        stores = np.array([store for store, _ in ranked])
        order = np.lexsort((ids, stores, -scores))
        ranked = [ranked[at] for at in order.tolist()]
    if not ranking.max_run and not ranking.newest:
        return (ranked if most is None else list(_within(ranked, most)))[:top_k]
    starts = np.cumsum([0, *(one.layer_entries for one in found)]).tolist()

    def position(place: Place) -> int:
        positions = found[place[0]].positions
        assert positions is not None
        return int(starts[place[0]] + positions[place[1]])

    newest = _newest(found, ranking.newest, most)
    return _spread(ranked, top_k, ranking, position, newest, most)


def _by_signatures(found: Sequence[Candidates]) -> list[Place]:
    if len(found) == 1:
        return [(0, at) for at in range(len(found[0].ids))]
    sizes = [len(one.ids) for one in found]
    keys = np.concatenate(
        [one.distances if one.estimates is None else -one.estimates for one in found]
    )
    order = np.argsort(keys, kind="stable")
    stores = np.repeat(np.arange(len(found)), sizes)[order]
    places = order - np.cumsum([0, *sizes[:-1]])[stores]
    return list(zip(stores.tolist(), places.tolist(), strict=True))


def _within(ranked: Iterable[Place], most: Sequence[int | None]) -> Iterable[Place]:
    """Leave out what exceeds the most of its store."""
    left = list(most)
    for place in ranked:
        room = left[place[0]]
        if room is None:
            yield place
        elif room:
            left[place[0]] = room - 1
            yield place


def _newest(
    found: Sequence[Candidates], count: int, most: Sequence[int | None] | None
) -> list[Place]:
    """Return the candidates put last, the very last first."""
    newest: list[Place] = []
    for store in reversed(range(len(found))):
        last = np.argsort(found[store].ids)[::-1][:count].tolist()
        newest += [(store, at) for at in last]
    return (newest if most is None else list(_within(newest, most)))[:count]


def _spread(
    ranked: Sequence[Place],
    top_k: int,
    ranking: Ranking,
    position: Callable[[Place], int],
    newest: Sequence[Place],
    most: Sequence[int | None] | None,
) -> list[Place]:
    """Choose of the ranked candidates: no run of neighbours too long, the newest in.

    Parameters
    ----------
    position : callable
        Where a candidate stands in the order of its layer.
    newest : sequence of Place
        Those that are always chosen.
    """
    fixed = set(newest[:top_k])
    chosen: list[Place] = []
    taken: set[int] = {position(place) for place in fixed} if ranking.max_run else set()
    room = top_k - len(fixed)
    left = None if most is None else list(most)
    if left is not None:
        for store, _ in fixed:
            left[store] = _less(left[store])
    for place in ranked:
        if len(chosen) == top_k:
            break
        if place in fixed:
            chosen.append(place)
            continue
        if room == 0 or (left is not None and left[place[0]] == 0):
            continue
        if ranking.max_run:
            at = position(place)
            if _run_length(taken, at) > ranking.max_run:
                continue
            taken.add(at)
        if left is not None:
            left[place[0]] = _less(left[place[0]])
        chosen.append(place)
        room -= 1
    # A second stage may have left some of the newest out of what is ranked.
    return chosen + [place for place in newest[:top_k] if place not in chosen]


def _less(room: int | None) -> int | None:
    return None if room is None else room - 1


def _run_length(taken: set[int], at: int) -> int:
    """Return the length of the run of chosen neighbours that `at` would be part of."""
    low = at
    while low - 1 in taken:
        low -= 1
    high = at
    while high + 1 in taken:
        high += 1
    return high - low + 1

"""A layer beside the same in a dictionary, and what must hold of its clusters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridmem import _clusters
from hybridmem._index import LayerIndex
from hybridmem._view import IndexView
from hybridmem.hdc import SignatureSpec

U8 = NDArray[np.uint8]
SPEC = SignatureSpec(192)


class Model:
    """A layer, and the same in a dictionary."""

    def __init__(self, seed: int, planted: int = 12) -> None:
        self.rng = np.random.default_rng(seed)
        self.index = LayerIndex(SPEC)
        self.records: dict[int, U8] = {}
        self.last_id = 0
        self.centres = self.rng.integers(0, 2, (planted, SPEC.hdc_dim), dtype=np.uint8)

    def signatures(self, n: int) -> U8:
        """Near one of the centres each; a tenth of the bits turned."""
        bits = self.centres[self.rng.integers(0, len(self.centres), n)]
        return np.packbits(bits ^ (self.rng.random(bits.shape) < 0.1), axis=1)

    def extend(self, signatures: U8) -> None:
        n = len(signatures)
        ids = self.last_id + np.cumsum(self.rng.integers(1, 4, n))
        self.index.extend(ids, np.ones(n, np.uint32), signatures)
        self.records.update(zip(ids.tolist(), signatures, strict=True))
        self.last_id = int(ids[-1])

    def remove(self, some: list[int]) -> None:
        for entry_id in some:
            self.index.remove(entry_id)
            del self.records[entry_id]

    def remove_share(self, share: float) -> None:
        self.remove([i for i in self.records if self.rng.random() < share])

    def deal_all(self) -> IndexView:
        for _ in range(10_000):
            view = self.index.view(approximate=True)
            if len(view) < _clusters.LARGE or len(view) - end_of(view) < _clusters.BATCH:
                return view
        raise AssertionError("entries are never dealt")

    def expect(self, query: U8, k: int, among: set[int] | None = None) -> list[tuple[int, int]]:
        found = sorted(
            (int(np.unpackbits(signature ^ query).sum()), i)
            for i, signature in self.records.items()
            if among is None or i in among
        )
        return [(i, d) for d, i in found[:k]]


def end_of(view: IndexView) -> int:
    return 0 if view._dealt is None else view._dealt.end


def ids_of(view: IndexView) -> tuple[list[int], list[bool]]:
    """Id of every place of a view, and whether it is alive."""
    ids = [i for block, filled in view._parts for i in block.ids[:filled].tolist()]
    alive = [bool(a) for block, filled in view._parts for a in block.alive[:filled]]
    return ids, alive


def found(
    view: IndexView, query: U8, k: int, entry_ids: NDArray[np.uint64] | None = None
) -> list[tuple[int, int]]:
    ((ids, distances),) = view.search([query[None]], k, entry_ids, approximate=True)
    assert (ids.dtype, distances.dtype) == (np.uint64, np.uint32)
    return list(zip(ids.tolist(), distances.tolist(), strict=True))


def looked_at(view: IndexView, query: U8, k: int) -> set[int]:
    """Ids of the nearest clusters, by definition, and of what is in none."""
    ids, _ = ids_of(view)
    dealt = view._dealt
    assert dealt is not None
    count = _clusters.to_read(len(view), k)
    n = len(dealt.sizes)
    far = np.unpackbits(dealt.centres[:n] ^ query, axis=1).sum(axis=1) + dealt.nearer
    places = list(range(dealt.end, len(view)))
    read = 0
    for row in sorted(range(n), key=lambda row: (far[row], row)):
        if read < count:
            places += dealt.members[row, : dealt.sizes[row]].tolist()
            read += int(dealt.sizes[row])
    return {ids[place] for place in places}


def check_clusters(view: IndexView) -> None:
    """Every live entry before the end is in one cluster, and none after it."""
    dealt = view._dealt
    if dealt is None:
        return
    assert dealt.sizes.min(initial=0) >= 0
    assert dealt.sizes.max(initial=0) <= _clusters.ROOM
    places = [
        place
        for row, size in enumerate(dealt.sizes.tolist())
        for place in dealt.members[row, :size].tolist()
    ]
    assert len(places) == len(set(places))
    _, alive = ids_of(view)
    assert {place for place in places if alive[place]} == {
        place for place in range(dealt.end) if alive[place]
    }


def check_groups(index: LayerIndex) -> None:
    """Every cluster that holds something is in one group, which it knows."""
    clusters = index._clusters
    if clusters is None:
        return
    rows = [row for group in clusters._groups for row in group.tolist()]
    assert len(rows) == len(set(rows))
    assert set(np.flatnonzero(clusters._sizes).tolist()) <= set(rows)
    assert len(clusters._groups) == len(clusters._middles)
    for number, group in enumerate(clusters._groups):
        assert 0 < len(group) <= _clusters.GROUP
        assert (clusters._group[group] == number).all()

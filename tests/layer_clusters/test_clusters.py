"""Approximate search of pooled signatures: what is in clusters, and what a search may say."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import hybridmem
from hybridmem import _clusters, _kernels

from .helpers import SPEC, U8, Model, check_clusters, check_groups, end_of, found, ids_of, looked_at


@pytest.mark.parametrize("seed", range(8))
def test_a_random_history(seed: int) -> None:
    """Clusters hold what is live, and a search finds the best of what it looks at."""
    model = Model(seed)
    approximate = 0
    for step in range(60):
        action = model.rng.random()
        if action < 0.5 or len(model.records) < 100:
            model.extend(model.signatures(int(model.rng.integers(1, 90))))
        elif action < 0.6:
            model.remove_share(0.3)
        elif action < 0.7:  # the oldest, as eviction may
            model.remove(sorted(model.records)[: len(model.records) // 3])
        elif action < 0.72:
            model.remove_share(0.9)
        else:
            model.remove_share(0.08)
        view = model.index.view(approximate=True) if step % 3 else model.deal_all()
        check_clusters(view)
        check_groups(model.index)
        for k in (1, 4, 20):
            query = model.signatures(1)[0]
            want = model.expect(query, k)
            if view._dealt is not None and _clusters.to_read(len(view), k):
                among = looked_at(view, query, k)
                if len(view.living(view._dealt.near(query, _clusters.to_read(len(view), k)))) >= k:
                    approximate += want != model.expect(query, k, among)
                    want = model.expect(query, k, among)
            assert found(view, query, k) == want
    assert approximate, "every search was exact"


def test_what_was_just_put_is_found() -> None:
    model = Model(1)
    model.extend(model.signatures(400))
    model.deal_all()
    for n in (1, 3, 15, 16, 40):
        model.extend(model.rng.integers(0, 256, (n, SPEC.record_bytes), dtype=np.uint8))
        view = model.index.view(approximate=True)
        assert end_of(view) > 300
        for entry_id in sorted(model.records)[-min(n, 15) :]:
            assert found(view, model.records[entry_id], 1) == [(entry_id, 0)]


def test_an_existing_layer_is_dealt_batch_by_batch() -> None:
    """No search deals more than a batch, and none before an approximate one was made."""
    model = Model(2)
    model.extend(model.signatures(500))
    assert end_of(model.index.view()) == 0
    for batch in range(1, 500 // 16 + 1):
        assert end_of(model.index.view(approximate=True)) == 16 * batch
    assert end_of(model.index.view(approximate=True)) == 496
    assert model.index.view(approximate=True) is model.index.view()


def test_near_neighbours_are_found_in_few_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer are read the larger a layer, by its share."""
    monkeypatch.setattr(_clusters, "READ", 2)
    model = Model(3, planted=150)
    shares = []
    for _ in range(2):
        model.extend(model.signatures(1500))
        view = model.deal_all()
        right = total = read = 0
        for query in model.signatures(40):
            want = model.expect(query, 5)
            right += len({i for i, _ in want} & {i for i, _ in found(view, query, 5)})
            total += len(want)
            read += len(looked_at(view, query, 5))
        assert right / total > 0.95
        shares.append(read / 40 / len(model.records))
    assert shares[1] < shares[0] < 0.25


def test_exact_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(4)
    model.extend(model.signatures(700))
    model.remove_share(0.1)
    view = model.deal_all()
    queries = model.rng.integers(0, 256, (50, SPEC.record_bytes), dtype=np.uint8)  # far from all
    query = next(one for one in queries if found(view, one, 4) != model.expect(one, 4))
    some = sorted(model.records)[::2]
    among = np.array(some, np.uint64)
    assert found(view, query, 4, entry_ids=among) == model.expect(query, 4, set(some))
    for k in (100, 5000):
        assert _clusters.to_read(len(view), k) == 0
        assert found(view, query, k) == model.expect(query, k)
    ((ids, _),) = view.search([query[None]], 4)
    assert ids.tolist() == [i for i, _ in model.expect(query, 4)]
    monkeypatch.setattr(_clusters, "LARGE", 5000)
    assert found(view, query, 4) == model.expect(query, 4)


def test_exact_where_all_that_is_near_went() -> None:
    """One of six is removed everywhere, so that no block gets a smaller one instead."""
    model = Model(13)
    signatures = model.signatures(600)
    signatures[::6] = 0
    model.extend(signatures)
    view = model.deal_all()
    model.remove([i for i, signature in model.records.items() if not signature.any()])
    query = np.zeros(SPEC.record_bytes, np.uint8)
    assert view._dealt is not None
    assert len(view.living(view._dealt.near(query, _clusters.to_read(len(view), 10)))) < 10
    assert found(view, query, 10) == model.expect(query, 10)


def test_every_query_of_a_batch_is_searched_by_itself() -> None:
    model = Model(5)
    model.extend(model.signatures(600))
    view = model.deal_all()
    queries = [row[None] for row in model.signatures(5)]
    both = view.search(queries, 3, approximate=True)
    for query, (ids, distances) in zip(queries, both, strict=True):
        got = list(zip(ids.tolist(), distances.tolist(), strict=True))
        assert got == found(view, query[0], 3)


def test_a_view_stays_as_it_was() -> None:
    """Entries that come, and clusters that are split, do not show in it."""
    model = Model(6)
    model.extend(model.signatures(300))
    views = []
    for _ in range(6):
        view = model.index.view(approximate=True)
        query = model.signatures(1)[0]
        views.append((view, query, found(view, query, 4)))
        model.deal_all()
        model.extend(model.signatures(150))
    removed = set(list(model.records)[::3])
    for view, query, want in views:
        check_clusters(view)
        assert found(view, query, 4) == want
    model.remove(sorted(removed))
    for view, query, _ in views:
        check_clusters(view)
        ids = [i for i, _ in found(view, query, 4)]
        assert len(ids) == 4
        _, alive = ids_of(view)
        assert alive.count(False), "nothing was removed under the view"


def test_equal_signatures_do_not_scatter() -> None:
    """They cannot be told apart; halves of them fill clusters as others do."""
    model = Model(7)
    model.extend(np.repeat(model.signatures(1), 800, axis=0))
    view = model.deal_all()
    check_clusters(view)
    assert view._dealt is not None
    assert np.count_nonzero(view._dealt.sizes) <= 800 / (_clusters.ROOM / 4)
    query = model.signatures(1)[0]
    assert len(found(view, query, 4)) == 4


def test_equal_distances_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are all as far from each other part by halves, not one by one."""
    signatures = np.packbits(np.eye(SPEC.hdc_dim, dtype=np.uint8), axis=1)
    parts = _clusters._parted(signatures, 8)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(signatures)))
    assert min(len(part) for part in parts) >= 4
    model = Model(15)
    model.extend(np.tile(signatures, (4, 1)))
    model.deal_all()
    assert model.index._clusters is not None
    sizes = model.index._clusters._sizes
    assert np.count_nonzero(sizes) <= 4 * len(signatures) / 3
    assert len(model.index._clusters._groups) < np.count_nonzero(sizes) / 2


def test_where_few_are_left_in_clusters_all_are_dealt_anew() -> None:
    model = Model(8)
    model.extend(model.signatures(1500))
    model.deal_all()
    model.remove_share(0.9)
    view = model.index.view()
    assert end_of(view) < len(view) / 2
    query = model.signatures(1)[0]
    assert found(view, query, 5) == model.expect(query, 5)
    check_clusters(model.deal_all())


def test_clusters_that_were_split_or_emptied_give_room() -> None:
    """Memory follows the entries there are, not those that there were."""
    model = Model(9)
    for _ in range(60):
        model.extend(model.signatures(100))
        model.deal_all()
        if len(model.records) > 400:
            model.remove(sorted(model.records)[:100])
    view = model.deal_all()
    check_clusters(view)
    assert view._dealt is not None
    assert len(view._dealt.centres) < len(model.records) < model.last_id / 20


def test_no_entry_of_a_batch_is_alive() -> None:
    model = Model(10)
    model.extend(model.signatures(200))
    model.remove(sorted(model.records)[:16])
    check_clusters(model.index.view(approximate=True))
    check_clusters(model.deal_all())


def dealt_by_history() -> list[bytes]:
    model = Model(11)
    for _ in range(5):
        model.extend(model.signatures(130))
        view = model.deal_all()
        model.remove_share(0.1)
    assert view._dealt is not None
    n = len(view._dealt.sizes)
    held = [view._dealt.members[row, : view._dealt.sizes[row]].tobytes() for row in range(n)]
    return [view._dealt.centres[:n].tobytes(), view._dealt.nearer.tobytes(), *held]


def test_wide_clusters_are_looked_at_sooner() -> None:
    """By three sixteenths of what their mean radius is more."""
    model = Model(14)
    model.extend(model.signatures(500))
    dealt = model.deal_all()._dealt
    assert dealt is not None
    signatures = list(model.records.values())
    for row in np.flatnonzero(dealt.sizes).tolist():
        theirs = np.stack([signatures[i] for i in dealt.members[row, : dealt.sizes[row]]])
        radius = int(np.unpackbits(theirs ^ dealt.centres[row], axis=1).sum()) // len(theirs)
        assert dealt.nearer[row] == 3 * (SPEC.hdc_dim - radius) // 16


def test_the_same_clusters_at_every_level(simd: str) -> None:
    got = dealt_by_history()
    _kernels.set_simd_level("scalar")
    assert got == dealt_by_history()
    assert simd in _kernels.simd_levels()


def test_searches_beside_one_who_adds_and_removes() -> None:
    """Threads search views, some old ones, without a lock; each answer is of entries that were."""
    model = Model(12)
    model.extend(model.signatures(600))
    model.deal_all()
    everything = dict(model.records)
    queries = model.signatures(8)
    shown = [model.index.view()]
    over = threading.Event()
    wrong: list[object] = []
    searches = [0] * 3

    def search(number: int) -> None:
        rng = np.random.default_rng(number)
        while not over.is_set():
            view = shown[int(rng.integers(len(shown)))]
            query = queries[int(rng.integers(len(queries)))]
            got = found(view, query, 4)
            order = [(d, i) for i, d in got]
            far = [int(np.unpackbits(everything[i] ^ query).sum()) for i, _ in got]
            if len(got) != 4 or order != sorted(set(order)) or far != [d for _, d in got]:
                wrong.append(got)
            searches[number] += 1

    threads = [threading.Thread(target=search, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            new = model.signatures(int(model.rng.integers(1, 60)))
            before = set(model.records)
            next_ids = model.last_id
            model.rng, kept = np.random.default_rng(next_ids), model.rng
            ids = next_ids + np.cumsum(model.rng.integers(1, 4, len(new)))
            everything.update(zip(ids.tolist(), new, strict=True))
            model.rng = np.random.default_rng(next_ids)
            model.extend(new)
            model.rng = kept
            assert set(model.records) > before
            model.remove(sorted(model.records)[: len(new) // 2])
            shown.append(model.index.view(approximate=True))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all(searches)


def test_a_store_deals_when_it_is_asked_approximately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    keys = rng.normal(size=(200, 1, 16)).astype(np.float32)
    asked: list[int] = []
    near = _clusters.Dealt.near

    def counted(self: _clusters.Dealt, query: U8, count: int) -> NDArray[np.int64]:
        asked.append(count)
        return near(self, query, count)

    monkeypatch.setattr(_clusters.Dealt, "near", counted)
    with hybridmem.create(tmp_path / "s", embed_dim=16, hdc_dim=192) as store:
        ids = [store.put(one, one, 0) for one in keys]
        store.query(keys[0, 0], 0, 1)
        assert not asked
        for one, entry_id in zip(keys, ids, strict=True):
            (hit,) = store.query(one[0], 0, 1, approximate=True)
            assert hit.entry_id == entry_id
        assert len(asked) == len(keys)
        assert store.put(keys[5], keys[5], 0)
        new = rng.normal(size=(1, 16)).astype(np.float32)
        last = store.put(new, new, 0)
        (hit,) = store.query(new[0], 0, 1, approximate=True)
        assert hit.entry_id == last

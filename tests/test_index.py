"""LayerIndex: exact search against a list of records, while entries come and go."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import twins
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmem import _index, _kernels, _parallel, _view, hdc
from hybridmem._index import LayerIndex
from hybridmem.hdc import SignatureSpec

SPECS = [
    SignatureSpec(64),
    SignatureSpec(192),
    SignatureSpec(4096),
    SignatureSpec(512, 1, 64),
    SignatureSpec(320, 3, 64),
    SignatureSpec(512, 2, 0),
    SignatureSpec(4096, 1, 64),
    SignatureSpec(65 * 64, 1, 64),
    SignatureSpec(4096, 16, 1024),
]


@pytest.fixture(autouse=True, params=["equal", "growing"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 entries, or of 64, 64, 128, 256 ...: a few hundred entries fill several."""
    monkeypatch.setattr(_index, "FIRST_BLOCK_BYTES", 1)
    monkeypatch.setattr(_index, "HUGE_PAGE", 1)
    monkeypatch.setattr(_index, "BLOCK_BYTES", 1 if request.param == "equal" else 1 << 24)


class Model:
    """The same index as a dictionary, searched with the twins."""

    def __init__(self, spec: SignatureSpec, seed: int, few: bool) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(seed)
        self.values = 2 if few else 256  # few values: many ties
        self.index = LayerIndex(spec)
        self.records: dict[int, np.ndarray] = {}
        self.next_id = 1

    def subs(self, n: int) -> np.ndarray:
        return self.rng.integers(0, self.values, (n, self.spec.bits // 8), dtype=np.uint8)

    def extend(self, n: int) -> None:
        steps = self.rng.integers(1, 4, n)
        ids = (self.next_id + np.cumsum(steps)).astype(np.uint64)
        longest = max(1, self.spec.slots * max(1, self.spec.signature_tokens) * 5 // 4)
        tokens = self.rng.integers(1, longest + 1, n).astype(np.uint32)
        records = np.zeros((n, self.spec.record_bytes), np.uint8)
        for i in range(n):
            subs = self.subs(self.spec.used_slots(int(tokens[i])))
            records[i, : subs.size] = subs.reshape(-1)
            self.records[int(ids[i])] = subs
        self.index.extend(ids, tokens, records)
        if n:
            self.next_id = int(ids[-1]) + 1

    def remove(self, share: float) -> None:
        for entry_id in [i for i in self.records if self.rng.random() < share]:
            self.index.remove(entry_id)
            del self.records[entry_id]

    def query(self, tokens: int) -> np.ndarray:
        return self.subs(1 if self.spec.pooled else tokens)

    def expect(self, query: np.ndarray, k: int, among: set[int] | None = None) -> list:
        found = sorted(
            (twins.late(subs, query), i)
            for i, subs in self.records.items()
            if among is None or i in among
        )
        return [(i, d) for d, i in found[:k]]

    def check(
        self, view: _view.IndexView, k: int, among: list[int] | None = None, threads: int = 1
    ) -> None:
        queries = [self.query(t) for t in (1, 9, 2)]
        ids = None if among is None else np.array(among, np.uint64)
        results = view.search(queries, k, ids, threads=threads)
        assert len(results) == 3
        for query, (got_ids, got_distances) in zip(queries, results, strict=True):
            assert (got_ids.dtype, got_distances.dtype) == (np.uint64, np.uint32)
            got = list(zip(got_ids.tolist(), got_distances.tolist(), strict=True))
            assert got == self.expect(query, k, None if among is None else set(among))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_level_and_kind(simd: str, spec: SignatureSpec) -> None:
    model = Model(spec, 1, few=False)
    model.extend(150)
    model.remove(0.2)
    model.extend(3)
    for k in (1, 7, 64, 65, 1000):
        model.check(model.index.view(), k)
    chosen = [0, 10**9, 2**64 - 1, *list(model.records)[::3]]
    model.check(model.index.view(), 5, chosen + chosen[:9])


@pytest.mark.parametrize("spec", SPECS[2::3], ids=str)
def test_all_of_them_by_id_are_scanned_like_all(
    spec: SignatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(spec, 2, few=True)
    model.extend(150)
    model.remove(0.1)  # too few for blocks to be rewritten: their places stay, dead
    view, everything = model.index.view(), list(model.records)
    assert len(view) > len(everything)
    model.extend(9)  # not in this view
    later = list(model.records)
    for entry_id in later[-4:]:
        model.index.remove(entry_id)
        del model.records[entry_id]
    for k in (1, 7, 1000):
        model.check(view, k, everything[4:])  # as many are missing as are dead elsewhere
    monkeypatch.setattr(_view.IndexView, "_search_at", None)  # which is for some of them
    for k in (1, 7, 1000):
        model.check(view, k, everything)
        model.check(model.index.view(), k, later)
    with pytest.raises(TypeError):
        model.check(view, 5, everything[1:])


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_threads_find_the_same(
    spec: SignatureSpec, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_view, "LEAST_BYTES", 1)
    used = set()
    scan = _kernels.hamming_topk if spec.pooled else _kernels.late_topk

    def noted(*args: object) -> None:
        used.add(threading.get_ident())
        time.sleep(0.01)
        scan(*args)

    monkeypatch.setattr(_kernels, scan.__name__, noted)
    for few in (False, True):  # many ties
        model = Model(spec, 3, few)
        model.extend(333)
        model.remove(0.3)
        for k in (1, 5, 64):
            model.check(model.index.view(), k, threads=threads)
    assert len(used) > 1


@pytest.mark.parametrize("shares", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("step", [1, 4, 64])
@pytest.mark.parametrize("sizes", [[64], [64, 64, 1], [0, 13, 200, 0, 64, 77], [1, 1, 1]])
def test_shares_cover_all_blocks_once(sizes: list[int], step: int, shares: int) -> None:
    divided = _parallel.divided(sizes, shares, step)
    assert len(divided) <= shares
    spans = [span for share in divided for span in share]
    covered = [(block, at) for block, first, end in spans for at in range(first, end)]
    assert covered == [(block, at) for block, size in enumerate(sizes) for at in range(size)]
    assert all(span.first % step == 0 for span in spans)
    each = -(-sum(sizes) // shares)
    assert all(sum(end - first for _, first, end in share) < each + step for share in divided)


def test_a_failing_thread_fails_the_search() -> None:
    def scan(spans: list[_parallel.Span]) -> _parallel.Best:
        if spans[0].first:
            raise MemoryError("injected")
        return _parallel.Best(np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.int64))

    with pytest.raises(MemoryError, match="injected"):
        _parallel.scanned(scan, _parallel.divided([100], 2, 1))


def test_long_query_over_few_entries() -> None:
    """Distances far larger than the number of entries: sorted, not counted."""
    model = Model(SignatureSpec(4096, 16, 1024), 2, few=False)
    model.extend(90)
    model.remove(0.1)
    query = model.query(80)
    ids = np.array(list(model.records)[::2], np.uint64)
    for among in (None, ids):
        ((got_ids, got_distances),) = model.index.view().search([query], 70, among)
        got = list(zip(got_ids.tolist(), got_distances.tolist(), strict=True))
        assert got == model.expect(query, 70, None if among is None else set(ids.tolist()))


def most_telling(records: list[np.ndarray], query: np.ndarray) -> list[int]:
    """Query tokens, each the one whose sum with those before it correlates best with all."""
    far = [[twins.late(record, token[None]) for record in records] for token in query]
    whole = np.sum(far, axis=0)
    order: list[int] = []
    while len(order) < len(query):
        tried = {}
        for token in set(range(len(query))) - set(order):
            some = np.sum([far[t] for t in (*order, token)], axis=0)
            tried[token] = np.corrcoef(some, whole)[0, 1] if some.std() else -1
        order.append(max(tried, key=lambda token: tried[token]))
    return order


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.pooled and s.hdc_dim < 4096], ids=str)
@pytest.mark.parametrize("few", [False, True])
def test_approximate_search_gives_up_what_begins_far_away(
    few: bool, spec: SignatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third goes on after the two tokens that tell most, by a sample, and an eighth after 5."""
    monkeypatch.setattr(_view, "GATES", ((2, 3), (5, 8)))
    monkeypatch.setattr(_view, "LARGE", 100)
    monkeypatch.setattr(_view, "_SAMPLE", 40)
    model = Model(spec, 3, few)
    model.extend(330)
    everyone = dict(model.records)
    model.remove(0.2)
    view = model.index.view()
    places = [i for block, filled in view._parts for i in block.ids[:filled].tolist()]
    chosen = [i for i in model.records if i % 2]
    assert len(chosen) >= 100
    differs = 0
    for among in (None, chosen):
        for tokens, gates in ((9, ((2, 3), (5, 8))), (4, ((2, 3),)), (2, ())):
            query = model.query(tokens)
            pool = places if among is None else chosen  # dead ones are sampled too
            passed = set(pool)
            sampled = [everyone[i] for i in pool[:: len(pool) // 40]]
            telling = most_telling(sampled, query)
            for end, share in gates:
                far = {i: twins.late(everyone[i], query[telling[:end]]) for i in pool}
                sample = sorted(twins.late(one, query[telling[:end]]) for one in sampled)
                passed &= {i for i in pool if far[i] <= sample[len(sample) // share]}
            passed &= set(model.records)
            for k in (1, 3) if among else (1, 8):
                exact = model.expect(query, k, None if among is None else set(among))
                want = model.expect(query, k, passed) if len(passed) >= k else exact
                ids = None if among is None else np.array(among, np.uint64)
                ((got_ids, got_distances),) = view.search([query], k, ids, approximate=True)
                got = list(zip(got_ids.tolist(), got_distances.tolist(), strict=True))
                assert got == (want if gates else exact)
                differs += want != exact
    assert differs or few
    for k in (11, 1000):  # so many are wanted that all are looked at
        query = model.query(9)
        ((ids, _),) = view.search([query], k, approximate=True)
        assert ids.tolist() == [i for i, _ in model.expect(query, k)]


def test_queries_of_a_batch_are_approximate_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tokens are too few to give entries up by; those of the other query are given up."""
    monkeypatch.setattr(_view, "LARGE", 100)
    monkeypatch.setattr(_view, "_SAMPLE", 40)
    model = Model(SignatureSpec(512, 1, 64), 6, few=False)
    model.extend(330)
    view = model.index.view()
    queries = [model.query(9), model.query(2)]
    everyone = np.array(list(model.records), np.uint64)
    for ids in (None, everyone, everyone[1:]):
        both = view.search(queries, 4, ids, approximate=True)
        alone = [view.search([query], 4, ids, approximate=True)[0] for query in queries]
        for got, want in zip(both, alone, strict=True):
            np.testing.assert_array_equal(got, want)
    exact = [i for i, _ in model.expect(queries[0], 4)]
    assert view.search(queries, 4, approximate=True)[0][0].tolist() != exact


def test_approximate_search_of_few_or_pooled_entries_is_exact() -> None:
    for spec in (SignatureSpec(4096), SignatureSpec(512, 1, 64)):
        model = Model(spec, 4, few=False)
        model.extend(150)
        query = model.query(8)
        ((ids, _),) = model.index.view().search([query], 1, approximate=True)
        assert ids.tolist() == [i for i, _ in model.expect(query, 1)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_dots_in_the_order_of_the_ids(spec: SignatureSpec) -> None:
    model = Model(spec, 5, few=False)
    model.extend(300)
    model.remove(0.2)
    model.extend(5)
    view = model.index.view()
    rng = np.random.default_rng(1)
    for count in (1, 40, len(model.records)):
        ids = rng.permutation(np.array(list(model.records), np.uint64))[:count]
        query = rng.integers(-15, 16, (1 if spec.pooled else 9, spec.bits)).astype(np.int8)
        want = [twins.dots(model.records[i], query) for i in ids.tolist()]
        np.testing.assert_array_equal(view.dots(query, ids), want)
    for missing in (1, 10**9, 2**64 - 1):  # ids begin with 2 at least
        with pytest.raises(KeyError):
            view.dots(query, np.array([*ids[:3], missing], np.uint64))
    model.index.remove(int(ids[0]))
    with pytest.raises(KeyError):
        view.dots(query, ids)


@settings(max_examples=40)
@given(
    spec=st.sampled_from([s for s in SPECS if s.hdc_dim <= 512]),
    seed=st.integers(0, 2**32 - 1),
    few=st.booleans(),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(0, 100)),
            st.tuples(st.just("remove"), st.floats(0, 1)),
            st.tuples(st.just("search"), st.sampled_from([1, 3, 64, 70, 2**62])),
            st.tuples(st.just("among"), st.integers(0, 50)),
        ),
        max_size=12,
    ),
)
def test_any_history(spec: SignatureSpec, seed: int, few: bool, steps: list) -> None:
    model = Model(spec, seed, few)
    for step, value in steps:
        blocks = model.index._blocks
        if step == "extend":
            model.extend(value)
        elif step == "remove":
            model.remove(value)
        elif step == "search":
            model.check(model.index.view(), value)
        else:
            ids = model.rng.integers(0, model.next_id + 5, value).tolist()
            model.check(model.index.view(), 10, ids)
        assert len(model.index) == len(model.records)
        for block in set(model.index._blocks) - set(blocks):
            assert 4 * block.dead <= block.filled
    model.check(model.index.view(), 5)


def test_empty() -> None:
    index = LayerIndex(SignatureSpec(64))
    query = np.zeros((1, 8), np.uint8)
    for among in (None, np.array([1, 2], np.uint64), []):
        ((ids, distances),) = index.view().search([query], 3, among)
        assert (len(ids), len(distances)) == (0, 0)
    assert index.view().search([], 3) == []
    with pytest.raises(KeyError):
        index.remove(1)


def test_search_among_all_entries_that_there_are_or_were() -> None:
    spec = SignatureSpec(64)
    index = LayerIndex(spec)
    index.extend(np.arange(1, 41), np.ones(40, np.uint32), np.zeros((40, 8), np.uint8))
    query = np.zeros((1, 8), np.uint8)
    everything = np.arange(1, 41, dtype=np.uint64)
    assert index.view().find(everything).tolist() == list(range(40))
    assert index.view().find(everything + np.uint64(1)).tolist() == list(range(1, 40))
    index.remove(7)
    ids, _ = index.view().search([query], 40, everything)[0]
    assert ids.tolist() == [one for one in range(1, 41) if one != 7]


def test_removing_compacts_and_old_views_hold() -> None:
    model = Model(SignatureSpec(512, 1, 64), 3, few=False)
    model.extend(200)
    view, before = model.index.view(), dict(model.records)
    model.remove(0.8)
    assert len(model.index.view()) < 1.4 * len(model.index) + 16
    model.check(model.index.view(), 300)
    found = view.search([model.query(2)], 1000)[0][0].tolist()
    assert set(model.records) <= set(found) <= set(before)
    model.extend(100)
    model.check(model.index.view(), 300)


@pytest.mark.parametrize("bad", [0, 1, 5, 10**6, -1, 2**64, 2**70])
def test_removing_what_is_not_there(bad: int) -> None:
    index = LayerIndex(SignatureSpec(64))
    index.extend(np.arange(2, 22, 2), np.ones(10, int), np.zeros((10, 8), np.uint8))
    with pytest.raises(KeyError):
        index.remove(bad)
    for gone in (20, 4):
        index.remove(gone)
        with pytest.raises(KeyError):
            index.remove(gone)
    assert len(index) == 8
    assert len(index.view()) == 10  # too few are dead for compaction


@pytest.mark.parametrize("spec", [SignatureSpec(256), SignatureSpec(512, 1, 64)], ids=str)
def test_views_hold_while_another_thread_extends(spec: SignatureSpec) -> None:
    model = Model(spec, 9, few=False)
    model.extend(300)
    view = model.index.view()
    queries = [model.query(3) for _ in range(4)]
    want = [model.expect(query, 70) for query in queries]
    stop = threading.Event()
    more = np.random.default_rng(1).integers(0, 256, (50, spec.record_bytes), dtype=np.uint8)

    def extend() -> None:
        next_id = 10**6
        while not stop.is_set() and next_id < 10**6 + 400_000:
            model.index.extend(np.arange(next_id, next_id + 50), np.full(50, 3), more)
            next_id += 50

    thread = threading.Thread(target=extend)
    thread.start()
    try:
        turns = 0
        while turns < 100 or (thread.is_alive() and len(model.index) <= 300):
            turns += 1
            for k in (5, 70):
                for (ids, distances), wanted in zip(view.search(queries, k), want, strict=True):
                    pairs = zip(ids.tolist(), distances.tolist(), strict=True)
                    assert list(pairs) == wanted[:k]
    finally:
        stop.set()
        thread.join()
    assert len(model.index) > 300


def test_signatures_find_their_entry() -> None:
    rng = np.random.default_rng(0)
    for spec in (SignatureSpec(1024), SignatureSpec(1024, 2, 128)):
        projector, index = spec.projector(48), LayerIndex(spec)
        entries = rng.standard_normal((100, 9, 48)).astype(np.float32)
        records = np.array([hdc.sign_entry(projector, spec, keys) for keys in entries])
        index.extend(np.arange(1, 101), np.full(100, 9), records)
        keys = entries[41] if spec.pooled else hdc.mean_pool(entries[41], 2)
        ((ids, distances),) = index.view().search([hdc.sign_query(projector, spec, keys)], 3)
        assert (ids[0], distances[0]) == (42, 0)


@pytest.mark.parametrize(
    ("ids", "tokens", "records", "says"),
    [
        ([5], [1], np.zeros((1, 9), np.uint8), r"\[n, 8\]"),
        ([5], [1, 1], np.zeros((1, 8), np.uint8), "n_tokens"),
        (5, 1, np.zeros(8, np.uint8), "expected"),
        ([4], [1], np.zeros((1, 8), np.uint8), "ascend"),
        ([6, 6], [1, 1], np.zeros((2, 8), np.uint8), "ascend"),
        ([7, 6], [1, 1], np.zeros((2, 8), np.uint8), "ascend"),
        ([6], [0], np.zeros((1, 8), np.uint8), "n_tokens must be at least 1"),
        ([6], [2**32], np.zeros((1, 8), np.uint8), "n_tokens must fit uint32"),
        ([-6], [1], np.zeros((1, 8), np.uint8), "ids must fit uint64"),
        ([6.0], [1], np.zeros((1, 8), np.uint8), "ids must hold integers"),
        ([6], [1], np.full((1, 8), 256), "signatures must fit uint8"),
    ],
)
def test_wrong_entries(ids: object, tokens: object, records: np.ndarray, says: str) -> None:
    index = LayerIndex(SignatureSpec(64))
    index.extend([4], [1], np.zeros((1, 8), np.uint8))
    with pytest.raises((TypeError, ValueError), match=says):
        index.extend(ids, tokens, records)  # type: ignore[arg-type]
    assert len(index) == 1
    index.extend([5], [1], np.zeros((1, 8), np.uint8))


@pytest.mark.parametrize(
    ("spec", "query", "k", "says"),
    [
        (SignatureSpec(64), np.zeros((1, 8), np.uint8), 0, "k must be at least 1"),
        (SignatureSpec(64), np.zeros((1, 8), np.uint8), -(2**70), "k must be at least 1"),
        (SignatureSpec(64), np.zeros((2, 8), np.uint8), 1, "2 signatures"),
        (SignatureSpec(64), np.zeros((0, 8), np.uint8), 1, "0 signatures"),
        (SignatureSpec(64), np.zeros((1, 16), np.uint8), 1, r"\[tokens, 8\]"),
        (SignatureSpec(64), np.zeros(8, np.uint8), 1, r"\[tokens, 8\]"),
        (SignatureSpec(64), np.zeros((1, 8), np.int8), 1, "int8"),
        (
            SignatureSpec(2**20, 1),
            np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (4096, 2**17), (0, 0)),
            1,
            "too long for 32-bit",
        ),
    ],
)
def test_wrong_query(spec: SignatureSpec, query: np.ndarray, k: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LayerIndex(spec).view().search([query], k)

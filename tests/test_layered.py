"""Layered stores answer exactly as one store of all their entries does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmem
from hybridmem._finding import Search

WIDTH = 16
LAYERS = 2
POOLED: dict[str, Any] = {"hdc_dim": 64}
TOKENS: dict[str, Any] = {"hdc_dim": 256, "signature_tokens": 1, "signature_bits": 64}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


Entry = tuple[np.ndarray, np.ndarray, int]


def few_keys(n_distinct: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((n_distinct, 4, WIDTH)).astype(np.float32)


def entries_of(rng: np.random.Generator, count: int, n_distinct: int) -> list[Entry]:
    """Return entries of few different keys, the same at each call, so that many scores tie."""
    distinct = few_keys(n_distinct)
    made = []
    for _ in range(count):
        n_tokens = int(rng.integers(1, 3))
        keys = distinct[rng.integers(n_distinct), :n_tokens]
        values = rng.standard_normal((n_tokens, WIDTH)).astype(np.float32)
        made.append((keys, values, int(rng.integers(LAYERS))))
    return made


class Pair:
    """Layered stores, and one store with the entries of all of them in their order."""

    def __init__(
        self, path: Path, parts: list[list[Entry]], config: dict[str, Any], calibrated: bool = False
    ) -> None:
        self.union = hybridmem.create(path / "union", embed_dim=WIDTH, **config)
        self.parts = [
            hybridmem.create(path / str(number), embed_dim=WIDTH, **config)
            for number in range(len(parts))
        ]
        means = np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)
        for store in (self.union, *self.parts):
            for layer in range(LAYERS if calibrated else 0):
                store.calibrate(layer, keys=means[0], queries=means[1])
        self.place: dict[int, tuple[int, int]] = {}  # by id in the union
        for number, entries in enumerate(parts):
            for at, (keys, values, layer) in enumerate(entries):
                own = self.parts[number].put(keys, values, layer)
                entry_id = self.union.put(keys, values, layer)
                if at % 5 == 3:
                    self.parts[number].delete(own)
                    self.union.delete(entry_id)
                else:
                    self.place[entry_id] = (number, own)
        for store in self.parts[:-1]:
            store.close()
        packs = [store.path for store in self.parts[:-1]]
        self.memory = hybridmem.layered([*packs, self.parts[-1]])

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        self.parts[-1].close()
        self.union.close()

    def ids(self, union_ids: Any) -> list[int]:
        """Return the ids that entries of the union have in the layered memory."""
        by_place = {}
        for entry_id in self.memory:
            store, own = self.memory.locate(entry_id)
            by_place[self.memory.stores.index(store), own] = entry_id
        return [by_place[self.place[int(one)]] for one in union_ids]

    def told(self, hits: list[hybridmem.Hit]) -> list[Any]:
        """Return where hits of the layered memory are, and all else that is said of them."""
        told = []
        for hit in hits:
            store, own = self.memory.locate(hit.entry_id)
            told.append((self.memory.stores.index(store), own, *said(hit)))
        return told

    def wanted(self, hits: list[hybridmem.Hit]) -> list[Any]:
        return [(*self.place[hit.entry_id], *said(hit)) for hit in hits]


def said(hit: hybridmem.Hit) -> tuple[Any, ...]:
    return (hit.score, hit.layer_idx, hit.n_tokens, hit.keys.tobytes(), hit.values.tobytes())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.booleans())
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["rerank"] = draw(st.sampled_from(["pooled", "tokens", "late"]))
        options["n_heads"] = draw(st.sampled_from([1, 2]))
        if draw(st.booleans()):
            options["candidates"] = draw(st.integers(8, 12))
    if draw(st.booleans()):
        options["max_run"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        options["newest"] = draw(st.integers(0, 3))
    if not tokens and draw(st.booleans()):
        options["order"] = "norm"
    return {
        "seed": draw(st.integers(0, 2**16)),
        "counts": draw(st.lists(st.integers(0, 14), min_size=1, max_size=4)),
        "n_distinct": draw(st.integers(1, 3)),
        "config": TOKENS if tokens else POOLED,
        "calibrated": "order" in options or draw(st.booleans()),
        "top_k": draw(st.integers(1, 8)),
        "among": draw(st.booleans()),
        "options": options,
    }


def test_runs_are_counted_over_entries_that_are_not_looked_for(tmp_path: Path) -> None:
    """The entry of the middle store keeps its neighbours apart, though it is not asked for."""
    keys = few_keys(1)[0]
    entry = (keys, keys, 0)
    with Pair(tmp_path, [[entry], [entry], [entry]], POOLED) as pair:
        ids = pair.ids([1, 3])
        for options, n_hits in (({}, 2), ({"max_run": 1}, 2)):
            wanted = pair.union.query(keys, 0, entry_ids=[1, 3], **options)
            got = pair.memory.query(keys, 0, entry_ids=ids, **options)
            assert pair.told(got) == pair.wanted(wanted)
            assert len(got) == n_hits
        assert len(pair.memory.query(keys, 0, max_run=1)) == 2


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_split_store_answers_as_the_whole(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    parts = [entries_of(rng, count, case["n_distinct"]) for count in case["counts"]]
    with (
        tempfile.TemporaryDirectory() as path,
        Pair(Path(path), parts, case["config"], case["calibrated"]) as pair,
    ):
        assert len(pair.memory) == len(pair.union)
        assert pair.memory.stats().entries_by_layer == pair.union.stats().entries_by_layer
        queries = rng.standard_normal((3, 2, WIDTH)).astype(np.float32)
        options, k = case["options"], case["top_k"]
        if case["among"]:
            some = [one for one in pair.union if rng.random() < 0.6]
            among: Any = {"entry_ids": some}, {"entry_ids": pair.ids(some)}
        else:
            among = {}, {}
        for layer in range(LAYERS):
            wanted = pair.union.query_many(list(queries), layer, k, **among[0], **options)
            got = pair.memory.query_many(list(queries), layer, k, **among[1], **options)
            assert [pair.told(hits) for hits in got] == [pair.wanted(hits) for hits in wanted]
            one = pair.memory.query(queries[0], layer, k, **among[1], **options)
            assert pair.told(one) == pair.wanted(wanted[0])
            pair.union.query(queries[0], layer, k, **among[0], **options)
            for mine, theirs in zip(
                hybridmem.attend(queries[0], pair.memory, layer, k, n_heads=2),
                hybridmem.attend(queries[0], pair.union, layer, k, n_heads=2),
                strict=True,
            ):
                np.testing.assert_array_equal(mine, theirs)
            for mine, theirs in zip(
                hybridmem.augmented_kv(queries[0], queries[1], queries[2], pair.memory, layer, k),
                hybridmem.augmented_kv(queries[0], queries[1], queries[2], pair.union, layer, k),
                strict=True,
            ):
                np.testing.assert_array_equal(mine, theirs)
        # Accesses count where the entries are that may change: in the private store.
        private = len(pair.parts) - 1
        counts = {
            pair.place[record["entry_id"].item()]: record["access_count"].item()
            for record in pair.union.entries
        }
        for record in pair.parts[-1].entries:
            place = (private, record["entry_id"].item())
            assert record["access_count"].item() == counts[place]
        assert pair.memory.stats().queries == pair.union.stats().queries
        assert pair.memory.stats().hits == pair.union.stats().hits


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, 2**16),
    st.integers(1, 10),
    st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=3, max_size=3),
    st.booleans(),
    st.integers(0, 2),
)
def test_limits_pass_over_what_is_too_much(
    seed: int, top_k: int, limits: list[int | None], by_layer: bool, newest: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [entries_of(rng, 10, 4) for _ in limits]
    with tempfile.TemporaryDirectory() as path, Pair(Path(path), parts, POOLED) as pair:
        query = rng.standard_normal((1, WIDTH)).astype(np.float32)
        given_limits: Any = [
            {0: limit} if by_layer and limit is not None else limit for limit in limits
        ]
        memory = hybridmem.layered(pair.memory.stores, limits=given_limits)
        for layer in range(LAYERS):
            left = [99 if limit is None or (by_layer and layer) else limit for limit in limits]
            ranked = pair.wanted(pair.union.query(query, layer, 30))
            wanted = []
            for told in ranked:
                if left[told[0]] and len(wanted) < top_k:
                    left[told[0]] -= 1
                    wanted.append(told)
            assert pair.told(memory.query(query, layer, top_k)) == wanted
            for options in ({"newest": newest, "max_run": 2}, {"rerank": "late"}):
                hits = pair.told(memory.query(query, layer, top_k, **options))
                for number, limit in enumerate(limits):
                    if limit is not None and not (by_layer and layer):
                        assert sum(told[0] == number for told in hits) <= limit


# -- ids ------------------------------------------------------------------------------------------


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[..., hybridmem.Store]]:
    made = []

    def new(name: str, count: int = 0, **config: Any) -> hybridmem.Store:
        store = hybridmem.create(tmp_path / name, **{"embed_dim": WIDTH, "hdc_dim": 64, **config})
        made.append(store)
        rng = np.random.default_rng(len(made))
        for keys, values, layer in entries_of(rng, count, 3):
            store.put(keys, values, layer)
        return store

    yield new
    for store in made:
        store.close()


def test_ids_stay_what_they_are_beside_other_stores(new_store: Any) -> None:
    one, two, mine = new_store("one", 3), new_store("two", 3), new_store("mine", 3)
    both = hybridmem.layered([one, two, mine])
    few = hybridmem.layered([two, mine])
    assert list(few) == list(both)[3:]
    assert list(both)[6:] == list(mine) == [1, 2, 3]
    assert all(0 < entry_id < 1 << 63 for entry_id in both)
    assert both.store_id == few.store_id == mine.store_id
    for number, entry_id in enumerate(both):
        store, own = both.locate(entry_id)
        assert store is both.stores[number // 3]
        entry = both.get(entry_id)
        assert entry.entry_id == entry_id
        np.testing.assert_array_equal(entry.values, store.get(own).values)
        assert entry_id in both
    stamps = [store.get(own).timestamp for store, own in map(both.locate, both)]
    assert both.timestamps([*both, 99, 5 << 50]) == [*stamps, 0, 0]
    gone = next(iter(both))
    assert gone not in few
    assert few.timestamps([gone]) == [0]
    for asked in (few.get, few.locate, few.delete):
        with pytest.raises(KeyError):
            asked(gone)
    for asked in (both.get, both.delete):
        missing = list(both)[2] + 1
        with pytest.raises(KeyError, match=f"has no entry {missing}: it was deleted, evicted or"):
            asked(missing)
        with pytest.raises(KeyError, match=r"Layered .*mode='r\+'> has no entry -1"):
            asked(-1)
    assert "x" not in both


def test_without_a_private_store_all_is_read_only(new_store: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        new_store(name, 3).close()
    row = np.ones((1, WIDTH), np.float32)
    with hybridmem.layered([tmp_path / "one", str(tmp_path / "two")]) as memory:
        assert (memory.mode, len(memory), len(set(memory))) == ("r", 6, 6)
        assert min(memory) >= 1 << 40
        assert memory.store_id not in [store.store_id for store in memory.stores]
        for call in (
            lambda: memory.put(row, row, 0),
            lambda: memory.put_many([(row, row)], 0),
            lambda: memory.delete(1),
            lambda: memory.evict(0),
            lambda: memory.compact(),
            lambda: memory.flush(),
            lambda: memory.calibrate(0, keys=row),
        ):
            with pytest.raises(hybridmem.ReadOnlyError, match="no private store"):
                call()
        stores = memory.stores
    for store in stores:
        with pytest.raises(hybridmem.StoreClosedError):
            len(store)


def test_what_writes_goes_to_the_private_store(new_store: Any, tmp_path: Path) -> None:
    new_store("pack", 4).close()
    mine = new_store("mine", 1)
    row = np.ones((1, WIDTH), np.float32)
    with hybridmem.layered([tmp_path / "pack", mine]) as memory:
        assert memory.put(row, row, 0, source="a") == 2
        assert memory.put_many([(row, row)], 1, sources=["b"]) == [3]
        assert (memory.get(2).source, memory.get(3).source) == ("a", "b")
        memory.delete(1)
        packed = next(iter(memory))
        with pytest.raises(hybridmem.ReadOnlyError, match=r"is entry 1 of .*pack, not private"):
            memory.delete(packed)
        assert memory.evict(1) == 1
        memory.flush()
        assert memory.compact() >= 0
        assert (len(memory), len(mine)) == (5, 1)
        assert memory.stats().evicted == 1
    assert len(mine) == 1  # open still
    with hybridmem.open(mine.path, mode="r") as reader:
        assert len(reader) == 1


def test_close_flushes_and_a_second_close_does_nothing(new_store: Any) -> None:
    mine = new_store("mine", 2)
    memory = hybridmem.layered([mine])
    memory.close()
    with hybridmem.open(mine.path, mode="r") as reader:
        assert len(reader) == 2
    mine.close()
    memory.close()
    row = np.ones((1, WIDTH), np.float32)
    for call in (
        lambda: memory.query(row, 0),
        lambda: memory.query_many([row], 0),
        lambda: memory.query_stored(row, 0),
        lambda: memory.get(1),
        lambda: memory.timestamps([1]),
        lambda: memory.put(row, row, 0),
        lambda: memory.take_back([]),
        lambda: memory.stats(),
        lambda: memory.refresh(),
        lambda: memory.store_id,
        lambda: memory.calibration,
        lambda: len(memory),
        lambda: list(memory),
        lambda: 1 in memory,
        lambda: memory.__enter__(),
    ):
        with pytest.raises(hybridmem.StoreClosedError):
            call()


def test_a_refresh_moves_the_readers(new_store: Any) -> None:
    writer, mine = new_store("shared", 2), new_store("mine", 1)
    writer.flush()
    with hybridmem.layered([writer.path, mine]) as memory:
        row = np.ones((1, WIDTH), np.float32)
        writer.put(row, row, 0)
        writer.flush()
        assert (len(memory), memory.refresh(), len(memory), memory.refresh()) == (3, True, 4, False)
        assert memory.query(row, 0, 1)[0].score == 1.0


# -- what cannot be layered -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"embed_dim": 24},
        {"hdc_dim": 128},
        {"seed": 7},
        {"signature_bits": 64, "signature_tokens": 1},
    ],
)
def test_other_signatures_are_refused_by_name(config: dict[str, Any], new_store: Any) -> None:
    one, other = new_store("one"), new_store("other", **config)
    name = "signature_tokens" if "signature_bits" in config else next(iter(config))
    with pytest.raises(ValueError, match=f"one and .*other cannot be layered: their {name}"):
        hybridmem.layered([one, other])


def test_other_models_are_refused(new_store: Any) -> None:
    one, other = new_store("one", model_id="A"), new_store("other", model_id="B")
    with pytest.raises(hybridmem.ModelMismatchError, match="'A' and 'B'"):
        hybridmem.layered([one, other])
    hybridmem.layered([one, new_store("unnamed")]).close()


def test_other_stored_forms_are_fine(new_store: Any, rng: np.random.Generator) -> None:
    small, mine = new_store("small", 5, quantize_stored=True), new_store("mine", 5)
    memory = hybridmem.layered([small, mine])
    query = rng.standard_normal((2, WIDTH)).astype(np.float32)
    assert len(memory.query(query, 0, 99)) + len(memory.query(query, 1, 99)) == 10
    output, log_sum_exp = hybridmem.attend(query, memory, 0, 99)
    parts = [hybridmem.attend(query, store, 0, 99) for store in (small, mine)]
    wanted = hybridmem.merge_attention(*parts[0], *parts[1])
    np.testing.assert_allclose(output, wanted[0], atol=1e-6)
    np.testing.assert_allclose(log_sum_exp, wanted[1], atol=1e-6)


def test_a_store_twice_is_refused(new_store: Any, tmp_path: Path) -> None:
    one = new_store("one", 1)
    one.flush()
    one.snapshot(tmp_path / "again")
    with pytest.raises(ValueError, match="one store, or copies of one"):
        hybridmem.layered([tmp_path / "again", one])


def test_ids_that_would_run_into_those_of_other_stores_are_refused(
    new_store: Any, tmp_path: Path
) -> None:
    one, mine = new_store("one", 1), new_store("mine", 1)
    mine._writer.next_entry_id = 1 << 39
    mine.put(np.ones((1, WIDTH)), np.ones((1, WIDTH)), 0)
    mine.flush()
    for _ in range(2):  # with the entry, and with what it leaves behind
        with pytest.raises(ValueError, match=r"mine .*ids .* beyond 2\*\*39; put its entries"):
            hybridmem.layered([one, mine])
        if len(mine) == 2:
            mine.delete(1 << 39)
            mine.compact()


@pytest.mark.parametrize(
    ("stores", "limits", "message"),
    [
        ([], None, "stores: got none"),
        ("path", None, "stores: got str, want a list"),
        (["one"], [1, 2], "limits: got 2 for 1 stores"),
        (["one"], {0: 1}, "limits: got dict, want a list"),
        (["one"], [-1], "limits"),
        (["one"], [{0: -1}], "limits"),
        (["one"], [{-1: 1}], "layer_idx"),
    ],
)
def test_wrong_arguments(
    stores: Any, limits: Any, message: str, new_store: Any, tmp_path: Path
) -> None:
    new_store("one").close()
    paths = [tmp_path / one for one in stores] if isinstance(stores, list) else stores
    with pytest.raises((TypeError, ValueError), match=message):
        hybridmem.layered(paths, limits=limits)


# -- centring -------------------------------------------------------------------------------------


def test_a_private_store_without_entries_is_centred_like_the_others(
    new_store: Any, rng: np.random.Generator
) -> None:
    means = rng.standard_normal((2, WIDTH)).astype(np.float32)
    pack, mine = new_store("pack"), new_store("mine")
    pack.calibrate(0, keys=means[0], queries=means[1])
    pack.calibrate(1, keys=means[1])
    row = rng.standard_normal((1, WIDTH)).astype(np.float32)
    for layer in range(LAYERS):
        pack.put(row, row, layer)
    memory = hybridmem.layered([pack, mine])
    np.testing.assert_array_equal(mine.calibration[0][1], means[1])
    assert mine.calibration[1][1] is None
    assert memory.calibration.keys() == {0, 1}
    memory.put(row, row, 0)
    assert [hit.entry_id >> 40 > 0 for hit in memory.query(row + means[1] - means[0], 0)] == [
        True,
        False,
    ]
    with pytest.raises(ValueError, match=r"layer 0 has entries in .*pack"):
        memory.calibrate(0, keys=row)
    memory.calibrate(7, keys=row)
    assert 7 in mine.calibration


def test_layers_that_are_centred_differently_are_refused(
    new_store: Any, rng: np.random.Generator
) -> None:
    means = rng.standard_normal((2, WIDTH)).astype(np.float32)
    one, other, none = new_store("one", 9), new_store("other", 9), new_store("none", 9)
    one.calibrate(0, keys=means[0])
    other.calibrate(0, keys=means[1])
    with pytest.raises(ValueError, match=r"centre layer 0 differently.* pack one like the other"):
        hybridmem.layered([one, other])
    with pytest.raises(ValueError, match=r"calibrate .*none with the means of the other"):
        hybridmem.layered([one, none])
    none.calibrate(0, keys=one.calibration[0][0])  # the way out that it names
    memory = hybridmem.layered([one, none])
    none.calibrate(1, keys=means[0])
    with pytest.raises(ValueError, match="centre layer 1 differently"):
        memory.query(means[0], 0)  # also when it happens later


def test_an_entry_that_goes_during_a_search_is_not_found(
    new_store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, mine = new_store("pack", 20), new_store("mine")
    memory = hybridmem.layered([pack, mine])
    rows = rng.standard_normal((2, 1, WIDTH)).astype(np.float32)
    gone, left = (memory.put(rows[0], value, 0) for value in rows)
    run = Search.run

    def run_and_delete(search: Search) -> None:
        run(search)
        if search.finder is mine and gone in mine:
            mine.delete(gone)

    monkeypatch.setattr(Search, "run", run_and_delete)
    hits = memory.query(rows[0], 0, 3)
    assert gone not in mine
    assert (len(hits), hits[0].entry_id, hits[0].score) == (3, left, 1.0)

"""The life of layered stores: ids, what writes, what cannot be layered, how they are centred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem._finding import Search

WIDTH = 16
LAYERS = 2


# -- ids ------------------------------------------------------------------------------------------


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[..., hybridmem.Store]]:
    made = []

    def new(name: str, count: int = 0, **config: Any) -> hybridmem.Store:
        store = hybridmem.create(tmp_path / name, **{"embed_dim": WIDTH, "hdc_dim": 64, **config})
        made.append(store)
        rng = np.random.default_rng(len(made))
        for at in range(count):
            keys, values = rng.standard_normal((2, 2, WIDTH), np.float32)
            store.put(keys, values, at % LAYERS)
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
        with pytest.raises(KeyError, match="nor the store that gave it"):
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


def test_layers_of_layers_are_refused(new_store: Any) -> None:
    one, memory = new_store("one"), hybridmem.layered([new_store("other")])
    with pytest.raises(TypeError, match="stores: got a Layered among them, want stores or paths"):
        hybridmem.layered([one, memory])


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

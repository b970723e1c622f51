"""FORMAT-AND-API section 3: put and put_many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader

import hybridmem

from .helpers import contents, directory_bytes, fill, pair, shards

MAX32 = 2**32 - 1


def test_ids_count_from_one(store: Any, rng: np.random.Generator) -> None:
    assert fill(store, rng, 3) == [1, 2, 3]
    assert type(store.put(*pair(rng, 1), layer_idx=9)) is int


def test_importance_defaults_to_one_and_arguments_have_their_order(
    store: Any, rng: np.random.Generator
) -> None:
    keys, values = pair(rng, 2)
    store.put(keys, values, 3)
    store.put(keys, values, 4, 0.25)
    store.put(keys=keys, values=values, layer_idx=5, importance=2)
    assert store.entries["layer_idx"].tolist() == [3, 4, 5]
    assert store.entries["importance"].tolist() == [1.0, 0.25, 2.0]


def test_importance_zero_is_allowed(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1, importance=0)
    assert store.get(1).importance == 0


def test_importance_is_rounded_to_float32(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1, importance=0.1)
    assert store.get(1).importance == float(np.float32(0.1))


@pytest.mark.parametrize("layer_idx", [0, 1, 2**31, MAX32])
def test_layer_range(layer_idx: int, store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 2)
    store.put(keys, values, layer_idx=layer_idx)
    store.flush()
    assert [hit.layer_idx for hit in store.query(keys, layer_idx=layer_idx)] == [layer_idx]
    assert ForeignReader(store.path).records[1].layer_idx == layer_idx


def test_timestamp_is_the_time_of_the_put_in_ns(store: Any, rng: np.random.Generator) -> None:
    before = time.time_ns()
    fill(store, rng, 2)
    between = time.time_ns()
    fill(store, rng, 1)
    after = time.time_ns()
    store.flush()
    first, second, third = (store.get(i).timestamp for i in (1, 2, 3))
    assert before <= first <= second <= between <= third <= after


def test_queryable_at_once_and_unchanged_by_flush(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    entry_id = store.put(keys, values, layer_idx=1)
    for _ in range(2):
        (hit,) = store.query(keys, layer_idx=1)
        assert (hit.entry_id, hit.score) == (entry_id, 1.0)
        assert hit.keys.tobytes() == keys.tobytes()
        assert hit.values.tobytes() == values.tobytes()
        assert entry_id in store
        assert len(store) == 1
        store.flush()


def test_the_caller_may_reuse_its_arrays_at_once(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    wanted = keys.tobytes(), values.tobytes()
    store.put(keys, values, layer_idx=0)
    store.put_many([(keys, values)], layer_idx=0)
    mean = keys.copy()
    keys[:] = 7
    values[:] = 8
    for _ in range(2):
        for entry_id in (1, 2):
            entry = store.get(entry_id)
            assert (entry.keys.tobytes(), entry.values.tobytes()) == wanted
        assert [hit.score for hit in store.query(mean, layer_idx=0)] == [1.0, 1.0]
        store.flush()


def test_keys_and_values_may_be_one_array(store: Any, rng: np.random.Generator) -> None:
    keys, _ = pair(rng, 3)
    store.put(keys, keys, layer_idx=0)
    store.flush()
    assert store.get(1).keys.tobytes() == store.get(1).values.tobytes() == keys.tobytes()


def test_ids_are_never_used_again(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    store.flush()
    store.delete(3)
    assert fill(store, rng, 1) == [4]
    store.delete(4)
    store.flush()
    store.evict(0)
    store.compact()
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == []
        assert fill(again, rng, 1) == [5]
        again.delete(5)
    with hybridmem.open(store.path) as again:
        assert fill(again, rng, 1) == [6]


def test_an_entry_evicted_before_its_flush_is_never_written_but_its_id_stays_used(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=2)
    mark = np.full((4, 24), 1.2345678, np.float32)
    store.put(mark, mark, layer_idx=0, importance=0)
    fill(store, rng, 3)
    assert 1 not in store
    store.close()
    for path in Path(store.path).iterdir():
        assert mark.tobytes() not in path.read_bytes()
    with hybridmem.open(store.path) as again:
        assert list(again) == [3, 4]
        assert fill(again, rng, 1) == [5]


def test_put_spills_full_shards_by_itself(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """What waits for a flush is bounded by the size of a shard, and is readable all the same."""
    store = new_store(shard_max_bytes=16_384)
    pairs = [pair(rng, 8) for _ in range(200)]
    generation = store.stats().generation
    grown = directory_bytes(Path(store.path))
    for keys, values in pairs:
        store.put(keys, values, layer_idx=0)
    assert directory_bytes(Path(store.path)) - grown > 200 * 8 * 24 * 8 * 0.8
    assert len(shards(Path(store.path))) > 10
    assert store.stats().generation == generation
    for entry_id, (keys, values) in enumerate(pairs, 1):
        entry = store.get(entry_id)
        assert entry.keys.tobytes() == keys.tobytes()
        assert entry.values.tobytes() == values.tobytes()
    with hybridmem.open(store.path, mode="r") as reader:
        assert len(reader) == 0
        store.flush()
        reader.refresh()
        assert contents(reader) == contents(store)


def test_put_many(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    pairs = [pair(rng, n) for n in (1, 5, 2)]
    ids = store.put_many(pairs, 7)
    assert list(ids) == [2, 3, 4]
    assert all(type(i) is int for i in ids)
    for entry_id, (keys, values) in zip(ids, pairs, strict=True):
        entry = store.get(entry_id)
        assert (entry.layer_idx, entry.importance) == (7, 1.0)
        assert entry.keys.tobytes() == keys.tobytes()
        assert entry.values.tobytes() == values.tobytes()
        assert store.query(keys, layer_idx=7, top_k=1)[0].entry_id == entry_id


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_put_many_with_one_importance_each(
    form: Callable[[list[float]], Any], store: Any, rng: np.random.Generator
) -> None:
    pairs = [pair(rng, 2) for _ in range(3)]
    store.put_many(pairs, layer_idx=0, importance=form([0.5, 0.0, 3.0]))
    assert store.entries["importance"].tolist() == [0.5, 0.0, 3.0]
    store.put_many(pairs, layer_idx=0, importance=0.25)
    assert store.entries["importance"].tolist()[3:] == [0.25] * 3


def test_put_many_of_nothing(store: Any) -> None:
    assert list(store.put_many([], layer_idx=0)) == []
    assert len(store) == 0


def test_put_many_equals_single_puts(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    pairs = [pair(rng, n) for n in (1, 2, 3, 4, 5)]
    one, many = new_store("one"), new_store("many")
    for keys, values in pairs:
        one.put(keys, values, layer_idx=0)
    many.put_many(pairs, layer_idx=0)
    assert contents(one) == contents(many)
    assert [bytes(s) for s in one.entries["signature"]] == [
        bytes(s) for s in many.entries["signature"]
    ]


def test_put_many_takes_an_iterator(store: Any, rng: np.random.Generator) -> None:
    assert list(store.put_many((pair(rng, 2) for _ in range(3)), layer_idx=0)) == [1, 2, 3]


def bad_batches(rng: np.random.Generator) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    good = pair(rng, 2)
    nan = good[0].copy()
    nan[1, 3] = np.nan
    wide = np.zeros((2, 25), np.float32)
    yield "nan in the last", [good, good, (nan, good[1])], {}
    yield "width of the last", [good, good, (good[0], wide)], {}
    yield "unequal tokens", [good, (good[0], good[1][:1])], {}
    yield "empty entry", [good, (good[0][:0], good[1][:0])], {}
    yield "not a pair", [good, (good[0],)], {}
    yield "three arrays", [good, (*good, good[0])], {}
    yield "a number", [good, 3.0], {}
    yield "importance of the last", [good, good], {"importance": [1.0, -1.0]}
    yield "importance NaN", [good, good], {"importance": [1.0, float("nan")]}
    yield "too few importances", [good, good], {"importance": [1.0]}
    yield "too many importances", [good, good], {"importance": [1.0, 1.0, 1.0]}
    yield "layer", [good, good], {"layer_idx": -1}


@pytest.mark.parametrize("case", range(12))
def test_put_many_is_all_or_nothing(case: int, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 1)
    wanted, size = contents(store), directory_bytes(Path(store.path))
    name, batch, options = next(itertools.islice(bad_batches(rng), case, None))
    with pytest.raises((ValueError, TypeError)):
        store.put_many(batch, **{"layer_idx": 0, **options})
    assert contents(store) == wanted, name
    assert directory_bytes(Path(store.path)) == size
    assert store.stats().entries == 3
    assert fill(store, rng, 1) == [4]


def test_put_many_passes_on_what_its_iterator_raises(store: Any, rng: np.random.Generator) -> None:
    def entries() -> Any:
        yield pair(rng, 2)
        raise TypeError("of the caller's own making")

    with pytest.raises(TypeError, match="own making"):
        store.put_many(entries(), layer_idx=0)
    assert len(store) == 0


def test_put_many_stores_nothing_when_its_iterator_fails(
    store: Any, rng: np.random.Generator
) -> None:
    def entries() -> Iterator[Any]:
        yield pair(rng, 2)
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        store.put_many(entries(), layer_idx=0)
    assert len(store) == 0
    assert fill(store, rng, 1) == [1]


def test_put_many_evicts_to_keep_the_limit(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=4)
    fill(store, rng, 3)
    ids = store.put_many([pair(rng, 2) for _ in range(3)], layer_idx=0)
    assert list(ids) == [4, 5, 6]
    assert list(store) == [3, 4, 5, 6]

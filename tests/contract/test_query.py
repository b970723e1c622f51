"""FORMAT-AND-API section 3: query, query_many, scores, ties, counts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model

import hybridmem

from .helpers import Floats, fill, mapped_in, pair, same_hits, shard_of


def store_and_model(
    new_store: Callable[..., Any],
    rng: np.random.Generator,
    count: int = 40,
    layers: int = 3,
    name: str = "mem",
    **fields: Any,
) -> tuple[Any, Model]:
    store = new_store(name, **fields)
    kinds = ("signature_tokens", "signature_bits", "kv_dtype", "seed", "hdc_dim")
    model = Model(24, **{"hdc_dim": 512, **{k: v for k, v in fields.items() if k in kinds}})
    for i in range(count):
        keys, values = pair(rng, int(rng.integers(1, 6)))
        store.put(keys, values, layer_idx=i % layers)
        model.put(keys, values, i % layers)
    return store, model


def named(hits: list[Any]) -> list[tuple[int, float]]:
    return [(hit.entry_id, pytest.approx(hit.score, abs=1e-12)) for hit in hits]


FORMS: list[dict[str, Any]] = [
    {},
    {"hdc_dim": 64},
    {"hdc_dim": 192},
    {"kv_dtype": "float16"},
    {"signature_tokens": 1, "signature_bits": 128},
    {"signature_tokens": 2, "signature_bits": 64},
    {"signature_tokens": 3},
]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("flushed", [False, True])
def test_ids_scores_order_and_arrays_are_the_models(
    fields: dict[str, Any], flushed: bool, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store, model = store_and_model(new_store, rng, **fields)
    if flushed:
        store.flush()
    for i in range(9):
        query = pair(rng, 1 + i % 3)[0]
        hits = store.query(query, layer_idx=i % 3, top_k=1 + i)
        assert model.query(query, i % 3, 1 + i) == named(hits)
        for hit in hits:
            row = model.rows[hit.entry_id]
            assert hit.layer_idx == row.layer_idx == i % 3
            assert hit.keys.tobytes() == row.keys.tobytes()
            assert hit.values.tobytes() == row.values.tobytes()
    assert store.entries["access_count"].tolist() == [
        row.access_count for row in model.rows.values()
    ]


def test_top_k_defaults_to_five(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 9)
    query = pair(rng, 1)[0]
    assert len(store.query(query, 0)) == 5
    assert same_hits(store.query(query, 0), store.query(query, 0, 5))
    assert [len(hits) for hits in store.query_many([query], 0)] == [5]


@pytest.mark.parametrize("top_k", [3, 4, 1000, 2**31, 2**63, 10**30])
def test_fewer_where_there_are_fewer(top_k: int, store: Any, rng: np.random.Generator) -> None:
    ids = fill(store, rng, 3)
    fill(store, rng, 4, layer_idx=1)
    hits = store.query(pair(rng, 1)[0], layer_idx=0, top_k=top_k)
    assert sorted(hit.entry_id for hit in hits) == ids
    assert store.stats().hits == 3


def test_nothing_found_is_an_empty_list(store: Any, rng: np.random.Generator) -> None:
    query = pair(rng, 2)[0]
    assert store.query(query, layer_idx=0) == []
    fill(store, rng, 2)
    assert store.query(query, layer_idx=1) == []
    assert store.query(query, layer_idx=2**32 - 1) == []
    assert store.query_many([query, query], layer_idx=1) == [[], []]


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
@pytest.mark.parametrize("hdc_dim", [64, 512, 4096])
def test_the_own_mean_key_scores_one(
    scale: float, hdc_dim: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(hdc_dim=hdc_dim)
    keys = (rng.standard_normal((7, 24)) * scale).astype(np.float32)
    store.put(keys, keys, layer_idx=0)
    fill(store, rng, 3)
    mean = (keys.astype(np.float64).sum(axis=0) / 7).astype(np.float32)
    for query in (mean, mean[None], keys):
        hit = store.query(query, layer_idx=0)[0]
        assert (hit.entry_id, hit.score) == (1, 1.0)


def test_the_opposite_key_scores_minus_one(store: Any, rng: np.random.Generator) -> None:
    keys = rng.standard_normal((1, 24)).astype(np.float32)
    store.put(keys, keys, layer_idx=0)
    (hit,) = store.query(-keys, layer_idx=0)
    assert hit.score == -1.0


@pytest.mark.parametrize("tokens", [1, 3])
def test_sub_signatures_score_by_token(
    tokens: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """The mean over query tokens of the best sub-signature; the query is not pooled."""
    store = new_store(hdc_dim=512, signature_tokens=1, signature_bits=128)
    keys, values = pair(rng, 4)
    store.put(keys, values, layer_idx=0)
    fill(store, rng, 5, n=4)
    (hit,) = store.query(keys[4 - tokens :], layer_idx=0, top_k=1)
    assert (hit.entry_id, hit.score) == (1, 1.0)
    # A token past the last sub-signature is not in the index.
    long = pair(rng, 5)[0]
    store.put(long, long, layer_idx=1)
    assert store.query(long[:4], layer_idx=1)[0].score == 1.0
    assert store.query(long[4:], layer_idx=1)[0].score < 1.0


def test_every_token_of_64_has_its_own_signature(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """The configuration that the contract names: 64 signatures of 256 bits in a record."""
    store = new_store(hdc_dim=16384, signature_tokens=1, signature_bits=256)
    keys, values = rng.standard_normal((2, 65, 24)).astype(np.float32)
    store.put(keys, values, layer_idx=0)
    scores = [hits[0].score for hits in store.query_many(keys, layer_idx=0)]
    assert scores[:64] == [1.0] * 64
    assert scores[64] < 1.0


@pytest.mark.parametrize("fields", [{}, {"signature_tokens": 1, "signature_bits": 64}], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 5, 40, 100, 1000])
def test_ties_go_to_the_smaller_id(
    fields: dict[str, Any], top_k: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(**fields)
    same = pair(rng, 2)[0]
    others = [pair(rng, 2)[0] for _ in range(3)]
    for i in range(300):
        keys = same if i % 3 else others[i % 9 // 3]
        store.put(keys, keys, layer_idx=i % 2)
    twins = [i + 1 for i in range(300) if i % 3 and i % 2 == 0]
    got = [hit.entry_id for hit in store.query(same, layer_idx=0, top_k=top_k)]
    assert got[: len(twins)] == twins[: len(got)]
    again = store.query(others[0], layer_idx=0, top_k=top_k)
    order = [(-hit.score, hit.entry_id) for hit in again]
    assert order == sorted(order)


def test_ties_hold_across_shards_flushes_and_reopening(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    keys = pair(rng, 3)[0]
    for i in range(60):
        store.put(keys, keys, layer_idx=0)
        if i % 17 == 0:
            store.flush()
    wanted = list(range(1, 11))
    assert [hit.entry_id for hit in store.query(keys, 0, 10)] == wanted
    store.close()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode=mode) as again:
            assert [hit.entry_id for hit in again.query(keys, 0, 10)] == wanted


def test_a_query_of_several_tokens_is_pooled(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 10)
    query = rng.standard_normal((5, 24)).astype(np.float32)
    mean = (query.astype(np.float64).sum(axis=0) / 5).astype(np.float32)
    assert same_hits(store.query(query, 0), store.query(mean, 0))


def test_a_query_sees_its_layer_only(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 2)
    for layer_idx in (0, 1, 2, 2**32 - 1):
        store.put(keys, values, layer_idx=layer_idx)
    for i, layer_idx in enumerate((0, 1, 2, 2**32 - 1), 1):
        hits = store.query(keys, layer_idx=layer_idx)
        assert [(hit.entry_id, hit.layer_idx) for hit in hits] == [(i, layer_idx)]
    assert store.entries["access_count"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("form", [list, tuple, set, frozenset, np.array])
@pytest.mark.parametrize("flushed", [False, True])
def test_entry_ids_limits_the_search(
    form: Callable[[list[int]], Any],
    flushed: bool,
    new_store: Callable[..., Any],
    rng: np.random.Generator,
) -> None:
    store, model = store_and_model(new_store, rng)
    if flushed:
        store.flush()
    query = pair(rng, 1)[0]
    allowed = [1, 2, 4, 7, 10, 13, 22, 40]
    hits = store.query(query, layer_idx=0, top_k=3, entry_ids=form(allowed))
    assert model.query(query, 0, 3, allowed) == named(hits)
    counted = {hit.entry_id for hit in hits}
    assert {i for i in store if store.get(i).access_count} == counted


def test_entry_ids_may_be_empty_unknown_foreign_or_repeated(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 3)
    fill(store, rng, 3, layer_idx=1)
    store.delete(2)
    query = pair(rng, 1)[0]

    def found(ids: list[int]) -> list[int]:
        return sorted(hit.entry_id for hit in store.query(query, 0, 10, entry_ids=ids))

    assert found([]) == []
    assert found([2]) == []
    assert found([4, 5, 99, 2**64 - 1]) == []
    assert found([3, 3, 1, 1, 1]) == [1, 3]
    assert found([1, 2, 3, 4, 5, 6]) == [1, 3]
    assert sorted(hit.entry_id for hit in store.query(query, 0, 10, entry_ids=None)) == [1, 3]


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_query_many_equals_single_queries(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    one, _ = store_and_model(new_store, np.random.default_rng(5), name="one", **fields)
    many, _ = store_and_model(new_store, np.random.default_rng(5), name="many", **fields)
    queries = [pair(rng, n)[0] for n in (1, 2, 1, 5, 3)]
    queries[2] = queries[2][0]  # [embed_dim]
    single = [one.query(q, layer_idx=1, top_k=4) for q in queries]
    batch = many.query_many(queries, layer_idx=1, top_k=4)
    assert len(batch) == 5
    for left, right in zip(single, batch, strict=True):
        assert same_hits(left, right)
    assert one.entries["access_count"].tolist() == many.entries["access_count"].tolist()
    assert one.entries["access_count"].sum() == 20
    assert one.stats().queries == many.stats().queries == 5
    assert one.stats().hits == many.stats().hits == 20


@pytest.mark.parametrize("fields", [{}, {"signature_tokens": 1, "signature_bits": 64}], ids=str)
def test_an_array_of_queries_is_one_query_a_row(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store, _ = store_and_model(new_store, rng, **fields)
    queries = pair(rng, 6)[0]
    batch = store.query_many(queries, layer_idx=0, top_k=3)
    assert len(batch) == 6
    assert store.stats().queries == 6
    for row, hits in zip(queries, batch, strict=True):
        assert same_hits(store.query(row, layer_idx=0, top_k=3), hits)


def test_query_many_of_nothing(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    assert store.query_many([], layer_idx=0) == []
    assert store.query_many(np.zeros((0, 24), np.float32), layer_idx=0) == []
    assert store.stats().queries == 0


def test_each_hit_is_counted_once_a_query(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    query = pair(rng, 1)[0]
    best = store.query(query, 0, 1)[0].entry_id
    store.query(query, 0, 1)
    store.query_many([query, query, query], 0, 1)
    hybridmem.augmented_kv(query, query, query, store, 0, 1)
    counts = {i: store.get(i).access_count for i in store}
    assert counts == {i: 6 if i == best else 0 for i in (1, 2, 3)}


def test_counts_survive_flush_and_close(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    query = pair(rng, 1)[0]
    for _ in range(3):
        store.query(query, 0)
        store.flush()
    store.query(query, 0)
    store.close()
    with hybridmem.open(store.path) as again:
        assert again.entries["access_count"].tolist() == [4, 4]
        again.query(query, 0)
    with hybridmem.open(store.path, mode="r") as reader:
        assert reader.entries["access_count"].tolist() == [5, 5]


def test_a_reader_does_not_count(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    query = pair(rng, 1)[0]
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        for _ in range(3):
            assert len(reader.query(query, 0)) == 2
        hybridmem.augmented_kv(query, query, query, reader, 0)
        assert reader.entries["access_count"].tolist() == [0, 0]
        assert reader.get(1).access_count == 0
    with hybridmem.open(store.path) as writer:
        assert writer.entries["access_count"].tolist() == [0, 0]


def check_arrays(hit: Any, keys: Floats, values: Floats) -> None:
    for array, wanted in ((hit.keys, keys), (hit.values, values)):
        assert type(array) is np.ndarray
        assert array.dtype == np.float32
        assert array.dtype.isnative
        assert array.shape == wanted.shape
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
        assert array.tobytes() == wanted.tobytes()


def test_memory_that_a_hit_shares_cannot_be_made_writeable(
    store: Any, rng: np.random.Generator
) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    for _ in range(2):  # not flushed yet, and mapped
        hit = store.query(keys, 0)[0]
        for array in (hit.keys, hit.values):
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        store.flush()


STORED = [{}, {"kv_dtype": "float16"}, {"kv_dtype": "bfloat16"}, {"quantize_stored": True}]


@pytest.mark.parametrize("fields", STORED, ids=str)
def test_hits_are_readonly_float32(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(**fields)
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    if fields.get("quantize_stored"):
        keys, values = store.get(1).keys.copy(), store.get(1).values.copy()
    for _ in range(2):
        check_arrays(store.query(keys, 0)[0], keys, values)
        check_arrays(store.query_many([keys], 0)[0][0], keys, values)
        store.flush()
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        check_arrays(reader.query(keys, 0)[0], keys, values)


def test_f32_hits_are_views_of_the_mapped_shard(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 20)
    store.close()
    path = Path(store.path)
    for mode in ("r", "r+"):
        with hybridmem.open(path, mode=mode) as again:
            for hit in again.query(pair(rng, 1)[0], 0, 20):
                shard = shard_of(again, hit.entry_id)
                assert mapped_in(hit.keys, path) == shard
                assert mapped_in(hit.values, path) == shard
                assert not hit.keys.flags.owndata
    with hybridmem.open(path) as again:  # what this very writer has flushed is mapped too
        keys, values = pair(rng, 2)
        entry_id = again.put(keys, values, layer_idx=5)
        again.flush()
        assert mapped_in(again.get(entry_id).keys, path)


@pytest.mark.parametrize("fields", STORED, ids=str)
def test_hits_stay_valid_and_unchanged(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Through flush, eviction, compaction, more puts and close, mapped or not."""
    store = new_store(shard_max_bytes=4096, **fields)
    fill(store, rng, 20)
    store.flush()
    fill(store, rng, 20)
    query = pair(rng, 1)[0]
    hits = store.query(query, 0, 40)
    wanted = [(hit.keys.tobytes(), hit.values.tobytes()) for hit in hits]

    def unchanged() -> bool:
        return [(hit.keys.tobytes(), hit.values.tobytes()) for hit in hits] == wanted

    assert len(hits) == 40
    for step in (
        store.flush,
        lambda: store.evict(15),
        store.compact,
        lambda: fill(store, rng, 30),
        lambda: store.evict(0),
        store.compact,
        store.close,
    ):
        step()
        assert unchanged(), step
    with hybridmem.open(store.path) as again:
        fill(again, rng, 30)
    assert unchanged()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_change_nothing(threads: int, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 40, n=2)
    queries = pair(rng, 3)[0]
    plain = store.query_many(queries, 0, 9)
    divided = store.query_many(queries, 0, 9, threads=threads)
    assert [[(hit.entry_id, hit.score) for hit in hits] for hits in divided] == [
        [(hit.entry_id, hit.score) for hit in hits] for hits in plain
    ]
    one = store.query(queries[0], 0, 9, threads=threads)
    assert [hit.entry_id for hit in one] == [hit.entry_id for hit in plain[0]]


@pytest.mark.parametrize(("wrong", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_threads_are_counted(wrong: Any, kind: Any, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3, n=1)
    with pytest.raises(kind, match="threads: got"):
        store.query(pair(rng, 1)[0], 0, threads=wrong)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_each_hit_has_arrays_of_its_own(
    kv_dtype: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Found again, an entry has the same values in other arrays, whose shape one may set."""
    store = new_store(kv_dtype=kv_dtype)
    keys, values = (rows.astype(np.float16).astype(np.float32) for rows in pair(rng, 3))
    store.put(keys, values, 0)
    store.flush()
    found = [store.query(keys, 0)[0] for _ in range(3)]
    for hit in found:
        assert np.array_equal(hit.keys, keys)
        assert np.array_equal(hit.values, values)
        assert not hit.keys.flags.writeable
        assert not hit.values.flags.writeable
    arrays = [array for hit in found for array in (hit.keys, hit.values)]
    assert len({id(array) for array in arrays}) == len(arrays)
    # Those of float32 are the mapped file itself, however often they are found.
    assert np.shares_memory(found[0].keys, found[2].keys) == (kv_dtype == "float32")


@pytest.mark.parametrize("form", [{}, {"kv_dtype": "float16"}, {"quantize_stored": True}])
@pytest.mark.parametrize("flushed", [False, True])
def test_each_answer_has_tensors_of_its_own(
    flushed: bool, form: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Loops over tensors rely on their shapes, which those who were given them can set."""
    store = new_store(**form)
    keys = pair(rng, 3)[0]
    store.put(keys, keys, 0)
    if flushed:
        store.flush()
    output, _ = hybridmem.attend(keys, store, 0)
    for tensor in store.query_stored(keys, 0)[0]:
        tensor.data.shape = (-1,)
    for tensor in store.query_stored(keys, 0)[0]:
        assert tensor.data.shape == tensor.shape
    assert np.array_equal(hybridmem.attend(keys, store, 0)[0], output)


def test_a_hit_has_all_its_fields_and_keeps_them(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, 0, source={"page": 7})
    (hit,) = store.query(keys, 0)
    fields = {field.name for field in dataclasses.fields(hit)}
    assert vars(hit).keys() == fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        hit.score = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        hit.other = 1.0
    for other in (copy.copy(hit), pickle.loads(pickle.dumps(hit)), dataclasses.replace(hit)):
        assert vars(other).keys() == fields
        assert (other.entry_id, other.score, other.source) == (1, hit.score, {"page": 7})
        assert np.array_equal(other.keys, keys)

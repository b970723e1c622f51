"""FORMAT-AND-API "Named in the other pages": index_keys, calibrate, what may follow a search."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model, mean_pool
from reader import ForeignReader

import hybridmem

from .helpers import Floats, contents, copy_committed, fill, pair, photograph, record, same_hits

FORMS: list[dict[str, Any]] = [{}, {"signature_tokens": 1, "signature_bits": 128}]


def model_for(store: Any) -> Model:
    config = store.config
    return Model(
        24,
        config.hdc_dim,
        signature_tokens=config.signature_tokens,
        signature_bits=config.signature_bits,
    )


# --- index_keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_index_keys_are_what_is_found_and_keys_what_is_kept(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(**fields)
    keys, values = pair(rng, 3)
    indexed = pair(rng, 3)[0]
    fill(store, rng, 5)
    ids = [store.put(keys, values, layer_idx=0, index_keys=indexed)]
    ids += store.put_many([(keys, values)] * 2, layer_idx=0, index_keys=[indexed, keys])
    wanted = [model_for(store).signature(x).tobytes() for x in (indexed, indexed, keys)]
    assert [bytes(record(store, i, "signature")) for i in ids] == wanted
    hits = store.query(indexed, layer_idx=0, top_k=2)
    assert [(hit.entry_id, hit.score) for hit in hits] == [(ids[0], 1.0), (ids[1], 1.0)]
    for entry_id in ids:
        assert store.get(entry_id).keys.tobytes() == keys.tobytes()
        assert store.get(entry_id).values.tobytes() == values.tobytes()


@pytest.mark.parametrize("case", ["tokens", "width", "nan", "integers", "too few", "too many"])
def test_bad_index_keys(case: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    keys, values = pair(rng, 3)
    before = contents(store)
    bad = {
        "tokens": keys[:2],
        "width": keys[:, :23],
        "nan": np.where(keys == keys[1, 1], np.nan, keys),
        "integers": keys.astype(int),
    }.get(case)
    many = {"too few": [keys], "too many": [keys] * 3}.get(case, [keys, bad])
    if bad is not None:
        with pytest.raises((ValueError, TypeError), match="index_keys"):
            store.put(keys, values, layer_idx=0, index_keys=bad)
    with pytest.raises((ValueError, TypeError), match="index_keys"):
        store.put_many([(keys, values)] * 2, layer_idx=0, index_keys=many)
    assert contents(store) == before
    assert fill(store, rng, 1) == [3]


# --- calibrate -----------------------------------------------------------------------------------


def same_records(store: Any, model: Model) -> bool:
    """Signatures are the model's, and the paddings its norms."""
    for row in model.rows.values():
        if bytes(record(store, row.entry_id, "signature")) != row.signature.tobytes():
            return False
        norm = record(store, row.entry_id, "padding").view(np.float32)
        if not math.isclose(norm, model.padding(row.keys, row.layer_idx), rel_tol=1e-6):
            return False
    return True


def named(hits: list[Any]) -> list[Any]:
    return [(hit.entry_id, pytest.approx(hit.score, abs=1e-12)) for hit in hits]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("centre_queries", [False, True])
def test_calibrate(
    centre_queries: bool,
    flushed: bool,
    fields: dict[str, Any],
    new_store: Callable[..., Any],
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """Signatures from before are made anew; the means stay with the store."""
    store = new_store(**fields)
    model = model_for(store)
    for i in range(20):
        keys, values = pair(rng, 1 + i % 4)
        store.put(keys + 2, values, layer_idx=i % 2)
        model.put(keys + 2, values, i % 2)
    if flushed:
        store.flush()
    sample, queries = pair(rng, 30)[0] + 2, pair(rng, 7)[0] - 1 if centre_queries else None
    store.calibrate(1, keys=sample, queries=queries)
    model.calibrate(1, sample, queries)
    assert same_records(store, model)
    copy = copy_committed(Path(store.path), tmp_path / "copy")  # committed on return
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=1)
    model.put(keys, values, 1)
    store.flush()
    assert ForeignReader(store.path).ids() == list(store)
    wanted = model.query(keys, 1, 9)
    assert named(store.query(keys, 1, 9)) == wanted
    store.close()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode=mode) as again:
            assert same_records(again, model)
            mean_key, mean_query = again.calibration[1]
            assert mean_key.tobytes() == model.means[1][0].tobytes()
            assert list(again.calibration) == [1]
            if centre_queries:
                assert mean_query.tobytes() == mean_pool(queries).tobytes()
            else:
                assert mean_query is None
            assert named(again.query(keys, 1, 9)) == wanted
            assert again.query(keys, 0, 99)[0].score <= 1.0
    with hybridmem.open(copy, mode="r") as reader:
        del model.rows[21]
        assert same_records(reader, model)


def test_the_mean_of_the_stored_keys_is_the_default(store: Any, rng: np.random.Generator) -> None:
    model = model_for(store)
    for _ in range(6):
        keys, values = pair(rng, 3)
        store.put(keys, values, layer_idx=4)
        model.put(keys, values, 4)
    store.calibrate(4)
    model.calibrate(4, np.concatenate([row.keys for row in model.rows.values()]))
    assert same_records(store, model)


def test_a_calibrated_layer_is_frozen(store: Any, rng: np.random.Generator) -> None:
    sample = pair(rng, 5)[0]
    store.calibrate(1, keys=sample)
    mean = store.calibration[1][0].tobytes()
    with pytest.raises(ValueError, match="calibrated"):
        store.calibrate(1, keys=sample + 1)
    assert store.calibration[1][0].tobytes() == mean
    store.calibrate(0, keys=sample)
    assert list(store.calibration) == [0, 1]


def test_calibrating_a_layer_changes_no_other(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 5, layer_idx=0)
    fill(store, rng, 5, layer_idx=1)
    before = store.entries[:5].tolist()
    wanted, query = contents(store), pair(rng, 1)[0]
    hits = store.query(query, 0, 5)
    store.calibrate(1)
    assert contents(store) == wanted
    assert same_hits(store.query(query, 0, 5), hits)
    unchanged = ["entry_id", "signature", "padding", "timestamp", "importance"]
    names = [store.entries.dtype.names.index(name) for name in unchanged]
    after = store.entries[:5].tolist()
    assert [[row[i] for i in names] for row in after] == [[row[i] for i in names] for row in before]


def test_calibration_is_refused_where_it_cannot_be_right(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 2)
    store.put(*pair(rng, 2), layer_idx=3, index_keys=pair(rng, 2)[0])
    store.flush()
    before = photograph(Path(store.path))
    nan = np.full((2, 24), np.nan, np.float32)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("keys", lambda: store.calibrate(9)),  # no keys given, none stored
        ("index_keys", lambda: store.calibrate(3)),  # its index keys are not stored
        ("keys", lambda: store.calibrate(0, keys=nan)),
        ("queries", lambda: store.calibrate(0, queries=nan)),
        ("keys", lambda: store.calibrate(0, keys=np.ones((2, 23), np.float32))),
        ("layer_idx", lambda: store.calibrate(-1, keys=np.ones((2, 24), np.float32))),
    ]
    for name, call in cases:
        with pytest.raises((ValueError, TypeError), match=name):
            call()
    assert store.calibration == {}
    assert photograph(Path(store.path)) == before


def test_short_entries_of_other_keys_are_not_signed_anew(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """One token of 128 bits in a record of 8,192: what differs is little of the record."""
    store = new_store(hdc_dim=8192, signature_tokens=1, signature_bits=128)
    store.put(*pair(rng, 1), layer_idx=0, index_keys=pair(rng, 1)[0])
    with pytest.raises(ValueError, match="index_keys"):
        store.calibrate(0)


# --- what may follow the search ------------------------------------------------------------------


def shares(query: Floats, keys: list[Floats], heads: int) -> list[float]:
    """Each entry's share of the softmax attention over the tokens of all of them."""
    width = query.shape[1] // heads
    total = np.zeros(len(keys))
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for q in query[:, part].astype(np.float64):
            mass = [np.exp(k[:, part] @ q / math.sqrt(width)).sum() for k in keys]
            total += np.array(mass) / sum(mass)
    return list(total)


def late(query: Floats, keys: list[Floats], heads: int) -> list[float]:
    width = query.shape[1] // heads
    out = []
    for k in keys:
        best = 0.0
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for q in query[:, part].astype(np.float64):
                best += (k[:, part] @ q).max()
        out.append(best)
    return out


def pooled(query: Floats, keys: list[Floats], heads: int) -> list[float]:
    return [query.mean(axis=0, dtype=float) @ k.mean(axis=0, dtype=float) for k in keys]


RERANKS = {"pooled": pooled, "tokens": shares, "late": late}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rerank", RERANKS)
@pytest.mark.parametrize("candidates", [None, 4, 9, 40])
def test_rerank_orders_the_candidates_by_their_keys(
    candidates: int | None, rerank: str, heads: int, store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 40)
    for _ in range(3):
        query = pair(rng, 2)[0]
        plain = [hit.entry_id for hit in store.query(query, 0, candidates or 12)]
        keys = [store.get(i).keys for i in plain]
        scores = RERANKS[rerank](query, keys, heads)
        order = sorted(zip(scores, plain, strict=True), key=lambda pair: (-pair[0], pair[1]))
        hits = store.query(query, 0, 3, rerank=rerank, candidates=candidates, n_heads=heads)
        assert [hit.entry_id for hit in hits] == [i for _, i in order[:3]]
        similarity = {hit.entry_id: hit.score for hit in store.query(query, 0, 40)}
        assert all(hit.score == similarity[hit.entry_id] for hit in hits)


@pytest.mark.parametrize("rerank", RERANKS)
def test_rerank_of_numbers_whose_products_overflow_float32(
    rerank: str, store: Any, rng: np.random.Generator
) -> None:
    query = pair(rng, 2)[0]
    for _ in range(8):
        store.put(*(np.float32(2.0**100) * x for x in pair(rng, 3)), layer_idx=0)
    wide = np.float32(2.0**100) * query
    q, keys = wide.astype(np.float64), [store.get(i).keys.astype(np.float64) for i in store]
    halves = (slice(12), slice(12, 24))
    best = np.array([[(k[:, at] @ q[:, at].T).max(axis=0) for at in halves] for k in keys])
    wanted = {
        "pooled": np.array([q.mean(axis=0) @ k.mean(axis=0) for k in keys]),
        "tokens": (best == best.max(axis=0)).mean(axis=(1, 2)),  # the largest takes all
        "late": best.mean(axis=(1, 2)),
    }[rerank]
    order = np.lexsort((np.arange(8), -wanted)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hits = store.query(wide, 0, 8, rerank=rerank, n_heads=2)
    assert [hit.entry_id for hit in hits] == order.tolist()


@pytest.mark.parametrize("options", [{"bogus": 1}, {"bogus": None}, {"top": 3}])
def test_options_that_there_are_not(
    options: dict[str, Any], store: Any, rng: np.random.Generator
) -> None:
    query = pair(rng, 2)[0]
    with pytest.raises(TypeError, match=next(iter(options))):
        store.query_many(query, 0, **options)
    with pytest.raises(TypeError, match="rerank_query: got int"):
        store.query_many(query, 0, rerank="late", rerank_query=5)


@pytest.mark.parametrize("rerank", [*RERANKS, "signatures"])
def test_rerank_ties_go_to_the_smaller_id(
    rerank: str, store: Any, rng: np.random.Generator
) -> None:
    keys, values = pair(rng, 2)
    for _ in range(6):
        store.put(keys, values, layer_idx=0)
    hits = store.query(keys, 0, 4, rerank=rerank)
    assert [hit.entry_id for hit in hits] == [1, 2, 3, 4]


def cosine(model: Model, query: Floats, layer: int, signature: Any, n_tokens: int) -> float:
    """Mean over query tokens of the largest cosine with a vector of signs, of small integers."""
    subs = [np.frombuffer(bytes(signature), np.uint8)]
    if model.signature_tokens:
        subs = np.split(subs[0], model.hdc_dim // model.bits)[:n_tokens]
    signs = [2.0 * np.unpackbits(sub, bitorder="little") - 1 for sub in subs]
    mean_query = model.means.get(layer, (None, None))[1]
    best = []
    for token in query if model.signature_tokens else [mean_pool(query)]:
        value = model.projector.values(token if mean_query is None else token - mean_query)
        whole = np.round(value * (np.float32(15) / np.abs(value).max())).astype(np.float64)
        length = math.sqrt((whole @ whole) * model.bits)
        best.append(max(whole @ one for one in signs) / length)
    return sum(best) / len(best)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("candidates", [None, 4, 9, 40])
@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_rerank_by_signatures_reads_no_key(
    fields: dict[str, Any],
    candidates: int | None,
    centred: bool,
    new_store: Callable[..., Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = new_store(**fields)
    model = model_for(store)
    if centred:
        means = pair(rng, 9)
        store.calibrate(0, keys=means[0], queries=means[1])
        model.calibrate(0, means[0], means[1])
    ids = fill(store, rng, 35) + fill(store, rng, 5, n=6)  # of more tokens than signatures
    for entry_id in ids[10::7]:
        store.delete(entry_id)
    among = [i for i in ids if i % 3]
    monkeypatch.setattr(type(store), "_keys", lambda *_: pytest.fail("keys were read"))
    differs = 0
    for entry_ids in (None, among):
        for n in (1, 2, 3):
            query = pair(rng, n)[0]
            options = {"entry_ids": entry_ids, "rerank": "signatures", "candidates": candidates}
            found = store.query(query, 0, candidates or 12, entry_ids=entry_ids)
            scores = {hit.entry_id: hit.score for hit in found}
            order = {
                i: cosine(
                    model, query, 0, record(store, i, "signature"), record(store, i, "n_tokens")
                )
                for i in scores
            }
            wanted = sorted(order, key=lambda i: (-order[i], i))[:3]
            hits = store.query(query, 0, 3, **options)
            assert [(hit.entry_id, hit.score) for hit in hits] == [(i, scores[i]) for i in wanted]
            differs += wanted != list(scores)[:3]
    assert differs


def test_rerank_by_signatures_of_a_query_without_direction(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 9)
    zero = np.zeros(24, np.float32)
    found = sorted(hit.entry_id for hit in store.query(zero, 0, 8))
    hits = store.query(zero, 0, 3, rerank="signatures", candidates=8)
    assert [hit.entry_id for hit in hits] == found[:3]
    assert store.query(zero, 1, 3, rerank="signatures") == []
    assert store.query(zero, 0, 3, rerank="signatures", entry_ids=[]) == []


def test_rerank_by_signatures_takes_no_query_for_keys(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    query = pair(rng, 2)[0]
    for ask in (
        lambda: store.query(query, 0, rerank="signatures", rerank_query=query),
        lambda: store.query_stored(query, 0, rerank="signatures", rerank_query=query),
        lambda: store.query_many([query], 0, rerank="signatures", rerank_query=[query]),
    ):
        with pytest.raises(ValueError, match="rerank_query"):
            ask()
    assert store.stats().queries == 0


def test_rerank_query_is_in_the_space_of_the_stored_keys(
    store: Any, rng: np.random.Generator
) -> None:
    for _ in range(20):
        keys, values = pair(rng, 2)
        store.put(keys, values, layer_idx=0, index_keys=keys[:, ::-1])
    query = pair(rng, 2)[0]
    turned = query[:, ::-1]
    scores = late(query, [store.get(i).keys for i in store], 1)
    best = min(zip(scores, store, strict=True), key=lambda pair: (-pair[0], pair[1]))[1]
    hits = store.query(turned, 0, 1, rerank="late", candidates=20, rerank_query=query)
    assert [hit.entry_id for hit in hits] == [best]


def test_a_rerank_query_is_not_centred_by_the_mean_of_another_space(
    store: Any, rng: np.random.Generator
) -> None:
    store.calibrate(0, keys=pair(rng, 5)[0], queries=9 * pair(rng, 2)[0])
    for _ in range(20):
        keys, values = pair(rng, 2)
        store.put(keys, values, layer_idx=0, index_keys=keys[:, ::-1])
    query = pair(rng, 3)[0]
    scores = late(query, [store.get(i).keys for i in store], 1)
    order = sorted(zip(scores, store, strict=True), key=lambda pair: (-pair[0], pair[1]))
    hits = store.query(query[:, ::-1], 0, 20, rerank="late", rerank_query=query)
    assert [hit.entry_id for hit in hits] == [i for _, i in order]


def test_order_by_norm(store: Any, rng: np.random.Generator) -> None:
    for i in range(40):
        keys, values = pair(rng, 2)
        store.put(keys * (1 + i % 5), values, layer_idx=0)
    query = pair(rng, 1)[0]
    with pytest.raises(ValueError, match="order"):
        store.query(query, 0, order="norm")
    store.calibrate(0)
    estimates = []
    for hit in store.query(query, 0, 40):
        norm = float(record(store, hit.entry_id, "padding").view(np.float32))
        angle = math.pi * round((1 - hit.score) / 2 * 512) / 512
        estimates.append((-norm * math.cos(angle), hit.entry_id))
    wanted = [entry_id for _, entry_id in sorted(estimates)]
    assert wanted != [hit.entry_id for hit in store.query(query, 0, 40)]
    for top_k in (1, 5, 40):
        assert [h.entry_id for h in store.query(query, 0, top_k, order="norm")] == wanted[:top_k]


def test_approximate_gives_up_what_is_far_from_a_few_tokens(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """In a large layer; what is found has its whole score, and what stands out is found."""
    store = new_store(hdc_dim=512, signature_tokens=1, signature_bits=256)
    n = 20_000
    keys, values = pair(rng, 1)[0], pair(rng, 1)[1]
    entries = [(row[None], values) for row in pair(rng, n)[0]]
    entries[::4000] = [(keys, values)] * 5
    store.put_many(entries, layer_idx=0)
    query = np.concatenate([pair(rng, 4)[0], np.repeat(keys, 4, axis=0)])
    exact = store.query(query, 0, 200)
    found = store.query(query, 0, 200, approximate=True)
    assert same_hits(store.query(query, 0, 200, approximate=False), exact)
    assert [hit.entry_id for hit in found[:5]] == [1, 4001, 8001, 12001, 16001]
    query = pair(rng, 8)[0]  # nothing stands out
    exact = store.query(query, 0, 300)
    found = store.query(query, 0, 300, approximate=True)
    assert [h.entry_id for h in found] != [h.entry_id for h in exact]
    scores = {hit.entry_id: hit.score for hit in store.query(query, 0, n)}
    assert all(hit.score == scores[hit.entry_id] for hit in found)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    few = np.arange(1, 16_001)  # a conversation's entries, too few to give any up
    among = store.query(query, 0, 200, entry_ids=few)
    assert same_hits(store.query(query, 0, 200, entry_ids=few, approximate=True), among)


def longest_run(ids: list[int]) -> int:
    ids = sorted(ids)
    longest = length = 1
    for before, after in itertools.pairwise(ids):
        length = length + 1 if after == before + 1 else 1
        longest = max(longest, length)
    return longest


@pytest.mark.parametrize("max_run", [1, 2, 3])
def test_max_run_limits_neighbours(max_run: int, store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 2)
    for i in range(30):
        near = keys if i < 12 else pair(rng, 2)[0]
        store.put(near, values, layer_idx=0)
    assert longest_run([hit.entry_id for hit in store.query(keys, 0, 8)]) == 8
    hits = store.query(keys, 0, 8, max_run=max_run)
    assert len(hits) == 8
    assert longest_run([hit.entry_id for hit in hits]) <= max_run
    assert hits[0].entry_id == 1


@pytest.mark.parametrize("rerank", [None, "signatures", "pooled", "late"])
def test_the_newest_are_in_the_result(
    rerank: str | None, store: Any, rng: np.random.Generator
) -> None:
    """Whatever their similarity, also where a second stage looks at fewer entries."""
    keys, values = pair(rng, 2)
    for i in range(40):
        store.put(keys if i < 30 else -keys, values, layer_idx=0)
    plain = [hit.entry_id for hit in store.query(keys, 0, 5, rerank=rerank)]
    assert plain == [1, 2, 3, 4, 5]
    found = [hit.entry_id for hit in store.query(keys, 0, 5, newest=2, rerank=rerank)]
    assert sorted(found) == [1, 2, 3, 39, 40]
    among = list(range(1, 36))
    hits = store.query(keys, 0, 5, newest=2, rerank=rerank, entry_ids=among)
    assert sorted(hit.entry_id for hit in hits) == [1, 2, 3, 34, 35]
    assert len(store.query(keys, 0, 2, newest=9, rerank=rerank)) == 2


OPTIONS: list[dict[str, Any]] = [
    {"rerank": "late", "candidates": 12, "n_heads": 2},
    {"rerank": "tokens"},
    {"rerank": "signatures", "candidates": 9},
    {"max_run": 1},
    {"newest": 1},
    {"max_run": 2, "newest": 2, "rerank": "pooled"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_query_many_takes_the_same_options(
    options: dict[str, Any], store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 30)
    queries = [pair(rng, n)[0] for n in (1, 2, 3)]
    batch = store.query_many(queries, 0, 3, **options)
    assert store.stats().queries == 3
    for query, hits in zip(queries, batch, strict=True):
        assert same_hits(store.query(query, 0, 3, **options), hits)
    assert store.entries["access_count"].sum() == 18


@pytest.mark.parametrize(
    "options",
    [
        {"rerank": "best"},
        {"rerank": 3},
        {"order": "cosine"},
        {"candidates": 2},
        {"candidates": 1.5},
        {"n_heads": 5},
        {"n_heads": 0},
        {"max_run": 0},
        {"newest": -1},
        {"approximate": 1},
        {"rerank_query": np.ones((2, 23), np.float32), "rerank": "late"},
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(
    options: dict[str, Any], store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 5)
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        store.query(pair(rng, 1)[0], 0, 3, **options)
    assert store.stats().queries == 0
    assert not store.entries["access_count"].any()


def test_defaults_are_the_plain_search(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 30)
    query = pair(rng, 2)[0]
    plain = store.query(query, 0, 5)
    spelled = store.query(query, 0, 5, rerank=None, candidates=None, max_run=None, newest=0)
    assert same_hits(plain, spelled)
    assert same_hits(plain, store.query(query, 0, 5, order="hamming"))

"""FORMAT-AND-API "Named in the other pages": what may follow a search, and options of a query."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from model import Model, mean_pool

from .helpers import FORMS, Floats, fill, model_for, pair, record, same_hits


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

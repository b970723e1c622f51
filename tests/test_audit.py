"""Audit: recall of every ranking against brute force, computed again in plain numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import twins
from numpy.typing import NDArray

import hybridmem
from hybridmem import _view

Floats = NDArray[np.float32]
WIDTH, HEADS, SEED = 16, 2, 5
TOKENS = [1 + at % 4 for at in range(30)]


def rows(rng: np.random.Generator, n: int) -> Floats:
    return rng.normal(1, 1, (n, WIDTH)).astype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


@pytest.fixture
def chunks(rng: np.random.Generator) -> dict[int, Floats]:
    """Keys by entry id."""
    return {at + 1: rows(rng, n) for at, n in enumerate(TOKENS)}


@pytest.fixture
def queries(rng: np.random.Generator) -> list[Floats]:
    return [rows(rng, 1 + at % 3) for at in range(9)]


@pytest.fixture
def make(tmp_path: Path, chunks: dict[int, Floats]) -> Callable[..., hybridmem.Store]:
    def make(centre: bool = False, **fields: Any) -> hybridmem.Store:
        store = hybridmem.create(tmp_path / "mem", embed_dim=WIDTH, seed=SEED, **fields)
        if centre:
            store.calibrate(7, keys=np.concatenate(list(chunks.values())), queries=CENTRE[None])
        for keys in chunks.values():
            store.put(keys, keys, layer_idx=7)
        return store

    return make


CENTRE = np.full(WIDTH, 0.7, np.float32)


# --- the oracle ----------------------------------------------------------------------------------


def heads(x: Floats) -> NDArray[np.float64]:
    """[n, width] as [heads, n, width / heads]."""
    return x.astype(np.float64).reshape(len(x), HEADS, -1).transpose(1, 0, 2)


def brute(truth: str, query: Floats, chunks: dict[int, Floats], centre: Floats) -> dict[int, float]:
    """Score of each entry by its keys."""
    if truth == "pooled":
        return {
            i: float(query.mean(0, np.float64) @ k.mean(0, np.float64)) for i, k in chunks.items()
        }
    if truth == "late":
        return {
            i: float(np.mean((heads(query - centre) @ heads(k).transpose(0, 2, 1)).max(2)))
            for i, k in chunks.items()
        }
    mass = {
        i: np.exp(heads(query) @ heads(k).transpose(0, 2, 1) / math.sqrt(WIDTH / HEADS)).sum(2)
        for i, k in chunks.items()
    }
    total = np.sum(list(mass.values()), axis=0)
    return {i: float(np.mean(one / total)) for i, one in mass.items()}


def bits(x: Floats, n: int) -> NDArray[np.uint8]:
    return _bits(x.tobytes(), n)


@functools.cache
def _bits(x: bytes, n: int) -> NDArray[np.uint8]:
    return np.unpackbits(twins.project(np.frombuffer(x, np.float32), n, SEED))


def far(a: Floats, b: Floats, n: int) -> int:
    return int((bits(a, n) != bits(b, n)).sum())


def by_signature(
    query: Floats, chunks: dict[int, Floats], n: int, tokens: bool, key: Floats, middle: Floats
) -> dict[int, float]:
    """Likeness of each entry by signatures of n bits, keys and query centred."""
    if not tokens:
        q = twins.mean_pool(query, len(query))[0] - middle
        return {i: -far(q, twins.mean_pool(k, len(k))[0] - key, n) for i, k in chunks.items()}
    return {
        i: -sum(min(far(q - middle, one - key, n) for one in k) for q in query)
        for i, k in chunks.items()
    }


def by_cosine(
    query: Floats, chunks: dict[int, Floats], n: int, tokens: bool, key: Floats, middle: Floats
) -> dict[int, float]:
    """Cosine of query tokens in small integers and the signs of an entry's nearest token."""

    def best(one: Floats, mine: Floats) -> float:
        whole = twins.rounded(twins.projected(one, n, SEED), 15)
        signed = np.stack([twins.project(k, n, SEED) for k in mine])
        length = math.sqrt(n * np.square(whole, dtype=np.int64).sum())
        return float(twins.dots(signed, whole[None])[0] / length)

    asked = query if tokens else twins.mean_pool(query, len(query))
    return {
        i: float(
            np.mean(
                [
                    best(q - middle, (k if tokens else twins.mean_pool(k, len(k))) - key)
                    for q in asked
                ]
            )
        )
        for i, k in chunks.items()
    }


def first(scores: dict[int, float], k: int) -> list[int]:
    return sorted(scores, key=lambda i: (-scores[i], i))[:k]


def recall(wanted: dict[int, float], found: dict[int, float], k: int) -> float:
    return len(set(first(wanted, k)) & set(first(found, k))) / k


ZERO = np.zeros(WIDTH, np.float32)


# --- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_every_ranking_against_plain_numpy(
    tokens: bool,
    centre: bool,
    make: Callable[..., hybridmem.Store],
    chunks: dict[int, Floats],
    queries: list[Floats],
) -> None:
    k, n, candidates = 4, 64, 9
    fields = {"hdc_dim": 64 * 4, "signature_tokens": 1, "signature_bits": 64} if tokens else {}
    store = make(centre, **(fields or {"hdc_dim": 64}))
    found = store.audit(queries, 7, k, n_heads=HEADS, candidates=candidates)
    assert (found.layer_idx, found.entries, found.queries, found.top_k) == (7, 30, 9, k)
    assert found.other_keys == 0
    mean_key = twins.mean_pool(np.concatenate(list(chunks.values())), sum(TOKENS))[0]
    own_key, own_middle = (mean_key, CENTRE) if centre else (ZERO, ZERO)

    def norm(query: Floats, bits: int, middle: Floats) -> dict[int, float]:
        alike = by_signature(query, chunks, bits, False, mean_key, middle)
        size = {
            i: np.linalg.norm(keys.mean(0, np.float64) - mean_key) for i, keys in chunks.items()
        }
        return {i: size[i] * math.cos(math.pi * -alike[i] / bits) for i in chunks}

    name = ("every token, 64 bits" if tokens else "pooled, 64 bits") + ", centred" * centre
    wanted: dict[str, dict[str, list[float]]] = {}
    for at, query in enumerate(queries):
        others = np.concatenate([q for i, q in enumerate(queries) if i != at]).mean(0)
        middle = CENTRE if centre else others
        own = by_signature(query, chunks, n, tokens, own_key, own_middle)
        truths = {t: brute(t, query, chunks, own_middle) for t in ("pooled", "tokens", "late")}
        rankings = {
            "recency": {i: float(i) for i in chunks},
            f"{name}: this store": own,
            "pooled, 4,096 bits": by_signature(query, chunks, 4096, False, ZERO, ZERO),
            "pooled, 4,096 bits, centred": by_signature(
                query, chunks, 4096, False, mean_key, middle
            ),
            "pooled, 4,096 bits, centred, by norm": norm(query, 4096, middle),
            "every token, 256 bits": by_signature(query, chunks, 256, True, ZERO, ZERO),
            "every token, 256 bits, centred": by_signature(
                query, chunks, 256, True, mean_key, middle
            ),
        }
        if centre and not tokens:
            rankings[f"{name}, by norm: this store"] = norm(query, n, CENTRE)
        whole = by_cosine(query, chunks, n, tokens, own_key, own_middle)
        rankings[f"{name}, {candidates} re-ranked by signatures: this store"] = {
            i: whole[i] for i in first(own, candidates)
        }
        for truth, scores in truths.items():
            rankings[f"{name}, {candidates} re-ranked by {truth}: this store"] = {
                i: scores[i] for i in first(own, candidates)
            }
        for ranking, order in rankings.items():
            for truth, scores in truths.items():
                each = wanted.setdefault(ranking, {}).setdefault(truth, [])
                each.append(recall(scores, order, k))
    wanted["random"] = {t: [k / 30] * 9 for t in ("pooled", "tokens", "late")}
    assert set(found.recall) == set(wanted)
    for ranking, by_truth in wanted.items():
        for truth, each in by_truth.items():
            assert found.recall[ranking][truth].tolist() == each, (ranking, truth)
            assert found.mean()[ranking][truth] == pytest.approx(np.mean(each))


def test_rows_of_this_store_are_what_query_answers(
    make: Callable[..., hybridmem.Store], chunks: dict[int, Floats], queries: list[Floats]
) -> None:
    store = make(centre=True, hdc_dim=128)
    k = 5
    found = store.audit(queries, 7, k)
    assert store.stats().queries == 0
    assert not store.entries["access_count"].any()
    truths = [brute("pooled", query, chunks, CENTRE) for query in queries]
    for suffix, options in {
        "": {},
        ", by norm": {"order": "norm"},
        ", 20 re-ranked by signatures": {"rerank": "signatures"},
        ", 20 re-ranked by pooled": {"rerank": "pooled"},
        ", 20 re-ranked by late": {"rerank": "late"},
    }.items():
        each = found.recall[f"pooled, 128 bits, centred{suffix}: this store"]["pooled"]
        for at, (query, scores) in enumerate(zip(queries, truths, strict=True)):
            ids = {hit.entry_id for hit in store.query(query, 7, k, **options)}
            assert each[at] == len(ids & set(first(scores, k))) / k


def test_large_layers_have_a_row_for_the_approximate_search(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {at + 1: rows(rng, 1 + at % 2) - 1 for at in range(1100)}
    queries = [rows(rng, 2 + at % 8) - 1 for at in range(32)]
    store = hybridmem.create(
        tmp_path / "mem", embed_dim=WIDTH, hdc_dim=128, signature_tokens=1, signature_bits=64
    )
    store.put_many([(chunk, chunk) for chunk in keys.values()], layer_idx=7)
    name = "every token, 64 bits, approximate: this store"
    assert name not in store.audit(queries, 7, 16).recall
    monkeypatch.setattr(_view, "LARGE", 1100)
    found = store.audit(queries, 7, 16, n_heads=HEADS).recall
    for at, query in enumerate(queries):
        ids = {hit.entry_id for hit in store.query(query, 7, 16, approximate=True)}
        wanted = first(brute("late", query, keys, ZERO), 16)
        assert found[name]["late"][at] == len(ids & set(wanted)) / 16
    exact = found["every token, 64 bits: this store"]["late"]
    assert (found[name]["late"] != exact).any()
    assert found[name]["late"][0] == exact[0]  # of two tokens, all of which are looked for
    store.close()


def test_few_queries_are_not_centred_by_one_another(
    make: Callable[..., hybridmem.Store], chunks: dict[int, Floats], queries: list[Floats]
) -> None:
    k, few = 4, queries[:7]
    found = make().audit(few, 7, k)
    mean_key = twins.mean_pool(np.concatenate(list(chunks.values())), sum(TOKENS))[0]
    each = found.recall["every token, 256 bits, centred"]["pooled"]
    for at, query in enumerate(few):
        alike = by_signature(query, chunks, 256, True, mean_key, ZERO)
        assert each[at] == recall(brute("pooled", query, chunks, ZERO), alike, k)


# --- other keys ----------------------------------------------------------------------------------


def test_entries_indexed_by_other_keys(
    tmp_path: Path, chunks: dict[int, Floats], queries: list[Floats]
) -> None:
    """Against the stored keys, of which the index knows nothing, and against those it knows."""
    k = 3
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH, seed=SEED) as store:
        for at, keys in chunks.items():
            other = None if at % 3 == 0 else keys[:, ::-1]
            store.put(keys, keys, layer_idx=7, index_keys=other)
        turned = [query[:, ::-1] for query in queries]
        stored = store.audit(turned, 7, k, rerank_queries=queries, n_heads=HEADS)
        assert stored.other_keys == 20
        row = "pooled, 4,096 bits, 12 re-ranked by tokens: this store"
        for at, query in enumerate(queries):
            truth = brute("tokens", query, chunks, ZERO)
            hits = store.query(turned[at], 7, k, rerank="tokens", rerank_query=query, n_heads=HEADS)
            share = len({hit.entry_id for hit in hits} & set(first(truth, k))) / k
            assert stored.recall[row]["tokens"][at] == share

        indexed = {at: keys[:, ::-1] for at, keys in chunks.items() if at % 3}
        found = store.audit(turned, 7, k, keys=indexed)
        assert (found.other_keys, found.entries) == (0, 20)
        assert [ranking for ranking in found.recall if "re-ranked" in ranking] == [
            "pooled, 4,096 bits, 12 re-ranked by signatures: this store"
        ]
        each = found.recall["pooled, 4,096 bits: this store"]["pooled"]
        for at, query in enumerate(turned):
            alike = by_signature(query, indexed, 4096, False, ZERO, ZERO)
            assert each[at] == recall(brute("pooled", query, indexed, ZERO), alike, k)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("queries", {"queries": []}),
        ("query 1", {"queries": [np.ones(WIDTH, np.float32), np.ones(3, np.float32)]}),
        ("layer_idx", {"layer_idx": 3}),
        ("top_k", {"top_k": 0}),
        ("candidates", {"candidates": 3}),
        ("n_heads", {"n_heads": 3}),
        ("rerank_queries", {"rerank_queries": [np.ones(WIDTH, np.float32)]}),
        ("keys of entry 2", {"keys": {2: np.ones((9, WIDTH), np.float32)}}),
        ("layer_idx", {"keys": {99: np.ones((9, WIDTH), np.float32)}}),
        ("rerank_queries", {"keys": {}, "rerank_queries": np.ones((9, WIDTH), np.float32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_compared_is_refused_by_name(
    name: str, given: dict[str, Any], make: Callable[..., hybridmem.Store], queries: list[Floats]
) -> None:
    store = make()
    arguments: dict[str, Any] = {"queries": queries, "layer_idx": 7, "top_k": 4, **given}
    with pytest.raises((ValueError, TypeError), match=name):
        store.audit(**arguments)


def test_an_audit_asks_for_no_more_than_there_is(
    make: Callable[..., hybridmem.Store], queries: list[Floats]
) -> None:
    found = make().audit(queries, 7, 99)
    assert found.top_k == 30
    assert all((each == 1).all() for row in found.recall.values() for each in row.values())

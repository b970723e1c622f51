"""Layered stores answer exactly as one store of all their entries does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmem

WIDTH = 16
LAYERS = 2
POOLED: dict[str, Any] = {"hdc_dim": 64}
TOKENS: dict[str, Any] = {"hdc_dim": 256, "signature_tokens": 1, "signature_bits": 64}


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
        options["rerank"] = draw(st.sampled_from(["signatures", "pooled", "tokens", "late"]))
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


@settings(max_examples=40)
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


@settings(max_examples=15)
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
            for options in (
                {"newest": newest, "max_run": 2},
                {"rerank": "late"},
                {"rerank": "signatures"},
            ):
                hits = pair.told(memory.query(query, layer, top_k, **options))
                for number, limit in enumerate(limits):
                    if limit is not None and not (by_layer and layer):
                        assert sum(told[0] == number for told in hits) <= limit

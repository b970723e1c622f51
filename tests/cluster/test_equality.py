"""A cluster answers as one store of all its entries does, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hybridmem

from .nodes import HOW, Nodes

pytest.importorskip("ray", reason=HOW)

WIDTH = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "hash": {"partitions": 3, "hdc_dim": 256},
    "hash, sub-signatures": {
        "partitions": 2,
        "hdc_dim": 512,
        "signature_tokens": 1,
        "signature_bits": 64,
        "kv_dtype": "bfloat16",
    },
    "layer": {"partitions": 3, "hdc_dim": 256, "quantize_stored": True},
}


class Pair:
    """A cluster, and one store that is given the same."""

    def __init__(self, root: str, path: Path, route: str, partitions: int, **config: Any) -> None:
        from hybridmem.integrations import ray as hm

        self.cluster = hm.create(
            root, partitions=partitions, route=route, embed_dim=WIDTH, deadline_s=60, **config
        )
        self.store = hybridmem.create(path, embed_dim=WIDTH, **config)
        self.same_ids = route == "hash"
        #: Ids of the store by those of the cluster.
        self.ids: dict[int, int] = {}
        self.layers = 0

    def put(self, layer: int, chunks: list[tuple[int, int]], sources: list[Any]) -> None:
        entries = [(matrix(seed, n), matrix(seed + 1, n)) for seed, n in chunks]
        weights = [float(n) for _, n in chunks]
        theirs = self.store.put_many(entries, layer, weights, sources=sources)
        if len(entries) == 1:
            ours = [self.cluster.put(*entries[0], layer, weights[0], source=sources[0])]
        else:
            ours = self.cluster.put_many(entries, layer, weights, sources=sources)
        self.ids.update(zip(ours, theirs, strict=True))
        assert ours == sorted(ours)
        assert not self.same_ids or ours == theirs

    def seen(self, hits: list[hybridmem.Hit], *, ours: bool) -> list[Any]:
        return [
            (
                self.ids[hit.entry_id] if ours else hit.entry_id,
                hit.score,
                hit.layer_idx,
                hit.importance,
                hit.access_count,
                hit.source,
                hit.keys.tobytes(),
                hit.values.tobytes(),
                hit.keys.flags.writeable,
            )
            for hit in hits
        ]

    def check(self, query: Any, layer: int, top_k: int, among: Any, **options: Any) -> None:
        theirs = None if among is None else sorted(self.ids.get(one, 0) for one in among)
        got = self.cluster.query(query, layer, top_k, entry_ids=among, **options)
        wanted = self.store.query(query, layer, top_k, entry_ids=theirs, **options)
        assert self.seen(got, ours=True) == self.seen(wanted, ours=False)

    def close(self) -> None:
        self.cluster.close()
        self.store.close()


def matrix(seed: int, n: int) -> Any:
    """Few different ones, so that ties are frequent."""
    rng = np.random.default_rng([seed, n])
    return rng.integers(-24, 25, (n, WIDTH)).astype(np.float32) / 8


@pytest.fixture(scope="module", params=CONFIGS)
def pair(
    request: pytest.FixtureRequest, nodes: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("one")
    route = request.param.split(",")[0]
    made = Pair(f"$HYBRIDMEM_DISK/{path.name}", path / "mem", route, **CONFIGS[request.param])
    yield made
    made.close()


chunks = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=6)
options = st.fixed_dictionaries(
    {},
    optional={
        "rerank": st.sampled_from(["signatures", "pooled", "tokens", "late"]),
        "candidates": st.just(20),
        "n_heads": st.sampled_from([1, 2]),
        "max_run": st.integers(1, 2),
        "newest": st.integers(0, 3),
        "approximate": st.booleans(),
    },
)


@given(data=st.data())
@settings(
    max_examples=12,
    phases=(Phase.explicit, Phase.generate),  # on actors that go on, nothing can be repeated
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_answers(pair: Pair, data: st.DataObject) -> None:
    """Random layers, each spread over the partitions in its own way."""
    layers = list(range(pair.layers, pair.layers + data.draw(st.integers(1, 4))))
    pair.layers = layers[-1] + 1
    before = set(pair.ids)
    for layer in layers:
        if data.draw(st.booleans()):
            centre = matrix(99, 3)
            pair.cluster.calibrate(layer, keys=centre, queries=centre)
            pair.store.calibrate(layer, keys=centre, queries=centre)
        for some in data.draw(st.lists(chunks, max_size=3)):
            pair.put(layer, some, [{"from": one} if one[1] > 2 else None for one in some])
    ids = sorted(set(pair.ids) - before)
    for one in data.draw(st.sets(st.sampled_from(ids), max_size=3)) if ids else ():
        pair.cluster.delete(one)
        pair.store.delete(pair.ids[one])
    if data.draw(st.booleans()):
        pair.cluster.flush()
        pair.store.flush()
    for _ in range(3):
        layer = data.draw(st.sampled_from(layers))
        query = matrix(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3)))
        among = data.draw(st.none() | st.sets(st.sampled_from(ids or [1])).map(sorted))
        given_options = data.draw(options)
        if layer in pair.store.calibration and pair.store.config.signature.pooled:
            given_options |= {"order": data.draw(st.sampled_from(["hamming", "norm"]))}
        pair.check(query, layer, data.draw(st.sampled_from([1, 2, 5, 20])), among, **given_options)
    many = [matrix(seed, 2) for seed in range(3)]
    got = pair.cluster.query_many(many, layers[0], 3)
    wanted = pair.store.query_many(many, layers[0], 3)
    assert [pair.seen(hits, ours=True) for hits in got] == [
        pair.seen(hits, ours=False) for hits in wanted
    ]


def test_every_option_on_one_layer(pair: Pair) -> None:
    layer = pair.layers
    pair.layers += 1
    pair.put(layer, [(seed, 2 + seed % 3) for seed in range(60)], [None] * 60)
    for seed in range(4):
        for given_options in (
            {"rerank": "signatures"},
            {"rerank": "signatures", "candidates": 30, "newest": 1},
            {"rerank": "pooled"},
            {"rerank": "tokens", "n_heads": 2},
            {"rerank": "late", "candidates": 30},
            {"max_run": 1},
            {"newest": 2},
            {"rerank": "late", "max_run": 2, "newest": 1},
        ):
            for top_k in (1, 4):
                pair.check(matrix(100 + seed, 2), layer, top_k, None, **given_options)


def test_one_step_asks_all_layers_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in range(pair.layers, pair.layers + 4):
        pair.put(layer, [(seed, 2) for seed in range(5)], [None] * 5)
    layers = range(pair.layers, pair.layers + 4)
    pair.layers += 4
    calls: list[Any] = []
    read = pair.cluster._owners.read

    def counted(wanted: Any, seconds: float) -> Any:
        calls.append({one: args[0] for one, args in wanted.items() if args})
        return read(wanted, seconds)

    monkeypatch.setattr(pair.cluster._owners, "read", counted)
    got = pair.cluster.query_layers({layer: matrix(layer, 1) for layer in layers}, 3)
    for layer in layers:
        wanted = pair.store.query(matrix(layer, 1), layer, 3)
        assert pair.seen(got[layer], ours=True) == pair.seen(wanted, ours=False)
    partitions = set(range(len(pair.cluster._owners.all)))
    assert calls[0] == dict.fromkeys(partitions, "ask")
    assert len(calls[1]) <= len(partitions)
    assert set(calls[1].values()) <= {"fetch"}
    assert len(calls) == 2


def test_attention_over_what_is_found(pair: Pair) -> None:
    layer = pair.layers
    pair.layers += 1
    pair.put(layer, [(seed, 3) for seed in range(8)], [None] * 8)
    query = matrix(3, 1)
    got = hybridmem.attend(query, pair.cluster, layer, 4, n_heads=2)
    wanted = hybridmem.attend(query, pair.store, layer, 4, n_heads=2)
    assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted]
    cache = matrix(50, 2)
    got = hybridmem.augmented_kv(query, cache, cache, pair.cluster, layer, 4)
    wanted = hybridmem.augmented_kv(query, cache, cache, pair.store, layer, 4)
    assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted]


def test_contents(pair: Pair) -> None:
    layer = pair.layers
    pair.layers += 1
    pair.put(layer, [(seed, 2) for seed in range(4)], [None, {"a": 1}, None, None])
    cluster, store = pair.cluster, pair.store
    assert len(cluster) == len(store)
    assert [pair.ids[one] for one in cluster] == list(store)
    theirs, ours = cluster.stats(), store.stats()
    for name in ("entries", "entries_by_layer", "tokens", "queries", "hits"):
        assert getattr(theirs, name) == getattr(ours, name)
    newest = max(pair.ids)
    got, wanted = cluster.get(newest), store.get(pair.ids[newest])
    assert got.signature == wanted.signature
    assert got.keys.tobytes() == wanted.keys.tobytes()
    assert got.padding == wanted.padding
    assert got.timestamp == cluster.timestamps([newest])[0] > 0
    assert newest in cluster
    assert newest + 1000 not in cluster
    assert cluster.timestamps([newest + 1000]) == [0]
    with pytest.raises(KeyError):
        cluster.get(newest + 1000)
    with pytest.raises(KeyError):
        cluster.delete(newest + 1000)
    with pytest.raises(ValueError, match="keys: "):
        cluster.put(np.ones((2, 3)), np.ones((2, 3)), 0)
    assert len(cluster) == len(store)

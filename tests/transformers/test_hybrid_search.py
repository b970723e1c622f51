"""When a search is made, with which queries, and what finding little does to the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import left_padding, run, text, torch, transformers

import hybridmem
from hybridmem.integrations.transformers import retrieval
from hybridmem.integrations.transformers._fusion import Fusion

pytestmark = [pytest.mark.torch, pytest.mark.transformers]


class Searches(list[Any]):
    """Layer, queries and hits of every search."""

    def of(self, layer: int) -> list[Any]:
        return [(vectors, ids) for where, vectors, ids in self if where == layer]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    seen = Searches()
    query_many = hybridmem.Store.query_many

    def spy(self: Any, queries: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        found = query_many(self, queries, layer_idx, *args, **kwargs)
        for vectors, hits in zip(queries, found, strict=True):
            seen.append((layer_idx, np.array(vectors), [hit.entry_id for hit in hits]))
        return found

    monkeypatch.setattr(hybridmem.Store, "query_many", spy)
    return seen


def test_blocks_end_at_multiples_in_the_sequence(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    model = tiny_model()
    cache = new_cache(model, top_k=2, block_tokens=8, query_tokens=3)
    with retrieval(model):
        run(model, text(30), [30], cache)
        searches.clear()
        run(model, text(30, seed=2), [30], cache)
    # From token 30 on: to 32, 40, 48, 56, 60.
    assert len(searches.of(0)) == 5
    assert all(len(vectors) == 3 for vectors, _ in searches.of(0))


def test_pieces_that_end_with_blocks_find_the_same(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    """Results do not depend on how a prompt is cut, as long as nothing is evicted in between."""
    model = tiny_model()
    trunk = new_cache(model, top_k=2, block_tokens=8, window=100)
    trunk.window = 5
    with retrieval(model):
        run(model, text(40), [40], trunk)
    got, found = [], []
    for pieces in ([24], [8, 16], [8, 8, 8]):
        branch = trunk.branch()
        branch.window = 100
        searches.clear()
        with retrieval(model):
            got.append(run(model, text(24, seed=2), pieces, branch))
        found.append([ids for _, ids in searches.of(2)])
    assert found[0] == found[1] == found[2]
    assert len({tuple(ids) for ids in found[0]}) > 1
    assert torch.allclose(got[0], got[1], atol=1e-4)
    assert torch.allclose(got[0], got[2], atol=1e-4)


def test_searches_are_decided_by_signatures_and_the_whole_query(
    tiny_model: Any, new_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another answer than that of the query's signs, of the same candidates."""
    others = []
    query_many = hybridmem.Store.query_many

    def spy(self: Any, queries: Any, layer_idx: int, top_k: int, **options: Any) -> Any:
        assert options.pop("rerank") == "signatures"
        found = query_many(self, queries, layer_idx, top_k, rerank="signatures", **options)
        for mine, plain in zip(
            found, query_many(self, queries, layer_idx, 4 * top_k, **options), strict=True
        ):
            ids, candidates = ([hit.entry_id for hit in hits] for hits in (mine, plain))
            assert set(ids) <= set(candidates)
            others.append(ids != candidates[:top_k])
        return found

    monkeypatch.setattr(hybridmem.Store, "query_many", spy)
    model = tiny_model()
    cache = new_cache(model, top_k=2, block_tokens=8, chunk_tokens=4)
    with retrieval(model):
        run(model, text(60), [30, 30], cache)
    assert any(others)


def test_one_search_where_everything_is_found_anyway(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    model = tiny_model()
    cache = new_cache(model, block_tokens=4)
    with retrieval(model):
        run(model, text(30), [30], cache)
        run(model, text(30), [30], cache)
    assert len(searches) == 3


def test_search_interval(tiny_model: Any, new_cache: Any, searches: Searches) -> None:
    model = tiny_model()
    trunk = new_cache(model, top_k=2, chunk_tokens=8, window=6)
    with retrieval(model):
        run(model, text(48), [48], trunk)  # 8 are held: 6 more until the next eviction
    for interval, wanted in ((1, 12), (4, 3 + 1), (100, 2)):
        cache = trunk.branch()
        cache.search_interval = interval
        searches.clear()
        with retrieval(model):
            run(model, text(12, seed=5), [1] * 12, cache)
        # One more right after the eviction: what has just left would be lost until the next one.
        assert len(searches.of(0)) == wanted


def test_queries_of_padding_are_left_out(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    model = tiny_model()
    ids, mask = text(40, batch=2), left_padding(40, [0, 23])
    cache = new_cache(model, top_k=2, query_tokens=8, block_tokens=100)
    with retrieval(model):
        run(model, ids, [36, 4], cache, mask)
    assert [len(vectors) for vectors, _ in searches.of(0)] == [8, 8]
    searches.clear()
    alone = new_cache(model, top_k=2, query_tokens=20, block_tokens=100, centre=False)
    with retrieval(model):
        run(model, ids[1:, 23:], [13, 4], alone)
        batch = new_cache(model, top_k=2, query_tokens=20, block_tokens=100, centre=False)
        run(model, ids, [36, 4], batch, mask)
    # The second row has seen 17 tokens, and 20 columns back there is padding.
    found = searches.of(0)
    assert [len(vectors) for vectors, _ in found] == [17, 20, 17]
    np.testing.assert_allclose(found[2][0], found[0][0], atol=1e-3)


def test_a_second_eviction_of_the_same_tokens_would_show(tiny_model: Any, new_cache: Any) -> None:
    """No token is stored twice and none is missing."""
    model = tiny_model()
    cache = new_cache(model, chunk_tokens=4, window=6)
    with retrieval(model):
        run(model, text(70), [31, 1, 1, 1, 1, 1, 34], cache)
    for layer in cache.hybrid_layers:
        (row,) = layer.rows
        tokens = list(range(row.n_sinks))
        for entry_id in row.entry_ids:
            placement = cache.placement(entry_id)
            tokens += range(placement.token, placement.token + placement.n_tokens)
        assert tokens == list(range(70 - layer.held))


def test_stored_keys_and_values_are_the_models(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    ids = text(40)
    reference = transformers.DynamicCache(config=model.config)
    run(model, ids, [40], reference)
    cache = new_cache(model)
    with retrieval(model):
        run(model, ids, [40], cache)
    for layer, wanted in zip(cache.hybrid_layers, reference.layers, strict=True):
        for entry_id in layer.rows[0].entry_ids:
            entry, placement = cache.store.get(entry_id), cache.placement(entry_id)
            place = slice(placement.token, placement.token + placement.n_tokens)
            for got, whole in ((entry.keys, wanted.keys), (entry.values, wanted.values)):
                rows = whole[0, :, place].transpose(0, 1).flatten(1).numpy()
                np.testing.assert_allclose(got, rows, atol=1e-6)


def test_more_retrieved_is_closer(tiny_model: Any, new_cache: Any) -> None:
    """Divergence from full attention falls with top_k in the mean, and ends at nothing."""
    model = tiny_model()
    divergences = []
    for seed in range(6):
        ids = text(60, seed=seed)
        wanted = run(model, ids, [60], transformers.DynamicCache(config=model.config))[:, 48:]
        wanted = wanted.log_softmax(-1)
        row = []
        for top_k in (1, 4, 8, 1000):
            cache = new_cache(model, top_k=top_k)
            with retrieval(model):
                got = run(model, ids, [48] + [1] * 12, cache)[:, 48:].log_softmax(-1)
            row.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
        divergences.append(row)
    mean = np.mean(divergences, axis=0)
    assert (np.diff(mean) < 0).all()
    assert mean[-1] < 1e-6


def test_the_store_is_calibrated_with_all_that_was_seen(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    ids, mask = text(40, batch=2), left_padding(40, [0, 23])
    cache = new_cache(model)
    kept: dict[str, Any] = {}
    attention = model.model.layers[0].self_attn
    hooks = [
        projection.register_forward_hook(
            lambda module, args, output, name=name: kept.update({name: output[mask.bool()]})
        )
        for name, projection in (("k", attention.k_proj), ("q", attention.q_proj))
    ]
    with retrieval(model):
        run(model, ids, [40], cache, mask)
    for hook in hooks:
        hook.remove()
    key, query = cache.store.calibration[0]
    heads = kept["q"].unflatten(1, (2, 2, 8)).sum(2).flatten(1)
    np.testing.assert_allclose(key, kept["k"].mean(0).numpy(), atol=1e-5)
    np.testing.assert_allclose(query, heads.mean(0).numpy(), atol=1e-5)
    plain = new_cache(model, centre=False)
    with retrieval(model):
        run(model, ids, [40], plain, mask)
    assert plain.store.calibration == {}


def test_first_prompt_with_memory_of_others_in_blocks(tiny_model: Any, new_cache: Any) -> None:
    """sdpa is given no mask then, and eager is: what they answer is the same."""
    ids, other = text(18, seed=2), text(60)
    got = []
    for attention in ("sdpa", "eager"):
        model = tiny_model("llama", attention)
        first = new_cache(model)
        with retrieval(model):
            run(model, other, [60], first)
            cache = new_cache(model, path=first.store, recall="all", top_k=2, block_tokens=4)
            cache.window = 100
            got.append(run(model, ids, [18], cache))
    assert torch.allclose(got[0], got[1], atol=1e-4)


def place(cache: Any, entry_id: int) -> tuple[int, int]:
    placement = cache.placement(entry_id)
    return placement.session, placement.token


def fused(cache: Any, found: list[list[int]], top_k: int) -> list[tuple[int, int]]:
    """What the last of several layers goes by, from the ids that each found, best first."""
    sums: dict[tuple[int, int], float] = {}
    for ids in found:
        for rank, entry_id in enumerate(ids[:top_k]):
            where = place(cache, entry_id)
            sums[where] = sums.get(where, 0) + 1 / (rank + 1)
    return sorted(sums, key=lambda where: -sums[where])


def attended(cache: Any, layer: int, row: int = 0) -> list[tuple[int, int]]:
    """What the queries of the newest tokens attended to, in its order."""
    return [place(cache, hit.entry_id) for hit in cache.layers[layer].searched[0][row]]


def alone(cache: Any, found: list[int]) -> list[tuple[int, int]]:
    return sorted(place(cache, entry_id) for entry_id in found)


@pytest.mark.parametrize("last", [1, 9])
def test_a_layer_goes_by_those_below_it_too(
    tiny_model: Any, new_cache: Any, searches: Searches, last: int
) -> None:
    model, length = tiny_model(), 70 + last
    cache = new_cache(model, top_k=3, query_tokens=4, block_tokens=8)
    ids, mask = text(length, batch=2), left_padding(length, [0, 11])
    with retrieval(model):
        run(model, ids[:, :70], [70], cache, mask[:, :70])
        searches.clear()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, 70:]
        model(ids[:, 70:], cache=cache, attention_mask=mask, position_ids=positions)
    others = 0
    for row in range(2):
        found = []
        for layer in range(3):
            of_rows = np.split(np.array([ids for _, ids in searches.of(layer)]), 2)
            found.append(of_rows[row][-1].tolist())
            assert len(found[-1]) == 3
            wanted = sorted(fused(cache, found, 3)[:3])
            assert attended(cache, layer, row) == wanted
            others += wanted != alone(cache, found[-1])
    assert others


def test_layers_that_go_by_themselves(tiny_model: Any, new_cache: Any, searches: Searches) -> None:
    model = tiny_model()
    cache = new_cache(model, top_k=3, fuse_layers=False)
    with retrieval(model):
        run(model, text(71), [70, 1], cache)
    for layer in range(3):
        assert attended(cache, layer) == alone(cache, searches.of(layer)[-1][1])


def test_layers_fuse_what_they_find_of_others(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    """A layer attends to what it found itself, in the order of all: its candidates are more."""
    model = tiny_model()
    first = new_cache(model)
    with retrieval(model):
        run(model, text(120), [120], first)
    others = 0
    for seed in range(3, 9):
        cache = new_cache(model, path=first.store, recall="all", top_k=3)
        searches.clear()
        with retrieval(model):
            run(model, text(9, seed=seed), [9], cache)
        found = []
        for layer in range(3):
            found.append(searches.of(layer)[-1][1])
            assert len(found[-1]) == 12
            at_hand = alone(cache, found[-1])
            wanted = sorted([one for one in fused(cache, found, 3) if one in at_hand][:3])
            assert attended(cache, layer) == wanted
            others += wanted != alone(cache, found[-1][:3])
    assert others


def test_what_one_layer_has_evicted_is_passed_over(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model, top_k=3)
    with retrieval(model):
        run(model, text(71), [70, 1], cache)
        gone = {hit.entry_id for hit in cache.layers[2].searched[0][0]}
        for entry_id in gone:
            cache.store.delete(entry_id)
        run(model, text(1, seed=4), [1], cache)
    left = {hit.entry_id for hit in cache.layers[2].searched[0][0]}
    assert len(left) == 3
    assert not left & gone


def test_what_a_layer_takes_from_those_below_it_counts_one_access(
    tiny_model: Any, new_cache: Any, searches: Searches
) -> None:
    """As what it found itself: an entry that is read is in use, and outlives one that is not."""
    model = tiny_model()
    cache = new_cache(model, top_k=3)
    with retrieval(model):
        run(model, text(70), [70], cache)
        before = {entry_id: cache.store.get(entry_id).access_count for entry_id in cache.store}
        searches.clear()
        run(model, text(1, seed=4), [1], cache)
    taken = 0
    for layer in range(3):
        ((_, found),) = searches.of(layer)
        read = {hit.entry_id for hit in cache.layers[layer].searched[0][0]}
        taken += len(read - set(found))
        for entry_id in cache.layers[layer].rows[0].entry_ids:
            counted = cache.store.get(entry_id).access_count - before[entry_id]
            assert counted == (entry_id in read or entry_id in found)
    assert taken


def test_reciprocal_ranks_are_summed_over_the_layers_of_a_forward() -> None:
    fusion = Fusion()
    a, b, c = (0, 1), (0, 2), (7, 64)
    assert fusion.best(9, "x", [a, b, c]) == [a, b, c]
    assert fusion.best(9, "x", [c, b]) == [c, a, b]  # 4/3, 1, 1/2 + 1/2: the first found first
    assert fusion.best(9, "y", [b]) == [b]
    assert fusion.best(9, "x", [b]) == [b, c, a]
    assert fusion.best(10, "x", [c]) == [c]

"""Rotation: undoing it, moving keys, and the mistakes of position that no one would see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import NAMES, left_padding, run, text, torch, transformers

import hybridmem
from hybridmem.integrations.transformers import HybridCache, _rope, retrieval

pytestmark = [pytest.mark.torch, pytest.mark.transformers]

ROTATING = [name for name in NAMES if name != "gpt2"]


def attention_of(model: Any, layer: int = 0) -> Any:
    return next(
        module
        for module in model.modules()
        if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) == layer
    )


def rotary_of(model: Any, positions: Any) -> _rope.Rotary:
    module = next(m for m in model.modules() if "Rotary" in type(m).__name__)
    x = torch.zeros(1, 1, 8)
    return _rope.Rotary(module, (x,), {"position_ids": positions}, module(x, positions))


@pytest.mark.parametrize("name", ROTATING)
def test_unrotated_keys_do_not_depend_on_the_position(tiny_model: Any, name: str) -> None:
    """Layer 0 computes its keys from the tokens alone, so undoing the rotation gives the same."""
    model = tiny_model(name)
    ids = text(12)
    plain = []
    for start in (0, 300):
        positions = torch.arange(start, start + 12)[None]
        cache = transformers.DynamicCache(config=model.config)
        model(ids, position_ids=positions, cache=cache)
        keys = cache.layers[0].keys
        rotary = rotary_of(model, positions)
        rotation = _rope.probe(attention_of(model), rotary, keys.shape[-1])
        angles = rotation.angles(rotary.cos, rotary.sin)
        plain.append(_rope.unrotate(keys, angles))
        assert torch.allclose(_rope.rotate(plain[-1], angles), keys, atol=1e-5)
        rotated = keys
    assert torch.allclose(plain[0], plain[1], atol=2e-5)
    assert not torch.allclose(plain[1], rotated, atol=0.1)


@pytest.mark.parametrize("name", ROTATING)
def test_moved_keys_are_those_of_the_other_place(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    ids = text(12)
    keys = {}
    for start in (100, 7):
        cache = transformers.DynamicCache(config=model.config)
        model(ids, position_ids=torch.arange(start, start + 12)[None], cache=cache)
        keys[start] = cache.layers[0].keys
    old, new = (torch.arange(start, start + 12)[None] for start in (100, 7))
    rotary = rotary_of(model, old)
    rotation = _rope.probe(attention_of(model), rotary, keys[7].shape[-1])
    moved = _rope.move(
        keys[100], rotation.angles(*rotary.tables(old)), rotation.angles(*rotary.tables(new))
    )
    assert float((moved - keys[7]).abs().max()) < 1e-5
    assert float((keys[100] - keys[7]).abs().max()) > 0.1


def test_interleaved_and_half_split_are_told_apart(tiny_model: Any) -> None:
    kinds = {}
    for name in ROTATING:
        model = tiny_model(name)
        rotary = rotary_of(model, torch.arange(5)[None])
        attention = attention_of(model)
        dim = getattr(attention, "head_dim", 8)
        kinds[name] = _rope.probe(attention, rotary, dim)
    assert kinds["llama"] == _rope.Rotation(interleaved=False, repeated=False)
    assert kinds["cohere"] == _rope.Rotation(interleaved=True, repeated=True)
    assert kinds["glm"] == _rope.Rotation(interleaved=True, repeated=False)


def test_unknown_rotation_is_refused(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def other(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q * cos + k * sin, k * cos - q.flip(-1) * sin

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    model = tiny_model("llama")
    with pytest.raises(TypeError, match="LlamaAttention rotates its keys in a way"):
        _rope.probe(attention_of(model), rotary_of(model, torch.arange(5)[None]), 8)


@pytest.mark.parametrize("rotates", [True, False])
def test_signatures_are_of_unrotated_keys(tiny_model: Any, new_cache: Any, rotates: bool) -> None:
    """The same tokens far apart: their entries have the same signature in layer 0."""
    model = tiny_model("llama") if rotates else tiny_model("smollm3", no_rope_layers=[0, 1, 1])
    chunk = text(8)
    ids = torch.cat((chunk, text(40, seed=9), chunk), dim=1)
    cache = new_cache(model, window=1, chunk_tokens=8, sink_tokens=0, centre=False)
    with retrieval(model):
        run(model, torch.cat((ids, text(9, seed=2)), dim=1), [65], cache)
    entries = cache.store.entries
    signatures = {
        cache.placement(int(entry["entry_id"])).token: bytes(entry["signature"])
        for entry in entries[entries["layer_idx"] == 0]
    }
    different = sum((a ^ b).bit_count() for a, b in zip(signatures[0], signatures[48], strict=True))
    unrelated = sum((a ^ b).bit_count() for a, b in zip(signatures[0], signatures[16], strict=True))
    # Rounding of the rotation may turn a bit whose projection is next to zero.
    assert different <= 4 < unrelated


def test_queries_are_summed_over_the_heads_that_share_a_key(
    tiny_model: Any, new_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    asked = []
    query_many = hybridmem.Store.query_many

    def spy(self: Any, queries: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        asked.extend((layer_idx, np.array(vectors)) for vectors in queries)
        return query_many(self, queries, layer_idx, *args, **kwargs)

    cache = new_cache(model, query_tokens=3, centre=False)
    ids = text(21)
    with retrieval(model):
        run(model, ids[:, :20], [20], cache)
        monkeypatch.setattr(hybridmem.Store, "query_many", spy)
        got = {}
        hook = attention_of(model).q_proj.register_forward_hook(
            lambda module, args, output: got.update(query=output[0])
        )
        run(model, ids[:, 20:], [1], cache)
        hook.remove()
    heads = got["query"][-1].reshape(4, 8)
    wanted = torch.cat((heads[0] + heads[1], heads[2] + heads[3]))
    vectors = [vector for layer, vector in asked if layer == 0]
    assert len(vectors) == 1
    assert vectors[0].shape == (3, 16)
    np.testing.assert_allclose(vectors[0][-1], wanted.numpy(), atol=1e-5)


def test_positions_count_tokens_seen_and_not_tokens_held(
    tiny_model: Any, new_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that counted what it holds would be silently, and only a little, wrong."""
    from hybridmem.integrations.transformers._layer import HybridLayer

    model = tiny_model("llama")
    ids, pieces = text(40), [20, 20]
    wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config))
    cache = new_cache(model)
    with retrieval(model):
        run(model, ids, pieces, cache)
    assert cache.get_seq_length() == 40
    assert cache.get_mask_sizes(3, 0) == (cache.layers[0].held + 3, 40 - cache.layers[0].held)
    with monkeypatch.context() as patch, retrieval(model):
        patch.setattr(HybridLayer, "get_seq_length", lambda self: self.held)
        wrong = run(model, ids, pieces, new_cache(model))
    assert float((wrong - wanted).abs().max()) > 1e-3


def test_placements(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model("llama")
    ids, mask = text(40, batch=2), left_padding(40, [0, 11])
    cache = new_cache(model)
    with retrieval(model):
        run(model, ids, [9, 31], cache, mask)
    for layer in cache.hybrid_layers:
        for number, row in enumerate(layer.rows):
            next_token = row.n_sinks
            for entry_id in row.entry_ids:
                placement = cache.placement(entry_id)
                assert placement.session == cache.sessions(2)[number]
                # Padding comes first and has no positions, so position and token are the same here.
                assert placement.position == placement.token == next_token
                assert placement.n_tokens == cache.store.get(entry_id).n_tokens
                next_token += placement.n_tokens
            assert next_token + layer.held == [40, 29][number]


def test_gap_in_the_positions_begins_another_entry(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model("llama")
    ids = text(40)
    positions = torch.cat((torch.arange(10), torch.arange(50, 80)))[None]
    wanted = model(ids, position_ids=positions).logits
    cache = new_cache(model, chunk_tokens=8, sink_tokens=0)
    with retrieval(model):
        first = model(ids[:, :24], position_ids=positions[:, :24], cache=cache).logits
        second = model(ids[:, 24:], position_ids=positions[:, 24:], cache=cache).logits
    assert float((torch.cat((first, second), dim=1) - wanted).abs().max()) < 1e-4
    places = [cache.placement(i) for i in cache.layers[0].rows[0].entry_ids]
    assert [(p.n_tokens, p.position) for p in places[:3]] == [(8, 0), (2, 8), (6, 50)]


def test_another_rope_is_refused(tiny_model: Any, new_cache: Any, tmp_path: Any) -> None:
    model = tiny_model("llama")
    with new_cache(model, path=tmp_path / "mem", model_id="same") as cache, retrieval(model):
        run(model, text(20), [20], cache)
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with pytest.raises(hybridmem.ModelMismatchError, match="RoPE"):
        HybridCache(other.config, tmp_path / "mem", model_id="same", chunk_tokens=4)
    # The refusal has let go of the store.
    hybridmem.open(tmp_path / "mem").close()


def test_rope_that_depends_on_the_length_cannot_be_moved(tiny_model: Any, new_cache: Any) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match="depend on the length"):
        new_cache(model, recall="all")
    ids = text(40)
    wanted = run(model, ids, [20, 20], transformers.DynamicCache(config=model.config))
    with retrieval(model):
        got = run(model, ids, [20, 20], new_cache(model))
    assert float((got - wanted).abs().max()) < 1e-4

"""With everything retrieved a HybridCache answers as a DynamicCache does."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import NAMES, left_padding, run, text, torch, transformers

from hybridmem.integrations.transformers import retrieval

pytestmark = [pytest.mark.torch, pytest.mark.transformers]

TOLERANCE = 1e-4  # at logits of standard deviation 1.4
PIECES = {
    "prefill, then decode": [30] + [1] * 10,
    "chunked prefill": [13, 13, 14],
    "token by token": [1] * 40,
    "mixed": [17, 1, 1, 6, 1, 14],
}


def difference(a: Any, b: Any, mask: Any = None) -> float:
    both = (a.float() - b.float()).abs()
    if mask is not None:
        both = both * mask[:, :, None]
    return float(both.max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(tiny_model: Any, new_cache: Any, name: str, attention: str) -> None:
    model = tiny_model(name, attention)
    ids = text(40)
    for pieces in PIECES.values():
        wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config))
        cache = new_cache(model)
        with retrieval(model):
            got = run(model, ids, pieces, cache)
        assert difference(got, wanted) < TOLERANCE
        assert cache.get_seq_length() == 40
        assert all(layer.held <= 8 for layer in cache.hybrid_layers)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "phi3", "cohere", "gpt_neox", "gpt2"])
def test_left_padded_batch(tiny_model: Any, new_cache: Any, name: str, attention: str) -> None:
    model = tiny_model(name, attention)
    ids, mask = text(40, batch=3), left_padding(40, [0, 11, 26])
    for pieces in PIECES.values():
        wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config), mask)
        cache = new_cache(model)
        with retrieval(model):
            got = run(model, ids, pieces, cache, mask)
        assert difference(got, wanted, mask) < TOLERANCE
    # Nothing of the padding was stored: a row has its tokens in the store, its sinks and its
    # window.
    for layer in cache.hybrid_layers:
        stored = [
            sum(cache.store.get(entry_id).n_tokens for entry_id in row.entry_ids)
            for row in layer.rows
        ]
        sinks = [row.n_sinks for row in layer.rows]
        held = [layer.held] * 3
        assert [sum(each) for each in zip(stored, sinks, held, strict=True)] == [40, 29, 14]


def test_each_row_of_a_batch_sees_only_its_own_entries(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(40, batch=3), [20, 20], cache)
    for layer in cache.hybrid_layers:
        ids = [set(row.entry_ids) for row in layer.rows]
        assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16(tiny_model: Any, new_cache: Any, attention: str) -> None:
    model = tiny_model("llama", attention, dtype=torch.bfloat16).to(torch.bfloat16)
    ids, mask = text(40, batch=2), left_padding(40, [0, 9])
    pieces = PIECES["mixed"]
    wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config), mask)
    cache = new_cache(model)
    assert cache.store.config.kv_dtype == "bfloat16"
    with retrieval(model):
        got = run(model, ids, pieces, cache, mask)
    assert got.dtype == torch.bfloat16
    # What bfloat16 does by itself: the same model over the same text in one piece.
    rounding = difference(
        run(model, ids, [40], transformers.DynamicCache(config=model.config), mask), wanted, mask
    )
    assert difference(got, wanted, mask) <= max(2 * rounding, 0.05)


@pytest.mark.parametrize("padded", [[0], [0, 11]])
def test_generate(tiny_model: Any, new_cache: Any, padded: list[int]) -> None:
    model = tiny_model("qwen3")
    ids, mask = text(30, batch=len(padded)), left_padding(30, padded)
    options = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    wanted = model.generate(ids, **options)
    with retrieval(model):
        got = model.generate(ids, cache=new_cache(model), **options)
        chunked = model.generate(ids, cache=new_cache(model), prefill_chunk_size=7, **options)
    for other in (got, chunked):
        assert other.sequences.tolist() == wanted.sequences.tolist()
        assert difference(torch.stack(other.logits), torch.stack(wanted.logits)) < TOLERANCE


def test_generate_over_several_turns(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    cache, reference = new_cache(model), transformers.DynamicCache(config=model.config)
    so_far = wanted_so_far = text(12)
    for turn in range(4):
        with retrieval(model):
            so_far = model.generate(so_far, cache=cache, **options)
        wanted_so_far = model.generate(wanted_so_far, cache=reference, **options)
        assert so_far.tolist() == wanted_so_far.tolist(), f"turn {turn}"
        assert cache.get_seq_length() == reference.get_seq_length() == so_far.shape[1] - 1
        so_far = wanted_so_far = torch.cat((so_far, text(10, seed=turn + 5)), dim=1)
    assert len(cache.store) > 3 * 4


def test_sampling_several_sequences(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    wanted = model.generate(text(20), **options)
    torch.manual_seed(3)
    with retrieval(model):
        got = model.generate(text(20), cache=new_cache(model), **options)
    assert got.tolist() == wanted.tolist()


def test_layers_that_slide_are_left_alone(tiny_model: Any, new_cache: Any) -> None:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model("qwen2", layer_types=layer_types, use_sliding_window=True, sliding_window=8)
    ids, pieces = text(40), PIECES["mixed"]
    wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config))
    cache = new_cache(model)
    with retrieval(model):
        got = run(model, ids, pieces, cache)
    assert difference(got, wanted) < TOLERANCE
    assert list(cache.store.stats().entries_by_layer) == [1]


def test_cache_only_is_another_answer(tiny_model: Any, new_cache: Any) -> None:
    """The equalities above would mean nothing if what is evicted did not matter."""
    model = tiny_model("llama")
    ids, pieces = text(40), PIECES["mixed"]
    wanted = run(model, ids, pieces, transformers.DynamicCache(config=model.config))
    with retrieval(model):
        nothing = run(model, ids, pieces, new_cache(model, recall="none"))
        some = run(model, ids, pieces, new_cache(model, top_k=2, block_tokens=4))
    assert difference(nothing, wanted) > 0.5
    assert difference(some, wanted) > 100 * TOLERANCE

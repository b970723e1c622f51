"""What a HybridCache cannot do is refused, before anything is lost or stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make, run, text, torch, transformers

import hybridmem
from hybridmem.integrations.transformers import HybridCache, retrieval

pytestmark = [pytest.mark.torch, pytest.mark.transformers]


def test_outside_retrieval(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with pytest.raises(RuntimeError, match="only inside `with retrieval"):
        model(text(20), cache=cache)
    with retrieval(model):
        run(model, text(20), [20], cache)
    stored = len(cache.store)
    with pytest.raises(RuntimeError, match="only inside `with retrieval"):
        model(text(1), cache=cache)
    assert (cache.get_seq_length(), len(cache.store)) == (20, stored)
    with retrieval(model):  # and it goes on where it was
        run(model, text(3), [3], cache)
    assert cache.get_seq_length() == 23


def test_attention_that_was_changed_within(tiny_model: Any, new_cache: Any) -> None:
    """Whoever takes the attention function away does not get a cache that silently forgets."""
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        model.set_attn_implementation("sdpa")
        model(text(20), cache=cache)
        with pytest.raises(RuntimeError, match="only inside `with retrieval"):
            model(text(1), cache=cache)


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_another_cache_within(tiny_model: Any, kind: str) -> None:
    model = tiny_model()
    cache = {
        "none": lambda: None,
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=30),
    }[kind]()
    named = "no cache" if cache is None else type(cache).__name__
    with retrieval(model), pytest.raises(TypeError, match=f"HybridCache.*{named}"):
        model(text(9), cache=cache, use_cache=cache is not None)
    model(text(9), cache=cache)  # outside it is nobody's business


def test_static_cache_implementation(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model), pytest.raises(ValueError, match="cache_implementation"):
        model.generate(text(9), cache=cache, cache_implementation="static", max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"prompt_lookup_num_tokens": 3}],
    ids=["beam search", "beam sample", "prompt lookup"],
)
def test_generation_that_takes_back(
    tiny_model: Any, new_cache: Any, options: dict[str, Any]
) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model), pytest.raises(ValueError, match="cannot be taken back"):
        model.generate(text(30), cache=cache, max_new_tokens=3, **options)
    assert len(cache.store) == 0
    assert cache.get_seq_length() == 0


def test_assisted_decoding(tiny_model: Any, new_cache: Any) -> None:
    model, assistant = tiny_model(), tiny_model("llama", num_hidden_layers=1)
    cache = new_cache(model)
    with retrieval(model), pytest.raises(ValueError, match="assisted"):
        model.generate(text(9), cache=cache, assistant_model=assistant, max_new_tokens=3)
    assert len(cache.store) == 0


def test_operations_on_the_cache(tiny_model: Any, new_cache: Any) -> None:
    cache = new_cache(tiny_model())
    for refused in (
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.activate_past_recording(),
    ):
        with pytest.raises(ValueError, match="HybridCache"):
            refused()
    assert not cache.is_croppable
    assert not cache.is_compileable


def test_only_sliding_layers(tmp_path: Path) -> None:
    model = make("mistral", sliding_window=8)
    with pytest.raises(ValueError, match="no layer of this model has full attention"):
        HybridCache(model.config, tmp_path / "mem")
    assert not (tmp_path / "mem").exists()


def test_encoder_decoder(tmp_path: Path) -> None:
    config = transformers.T5Config(num_layers=1, d_model=16)
    with pytest.raises(ValueError, match="encoder"):
        HybridCache(config, tmp_path / "mem")


def test_flash_attention(tiny_model: Any) -> None:
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="'sdpa' and 'eager'"), retrieval(model):
        pass
    model.config._attn_implementation_internal = "sdpa"


def test_training(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model().train()
    try:
        with retrieval(model), pytest.raises(RuntimeError, match=r"model\.eval"):
            model(text(9), cache=new_cache(model))
    finally:
        model.eval()


def test_prepared_mask(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(30), [30], cache)
        mask = torch.ones((1, 1, 2, 32), dtype=torch.bool)
        with pytest.raises(ValueError, match="2-D mask"):
            model(text(2), cache=cache, attention_mask=mask)


def test_another_batch_size(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(30), [30], cache)
        with pytest.raises(ValueError, match="holds 1 sequences, got a batch of 2"):
            model(text(2, batch=2), cache=cache)


def test_forward_that_failed_half_way(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(30), [30], cache)

        def fail(*args: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(text(3), cache=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="failed half-way"):
            model(text(3), cache=cache)
        cache.reset()
        run(model, text(30), [30], cache)


def test_other_weights(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    model = tiny_model()
    with new_cache(model, path=tmp_path / "mem") as cache, retrieval(model):
        run(model, text(20), [20], cache)
    other = make("llama")
    other.model.layers[2].mlp.down_proj.weight.data += 0.01
    cache = new_cache(other, path=tmp_path / "mem")
    for _ in range(2):
        with retrieval(other), pytest.raises(hybridmem.ModelMismatchError, match="other weights"):
            other(text(20), cache=cache)
    with retrieval(model):
        run(model, text(20), [20], cache)
        with (
            retrieval(other),
            pytest.raises(hybridmem.ModelMismatchError, match="other weights"),
        ):
            other(text(20), cache=cache)


def test_bfloat16_of_the_same_weights_is_the_same_model(
    tiny_model: Any, new_cache: Any, tmp_path: Path
) -> None:
    model = make("llama")
    with new_cache(model, path=tmp_path / "mem") as cache, retrieval(model):
        run(model, text(20), [20], cache)
    half = make("llama").to(torch.bfloat16)
    with new_cache(half, path=tmp_path / "mem", recall="all") as cache, retrieval(half):
        run(half, text(20), [20], cache)


def test_another_architecture(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    new_cache(tiny_model("llama"), path=tmp_path / "mem").close()
    with pytest.raises(hybridmem.ModelMismatchError, match="transformers:llama"):
        new_cache(tiny_model("qwen2"), path=tmp_path / "mem")


def test_store_that_would_round(new_cache: Any, tmp_path: Path) -> None:
    model = make("llama")
    store = hybridmem.create(tmp_path / "mem", embed_dim=16, kv_dtype="bfloat16")
    with retrieval(model):
        cache = new_cache(model, path=store)
        with pytest.raises(ValueError, match="would round"):
            model(text(9), cache=cache)
        again = new_cache(model, path=store, kv_dtype="bfloat16")
        model(text(9), cache=again)
    cache.close()
    again.close()
    store.close()


def test_store_of_another_width(new_cache: Any, tmp_path: Path) -> None:
    model = make("llama")
    store = hybridmem.create(tmp_path / "mem", embed_dim=24)
    cache = new_cache(model, path=store)
    with (
        retrieval(model),
        pytest.raises(ValueError, match="16 wide, but the store's embed_dim is 24"),
    ):
        model(text(9), cache=cache)
    cache.close()
    store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"top_k": 0}, "top_k"),
        ({"chunk_tokens": 2.5}, "chunk_tokens"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"recall": "some"}, "recall"),
    ],
)
def test_options(tiny_model: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridCache(tiny_model().config, tmp_path / "mem", **options)
    assert not (tmp_path / "mem").exists()


def test_reader(tiny_model: Any, tmp_path: Path) -> None:
    hybridmem.create(tmp_path / "mem", embed_dim=16).close()
    with (
        hybridmem.open(tmp_path / "mem", mode="r") as store,
        pytest.raises(hybridmem.ReadOnlyError, match=r"r\+"),
    ):
        HybridCache(tiny_model().config, store)


def test_chunks_without_signature(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    model = tiny_model()
    new_cache(model, path=tmp_path / "mem", chunk_tokens=4).close()
    with pytest.raises(ValueError, match="covers 4 tokens, fewer than chunk_tokens=5"):
        new_cache(model, path=tmp_path / "mem", chunk_tokens=5)


def test_the_model_is_left_as_it_was(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model("llama", "eager")
    before = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    attributes = set(vars(model))
    with pytest.raises(ZeroDivisionError), retrieval(model), retrieval(model):
        fail_after(model, new_cache(model))
    assert model.config._attn_implementation == "eager"
    assert before == {name: len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert set(vars(model)) == attributes


def fail_after(model: Any, cache: Any) -> None:
    run(model, text(20), [20], cache)
    raise ZeroDivisionError

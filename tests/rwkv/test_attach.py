"""Attaching, refusing and detaching."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem.integrations import rwkv_x

from .helpers import MARKS, load, run, text, torch

pytestmark = MARKS


def attributes(model: Any) -> dict[str, dict[str, int]]:
    """Identity of every attribute of every module."""
    return {
        name: {key: id(value) for key, value in module.__dict__.items()}
        for name, module in model.named_modules()
    }


def test_detach_restores_the_model_exactly(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(80)
    model, other = load(checkpoint, 8), load(checkpoint, 8)
    before, expected = attributes(model), run(model, tokens, [40, 20] + [1] * 20)[0]
    memory = rwkv_x.attach(model, tmp_path / "mem", top_k=1000, chunk_tokens=8)
    assert attributes(model) != before
    assert not torch.equal(run(model, tokens, [40, 20] + [1] * 20)[0], expected)
    assert torch.equal(run(other, tokens, [40, 20] + [1] * 20)[0], expected)  # this one only
    memory.detach()
    memory.detach()
    assert attributes(model) == before
    assert torch.equal(run(model, tokens, [40, 20] + [1] * 20)[0], expected)
    with pytest.raises(hybridmem.StoreClosedError):
        memory.store.flush()


def test_an_attribute_that_was_there_comes_back(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    mine = model.attn[0].att.decode
    model.attn[0].att.decode = mine
    rwkv_x.attach(model, tmp_path / "mem").detach()
    assert model.attn[0].att.__dict__["decode"] is mine


def test_store_made_for_the_model(checkpoint: Path, tmp_path: Path) -> None:
    with rwkv_x.attach(load(checkpoint), tmp_path / "mem", max_entries=50) as memory:
        config = memory.store.config
        assert config.embed_dim == 128
        assert config.model_id == memory.model_id
        assert (config.signature_tokens, config.signature_bits) == (1, 256)
        assert config.hdc_dim == 64 * 256  # every token of an entry has its own signature
        assert config.kv_dtype == "float32"
        assert config.max_entries == 50
    with rwkv_x.attach(load(checkpoint), tmp_path / "mem", max_entries=20) as memory:
        assert memory.store.config.max_entries == 20
    with pytest.raises(ValueError, match="quantize_stored"):
        rwkv_x.attach(load(checkpoint), tmp_path / "mem", quantize_stored=True)
    hybridmem.open(tmp_path / "mem").close()  # nothing was left open


def test_given_store_stays_open(checkpoint: Path, tmp_path: Path) -> None:
    with hybridmem.create(tmp_path / "mem", embed_dim=128) as store:
        model = load(checkpoint, 8)
        with rwkv_x.attach(model, store, top_k=1000, chunk_tokens=8):
            run(model, text(60), [50] + [1] * 10)
        assert len(store) > 0
        with pytest.raises(TypeError, match="max_entries"):
            rwkv_x.attach(model, store, max_entries=4)


def test_other_weights_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    rwkv_x.attach(load(checkpoint), tmp_path / "mem").detach()
    for name in ("blocks.2.ffn.key.weight", "blocks.3.att.w0"):
        changed = load(checkpoint)
        changed.rwkv.z[name] = changed.rwkv.z[name] * 1.001
        with pytest.raises(hybridmem.ModelMismatchError):
            rwkv_x.attach(changed, tmp_path / "mem")
    changed = load(checkpoint)
    with torch.no_grad():
        changed.attn[1].att.value.weight[0, 0] += 0.5
    with pytest.raises(hybridmem.ModelMismatchError):
        rwkv_x.attach(changed, tmp_path / "mem")
    with pytest.raises(hybridmem.ModelMismatchError):
        rwkv_x.attach(load(checkpoint, precision="bf16"), tmp_path / "mem")
    rwkv_x.attach(changed, tmp_path / "mem", force=True).detach()
    with hybridmem.open(tmp_path / "mem") as store:
        with pytest.raises(hybridmem.ModelMismatchError, match="force"):
            rwkv_x.attach(changed, store)
        rwkv_x.attach(changed, store, force=True).detach()
    rwkv_x.attach(load(checkpoint), tmp_path / "mem").detach()


def test_snapshot_of_other_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem") as memory:
        _, state = run(model, text(30), [30])
        memory.save(state, tmp_path / "c.pt")
    model.rwkv.z["blocks.0.att.w0"] = model.rwkv.z["blocks.0.att.w0"] + 1
    with rwkv_x.attach(model, tmp_path / "mem", force=True) as memory:
        memory.load(tmp_path / "c.pt")
    with (
        rwkv_x.attach(model, tmp_path / "new") as memory,
        pytest.raises(hybridmem.ModelMismatchError),
    ):
        memory.load(tmp_path / "c.pt")


def test_other_width_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with (
        hybridmem.create(tmp_path / "mem", embed_dim=64) as store,
        pytest.raises(hybridmem.ModelMismatchError, match="embed_dim=64"),
    ):
        rwkv_x.attach(load(checkpoint), store)
    with pytest.raises(hybridmem.ModelMismatchError, match="embed_dim=64"):
        rwkv_x.attach(load(checkpoint), tmp_path / "mem", force=True)


def test_reader_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    hybridmem.create(tmp_path / "mem", embed_dim=128).close()
    model = load(checkpoint)
    before = attributes(model)
    with (
        hybridmem.open(tmp_path / "mem", mode="r") as store,
        pytest.raises(ValueError, match=r"r\+"),
    ):
        rwkv_x.attach(model, store)
    assert attributes(model) == before


def test_second_attach_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    with (
        rwkv_x.attach(model, tmp_path / "a"),
        pytest.raises(ValueError, match="attached already"),
    ):
        rwkv_x.attach(model, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", 0),
        ("top_k", True),
        ("chunk_tokens", 0),
        ("search_every", 0),
        ("search_at_end", 1),
        ("query_tokens", 1.5),
        ("recall", "some"),
        ("importance", "mine"),
    ],
)
def test_options_are_checked(checkpoint: Path, tmp_path: Path, option: str, value: object) -> None:
    model = load(checkpoint)
    before = attributes(model)
    with pytest.raises(ValueError, match=option):
        rwkv_x.attach(model, tmp_path / "mem", **{option: value})
    assert attributes(model) == before
    assert not (tmp_path / "mem").exists()


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="rwkv_x"):
        rwkv_x.attach(torch.nn.Linear(2, 2), tmp_path / "mem")


def test_top_k_may_change(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=1, chunk_tokens=8, search_every=1) as memory:
        _, state = run(model, text(100), [100])
        _, state = run(model, text(1), [1], state)
        assert len(state["attn"][0]["hybridmem"]["hits"]) == 1
        memory.top_k = 5
        _, state = run(model, text(1), [1], state)
        assert len(state["attn"][0]["hybridmem"]["hits"]) == 5
        with pytest.raises(ValueError, match="top_k"):
            memory.top_k = 0


def test_query_of_several_tokens_in_a_pooled_store(checkpoint: Path, tmp_path: Path) -> None:
    """Any store of the width will do, also one with a signature for a whole entry."""
    model = load(checkpoint, 8)
    config = {"hdc_dim": 1024, "signature_tokens": 0, "signature_bits": 0}
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8, **config) as memory:
        logits, _ = run(model, text(80), [60] + [1] * 20)
        assert memory.store.stats().hits > 0
    assert np.isfinite(logits.numpy()).all()


def test_without_torch_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    module = importlib.reload(rwkv_x)  # importing it needs no torch
    with pytest.raises(ImportError, match=r"hybridmem\[rwkv\]"):
        module.attach(None, tmp_path / "mem")

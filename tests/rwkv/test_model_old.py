"""The earlier design, whose heads each drop rows of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridmem.integrations import rwkv_x

from .helpers import EVERYTHING, MARKS, TOLERANCE, largest, load_old, run, text, torch

pytestmark = MARKS

MANAGED = {
    "enable_kv_cache_management": True,
    "max_kv_cache_size": 60,
    "min_kv_cache_size": 40,
    "kv_cache_window_size": 16,
}
FULL = {"prefill_attn_mode": "full", "decoding_attn_mode": "full"}


def unmanaged(path: Path, tokens: list[int], pieces: list[int], **config: Any) -> Any:
    return run(load_old(path, **config), tokens, pieces)[0]


@pytest.mark.parametrize(
    "pieces",
    [[50] + [1] * 150, [70, 70, 60], [1] * 200, [1, 99, 1, 1, 98]],
    ids=["decode", "pieces", "from-one", "mixed"],
)
def test_equal_to_the_unmanaged_run(checkpoint: Path, tmp_path: Path, pieces: list[int]) -> None:
    tokens = text(200)
    model = load_old(checkpoint, **MANAGED, **FULL)
    expected = unmanaged(checkpoint, tokens, pieces, **FULL)
    bare, _ = run(model, tokens, pieces)
    assert largest(bare - expected) > 0.5  # management loses something
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        logits, state = run(model, tokens, pieces)
        assert len(memory.store) > 0
    assert largest(logits - expected) < TOLERANCE
    assert state["attn"][0]["k_cache"].shape[1] < 200


def test_cache_stays_what_upstream_makes_it(checkpoint: Path, tmp_path: Path) -> None:
    """Only what is attended to changes: with nothing evicted yet, bits and cache are upstream's."""
    tokens = text(60)
    model = load_old(checkpoint, **MANAGED, **FULL)
    expected, theirs = run(model, tokens, [40] + [1] * 20)
    with rwkv_x.attach(model, tmp_path / "mem"):
        logits, ours = run(model, tokens, [40] + [1] * 20)
    assert torch.equal(logits, expected)
    assert torch.equal(ours["attn"][1]["v_cache"], theirs["attn"][1]["v_cache"])


def test_every_row_of_every_head_is_in_one_place(checkpoint: Path, tmp_path: Path) -> None:
    tokens, pieces = text(150), [100] + [1] * 50
    _, whole = run(load_old(checkpoint, **FULL), tokens, pieces)
    model = load_old(checkpoint, **MANAGED, **FULL)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state = run(model, tokens, pieces)
        for layer in range(2):
            held, plain = state["attn"][layer], state["attn"][layer]["hybridmem"]
            entries = [memory.store.get(number) for number in plain["entries"].tolist()]
            ours = [
                np.concatenate(
                    [held[f"{kind}_cache"][0].numpy(), plain[f"{kind}{name}"].numpy()]
                    + [getattr(entry, f"{kind}{name}") for entry in entries]
                )
                for kind, name in (("k", "eys"), ("v", "alues"))
            ]
            theirs = [whole["attn"][layer][f"{kind}_cache"][0].numpy() for kind in ("k", "v")]
            for head in range(2):
                columns = slice(64 * head, 64 * head + 64)
                pair = [
                    np.concatenate([keys[:, columns], values[:, columns]], 1)
                    for keys, values in (ours, theirs)
                ]
                mine, wanted = (rows[np.lexsort(rows.T[::-1])] for rows in pair)
                np.testing.assert_allclose(mine, wanted, atol=1e-4)


def test_sparse_modes_use_memory_beside_the_same_choice(checkpoint: Path, tmp_path: Path) -> None:
    """Below the criterion sparse and full are one; above it memory makes a difference, no error."""
    sparse = {
        "prefill_attn_mode": "chunk",
        "decoding_attn_mode": "new",
        "short_sequence_criteria": 30,
        "attn_chunk_size": 8,
        "attn_topk": 2,
    }
    tokens, pieces = text(160), [100] + [1] * 60
    model = load_old(checkpoint, **MANAGED, **sparse)
    bare, _ = run(model, tokens, pieces)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        logits, _ = run(model, tokens, pieces)
        assert len(memory.store) > 0
    assert torch.equal(logits[:100], bare[:100])  # nothing evicted before the first decode
    assert torch.isfinite(logits).all()
    assert largest(logits[100:] - bare[100:]) > 0.1


def test_sparse_choice_equals_upstreams(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows of memory taken away again, the sparse paths give what upstream gives."""
    from hybridmem.integrations.rwkv_x import _hooks_old

    sparse = {
        "prefill_attn_mode": "chunk",
        "decoding_attn_mode": "new",
        "short_sequence_criteria": 30,
        "attn_chunk_size": 8,
        "attn_topk": 2,
    }
    tokens, pieces = text(200), [100] + [1] * 40 + [60]
    model = load_old(checkpoint, **MANAGED, **sparse)
    bare, _ = run(model, tokens, pieces)
    one, blocks = _hooks_old.attend_one, _hooks_old.attend_blocks
    # The last two groups are the rows of the cache and the token's own.
    monkeypatch.setattr(
        _hooks_old, "attend_one", lambda q, heads, groups: one(q, heads, groups[-2:])
    )
    monkeypatch.setattr(_hooks_old, "attend_blocks", lambda q, _, own: blocks(q, [], own))
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8):
        logits, _ = run(model, tokens, pieces)
    assert largest(logits - bare) < TOLERANCE


def test_saved_and_branched(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(200)
    model = load_old(checkpoint, **MANAGED, **FULL)
    expected = unmanaged(checkpoint, tokens, [100] + [1] * 100, **FULL)[150:]
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state = run(model, tokens[:150], [100] + [1] * 50)
        memory.save(state, tmp_path / "c.pt")
        branch = copy.deepcopy(state)
        run(model, text(50, seed=8), [1] * 50, branch)
        logits, _ = run(model, tokens[150:], [1] * 50, state)
        assert largest(logits - expected) < TOLERANCE
        logits, _ = run(model, tokens[150:], [1] * 50, memory.load(tmp_path / "c.pt"))
        assert largest(logits - expected) < TOLERANCE


def test_detach(checkpoint: Path, tmp_path: Path) -> None:
    model = load_old(checkpoint, **MANAGED, **FULL)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    rwkv_x.attach(model, tmp_path / "mem").detach()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match="corrected"):
        rwkv_x.attach(model, tmp_path / "mem2", importance="corrected")
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before

"""What the client relies on in rwkv-x; a release that changes it must be noticed here."""

from __future__ import annotations

from pathlib import Path

from .helpers import EVERYTHING, MARKS, hooks, largest, load, reference, run, text, torch

pytestmark = MARKS


def test_prefill_keeps_the_rows_with_the_largest_loss(checkpoint: Path) -> None:
    tokens = text(40)
    _, everything = run(load(checkpoint, EVERYTHING), tokens, [40])
    few = load(checkpoint, 8)
    block, losses = few.rwkv.blocks[1], []
    original = block.calculate_layer_memory_loss
    block.calculate_layer_memory_loss = lambda *args: losses.append(original(*args)) or losses[-1]
    _, state = run(few, tokens, [40])
    kept = torch.topk(losses[0], 8).indices
    everything_sorted = everything["attn"][0]["k_cache"][0]
    all_kept = torch.topk(losses[0], 40).indices
    rows = torch.empty_like(everything_sorted)
    rows[all_kept] = everything_sorted
    assert torch.equal(state["attn"][0]["k_cache"][0], rows[kept])


def test_second_prefill_overwrites_the_cache_and_pieces_differ(checkpoint: Path) -> None:
    tokens = text(60)
    model = load(checkpoint, EVERYTHING)
    logits, state = run(model, tokens, [30, 30])
    assert state["attn"][0]["k_cache"].shape[1] == 30
    assert largest(logits[30:] - reference(checkpoint, tokens)[30:]) > 0.5


def test_decode_appends_nothing_and_does_not_see_its_own_token(checkpoint: Path) -> None:
    tokens = text(31)
    logits, state = run(load(checkpoint, EVERYTHING), tokens, [30, 1])
    assert state["attn"][0]["k_cache"].shape[1] == 30
    assert largest(logits[30] - reference(checkpoint, tokens)[30]) > 1e-3


def test_loss_of_an_exactly_stored_token(checkpoint: Path) -> None:
    block = load(checkpoint).rwkv.blocks[0]
    generator = torch.Generator().manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(2, 64, generator=generator), dim=-1)
    value = torch.randn(2, 64, generator=generator)
    state = [None, torch.einsum("hv,hk->hvk", value, key), None]
    upstream = block.calculate_layer_memory_loss(state, key, value)
    assert float(upstream) > 0.3  # contracts the wrong axis
    assert float(hooks.corrected_loss(block, state, key, value)) < 1e-6


def test_small_checkpoint_needs_memory(checkpoint: Path) -> None:
    """Equalities on it mean something: logits move a lot when rows are lost."""
    tokens = text(200)
    logits, _ = run(load(checkpoint, 8), tokens, [100] + [1] * 100)
    expected = reference(checkpoint, tokens)
    assert 2 < float(expected.std()) < 4
    assert largest(logits[100:] - expected[100:]) > 2

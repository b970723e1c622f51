"""Rows side by side: what decode attends to is the same however they came to lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridmem.integrations import rwkv_x

from .helpers import MARKS, TOLERANCE, attended_rows, gathered, largest, load, run, text, torch

pytestmark = MARKS

OPTIONS: dict[str, Any] = {"top_k": 2, "chunk_tokens": 8, "search_every": 4}


def decoded(
    checkpoint: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    forgetful: bool = False,
    precision: str = "fp32",
) -> tuple[Any, list[np.ndarray]]:
    """Logits of 40 tokens of decode after a prompt, and the keys that each layer attended to."""
    model = load(checkpoint, 8, precision=precision)
    with monkeypatch.context() as patch, rwkv_x.attach(model, path, **OPTIONS) as memory:
        _, state = run(model, text(100), [100])
        seen = attended_rows(patch)
        logits = []
        for token in text(40, seed=3):
            one, state = run(model, [token], [1], state)
            logits.append(one)
            if forgetful:
                memory._tier.let_go()
    return torch.cat(logits), seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_at_hand_are_those_that_would_be_gathered_anew(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    anew, each = decoded(
        checkpoint, tmp_path / "a", monkeypatch, forgetful=True, precision=precision
    )
    logits, seen = decoded(checkpoint, tmp_path / "b", monkeypatch, precision=precision)
    for mine, theirs in zip(seen, each, strict=True):
        assert len(mine) > 2 * 8 + 8  # found, in the cache, and waiting
        np.testing.assert_array_equal(mine, theirs)
    assert largest(logits - anew) < (TOLERANCE if precision == "fp32" else 0.2)


def test_tensors_that_are_no_arrays_hold_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device other than the CPU."""
    expected, each = decoded(checkpoint, tmp_path / "a", monkeypatch)
    monkeypatch.setattr(gathered, "in_arrays", lambda device: False)
    monkeypatch.setattr(gathered, "_kernels", None)
    logits, seen = decoded(checkpoint, tmp_path / "b", monkeypatch)
    for mine, theirs in zip(seen, each, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert largest(logits - expected) < TOLERANCE


def test_a_search_writes_into_the_rows_at_hand(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    shown: list[Any] = []
    make, show = gathered.GatheredRows.__init__, gathered.GatheredRows.show

    def noting(rows: Any, *args: Any) -> None:
        made.append(rows)
        make(rows, *args)

    def showing(rows: Any, *args: Any) -> None:
        shown.append(rows)
        show(rows, *args)

    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", **OPTIONS) as memory:
        _, state = run(model, text(120), [100] + [1] * 20)
        monkeypatch.setattr(gathered.GatheredRows, "__init__", noting)
        monkeypatch.setattr(gathered.GatheredRows, "show", showing)
        _, state = run(model, text(32, seed=3), [1] * 32, state)
        kept = memory._tier.gathered
        assert kept._bytes == sum(rows.nbytes for _, rows in kept._rows.values())
    layers = len(state["attn"])
    assert not made  # nor where a chunk has left
    assert len(shown) >= layers * 32 // 4


def test_rows_beyond_the_limit_are_let_go(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", **OPTIONS) as memory:
        kept = memory._tier.gathered
        kept._limit = 1
        logits, _ = run(model, text(60), [40] + [1] * 20)
        assert len(kept._rows) == 1  # of the layers and conversations, the last
        assert kept._bytes == next(iter(kept._rows.values()))[1].nbytes
        memory._tier.let_go()
        assert not kept._rows
        assert kept._bytes == 0
    assert torch.isfinite(logits).all()

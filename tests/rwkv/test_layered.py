"""The RWKV-X client on layered stores: packs under the store of its conversations."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridmem
from hybridmem.integrations import rwkv_x

from .helpers import EVERYTHING, MARKS, TOLERANCE, largest, load, reference, run, text, torch

pytestmark = MARKS
OPTIONS: dict[str, Any] = {"top_k": EVERYTHING, "chunk_tokens": 8}
PIECES = [60, *[1] * 20]


@pytest.fixture
def pack(checkpoint: Path, tmp_path: Path) -> Path:
    """A pack of what another conversation has stored."""
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "first", **OPTIONS, centre_tokens=32):
        run(model, text(90, seed=7), [90])
    assert hybridmem.pack(tmp_path / "first", tmp_path / "pack") > 0
    return tmp_path / "pack"


@pytest.fixture
def layered(pack: Path, tmp_path: Path) -> Iterator[hybridmem.Layered]:
    """The pack under a store that has nothing yet."""
    with hybridmem.open(pack, mode="r") as opened:
        config = opened.config
    with (
        hybridmem.create(tmp_path / "mine", config=config) as mine,
        hybridmem.layered([pack, mine]) as memory,
    ):
        yield memory


def test_a_conversation_sees_its_own_entries_only(
    layered: hybridmem.Layered, checkpoint: Path
) -> None:
    model, tokens = load(checkpoint, 8), text(80)
    with rwkv_x.attach(model, layered, **OPTIONS) as memory:
        logits, _ = run(model, tokens, PIECES)
        assert memory.store is layered
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE
    pack, mine = layered.stores
    assert len(mine) > 0
    # The private store is centred as the pack is, which nothing has changed.
    assert mine.calibration.keys() == pack.calibration.keys() == {0, 1}
    assert len(layered) == len(pack) + len(mine)


def test_all_of_a_pack_is_recalled_as_from_one_store(
    layered: hybridmem.Layered, pack: Path, checkpoint: Path, tmp_path: Path
) -> None:
    tokens = text(80)
    with hybridmem.open(pack, mode="r") as opened:
        opened.snapshot(tmp_path / "union")  # what is put there follows the entries of the pack
    got = []
    for store in (layered, tmp_path / "union"):
        for top_k in (EVERYTHING, 3):
            model = load(checkpoint, 8)
            options = {**OPTIONS, "top_k": top_k, "recall": "all"}
            with rwkv_x.attach(model, store, **options):
                got.append(run(model, tokens, PIECES)[0])
            if store is layered:
                for entry_id in layered.stores[1]:
                    layered.delete(entry_id)
            else:
                with hybridmem.open(tmp_path / "union") as union:
                    for entry_id in set(union) - set(layered.stores[0]):
                        union.delete(entry_id)
    assert largest(got[0] - got[2]) < 1e-5
    assert largest(got[1] - got[3]) < 1e-5
    assert largest(got[0] - reference(checkpoint, tokens)) > 100 * TOLERANCE  # the pack is seen


def test_a_saved_conversation_goes_on_over_other_packs(
    layered: hybridmem.Layered, checkpoint: Path, tmp_path: Path
) -> None:
    model, tokens = load(checkpoint, 8), text(120)
    with rwkv_x.attach(model, layered, **OPTIONS) as memory:
        _, state = run(model, tokens[:80], [80])
        memory.save(state, tmp_path / "chat")
    expected = reference(checkpoint, tokens)[80:]
    mine = layered.stores[1]
    hybridmem.pack(layered.stores[0].path, tmp_path / "other")
    for stores in ([*layered.stores], [tmp_path / "other", *layered.stores], [mine]):
        with (
            hybridmem.layered(stores) as again,
            rwkv_x.attach(model, again, **OPTIONS) as memory,
        ):
            logits, _ = run(model, tokens[80:], [20] + [1] * 20, memory.load(tmp_path / "chat"))
        assert largest(logits - expected) < TOLERANCE
    with rwkv_x.attach(model, mine, **OPTIONS) as memory:  # without layers
        logits, _ = run(model, tokens[80:], [40], memory.load(tmp_path / "chat"))
    assert largest(logits - expected) < TOLERANCE


def test_what_was_recalled_of_a_pack_that_is_gone_is_passed_over(
    layered: hybridmem.Layered, checkpoint: Path, tmp_path: Path
) -> None:
    model = load(checkpoint, 8)
    options = {**OPTIONS, "recall": "all", "search_every": 50}
    with rwkv_x.attach(model, layered, **options) as memory:
        _, state = run(model, text(80), [80])
        hits = state["attn"][0]["hybridmem"]["hits"].tolist()
        assert any(layered.locate(one)[0] is layered.stores[0] for one in hits)
        memory.save(state, tmp_path / "chat")
    with (
        hybridmem.layered([layered.stores[1]]) as alone,
        rwkv_x.attach(model, alone, **options) as memory,
    ):
        state = memory.load(tmp_path / "chat")
        logits, _ = run(model, text(10, seed=5), [1] * 10, copy.deepcopy(state))
    assert torch.isfinite(logits).all()


def test_forgetting_leaves_the_packs(layered: hybridmem.Layered, checkpoint: Path) -> None:
    model = load(checkpoint, 8)
    pack, mine = layered.stores
    before = len(pack)
    with rwkv_x.attach(model, layered, **OPTIONS, recall="all") as memory:
        _, state = run(model, text(80), [80])
        count = len(mine)
        assert memory.forget(state) == count > 0
    assert (len(mine), len(pack)) == (0, before)


def test_layers_without_a_private_store_are_refused(pack: Path, checkpoint: Path) -> None:
    model = load(checkpoint, 8)
    with hybridmem.layered([pack]) as memory, pytest.raises(ValueError, match="r\\+"):
        rwkv_x.attach(model, memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, text(10), [10])  # as it was

"""The RWKV-X client on a cluster: nothing of it is changed, nor of what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hybridmem

from .nodes import HOW

pytest.importorskip("ray", reason=HOW)

from rwkv.helpers import MARKS, TOLERANCE, largest, load, reference, run, text, torch

from hybridmem.integrations import rwkv_x

pytestmark = MARKS
CHUNK = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint

    path = tmp_path_factory.mktemp("rwkv") / "small.pth"
    random_checkpoint(path, vocab=97)
    return path


@pytest.mark.parametrize("route", ["hash", "layer"])
def test_same_logits_as_on_one_store(
    nodes: object, root: str, checkpoint: Path, tmp_path: Path, route: str
) -> None:
    from hybridmem.integrations import ray as hm

    tokens, pieces = text(200), [100, 40] + [1] * 60
    model = load(checkpoint, 8)
    config: dict[str, Any] = {
        "embed_dim": model.config.n_embd,
        "hdc_dim": 256 * CHUNK,
        "signature_tokens": 1,
        "signature_bits": 256,
    }
    stores = (
        hybridmem.create(tmp_path / "mem", **config),
        hm.create(root, partitions=2, route=route, deadline_s=60, **config),
    )
    for top_k in (3, 10**6):
        found = []
        for store in stores:
            with rwkv_x.attach(model, store, top_k=top_k, chunk_tokens=CHUNK):
                found.append(run(model, tokens, pieces)[0])
        assert torch.equal(*found)
    assert largest(found[1] - reference(checkpoint, tokens)) < TOLERANCE

    with rwkv_x.attach(model, stores[1], top_k=3, chunk_tokens=CHUNK) as memory:
        _, state = run(model, tokens, pieces)
        memory.save(state, tmp_path / "conversation.pt")
        wanted, _ = run(model, tokens[:5], [1] * 5, state)
    stores[1].close()
    with (
        hm.open(root, deadline_s=60) as again,
        rwkv_x.attach(model, again, top_k=3, chunk_tokens=CHUNK) as memory,
    ):
        state = memory.load(tmp_path / "conversation.pt")
        assert torch.equal(run(model, tokens[:5], [1] * 5, state)[0], wanted)
        before = len(again)
        assert memory.forget(tmp_path / "conversation.pt") == before - len(again) > 0
    stores[0].close()

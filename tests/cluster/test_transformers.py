"""The transformers client on a cluster: nothing of it is changed, nor of what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hybridmem

from .nodes import HOW

pytest.importorskip("ray", reason=HOW)
WHICH = "needs PyTorch and transformers: pip install hybridmem[transformers]"
torch: Any = pytest.importorskip("torch", reason=WHICH)
models: Any = pytest.importorskip("transformers", reason=WHICH)
if getattr(models, "__file__", None) is None:  # the directory of tests passes for it
    pytest.skip(WHICH, allow_module_level=True)


def test_same_logits_as_on_one_store(nodes: object, root: str, tmp_path: Path) -> None:
    from hybridmem.integrations import ray as hm
    from hybridmem.integrations import transformers as client

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    shape |= {"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1}
    model = models.LlamaForCausalLM(models.LlamaConfig(**shape)).eval()
    ids = torch.randint(0, 64, (1, 120))

    def logits(store: Any) -> Any:
        with (
            client.HybridCache(model.config, store, window=16, top_k=3, chunk_tokens=8) as cache,
            client.retrieval(model),
            torch.no_grad(),
        ):
            for piece in (ids[:, :80], ids[:, 80:100], *ids[:, 100:].split(1, dim=1)):
                last = model(piece, cache=cache).logits
        return last

    wanted = logits(tmp_path / "one")
    with hybridmem.open(tmp_path / "one", mode="r") as one:
        config, entries = one.config, len(one)
    with hm.create(root, partitions=2, route="hash", config=config, deadline_s=60) as cluster:
        assert torch.equal(logits(cluster), wanted)
        assert len(cluster) == entries > 10

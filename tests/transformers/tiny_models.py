"""Tiny random models of many architectures, and runs of them in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

VOCABULARY = 97
#: Architectures that differ in where keys come from and how they are rotated.
NAMES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "cohere",
    "glm",
    "smollm3",
    "gpt_neox",
    "gpt2",
)
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"partial_rotary_factor": 0.5},
    "cohere": {"intermediate_size": 48},
    "glm": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
}


def make(name: str, **changes: Any) -> Any:
    """A model of 3 layers, 4 heads that share 2 keys where it can, and logits of std 1.4."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name not in ("gpt2", "gpt_neox"):
        options["num_key_value_heads"] = 2
    if name != "gpt2":
        options["intermediate_size"] = 48
    config = transformers.AutoConfig.for_model(name, **options | _SPECIAL.get(name, {}) | changes)
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.25 * noise)
    return model


def text(length: int, batch: int = 1, seed: int = 1) -> Any:
    """Random token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padding(length: int, padded: Sequence[int]) -> Any:
    """An attention mask whose rows begin with so many padded tokens."""
    mask = torch.ones((len(padded), length), dtype=torch.int64)
    for row, count in zip(mask, padded, strict=True):
        row[:count] = 0
    return mask


def run(model: Any, ids: Any, pieces: Sequence[int], cache: Any, mask: Any = None) -> Any:
    """Logits of `ids`, given to the model in pieces."""
    assert sum(pieces) == ids.shape[1]
    logits, at = [], 0
    for count in pieces:
        given = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            given = {
                "attention_mask": mask[:, : at + count],
                "position_ids": positions[:, at : at + count],
            }
        logits.append(model(ids[:, at : at + count], cache=cache, **given).logits)
        at += count
    return torch.cat(logits, dim=1)

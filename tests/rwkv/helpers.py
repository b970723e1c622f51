"""Models, texts and runs that the tests of the RWKV-X client share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HOW = "needs PyTorch and rwkv-x: pip install 'hybridmem[rwkv]' (torch's CPU build is enough)"
torch: Any = pytest.importorskip("torch", reason=HOW)
pytest.importorskip("rwkv_x", reason=HOW)
torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other

#: What needs torch to be imported comes from here, after it was looked for.
hooks: Any = importlib.import_module("hybridmem.integrations.rwkv_x._hooks")
gathered: Any = importlib.import_module("hybridmem.integrations.rwkv_x._gathered")
checkpoints: Any = importlib.import_module("hybridmem.integrations.rwkv_x.checkpoint")

MARKS = [pytest.mark.torch, pytest.mark.rwkv]
VOCAB = 97
EVERYTHING = 1_000_000
#: Of float32 logits with a standard deviation of about 2.5; without memory they are off by about 8.
TOLERANCE = 1e-4


def load(path: Path, keep: int = 8, *, precision: str = "fp32") -> Any:
    """Load a checkpoint into the design of 0.2.7, keeping so many rows at a prefill."""
    model = importlib.import_module("rwkv_x.model")
    config = model.RWKV_X_Memory_Config(memory_keep_tokens=keep)
    return model.RWKV_X(str(path), f"cpu {precision}", config)


def load_old(path: Path, **config: Any) -> Any:
    """Load a checkpoint into the earlier design."""
    model = importlib.import_module("rwkv_x.model_old")
    return model.RWKV_X(str(path), "cpu fp32", model.RWKV_X_Config(**config))


def text(length: int, seed: int = 1, vocab: int = VOCAB) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocab, (length,), generator=generator).tolist()
    return tokens


def run(model: Any, tokens: list[int], pieces: list[int], state: Any = None) -> tuple[Any, Any]:
    """Feed tokens in pieces of these lengths; return logits of every position, and the state."""
    assert sum(pieces) == len(tokens)
    # Upstream makes new states in the dtype of the model that was loaded last.
    importlib.import_module(type(model).__module__).DTYPE = model.rwkv.z["emb.weight"].dtype
    outputs, at = [], 0
    for piece in pieces:
        logits, state = model.forward(tokens[at : at + piece], state, full_output=True)
        outputs.append(logits.view(piece, -1))
        at += piece
    return torch.cat(outputs), state


def reference(path: Path, tokens: list[int], *, precision: str = "fp32") -> Any:
    """Logits of one upstream prefill that keeps every row."""
    return run(load(path, EVERYTHING, precision=precision), tokens, [len(tokens)])[0]


def largest(difference: Any) -> float:
    """Largest magnitude."""
    return float(difference.abs().max())


def attended_rows(patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Let what decode attends to from now on be noted, an array for each layer's turn.

    A row is a token's key and its value, side by side.
    """
    seen: list[np.ndarray] = []
    original = gathered.GatheredRows.attend

    def noting(rows: Any, query: Any) -> Any:
        keys = rows._keys[:, :, rows._first : rows._count]
        values = rows._values[:, rows._first : rows._count].transpose(0, 1)
        pairs = keys.permute(2, 0, 1).flatten(1), values.flatten(1)
        seen.append(torch.cat(pairs, 1).numpy())
        return original(rows, query)

    patch.setattr(gathered.GatheredRows, "attend", noting)
    return seen

"""What every question asks in every layer, for measurements that need no answers.

Of a set the queries of the last 8 tokens of all questions, as the model makes them that attends to
the whole document; unrotated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import smollm2
from .documents import TOKENS, Bank, build, captured, load_bank
from .evaluate import prompt_ids
from .facts import CHOOSE, REPORT

QUERY_TOKENS = 8


def asked(which: str, results: Path, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Queries of a set, read from a file that is made where it is missing.

    Returns
    -------
    dict
        queries : float32 [questions, layers, 8, 576]
        position : int64 [questions], of the last of these tokens
        document : str [questions]
        answer : int64 [questions, 2], the tokens of the document that hold the answer
        capture : str [questions], the file of the document's keys
    """
    path = results / "questions" / f"{which}-s{seed}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, **_ask(CHOOSE if which == "choose" else REPORT, results, seed))
        temporary.rename(path)
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def _ask(texts: dict[str, Any], results: Path, seed: int) -> dict[str, Any]:
    model, tokenizer = smollm2.load()
    found: dict[str, list[Any]] = {
        name: [] for name in ("queries", "position", "document", "answer", "capture")
    }
    for name, facts in texts.items():
        document = build(name, facts, tokenizer, seed)
        path = captured(document, model, results / "captures")
        bank = load_bank(path)
        for number, fact in enumerate(document.facts):
            prompt, _ = prompt_ids(fact, tokenizer)
            rows = queries_of(model, prompt, bank)
            found["queries"].append(np.stack([layer[-QUERY_TOKENS:] for layer in rows]))
            found["position"].append(TOKENS + len(prompt) - 1)
            found["document"].append(name)
            found["answer"].append(document.answers[number])
            found["capture"].append(path.name)
    return found


def queries_of(model: Any, ids: list[int], bank: Bank) -> list[NDArray[np.float32]]:
    """Of all of these tokens in each layer, [tokens, 576], with attention to all of a document."""
    rows: list[NDArray[np.float32]] = []

    def everything(layer: int, queries: NDArray[np.float32]) -> tuple[Any, Any]:
        rows.append(queries.copy())
        return bank.rotated[layer], bank.values[layer]

    smollm2.continue_with(model, ids, TOKENS, [everything])
    return rows

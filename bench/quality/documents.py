"""The documents: 8,000 tokens of a book with facts planted in them, and their captures."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import smollm2
from .facts import Fact

TEXTS = Path(__file__).parent / "texts"
TOKENS = 8_000
WINDOW = 256  # tokens that a bounded cache keeps: the last ones
FIRST, LAST = 0.04, 0.86  # facts lie between these parts of a document, before anything recent
QUERY_STRIDE = 25  # every 25th token's query is kept, to learn a mean query from


@dataclass
class Document:
    """One text as the model sees it."""

    name: str
    ids: list[int]
    facts: tuple[Fact, ...]
    spans: list[tuple[int, int]]  # tokens [first, last) of each fact's sentence
    answers: list[tuple[int, int]]  # tokens of its answer in that sentence


def build(name: str, facts: tuple[Fact, ...], tokenizer: Any, seed: int) -> Document:
    """Plant ``facts`` at seeded depths of the text ``name``, each after a sentence of the book."""
    rng = np.random.default_rng([seed, *name.encode()])
    text = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
    ends = [m.end() for m in re.finditer(r"[.!?]['\"]?(?=\s)", text)]
    chars = len(text) * TOKENS / len(tokenizer(text)["input_ids"])
    slots = np.linspace(FIRST, LAST, len(facts) + 1)
    depths = slots[:-1] + rng.uniform(0, 1, len(facts)) * np.diff(slots) * 0.8
    places = [min(ends, key=lambda end: abs(end - depth * chars)) for depth in depths]
    planted = [facts[i] for i in rng.permutation(len(facts))]
    pieces, spans, at, size = [], [], 0, 0
    for place, fact in zip(places, planted, strict=True):
        pieces += [text[at:place], " ", fact.sentence]
        size += place - at + 1
        spans.append((size, size + len(fact.sentence)))
        size += len(fact.sentence)
        at = place
    pieces.append(text[at:])
    encoded = tokenizer("".join(pieces), return_offsets_mapping=True)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])

    def tokens(first: int, last: int) -> tuple[int, int]:
        return int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, last))

    answers = []
    for (first, _), fact in zip(spans, planted, strict=True):
        inside = fact.sentence.rindex(fact.answer.strip())
        answers.append(tokens(first + inside, first + inside + len(fact.answer.strip())))
    document = Document(
        name, encoded["input_ids"][:TOKENS], tuple(planted), [tokens(*s) for s in spans], answers
    )
    if len(document.ids) < TOKENS or document.spans[-1][1] > TOKENS - WINDOW:
        raise ValueError(f"{name}: the text is too short for its facts")
    return document


@dataclass
class Bank:
    """What was captured of one document; all ``[layers, tokens, 192]``."""

    keys: NDArray[np.float32]  # unrotated
    rotated: NDArray[np.float32]
    values: NDArray[np.float32]


def captured(document: Document, model: Any, cache: Path) -> Path:
    """The file of ``document``'s capture, float16; the model runs where it is not there yet.

    It reads the document in bfloat16, as such models are run, and a fifth of the time of float32.
    """
    key = hashlib.sha256(np.asarray(document.ids, np.int32).tobytes()).hexdigest()[:16]
    path = cache / f"{document.name}-{key}-bf16.npz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        rows = np.arange(QUERY_STRIDE - 1, len(document.ids), QUERY_STRIDE)
        reader = copy.deepcopy(model).to(torch.bfloat16)
        got = smollm2.capture(reader, document.ids, list(range(smollm2.LAYERS)), rows)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        arrays = {"keys": got.keys, "values": got.values, "queries": got.queries}
        np.savez(temporary, **{name: a.astype(np.float16) for name, a in arrays.items()})
        temporary.rename(path)
    return path


def load_queries(path: Path) -> NDArray[np.float32]:
    """Only the queries of a capture, unrotated."""
    with np.load(path) as stored:
        return stored["queries"].astype(np.float32)


def load_bank(path: Path) -> Bank:
    """A capture, with its keys rotated."""
    with np.load(path) as stored:
        keys, values = (stored[name].astype(np.float32) for name in ("keys", "values"))
    positions = np.arange(keys.shape[1])
    rotated = np.stack([smollm2.rotate(layer, positions) for layer in keys])
    return Bank(keys, rotated, values)

"""When to ask: what a search finds that ends some tokens before a question does, or after.

``python -m bench.quality.moments``: for the questions to choose with, the share of questions and
layers in which the entry that holds the answer is among the first ten of its book, where the
search asks with the 8 tokens up to the last one of the question, up to one before it, and so on,
and up to tokens of the right answer. Signatures of 256 bits for each token, entries of 64. From
these, what is found when an answer begins by a client that searches at every so many tokens,
wherever the question happens to end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import smollm2
from .documents import TOKENS, Bank, build, captured, load_bank
from .evaluate import prompt_ids
from .facts import CHOOSE
from .needles import likeness
from .questions import QUERY_TOKENS, queries_of
from .rankings import grouped
from .report import write_csv
from .stages import OUT, RESULTS, centres

CHUNK, TOP, BITS = 64, 10, 256
BEFORE, AFTER = 15, 8
EVERY = (1, 2, 4, 8, 16)

Found = dict[int, list[bool]]


def note(
    found: Found,
    model: Any,
    texts: tuple[list[int], list[int]],
    answer: tuple[int, int],
    bank: Bank,
    means: Sequence[NDArray[np.float32]],
) -> None:
    """Whether the fact is found in each layer, by the place of the last token that asks."""
    question, rest = texts
    key_means, query_means = means
    first, last = answer
    for layer, rows in enumerate(queries_of(model, question + rest, bank)):
        alike = likeness(
            bank.keys[layer] - key_means[layer], grouped(rows) - query_means[layer], BITS
        )
        best = alike[:, : TOKENS // CHUNK * CHUNK].reshape(len(rows), -1, CHUNK).max(2)
        for at in range(-BEFORE, min(AFTER, len(rest)) + 1):
            end = len(question) + at
            if end < QUERY_TOKENS:
                continue
            scores = best[end - QUERY_TOKENS : end].mean(0, dtype=np.float64)
            target = scores[first // CHUNK : (last - 1) // CHUNK + 1].max()
            found.setdefault(at, []).append(bool((scores > target).sum() < TOP))


def measure(results: Path) -> list[dict[str, Any]]:
    """A row for each place of the last token that asks, then for each distance of searches."""
    model, tokenizer = smollm2.load()
    _, *means = centres(results)
    found: Found = {}
    for name, facts in CHOOSE.items():
        document = build(name, facts, tokenizer, 0)
        bank = load_bank(captured(document, model, results / "captures"))
        for number, fact in enumerate(document.facts):
            texts = prompt_ids(fact, tokenizer)
            note(found, model, texts, document.answers[number], bank, means)
    rows = [{"at": at, "found": float(np.mean(found[at]))} for at in sorted(found)]
    for every in EVERY:
        places = [np.mean(found[-back]) for back in range(every)]
        rows.append({"at": f"every {every}", "found": float(np.mean(places))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.moments", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = measure(args.results)
    write_csv(args.out / "moments.csv", rows)
    for row in rows:
        print(f"{row['at']!s:>10}  {row['found']:.3f}")


if __name__ == "__main__":
    main()

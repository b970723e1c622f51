"""Facts planted in the texts, and the questions that ask for them: ``facts.tsv``.

The set ``choose`` is there to choose methods and constants with. ``report`` has other texts, other
facts and other wordings (the question seldom repeats the words of the sentence); nothing may be
tuned on it. Sentences, questions and answers are ours; no answer can be guessed from the book or
from common knowledge.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """One planted sentence. The model continues ``Answer:`` + ``stem`` with ``answer``."""

    sentence: str
    question: str
    stem: str
    answer: str


def read(name: str) -> dict[str, tuple[Fact, ...]]:
    """The facts of the set ``name``, by text."""
    facts: dict[str, tuple[Fact, ...]] = {}
    with Path(__file__).with_name("facts.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["set"] == name:
                fact = Fact(
                    row["sentence"], row["question"], " " + row["stem"], " " + row["answer"]
                )
                facts[row["text"]] = (*facts.get(row["text"], ()), fact)
    return facts


CHOOSE = read("choose")
REPORT = read("report")

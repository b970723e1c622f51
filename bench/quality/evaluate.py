"""Every question: needle recall of each ranking, and the answer from what each retrieves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import smollm2
from .documents import TOKENS, WINDOW, Bank, Document, build, captured, load_bank
from .facts import Fact
from .rankings import NEEDLES_ONLY, WITHOUT_SINK, Keys, Query, Ranking, Scores, decisive, grouped

CALIBRATION = 2048  # tokens of each text that a layer's mean key is learned from


@dataclass
class Options:
    """What a run of the evaluation varies."""

    query_tokens: int = 8
    retrieved: int = 640  # tokens
    chunk: int = 64  # tokens of an entry
    sink: int = 4  # first tokens of the text, which much attention rests on: the cache keeps them
    seed: int = 0
    rankings: list[Ranking] = field(default_factory=list)


@dataclass
class Layer:
    """One layer of one document as the rankings see it."""

    keys: Keys
    indexes: list[Any]


def prompt_ids(fact: Fact, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of the question with the start of its answer, and of the rest of the answer."""
    prompt = f"\n\nQuestion: {fact.question}\nAnswer:{fact.stem}"
    return tokenizer(prompt)["input_ids"], tokenizer(fact.answer)["input_ids"]


def held(retrieved: NDArray[np.int64], sink: int) -> NDArray[np.int64]:
    """Retrieved tokens and those that the bounded cache holds, each once."""
    recent = np.arange(TOKENS - WINDOW, TOKENS)
    return np.concatenate([np.arange(sink), retrieved[retrieved >= sink], recent])


def relative_error(got: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Norm of the difference, in parts of the norm of what it should be."""
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


class Evaluation:
    """Four documents that make one memory, its rankings, and the model that answers from it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: dict[str, tuple[Fact, ...]],
        query_means: NDArray[np.float32],
        cache: Path,
        options: Options,
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.documents: list[Document] = []
        self.banks: list[Bank] = []
        for name, facts in texts.items():
            self.documents.append(build(name, facts, tokenizer, options.seed))
            self.banks.append(load_bank(captured(self.documents[-1], model, cache)))
        self.query_means = query_means
        key_means = np.mean([bank.keys[:, :CALIBRATION].mean(1) for bank in self.banks], axis=0)
        self.layers: list[list[Layer]] = []  # [document][layer]
        for bank in self.banks:
            of_bank = []
            for layer in range(smollm2.LAYERS):
                keys = Keys(bank.keys[layer], bank.rotated[layer], key_means[layer], options.chunk)
                of_bank.append(Layer(keys, [r.index(keys) for r in options.rankings]))
            self.layers.append(of_bank)

    def query(
        self, layer: int, queries: NDArray[np.float32], count: int, tokens: int | None = None
    ) -> Query:
        """The last query tokens of the first ``count`` rows, which follow the document."""
        rows = queries[max(0, count - (tokens or self.options.query_tokens)) : count]
        positions = TOKENS + np.arange(count - len(rows), count)
        return Query(
            grouped(rows),
            grouped(smollm2.rotate(rows, positions)),
            self.query_means[layer],
            self.options.chunk,
        )

    def stored(self, scores: Scores) -> Scores:
        """Of the chunks that left the cache."""
        return scores[: (TOKENS - WINDOW) // self.options.chunk]

    def retrieved(self, scores: Scores) -> NDArray[np.int64]:
        """Tokens of the best of the chunks that left the cache, in their order."""
        chunk = self.options.chunk
        top = np.argsort(-scores, kind="stable")[: self.options.retrieved // chunk]
        return (np.sort(top)[:, None] * chunk + np.arange(chunk)).reshape(-1)

    def run(self, done: set[tuple[str, int, str]]) -> Iterator[list[dict[str, Any]]]:
        """For each question one record a ranking, but for those that are ``done``."""
        for at, document in enumerate(self.documents):
            for number, fact in enumerate(document.facts):
                asked_of = {ranking.name for ranking in self.options.rankings}
                if all((document.name, number, name) in done for name in asked_of):
                    continue
                started = time.perf_counter()
                asked: dict[int, NDArray[np.float32]] = {}
                answers = self._answers(at, fact, asked)
                needles = self._needles(at, number, fact, asked)
                where = {"document": document.name, "fact": number}
                yield [
                    where | {"ranking": name} | needles.get(name, {}) | answers.get(name, {})
                    for name in answers | needles
                    if (document.name, number, name) not in done
                ]
                print(
                    f"{document.name} {number}: {time.perf_counter() - started:.0f} s", flush=True
                )

    def _needles(
        self, at: int, number: int, fact: Fact, asked: dict[int, NDArray[np.float32]]
    ) -> dict[str, dict[str, Any]]:
        """Layer by layer: chunks put before the answer's, and the error of attention outputs."""
        first, last = self.documents[at].answers[number]
        chunk = self.options.chunk
        needle = slice(first // chunk, (last - 1) // chunk + 1)
        count = len(prompt_ids(fact, self.tokenizer)[0])
        found: dict[str, dict[str, Any]] = {"cache only": {"errors": []}}
        outputs = [self._outputs(at, layer, asked[layer], None) for layer in range(smollm2.LAYERS)]
        for layer, exact in enumerate(outputs):
            got = self._outputs(at, layer, asked[layer], np.zeros(0, np.int64))
            found["cache only"]["errors"].append(relative_error(got, exact))
        for which, ranking in enumerate(self.options.rankings):
            own, everywhere, errors = [], [], []
            of_own: list[Scores] = []
            of_all: list[Scores] = []
            below: list[Scores] = []
            before = at * (TOKENS // chunk)  # chunks of the documents before this one
            for layer in range(smollm2.LAYERS):
                query = self.query(layer, asked[layer], count)
                scores = [
                    ranking.score(of_document[layer].indexes[which], query)
                    for of_document in self.layers
                ]
                of_own.append(scores[at])
                of_all.append(np.concatenate(scores))
                below.append(self.stored(scores[at]))
                inside, pooled = decisive(ranking, of_own), decisive(ranking, of_all)
                there = pooled[before + needle.start : before + needle.stop]
                own.append(int((inside > inside[needle].max()).sum()))
                everywhere.append(int((pooled > there.max()).sum()))
                best = self.retrieved(decisive(ranking, below))
                got = self._outputs(at, layer, asked[layer], best)
                errors.append(relative_error(got, outputs[layer]))
            found[ranking.name] = {"own_ranks": own, "pooled_ranks": everywhere, "errors": errors}
        return found

    def _outputs(
        self,
        at: int,
        layer: int,
        queries: NDArray[np.float32],
        retrieved: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """What the last query tokens attend to in a document: all of it, or cache and retrieved."""
        bank, positions = self.banks[at], TOKENS + np.arange(len(queries))
        rows = slice(None) if retrieved is None else held(retrieved, self.options.sink)
        turned = smollm2.rotate(queries, positions)[-self.options.query_tokens :]
        return smollm2.attend(turned, bank.rotated[layer][rows], bank.values[layer][rows])

    def _answers(
        self, at: int, fact: Fact, asked: dict[int, NDArray[np.float32]]
    ) -> dict[str, dict[str, Any]]:
        """Loss of the answer from the whole text, from the cache, and from what each ranking finds.

        ``asked`` is filled with the queries of the question as the whole text makes them.
        """
        prompt, answer = prompt_ids(fact, self.tokenizer)
        bank = self.banks[at]

        def everything(layer: int, queries: NDArray[np.float32]) -> tuple[Any, Any]:
            asked[layer] = queries[: len(prompt)].copy()
            return bank.rotated[layer], bank.values[layer]

        def cache_and(which: int | None, sink: int = self.options.sink) -> smollm2.Memory:
            below: list[Scores] = []

            def memory(layer: int, queries: NDArray[np.float32]) -> tuple[Any, Any]:
                tokens = np.zeros(0, np.int64)
                if which is not None:
                    ranking = self.options.rankings[which]
                    query = self.query(layer, queries, len(prompt))
                    scores = ranking.score(self.layers[at][layer].indexes[which], query)
                    below.append(self.stored(scores))
                    tokens = self.retrieved(decisive(ranking, below))
                chosen = held(tokens, sink)
                return bank.rotated[layer][chosen], bank.values[layer][chosen]

            return memory

        memories = {
            "full attention": everything,
            "cache only": cache_and(None),
            "cache only; without the first tokens": cache_and(None, 0),
        }
        for which, ranking in enumerate(self.options.rankings):
            if ranking.name not in NEEDLES_ONLY:
                memories[ranking.name] = cache_and(which)
            if ranking.name in WITHOUT_SINK:
                memories[f"{ranking.name}; without the first tokens"] = cache_and(which, 0)
        logits = smollm2.continue_with(
            self.model, prompt + answer, TOKENS, list(memories.values())
        )[:, len(prompt) - 1 : -1]
        wanted = torch.tensor(answer)
        return {
            name: {
                "loss": float(torch.nn.functional.cross_entropy(one, wanted)),
                "exact": bool((one.argmax(-1) == wanted).all()),
            }
            for name, one in zip(memories, logits, strict=True)
        }

"""How layers may decide together: ``python -m bench.quality.fusion`` tries it on the set to choose.

Every variant answers the 20 questions from what it retrieves: layer by layer, as in ``evaluate``,
or, in two passes, from the sum over all layers that a first pass over the question gives. Writes
``tables/fusion-choose.csv``; "found" is the share of questions and layers whose retrieved entries
hold the answer, with the queries that the model then has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import smollm2
from .documents import TOKENS
from .evaluate import Evaluation, Options, held, prompt_ids
from .facts import CHOOSE, Fact
from .rankings import ExactLate, Late, Layers, Ranking, Scores, WholeQuery, decisive, reranked
from .report import interval, write_csv
from .stages import OUT, RESULTS, centres

CHUNK, SINK = 64, 4
TOKEN = Late("each layer by itself", 256)
AGAIN = reranked("each layer by itself, best 40 re-ranked by signatures", 256)
TAKEN = "reciprocal ranks, layers so far"  # what the client does


@dataclass(frozen=True)
class Variant:
    """A ranking, and what of it is retrieved."""

    name: str
    ranking: Ranking
    retrieved: int = 640  # tokens
    passes: int = 1
    neighbours: bool = False  # the entries before and after the best ones count among them
    within: int | None = None  # only so many entries, the best of the layer itself
    query_tokens: int = 8


def cosine(distance: Scores) -> Scores:
    """Of the vectors whose signatures are so far apart."""
    return np.asarray(np.cos(np.pi * distance))


def square(distance: Scores) -> Scores:
    """Of the cosine; tokens that are not alike count nothing."""
    return np.asarray(np.maximum(cosine(distance), 0) ** 2)


def variants() -> list[Variant]:
    ranks, scores = Layers("reciprocal ranks", TOKEN), Layers("scores", TOKEN, how="z")
    return [
        Variant("each layer by itself", TOKEN),
        Variant("each layer by itself, 320 tokens", TOKEN, 320),
        Variant("each layer by itself, 1,280 tokens", TOKEN, 1280),
        Variant(AGAIN.name, AGAIN),
        Variant(TAKEN, ranks),
        Variant("the same, 320 tokens", ranks, 320),
        Variant("the same, 1,280 tokens", ranks, 1280),
        Variant("the same, neighbours among them", ranks, neighbours=True),
        Variant("the same, neighbours among them, 384 tokens", ranks, 384, neighbours=True),
        Variant("the same, of the layer's own best 40", ranks, within=40),
        Variant("the same, of 32 entries a layer", Layers("", TOKEN, top=32)),
        Variant("the same, a layer below counts 0.8", Layers("", TOKEN, decay=0.8)),
        Variant("the same, a layer below counts 0.5", Layers("", TOKEN, decay=0.5)),
        Variant("the same, rank + 1", Layers("", TOKEN, offset=1)),
        Variant("the same, rank + 4", Layers("", TOKEN, offset=4)),
        Variant("the same, rank + 60", Layers("", TOKEN, offset=60)),
        Variant("the same, excess over the tenth", Layers("", TOKEN, how="excess")),
        Variant("the same, cosines", Layers("", Late("", 256, likeness=cosine))),
        Variant("the same, squares of cosines", Layers("", Late("", 256, likeness=square))),
        Variant("the same, 4 query tokens", ranks, query_tokens=4),
        Variant("the same, 12 query tokens", ranks, query_tokens=12),
        Variant("the same, 16 query tokens", ranks, query_tokens=16),
        Variant("the same, 384 bits", Layers("", Late("", 384))),
        Variant("the same, 512 bits", Layers("", Late("", 512))),
        Variant("the same, query not made signs", Layers("", WholeQuery("", 256))),
        Variant("the same, best 40 re-ranked by signatures", Layers("", AGAIN)),
        Variant("the same, 512 bits, re-ranked", Layers("", reranked("", 512))),
        Variant("the same, exact keys", Layers("", ExactLate(""))),
        Variant("the same, exact cosine", Layers("", ExactLate("", cosine=True))),
        Variant("reciprocal ranks, all layers, two passes", ranks, passes=2),
        Variant("standardised scores, layers so far", scores),
        Variant("standardised scores, all layers, two passes", scores, passes=2),
    ]


def chosen(variant: Variant, own: Scores, scores: Scores) -> list[int]:
    """The entries that are retrieved, ascending."""
    if variant.within is not None:
        last = np.argsort(-own, kind="stable")[variant.within :]
        scores = scores.copy()
        scores[last] = -np.inf
    count = variant.retrieved // CHUNK
    entries: dict[int, None] = {}
    for entry in np.argsort(-scores, kind="stable").tolist():
        near = (entry, entry - 1, entry + 1) if variant.neighbours else (entry,)
        entries |= dict.fromkeys(one for one in near if 0 <= one < len(scores))
        if len(entries) >= count:
            break
    return sorted(list(entries)[:count])


class Asked:
    """One question, and what each variant makes of it."""

    def __init__(self, evaluation: Evaluation, at: int, fact: Fact, every: list[Variant]) -> None:
        self.evaluation, self.at, self.every = evaluation, at, every
        self.prompt, self.answer = prompt_ids(fact, evaluation.tokenizer)

    def memory(
        self, variant: Variant, all_layers: Scores | None, log: list[tuple[Scores, list[int]]]
    ) -> smollm2.Memory:
        """What a layer attends to; `log` gets what decided and what was retrieved."""
        evaluation, bank = self.evaluation, self.evaluation.banks[self.at]
        which = evaluation.options.rankings.index(base(variant.ranking))
        below: list[Scores] = []

        def attended(layer: int, queries: Any) -> tuple[Any, Any]:
            query = evaluation.query(layer, queries, len(self.prompt), variant.query_tokens)
            index = evaluation.layers[self.at][layer].indexes[which]
            below.append(evaluation.stored(variant.ranking.score(index, query)))
            scores = decisive(variant.ranking, below)
            entries = chosen(variant, below[-1], scores if all_layers is None else all_layers)
            log.append((scores, entries))
            tokens = np.concatenate([np.arange(e * CHUNK, (e + 1) * CHUNK) for e in entries])
            rows = held(tokens, SINK)
            return bank.rotated[layer][rows], bank.values[layer][rows]

        return attended

    def everything(self, layer: int, queries: Any) -> tuple[Any, Any]:
        bank = self.evaluation.banks[self.at]
        return bank.rotated[layer], bank.values[layer]

    def records(self, number: int) -> Iterator[dict[str, Any]]:
        """Loss of the answer and share of layers that found the fact, for each variant."""
        model, every = self.evaluation.model, self.every
        first, last = self.evaluation.documents[self.at].answers[number]
        needle = set(range(first // CHUNK, (last - 1) // CHUNK + 1))
        twice = [variant for variant in every if variant.passes == 2]
        logs: list[list[tuple[Scores, list[int]]]] = [[] for _ in twice]
        before = [self.memory(one, None, log) for one, log in zip(twice, logs, strict=True)]
        if before:
            smollm2.continue_with(model, self.prompt, TOKENS, before)
        summed = {one.name: log[-1][0] for one, log in zip(twice, logs, strict=True)}
        logs = [[] for _ in every]
        memories = [
            self.memory(one, summed.get(one.name), log)
            for one, log in zip(every, logs, strict=True)
        ]
        logits = smollm2.continue_with(
            model, self.prompt + self.answer, TOKENS, [self.everything, *memories]
        )[:, len(self.prompt) - 1 : -1]
        wanted = torch.tensor(self.answer)
        names = ["full attention", *(variant.name for variant in every)]
        for name, one, log in zip(names, logits, [[], *logs], strict=True):
            yield {
                "variant": name,
                "loss": float(torch.nn.functional.cross_entropy(one, wanted)),
                "exact": bool((one.argmax(-1) == wanted).all()),
                "found": float(np.mean([bool(needle & set(entries)) for _, entries in log] or 0)),
            }


def base(ranking: Ranking) -> Ranking:
    """The ranking of one layer."""
    return ranking.of if isinstance(ranking, Layers) else ranking


def table(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_name.setdefault(record["variant"], []).append(record)
    losses = {name: np.array([one["loss"] for one in each]) for name, each in by_name.items()}
    rows = []
    for name in ("full attention", *(variant.name for variant in variants())):
        each = by_name[name]
        row: dict[str, Any] = {"variant": name, "questions": len(each)}
        row["loss"] = float(losses[name].mean())
        for other, short in (("full attention", "full"), (TOKEN.name, "alone"), (TAKEN, "taken")):
            ends = interval((losses[name] - losses[other]).tolist())
            names = (f"above_{short}", f"above_{short}_low", f"above_{short}_high")
            row |= dict(zip(names, ends, strict=True))
        row["exact"] = sum(one["exact"] for one in each)
        row["found"] = float(np.mean([one["found"] for one in each]))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.fusion", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="join it to those measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    _, _, query_means = centres(args.results)
    every = [variant for variant in variants() if not args.only or variant.name in args.only]
    if len(every) < len(args.only):
        raise SystemExit(f"--only: there are {[variant.name for variant in variants()]}")
    kept = args.results / "fusion-choose.json"
    records = json.loads(kept.read_text(encoding="utf-8")) if args.only else []
    names = {record["variant"] for record in records}
    bases = list(dict.fromkeys(base(variant.ranking) for variant in every))
    evaluation = Evaluation(
        model, tokenizer, CHOOSE, query_means, args.results / "captures", Options(rankings=bases)
    )
    for at, document in enumerate(evaluation.documents):
        for number, fact in enumerate(document.facts):
            asked = Asked(evaluation, at, fact, every).records(number)
            records += [record for record in asked if record["variant"] not in names]
            print(document.name, number, flush=True)
    kept.write_text(json.dumps(records), encoding="utf-8")
    write_csv(args.out / "fusion-choose.csv", table(records))


if __name__ == "__main__":
    main()

"""What retrieval does to running text: ``python -m bench.quality.running``.

Not a question, but the book going on: at eight places of each text to choose with, the next 64
tokens are read from the first 4 tokens, the last 256 and 640 retrieved ones, and their loss is
compared with that of full attention. Their own last 8 tokens retrieve, as in a block of a prompt.
Writes ``tables/running-choose.csv``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import smollm2
from .documents import TOKENS, WINDOW
from .evaluate import Evaluation, Options
from .facts import CHOOSE
from .rankings import Ranking, Recency, Scores, all_rankings, decisive
from .report import interval, write_csv
from .stages import OUT, RESULTS, centres

BLOCK, CHUNK, SINK = 64, 64, 4
PLACES = range(TOKENS - BLOCK, 2_000, -12 * BLOCK)
RANKINGS = ("recency", "tokens x 256", "tokens x 256, layers fused")


def memory(evaluation: Evaluation, at: int, place: int, which: int | None) -> smollm2.Memory:
    """What a block that begins at `place` of a document attends to."""
    bank, below = evaluation.banks[at], list[Scores]()

    def attended(layer: int, queries: Any) -> tuple[Any, Any]:
        tokens = np.zeros(0, np.int64)
        if which is not None:
            ranking: Ranking = evaluation.options.rankings[which]
            query = evaluation.query(layer, queries, len(queries))
            scores = ranking.score(evaluation.layers[at][layer].indexes[which], query)
            below.append(scores[: (place - WINDOW) // CHUNK])
            tokens = evaluation.retrieved(decisive(ranking, below))
        recent = np.arange(place - WINDOW, place)
        chosen = np.concatenate([np.arange(SINK), tokens[tokens >= SINK], recent])
        return bank.rotated[layer][chosen], bank.values[layer][chosen]

    return attended


def everything(evaluation: Evaluation, at: int, place: int) -> smollm2.Memory:
    bank = evaluation.banks[at]
    return lambda layer, queries: (bank.rotated[layer][:place], bank.values[layer][:place])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.running", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    rankings = [r for r in all_rankings() if r.name in RANKINGS]
    assert isinstance(rankings[0], Recency)
    _, _, query_means = centres(args.results)
    evaluation = Evaluation(
        model, tokenizer, CHOOSE, query_means, args.results / "captures", Options(rankings=rankings)
    )
    losses: dict[str, list[float]] = {}
    for at, document in enumerate(evaluation.documents):
        for place in PLACES:
            memories = {"full attention": everything(evaluation, at, place)}
            memories["cache only"] = memory(evaluation, at, place, None)
            for which, ranking in enumerate(rankings):
                memories[ranking.name] = memory(evaluation, at, place, which)
            ids = document.ids[place : place + BLOCK]
            logits = smollm2.continue_with(model, ids, place, list(memories.values()))
            for name, one in zip(memories, logits, strict=True):
                loss = torch.nn.functional.cross_entropy(one[:-1], torch.tensor(ids[1:]))
                losses.setdefault(name, []).append(float(loss))
        print(document.name, {name: round(float(np.mean(x)), 3) for name, x in losses.items()})
    table = []
    for name, each in losses.items():
        mean, low, high = interval(np.subtract(each, losses["full attention"]).tolist())
        table.append(
            {
                "ranking": name,
                "blocks": len(each),
                "loss": float(np.mean(each)),
                "above_full": mean,
                "above_low": low,
                "above_high": high,
            }
        )
    write_csv(args.out / "running-choose.csv", table)


if __name__ == "__main__":
    main()

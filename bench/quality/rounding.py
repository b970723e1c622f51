"""How finely a query is rounded, and for whom: ``python -m bench.quality.rounding``.

Facts found by signatures of 256 bits on the questions to choose with, in all layers, each layer by
itself and fused: the query in signs, in integers up to some number, and as it is, compared with all
entries; and the best entries by signs re-ranked by a query in integers up to 15. Needs no model
once ``questions`` has asked it. Writes ``tables/rounding-choose.csv``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from . import smollm2
from .documents import TOKENS
from .questions import asked
from .rankings import (
    Keys,
    Late,
    Layers,
    Query,
    Ranking,
    Scores,
    Staged,
    WholeQuery,
    decisive,
    grouped,
)
from .report import interval, write_csv
from .stages import OUT, RESULTS, centres

BITS, CHUNK, TOP = 256, 64, 10
SIGNS = Late("signs", BITS)
RANKINGS: list[Ranking] = [
    SIGNS,
    *(WholeQuery(f"integers up to {most}", BITS, most) for most in (1, 3, 7, 15, 31)),
    WholeQuery("as it is", BITS),
    *(
        Staged(f"up to 15, {keep} candidates", SIGNS, WholeQuery("", BITS, 15), keep)
        for keep in (20, 40, 80, 160)
    ),
]
COLUMNS = ("own", "pooled", "own_fused", "pooled_fused")


def found(results: Path) -> dict[str, list[list[float]]]:
    """Of each ranking and question the shares of layers that find the fact, by column."""
    questions = asked("choose", results)
    _, key_means, query_means = centres(results)
    names = list(dict.fromkeys(questions["document"].tolist()))
    files = [questions["capture"][questions["document"].tolist().index(name)] for name in names]
    stored = [np.load(results / "captures" / file)["keys"] for file in files]
    seen: dict[tuple[str, int], tuple[list[Scores], list[Scores]]] = {}
    hits: dict[tuple[str, int], list[tuple[bool, ...]]] = {}
    for layer in range(smollm2.LAYERS):
        keys = [
            Keys(one, one, key_means[layer], CHUNK)
            for one in (each[layer].astype(np.float32) for each in stored)
        ]
        for ranking in RANKINGS:
            indexes = [ranking.index(one) for one in keys]
            for question, (first, last) in enumerate(questions["answer"].tolist()):
                rows = grouped(questions["queries"][question, layer])
                query = Query(rows, rows, query_means[layer], CHUNK)
                at = names.index(questions["document"][question])
                inside = slice(first // CHUNK, (last - 1) // CHUNK + 1)
                before = at * (TOKENS // CHUNK)
                overall = slice(before + inside.start, before + inside.stop)
                scores = [ranking.score(index, query) for index in indexes]
                of_own, of_all = seen.setdefault((ranking.name, question), ([], []))
                of_own.append(scores[at])
                of_all.append(np.concatenate(scores))
                each = []
                for one in (ranking, Layers("", ranking)):
                    for so_far, needle in ((of_own, inside), (of_all, overall)):
                        decides = decisive(one, so_far)
                        each.append(bool((decides > decides[needle].max()).sum() < TOP))
                hits.setdefault((ranking.name, question), []).append(tuple(each))
        print(f"layer {layer}", flush=True)
    shares: dict[str, list[list[float]]] = {}
    for (name, _), by_layer in hits.items():
        shares.setdefault(name, []).append(np.mean(by_layer, axis=0).tolist())
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.rounding", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    table = []
    for name, shares in found(args.results).items():
        row: dict[str, Any] = {"query": name, "questions": len(shares)}
        for column, values in zip(COLUMNS, zip(*shares, strict=True), strict=True):
            ends = (column, f"{column}_low", f"{column}_high")
            row |= dict(zip(ends, interval(values), strict=True))
        table.append(row)
    write_csv(args.out / "rounding-choose.csv", table)


if __name__ == "__main__":
    main()

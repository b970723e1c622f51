"""Wide models: the projection that folds its input against one that transforms all of it.

``python -m bench.quality.wide``. For wide input and few bits `Projector` adds the padded input up
to about four times as many sums, with random signs, and transforms those. Compared with the
transform of the whole width, for 256 bits a token and several seeds: the share of the best 10
entries by exact late interaction (centred cosine) that are among the first 10 by signatures, and
the share of facts found, among 500 entries of four texts. Wide keys are made of a small model's:
the layers of a block side by side (1,536 and 3,456 wide), or one layer turned by random
orthonormal rows into 3,584 dimensions, which changes no product. Writes ``tables/wide.csv``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem import _kernels
from hybridmem.hdc import Projector, splitmix64

from .questions import asked
from .rankings import best, grouped, hamming, words
from .report import interval, write_csv
from .stages import OUT, RESULTS, centres

BITS, CHUNK, TOP = 256, 64, 10
Floats = NDArray[np.float32]


def whole(rows: Floats, seed: int) -> NDArray[np.uint8]:
    """Signatures by the transform of the whole padded width, whatever the number of bits."""
    padded = 1 << (rows.shape[1] - 1).bit_length()
    out = np.empty((len(rows), BITS // 8), np.uint8)
    _kernels.project(rows, splitmix64(seed, 3 * padded // 64), padded, padded, BITS, out)
    return out


def folded(rows: Floats, seed: int) -> NDArray[np.uint8]:
    return Projector(rows.shape[1], BITS, seed).project(rows)


def scores(keys: NDArray[np.uint8], query: NDArray[np.uint8]) -> NDArray[np.float64]:
    return -best(hamming(words(keys), words(query)), CHUNK, np.minimum)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.wide", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    told = asked("choose", args.results)
    _, key_means, query_means = centres(args.results)
    files = list(dict.fromkeys(told["capture"].tolist()))
    captures = [np.load(args.results / "captures" / file)["keys"] for file in files]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3584, 192)))[0].T.astype(np.float32)
    cases: dict[str, tuple[list[list[int]], Floats | None]] = {
        "8 layers, 1,536 wide": ([list(range(at, at + 8)) for at in (0, 8, 16, 22)], None),
        "18 layers, 3,456 wide": ([list(range(12, 30))], None),
        "one layer turned, 3,584 wide": ([[17], [20], [23]], turn),
    }
    table = []
    for name, (blocks, turned) in cases.items():
        found: dict[str, list[list[float]]] = {"folded": [], "whole": []}
        taken = {"folded": 0.0, "whole": 0.0}
        for block in blocks:
            keys = np.concatenate(
                [
                    np.concatenate([c[at].astype(np.float32) - key_means[at] for at in block], 1)
                    for c in captures
                ]
            )
            rows = np.concatenate(
                [
                    grouped(told["queries"][:, at].reshape(-1, 576)) - query_means[at]
                    for at in block
                ],
                1,
            )
            unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            asks = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            asks = asks.reshape(len(told["queries"]), -1, rows.shape[1])
            exact = [best(ask @ unit.T, CHUNK, np.maximum) for ask in asks]
            if turned is not None:
                keys, rows = keys @ turned, rows @ turned
            for form, sign in (("folded", folded), ("whole", whole)):
                for seed in range(args.seeds):
                    start = time.perf_counter()
                    signed = sign(keys, seed)
                    taken[form] += time.perf_counter() - start
                    asked_for = sign(rows, seed).reshape(*asks.shape[:2], -1)
                    for question, ask in enumerate(asked_for):
                        got = scores(signed, ask)
                        first, last = told["answer"][question]
                        text = files.index(told["capture"][question])
                        needle = slice(
                            (text * 8000 + first) // CHUNK, (text * 8000 + last - 1) // CHUNK + 1
                        )
                        top = np.argsort(-got, kind="stable")[:TOP]
                        wanted = np.argsort(-exact[question], kind="stable")[:TOP]
                        found[form].append(
                            [
                                float(np.isin(wanted, top).mean()),
                                float((got > got[needle].max()).sum() < TOP),
                            ]
                        )
        row: dict[str, Any] = {"keys": name}
        means = {form: np.array(some) for form, some in found.items()}
        for form, some in means.items():
            row[f"{form}_recall"], row[f"{form}_facts"] = some.mean(0).tolist()
            tokens = len(blocks) * args.seeds * 8000 * len(captures)
            row[f"{form}_us_per_64_tokens"] = 64e6 * taken[form] / tokens
        for column, what in enumerate(("recall", "facts")):
            less = means["folded"][:, column] - means["whole"][:, column]
            by_question = less.reshape(-1, len(told["queries"])).mean(0)
            ends = interval(by_question.tolist())
            row |= dict(
                zip((f"{what}_more", f"{what}_more_low", f"{what}_more_high"), ends, strict=True)
            )
        table.append(row)
        print(row, flush=True)
    write_csv(args.out / "wide.csv", table)


if __name__ == "__main__":
    main()

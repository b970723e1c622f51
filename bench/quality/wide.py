"""Wide models: the projection that folds its input against one that transforms all of it.

``python -m bench.quality.wide recall``. For wide input and few bits `Projector` adds the padded
input up to about four times as many sums, with random signs, and transforms those. Compared with
the transform of the whole width, for 256 bits a token, on the same keys and queries with the same
seeds: the share of the best 10 entries by exact late interaction (centred cosine) that are among
the first 10 by signatures, and the share of facts found, among the 500 entries of four texts.
Nothing is chosen by it, so all 64 reported questions are asked. Wide keys are made of a small
model's: the layers of a block side by side (1,536 and 3,456 wide), or one layer turned by random
orthonormal rows into 3,584 dimensions, which changes no product.

Intervals of the differences are 95 % of a paired bootstrap over questions and seeds. "Between
seeds" is the standard deviation over seeds of the transform of the whole width. Writes
``tables/wide.csv``. ``time`` takes the time of a put's 64 rows, that of the thread on its core, for
``tables/wide-time.csv``.
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

from .documents import TOKENS
from .questions import asked
from .rankings import best, grouped, hamming, words
from .report import DRAWS, write_csv
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


FORMS = {"folded": folded, "whole": whole}


class Group:
    """The questions about four texts, and the keys of those."""

    def __init__(self, told: dict[str, NDArray[Any]], names: list[str], results: Path) -> None:
        here = np.isin(told["document"], names)
        self.told = {name: some[here] for name, some in told.items()}
        self.files = list(dict.fromkeys(self.told["capture"].tolist()))
        stored = [np.load(results / "captures" / file)["keys"] for file in self.files]
        self.keys = [np.concatenate(of_layer) for of_layer in zip(*stored, strict=True)]

    def measure(
        self, block: list[int], turn: Floats | None, means: tuple[Floats, Floats], seeds: int
    ) -> NDArray[np.float64]:
        """Found [forms, seeds, questions, (ten best, fact)]."""
        key_means, query_means = means
        centred = [self.keys[at].astype(np.float32) - key_means[at] for at in block]
        keys = np.concatenate(centred, axis=1)
        asks = np.concatenate(
            [
                grouped(self.told["queries"][:, at].reshape(-1, 576)) - query_means[at]
                for at in block
            ],
            axis=1,
        )
        n_questions = len(self.told["queries"])
        unit, unit_asks = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (keys, asks))
        exact = [
            best(ask @ unit.T, CHUNK, np.maximum)
            for ask in unit_asks.reshape(n_questions, -1, asks.shape[1])
        ]
        del unit
        if turn is not None:
            keys, asks = keys @ turn, asks @ turn
        found = np.empty((len(FORMS), seeds, n_questions, 2))
        for form, sign in enumerate(FORMS.values()):
            for seed in range(seeds):
                signed = sign(keys, seed)
                asked_for = sign(asks, seed).reshape(n_questions, -1, BITS // 8)
                for question, ask in enumerate(asked_for):
                    got = scores(signed, ask)
                    first = self.files.index(self.told["capture"][question]) * TOKENS
                    low, high = first + self.told["answer"][question]
                    needle = slice(low // CHUNK, (high - 1) // CHUNK + 1)
                    top = np.argsort(-got, kind="stable")[:TOP]
                    wanted = np.argsort(-exact[question], kind="stable")[:TOP]
                    found[form, seed, question] = (
                        np.isin(wanted, top).mean(),
                        (got > got[needle].max()).sum() < TOP,
                    )
        return found


def both_ways(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of [seeds, questions], and its interval if both were drawn anew."""
    rng = np.random.default_rng(0)
    seeds, questions = (rng.integers(0, n, (DRAWS, n)) for n in values.shape)
    means = [values[np.ix_(*drawn)].mean() for drawn in zip(seeds, questions, strict=True)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def times() -> list[dict[str, Any]]:
    """Microseconds of 64 rows, medians of both forms in turns."""
    rng = np.random.default_rng(0)
    table = []
    for width in (1536, 3456, 3584):
        rows = rng.standard_normal((64, width), np.float32)
        taken: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(300):
            for form, sign in FORMS.items():
                start = time.thread_time()
                sign(rows, 0)
                taken[form].append(time.thread_time() - start)
        each = {form: 1e6 * float(np.median(some)) for form, some in taken.items()}
        table.append({"width": width, **each})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.wide", description=__doc__)
    parser.add_argument("what", choices=["recall", "time"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--set", choices=["choose", "report"], default="report")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.what == "time":
        write_csv(args.out / "wide-time.csv", times())
        return
    told = asked(args.set, args.results)
    _, *means = centres(args.results)
    names = list(dict.fromkeys(told["document"].tolist()))
    groups = [Group(told, names[at : at + 4], args.results) for at in range(0, len(names), 4)]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3584, 192)))[0].T.astype(np.float32)
    cases: dict[str, tuple[list[list[int]], Floats | None]] = {
        "8 layers, 1,536 wide": ([list(range(at, at + 8)) for at in (4, 20)], None),
        "18 layers, 3,456 wide": ([list(range(12, 30))], None),
        "one layer turned, 3,584 wide": ([[17], [23]], turn),
    }
    table = []
    for name, (blocks, turned) in cases.items():
        of_blocks = []
        for block in blocks:
            parts = [
                group.measure(block, turned, (means[0], means[1]), args.seeds) for group in groups
            ]
            of_blocks.append(np.concatenate(parts, axis=2))
        found = np.mean(of_blocks, axis=0)  # [forms, seeds, questions, 2]
        row: dict[str, Any] = {"keys": name, "questions": found.shape[2], "seeds": args.seeds}
        for column, what in enumerate(("recall", "facts")):
            for form, each in zip(FORMS, found[..., column], strict=True):
                row[f"{form}_{what}"] = float(each.mean())
            ends = both_ways(found[0, ..., column] - found[1, ..., column])
            row |= dict(
                zip((f"{what}_more", f"{what}_more_low", f"{what}_more_high"), ends, strict=True)
            )
            row[f"{what}_between_seeds"] = float(found[1, ..., column].mean(1).std(ddof=1))
        table.append(row)
        print(row, flush=True)
    write_csv(args.out / "wide.csv", table)


if __name__ == "__main__":
    main()

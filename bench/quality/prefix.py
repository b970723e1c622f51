"""First stages that read fewer bytes: ``python -m bench.quality.prefix recall`` (and ``time``).

What bounds the search of a large layer is that its first stage reads every signature. Here the
first bits of each token's signature lie beside those of the other entries, a copy of their own, and
a first stage reads only them; who is near goes on to all bits as in the package. The bank is that
of 100,000 entries of ``stages``, and one layer for recall. Times are those of the thread on its
core, which other work disturbs less; take them with ``HYBRIDMEM_SIMD=avx2`` too. Writes
``tables/prefix.csv`` and ``tables/prefix-<level>.csv``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import hybridmem
from hybridmem._index import LayerIndex
from hybridmem._view import _FAR, _SAMPLE, GATES, IndexView, telling_first
from hybridmem.hdc import SignatureSpec

from .report import write_csv
from .stages import BITS, CHUNK, OUT, RESULTS, TOP, entries, query_signatures, token_signatures
from .stages import view as whole_view

U8 = NDArray[np.uint8]


class First(NamedTuple):
    """A first stage: so many query tokens, so many bits, one of so many entries goes on."""

    tokens: int
    bits: int
    share: int


FIRSTS = [
    First(tokens, bits, share)
    for tokens, bits in ((4, 64), (8, 64), (2, 128), (3, 128), (4, 128), (6, 128), (8, 128))
    for share in (2, 3, 4, 6)
]
TIMED = {(4, 64, 2), (2, 128, 3), (3, 128, 3), (4, 128, 4), (6, 128, 6), (8, 128, 6)}


class Bank:
    """Entries, and copies of the first bits of their signatures."""

    def __init__(self, records: U8) -> None:
        self.whole = whole_view(records)
        self.parts: dict[int, IndexView] = {}
        tokens = records.reshape(len(records), CHUNK, BITS // 8)
        for bits in {first.bits for first in FIRSTS}:
            index = LayerIndex(SignatureSpec(bits * CHUNK, 1, bits))
            for at in range(0, len(records), 5000):
                some = np.ascontiguousarray(tokens[at : at + 5000, :, : bits // 8])
                ids = np.arange(at + 1, at + len(some) + 1)
                index.extend(ids, np.full(len(some), CHUNK), some.reshape(len(some), -1))
            self.parts[bits] = index.view()
        self.sample = np.arange(0, len(records), max(1, len(records) // _SAMPLE))

    def passed(self, query: U8, first: First) -> NDArray[np.int64]:
        """Places of the entries that come through the first stage."""
        some = np.ascontiguousarray(query[: first.tokens, : first.bits // 8])
        far = self.parts[first.bits]._distances(some, None)
        sampled = np.sort(far[self.sample])
        return np.flatnonzero(far <= sampled[len(sampled) // first.share])

    def staged(self, query: U8, first: First) -> NDArray[np.uint32]:
        """Distances of those that come through the gates of the package too."""
        near = self.whole._by_token(query, self.sample)
        order = telling_first(near, GATES[-1][0])
        query, near = np.ascontiguousarray(query[order]), np.sort(near[order].cumsum(0), axis=1)
        limits = [near[end - 1, near.shape[1] // share] for end, share in GATES]
        ends = np.array([end for end, _ in GATES], np.uint32)
        places = self.passed(query, first)
        far = self.whole._distances(query, places, ends, np.array(limits, np.uint32))
        return far[far != _FAR]


def tenth(bank: Bank, query: U8) -> int:
    """Distance of the last of the ten best of the whole scan."""
    return int(np.partition(bank.whole._distances(query, None), TOP - 1)[TOP - 1])


def times(bank: Bank, small: IndexView, queries: list[U8]) -> list[dict[str, Any]]:
    """Milliseconds, medians over queries, all in turns."""
    cases: dict[str, Callable[[U8], Any]] = {
        "10,000": lambda query: small.search([query], TOP),
        "whole scan": lambda query: bank.whole.search([query], TOP),
        "as it is": lambda query: bank.whole.search([query], TOP, approximate=True),
        "two tokens": lambda query: bank.whole._distances(query[:2], None),
    }
    for first in FIRSTS:
        if first in TIMED:
            cases[",".join(map(str, first))] = lambda query, first=first: bank.staged(query, first)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for query in queries:
        for name, run in cases.items():
            start = time.thread_time()
            run(query)
            taken[name].append(time.thread_time() - start)
    return [
        {"first": name, "milliseconds": 1e3 * float(np.median(some))}
        for name, some in taken.items()
    ]


def recalls(large: Bank, signed: U8, asked: U8, step: int) -> list[dict[str, Any]]:
    """One row a first stage: recall in the large bank, and in those of one layer each."""
    asks: dict[str, list[tuple[Bank, U8, int]]] = {"large": [], "one_layer": []}
    for layer in range(0, signed.shape[1], step):
        own = Bank(entries(signed[:, layer : layer + 1], 0))
        for query in asked[:, layer]:
            asks["large"].append((large, query, tenth(large, query)))
            asks["one_layer"].append((own, query, tenth(own, query)))
    table = []
    for first in FIRSTS:
        row: dict[str, Any] = first._asdict()
        for where, each in asks.items():
            found = [
                min(TOP, int((bank.staged(query, first) <= limit).sum())) / TOP
                for bank, query, limit in each
            ]
            row[where] = float(np.mean(found))
        table.append(row)
        print(row, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.prefix", description=__doc__)
    parser.add_argument("what", choices=["recall", "time"])
    parser.add_argument("--layer-step", type=int, default=6, help="ask in every so many layers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    _, signed = token_signatures(args.results)
    asked = query_signatures("choose", args.results)
    large = Bank(np.concatenate([entries(signed, at) for at in (0, 32, 16)])[:100_000])
    if args.what == "recall":
        write_csv(args.out / "prefix.csv", recalls(large, signed, asked, args.layer_step))
        return
    small = whole_view(entries(signed, 0)[:10_000])
    queries = list(asked[:5, :: args.layer_step].reshape(-1, *asked.shape[2:]))
    table = times(large, small, queries)
    print(table)
    write_csv(args.out / f"prefix-{hybridmem.simd_level()}.csv", table)


if __name__ == "__main__":
    main()

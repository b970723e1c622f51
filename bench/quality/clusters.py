"""What an approximate search of a large layer finds, and what it costs, with pooled signatures.

``python -m bench.quality.clusters recall``: the keys of one layer of all 12 texts, each token an
entry with a signature of 4096 bits, are put into an index in the order of the texts, or of chance,
and dealt into clusters as they come. For queries of the model it is asked how many of the ten
entries at the smallest Hamming distances an approximate search finds, and what share of the layer
it reads, at several sizes. The questions to choose with set what is read; the others are reported.

``python -m bench.quality.clusters cost``: the time of searches of these entries, and of more that
are made of them by turning one of eight of their bits. Such layers are not real: their recall is
given to show that the search works there, and says nothing of real layers of that size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem import _clusters
from hybridmem._index import LayerIndex
from hybridmem._view import IndexView
from hybridmem.hdc import SignatureSpec

from .questions import asked
from .rankings import grouped
from .report import write_csv
from .stages import OUT, RESULTS, centres

SPEC, TOP = SignatureSpec(4096), 10
SIZES = (12_000, 24_000, 48_000, 96_000)
COST_LAYER, PART = 12, 50_000
Floats = NDArray[np.float32]
U8 = NDArray[np.uint8]


def layer_keys(paths: list[Path], layer: int, mean: Floats) -> Floats:
    """Centred keys of one layer of all texts, one text after the other."""
    rows = []
    for path in paths:
        with np.load(path) as stored:
            rows.append(stored["keys"][layer].astype(np.float32) - mean)
    return np.concatenate(rows)


def signed(results: Path, layer: int) -> tuple[U8, dict[str, U8]]:
    """Signatures of a layer's keys, and of the queries of each set of questions."""
    paths, key_means, query_means = centres(results)
    keys = layer_keys(paths, layer, key_means[layer])
    projector = SPEC.projector(keys.shape[1])
    queries = {}
    for name in ("choose", "report"):
        asking = asked(name, results)["queries"][:, layer]
        rows = grouped(asking.reshape(-1, asking.shape[-1])) - query_means[layer]
        queries[name] = projector.project(rows)
    return projector.project(keys), queries


def extend(index: LayerIndex, records: U8) -> None:
    first = len(index) + 1
    ids = np.arange(first, first + len(records), dtype=np.uint64)
    index.extend(ids, np.ones(len(records), np.uint32), records)


def deal(index: LayerIndex) -> tuple[IndexView, list[float]]:
    """Deal all that waits; the view then, and the seconds of each batch."""
    seconds: list[float] = []
    while True:
        before = index.view()
        start = time.perf_counter()
        view = index.view(approximate=True)
        if view is before:
            return view, seconds
        seconds.append(time.perf_counter() - start)


def to_read(n: int) -> int:
    """As in a large layer, also where layers are small."""
    return round(_clusters.READ * n ** (2 / 3))


def approximate(view: IndexView, query: U8) -> NDArray[np.uint64]:
    return view._search_clustered(query[None], TOP, to_read(len(view)), 1)[0]


def recall(view: IndexView, queries: U8) -> list[float]:
    """Share of the ten best that are found, of each query."""
    best = view.search([row[None] for row in queries], TOP)
    return [
        len(np.intersect1d(ids, approximate(view, query))) / TOP
        for query, (ids, _) in zip(queries, best, strict=True)
    ]


def read_of(view: IndexView, queries: U8) -> float:
    """Share of a layer that is read for a query, on average."""
    dealt = view._dealt
    assert dealt is not None
    read = [len(dealt.near(query, to_read(len(view)))) for query in queries]
    return (float(np.mean(read)) + len(view) - dealt.end) / len(view)


def measure_recall(results: Path, layers: list[int]) -> list[dict[str, Any]]:
    """One row for each order of the entries, size and layer."""
    rows = []
    _clusters.LARGE = min(SIZES)
    for layer in layers:
        records, queries = signed(results, layer)
        for order in ("texts", "chance"):
            if order == "chance":
                records = records[np.random.default_rng(layer).permutation(len(records))]
            index = LayerIndex(SPEC)
            for size in SIZES:
                extend(index, records[len(index) : size])
                view, _ = deal(index)
                row: dict[str, Any] = {"order": order, "entries": size, "layer": layer}
                for name, some in queries.items():
                    row[name] = float(np.mean(recall(view, some)))
                rows.append(row | {"read": read_of(view, queries["report"])})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def turned(records: U8, n: int, rng: np.random.Generator) -> U8:
    """Records made of real ones, of which one of eight bits is turned, in random order."""
    shape = (3, n, SPEC.record_bytes)
    bits = np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape)
    turning: U8 = bits[0] & bits[1] & bits[2]
    return records[rng.integers(0, len(records), n)] ^ turning


def times(view: IndexView, queries: U8) -> tuple[float, float]:
    """Median milliseconds of an exact and of an approximate search."""
    taken: tuple[list[float], list[float]] = ([], [])
    for query in queries:
        for way in (False, True):
            start = time.perf_counter()
            view.search([query[None]], TOP, approximate=way)
            taken[way].append(1000 * (time.perf_counter() - start))
    return float(np.median(taken[0])), float(np.median(taken[1]))


def measure_cost(results: Path, sizes: list[int], asking: int) -> list[dict[str, Any]]:
    """One row for each size: of real entries up to as many as there are, then of made ones."""
    records, queries = signed(results, COST_LAYER)
    some = queries["report"][:: len(queries["report"]) // asking][:asking]
    rng = np.random.default_rng(0)
    index, rows, seconds = LayerIndex(SPEC), [], []
    for size in sorted(sizes):
        while len(index) < size:
            n = len(index)
            made = records[n:size]
            if not len(made):
                made = turned(records, min(PART, size - n), rng)
            extend(index, made)
            seconds += deal(index)[1]
        view = index.view()
        dealt = view._dealt
        assert dealt is not None
        exact, near = times(view, some)
        row = {
            "entries": size,
            "made": "real" if size <= len(records) else "made",
            "scan_ms": exact,
            "approximate_ms": near,
            "read": read_of(view, some),
            "recall": float(np.mean(recall(view, some))),
            "batch_ms": 1000 * float(np.median(seconds)),
            "batch_99_ms": 1000 * float(np.quantile(seconds, 0.99)),
            "bytes_an_entry": (dealt.centres.nbytes + dealt.members.nbytes + 24 * len(dealt.sizes))
            / size,
        }
        rows.append(row)
        print(json.dumps(row | {"longest_batch_ms": 1000 * max(seconds)}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.clusters", description=__doc__)
    parser.add_argument("what", choices=["recall", "cost"])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 20, 27])
    parser.add_argument("--entries", type=int, nargs="+", default=[96_000, 1_000_000])
    parser.add_argument("--asking", type=int, default=128, help="queries whose time is taken")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.what == "recall":
        write_csv(args.out / "clusters.csv", measure_recall(args.results, args.layers))
    else:
        rows = measure_cost(args.results, args.entries, args.asking)
        write_csv(args.out / "clusters-cost.csv", rows)


if __name__ == "__main__":
    main()

"""Would a layer of millions be searched by clusters? How much of it they would have to read.

``python -m bench.quality.clusters``: the keys of one layer of all 12 texts, each token an entry
with a signature of 4096 bits, are dealt into clusters by their cosine (spherical k-means), either
learned from the keys themselves, which means to build the index anew as entries come, or from the
first 4,096 of them and then frozen, which costs nothing but the dealing. A search would read the
clusters in the order of their centres' products with the query. For queries of the model and
layers of growing size it is asked how much of a layer must be read until .9, .95 and .99 of the
ten entries at the smallest Hamming distances have been passed. The share that must be read is to
fall as the layer grows, else the index is not sublinear.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem._index import LayerIndex
from hybridmem.hdc import SignatureSpec

from .questions import asked
from .rankings import grouped
from .report import write_csv
from .stages import OUT, RESULTS, centres

SPEC, TOP = SignatureSpec(4096), 10
LEARNED_FROM = 4096
RECALLS = (0.9, 0.95, 0.99)
Floats = NDArray[np.float32]


def unit(rows: Floats) -> Floats:
    """Rows of length 1."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def k_means(rows: Floats, count: int, rng: np.random.Generator, rounds: int = 8) -> Floats:
    """Centres of unit rows; one that nothing is near begins again at some row."""
    found = rows[rng.choice(len(rows), count, replace=False)]
    for _ in range(rounds):
        nearest = dealt(rows, found)
        sums = np.zeros_like(found)
        np.add.at(sums, nearest, rows)
        empty = np.flatnonzero(np.bincount(nearest, minlength=count) == 0)
        sums[empty] = rows[rng.choice(len(rows), len(empty))]
        found = unit(sums)
    return found


def dealt(rows: Floats, centre_rows: Floats) -> NDArray[np.int64]:
    """The cluster of each row."""
    return np.concatenate(
        [(part @ centre_rows.T).argmax(1) for part in np.array_split(rows, len(rows) // 4096 + 1)]
    )


def needed(best: NDArray[np.int64], nearest: NDArray[np.int64], similar: Floats) -> Floats:
    """Share of the entries that are read until each of a query's best ones has been: [m, TOP]."""
    sizes = np.bincount(nearest, minlength=similar.shape[1])
    order = np.argsort(-similar, axis=1, kind="stable")
    read = np.cumsum(sizes[order], axis=1) / len(nearest)
    place = np.argsort(order, axis=1)  # of each cluster in a query's order
    at = np.take_along_axis(place, nearest[best], axis=1)
    return np.take_along_axis(read, at, axis=1).astype(np.float32)


def layer_keys(paths: list[Path], layer: int, mean: Floats) -> Floats:
    """Centred keys of one layer of all texts, one text after the other."""
    rows = []
    for path in paths:
        with np.load(path) as stored:
            rows.append(stored["keys"][layer].astype(np.float32) - mean)
    return np.concatenate(rows)


def measure(results: Path, layers: list[int]) -> list[dict[str, Any]]:
    """One row for each size, number of clusters and way to learn them."""
    paths, key_means, query_means = centres(results)
    questions = asked("choose", results)["queries"]
    shares: dict[tuple[int, int, str], list[Floats]] = {}
    for layer in layers:
        rng = np.random.default_rng(layer)
        keys = layer_keys(paths, layer, key_means[layer])
        asking = questions[:, layer].reshape(-1, questions.shape[-1])
        queries = grouped(asking) - query_means[layer]
        projector = SPEC.projector(keys.shape[1])
        signed, signed_queries = projector.project(keys), projector.project(queries)
        units, unit_queries = unit(keys), unit(queries)
        for size in (12_000, 24_000, 48_000, 96_000):
            index = LayerIndex(SPEC)
            index.extend(np.arange(1, size + 1), np.ones(size, np.uint32), signed[:size])
            found = index.view().search([row[None] for row in signed_queries], TOP)
            best = np.array([ids.astype(np.int64) - 1 for ids, _ in found])
            for count in (64, 256, 1024):
                for way in ("frozen", "all"):
                    learned_from = units[:LEARNED_FROM] if way == "frozen" else units[:size]
                    middle = k_means(learned_from, count, rng)
                    near = needed(best, dealt(units[:size], middle), unit_queries @ middle.T)
                    shares.setdefault((size, count, way), []).append(near)
        print(json.dumps({"layer": layer}), flush=True)
    rows = []
    for (size, count, way), some in shares.items():
        row: dict[str, Any] = {"entries": size, "clusters": count, "learned": way}
        row |= {f"read_{recall}": float(np.quantile(some, recall)) for recall in RECALLS}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.clusters", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 20, 27])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    write_csv(args.out / "clusters.csv", measure(args.results, args.layers))


if __name__ == "__main__":
    main()

"""One signature an entry: ``python -m bench.quality.pooled``.

How much of the exact order by the dot product of a query and the entries' mean keys a store finds
that keeps 4,096 bits of each mean: by Hamming distance, after centring, and by norm times cosine
(``order="norm"``); alone, and if the exact keys then decide among 4 or 10 times as many. In every
third layer all entries of 64 tokens of twelve texts, unrotated keys, are one memory, asked with the
queries of running text, 20 of each text. Writes ``tables/pooled.csv``; intervals over queries.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hybridmem

from .rankings import grouped, pooled
from .report import interval, write_csv
from .stages import CHUNK, OUT, RESULTS, TOP, centres

BITS, QUERIES = 4096, 20
WITHIN = (1, 4, 10)  # times as many candidates
RANKINGS = {
    "Hamming": (False, "hamming"),
    "Hamming, centred": (True, "hamming"),
    "norm times cosine, centred": (True, "norm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.pooled", description=__doc__)
    parser.add_argument("--layer-step", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    paths, key_means, _ = centres(args.results)
    captures = [np.load(path) for path in paths]
    keys, queries = ([one[name] for one in captures] for name in ("keys", "queries"))
    found: dict[tuple[str, int], list[float]] = {}
    entries = 0
    for layer in range(0, len(key_means), args.layer_step):
        rows = np.concatenate([of_text[layer] for of_text in keys]).astype(np.float32)
        rows = rows.reshape(-1, CHUNK, rows.shape[1])
        entries = len(rows)
        means = pooled(rows.reshape(-1, rows.shape[2]), CHUNK)
        asks = []
        for of_text in queries:
            step = of_text.shape[1] // QUERIES
            asks.append(grouped(of_text[layer][::step][:QUERIES].astype(np.float32)))
        asked = np.concatenate(asks)
        for name, (centre, order) in RANKINGS.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                hybridmem.create(
                    Path(folder) / "store",
                    embed_dim=rows.shape[2],
                    hdc_dim=BITS,
                    quantize_stored=True,
                ) as store,
            ):
                if centre:
                    store.calibrate(0, keys=key_means[layer])
                ids = store.put_many([(one, one) for one in rows], layer_idx=0)
                for query, best in zip(
                    asked, np.argsort(-(asked @ means.T), 1)[:, :TOP], strict=True
                ):
                    wanted = {ids[at] for at in best.tolist()}
                    hits = store.query(query, 0, TOP * max(WITHIN), order=order)
                    got = [hit.entry_id for hit in hits]
                    for times in WITHIN:
                        share = len(wanted & set(got[: times * TOP])) / TOP
                        found.setdefault((name, times), []).append(share)
        print(layer, {key: round(float(np.mean(x)), 3) for key, x in found.items()}, flush=True)
    table: list[dict[str, Any]] = []
    for name in RANKINGS:
        row: dict[str, Any] = {"ranking": name, "entries": entries}
        for times in WITHIN:
            ends = (f"top_{times}k", f"top_{times}k_low", f"top_{times}k_high")
            row |= dict(zip(ends, interval(found[name, times]), strict=True))
        table.append(row)
    write_csv(args.out / "pooled.csv", table)


if __name__ == "__main__":
    main()

"""Whether a store finds what the numpy rankings find: ``python -m bench.quality.stored same``.

The entries of every group of four texts are put into a store, each layer calibrated as in
``evaluate``, and every question of a set is asked in every layer, once among the entries of its own
document and once among all. Prints how often ``rerank="signatures"`` gave the same ten entries in
the same order as ``tokens x 256, re-ranked``, and the plain search as ``tokens x 256``.

``time`` prints what a search takes with and without the second stage, on an idle core.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import hybridmem

from . import smollm2
from .documents import TOKENS
from .evaluate import CALIBRATION
from .questions import asked
from .rankings import Keys, Late, Query, Ranking, decisive, grouped, reranked
from .stages import RESULTS, SPEC, centres

CHUNK, TOP = 64, 10
RANKINGS: tuple[tuple[Ranking, dict[str, str]], ...] = (
    (Late("tokens x 256", 256), {}),
    (reranked("tokens x 256, re-ranked", 256), {"rerank": "signatures"}),
)


def compare(which: str, results: Path) -> dict[str, tuple[int, int]]:
    """Return the number of answers that are the same, and of all, by ranking."""
    questions = asked(which, results)
    _, _, query_means = centres(results)
    same = {ranking.name: [0, 0] for ranking, _ in RANKINGS}
    names = list(dict.fromkeys(questions["document"].tolist()))
    per_text = TOKENS // CHUNK
    for group in (names[at : at + 4] for at in range(0, len(names), 4)):
        where = np.isin(questions["document"], group).nonzero()[0]
        files = [questions["capture"][list(questions["document"]).index(name)] for name in group]
        stored = [np.load(results / "captures" / file)["keys"] for file in files]
        for layer in range(smollm2.LAYERS):
            each = [keys[layer].astype(np.float32) for keys in stored]
            mean = np.mean([keys[:CALIBRATION].mean(0) for keys in each], axis=0)
            entries = [
                (keys[at : at + CHUNK], keys[at : at + CHUNK])
                for keys in each
                for at in range(0, per_text * CHUNK, CHUNK)
            ]
            with (
                tempfile.TemporaryDirectory() as path,
                hybridmem.create(
                    path,
                    embed_dim=smollm2.WIDTH,
                    hdc_dim=SPEC.hdc_dim,
                    signature_tokens=SPEC.signature_tokens,
                    signature_bits=SPEC.signature_bits,
                ) as store,
            ):
                store.calibrate(0, keys=mean[None], queries=query_means[layer][None])
                ids = np.array(store.put_many(entries, 0))
                indexes = [
                    [ranking.index(Keys(keys, keys, mean, CHUNK)) for keys in each]
                    for ranking, _ in RANKINGS
                ]
                for question in where.tolist():
                    rows = grouped(questions["queries"][question, layer])
                    query = Query(rows, rows, query_means[layer], CHUNK)
                    at = group.index(questions["document"][question])
                    own = slice(at * per_text, (at + 1) * per_text)
                    for (ranking, options), index in zip(RANKINGS, indexes, strict=True):
                        scores = [ranking.score(of_text, query) for of_text in index]
                        for some, among in (
                            (scores[at], ids[own]),
                            (np.concatenate(scores), ids),
                        ):
                            order = np.argsort(-decisive(ranking, [some]), kind="stable")[:TOP]
                            hits = store.query(rows, 0, TOP, entry_ids=among, **options)
                            got = [hit.entry_id for hit in hits]
                            same[ranking.name][0] += got == among[order].tolist()
                            same[ranking.name][1] += 1
        print(group, {name: tuple(counts) for name, counts in same.items()}, flush=True)
    return {name: (counts[0], counts[1]) for name, counts in same.items()}


def take_times() -> None:
    """Print medians, and that of the differences, of searches as the clients make them."""
    rng = np.random.default_rng(0)
    kinds = ({}, {"rerank": "signatures"})
    for entries, width, top in ((125, 192, 10), (2500, 192, 10), (2500, 768, 8)):
        with (
            tempfile.TemporaryDirectory() as path,
            hybridmem.create(
                path,
                embed_dim=width,
                hdc_dim=SPEC.hdc_dim,
                signature_tokens=SPEC.signature_tokens,
                signature_bits=SPEC.signature_bits,
            ) as store,
        ):
            for _ in range(entries // 125):
                keys = rng.standard_normal((125, CHUNK, width), np.float32)
                store.put_many([(one, one) for one in keys], 0)
            store.flush()
            ids = np.arange(1, entries + 1)
            queries = [rng.standard_normal((8, width), np.float32) for _ in range(40)]
            took: list[list[float]] = []
            for _ in range(9):
                for query in queries:
                    took.append([])
                    for options in kinds:
                        began = time.perf_counter()
                        store.query_many([query], 0, top, entry_ids=ids, **options)
                        took[-1].append((time.perf_counter() - began) * 1e6)
            each = np.array(took[len(queries) :])  # all was looked at before
            plain, again = np.median(each, axis=0)
            more = np.median(each[:, 1] - each[:, 0])
            print(
                f"{entries} entries, {width} wide, {top} wanted, {hybridmem.simd_level()}: "
                f"{plain:.0f} us, re-ranked {again:.0f} us, {more:.0f} more"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.stored", description=__doc__)
    parser.add_argument("what", choices=["same", "time"])
    parser.add_argument("--set", choices=["choose", "report"], default="report")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.what == "time":
        take_times()
        return
    for name, (alike, total) in compare(args.set, args.results).items():
        print(f"{name}: {alike} of {total} answers are the same")


if __name__ == "__main__":
    main()

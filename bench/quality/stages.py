"""The search of large layers in stages: what it misses and what it costs, on real signatures.

``python -m bench.quality.stages recall`` ranks by 2 query tokens, lets only the nearest entries go
on to 4 and only the nearest of those to all 8, and compares the result with the scan by all tokens.
The first tokens are those that tell most by a sample, as in the package, or the last ones. The
banks: the entries of one layer of all 12 texts (1,500); those of all 30 layers, each layer centred
by itself (45,000); and, for the largest, those that begin 32 and 16 tokens later too, so that every
fact lies in two or three of them. Questions are asked in every layer where the bank is one layer,
else in every sixth.

``python -m bench.quality.stages time`` takes the time of both at 10,000 and 100,000 entries, and
``costs`` that of the whole scan by bits and query tokens; on an idle core, with
``HYBRIDMEM_SIMD=avx2`` for the figures of the docs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hybridmem
from hybridmem._index import LayerIndex
from hybridmem._view import _SAMPLE, IndexView, telling_first
from hybridmem.hdc import SignatureSpec

from .rankings import grouped
from .report import interval, write_csv

BITS, CHUNK, TOP = 256, 64, 10
SPEC = SignatureSpec(BITS * CHUNK, 1, BITS)
CALIBRATION = 2048
RESULTS = Path(__file__).resolve().parent.parent / "results"
OUT = Path(__file__).parent / "tables"
# Which query tokens come first; one of so many entries goes on after 2 of them, and after 4.
SHARES = [("telling", two, four) for two in (2, 3, 4, 6, 8, 12) for four in (16, 32)]
SHARES.append(("last", 6, 16))
U8 = NDArray[np.uint8]


def centres(results: Path) -> tuple[list[Path], NDArray[np.float32], NDArray[np.float32]]:
    """Files of the captures; mean key, mean query of each layer."""
    from .facts import CHOOSE

    paths = sorted((results / "captures").glob("*-bf16.npz"))
    keys, queries = [], []
    for path in paths:
        with np.load(path) as stored:
            keys.append(stored["keys"][:, :CALIBRATION].mean(1, dtype=np.float32))
            if path.name.split("-")[0] in CHOOSE:
                means = [grouped(layer.astype(np.float32)).mean(0) for layer in stored["queries"]]
                queries.append(means)
    return paths, np.mean(keys, axis=0), np.mean(queries, axis=0)


def token_signatures(results: Path, bits: int = BITS) -> tuple[list[str], U8]:
    """Names of the texts, and the signature of each token: [texts, layers, 8000, bits / 8]."""
    cache = results / "questions" / f"tokens-{bits}.npz"
    if cache.exists():
        with np.load(cache) as stored:
            return stored["names"].tolist(), stored["signatures"]
    paths, key_means, _ = centres(results)
    projector = SignatureSpec(bits * CHUNK, 1, bits).projector(key_means.shape[1])
    out = []
    for path in paths:
        with np.load(path) as stored:
            keys = stored["keys"].astype(np.float32)
        layers = zip(keys, key_means, strict=True)
        out.append([projector.project(layer - mean) for layer, mean in layers])
    names, signed = [path.name.split("-")[0] for path in paths], np.array(out)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, names=names, signatures=signed)
    return names, signed


def entries(signed: U8, offset: int) -> U8:
    """Records of the chunks that begin `offset` tokens late: [entries, 2048], layer by layer."""
    chunks = (signed.shape[2] - offset) // CHUNK
    cut = signed[:, :, offset : offset + chunks * CHUNK]
    return cut.reshape(-1, CHUNK * signed.shape[3])


def view(records: U8) -> IndexView:
    index = LayerIndex(SPEC)
    index.extend(np.arange(1, len(records) + 1), np.full(len(records), CHUNK), records)
    return index.view()


def query_signatures(which: str, results: Path) -> U8:
    """Of each question in each layer: [questions, layers, 8, 32]."""
    from .questions import asked

    _, _, query_means = centres(results)
    queries = asked(which, results)["queries"]
    rows = grouped(queries.reshape(-1, queries.shape[-1])).reshape(*queries.shape[:3], -1)
    flat = (rows - query_means[:, None]).reshape(-1, rows.shape[-1])
    projector = SPEC.projector(rows.shape[-1])
    return projector.project(flat).reshape(*rows.shape[:3], -1)


def distances(where: IndexView, query: U8) -> NDArray[np.uint32]:
    """Of all entries."""
    return where._distances(query, None)


def first_tokens(where: IndexView, query: U8) -> dict[str, list[int]]:
    """The order of the query tokens: the last first, and those first that tell most."""
    sample = np.arange(0, len(where), max(1, len(where) // _SAMPLE))
    near = np.stack([where._distances(token[None], sample) for token in query])
    return {"last": list(range(len(query)))[::-1], "telling": telling_first(near, 4)}


def recall(results: Path, which: str, step: int) -> list[dict[str, Any]]:
    """What two stages find of what the scan of all bits finds: its best 10, and the facts."""
    from .questions import asked as questions

    names, signed = token_signatures(results)
    asked = query_signatures(which, results)
    told = questions(which, results)
    texts = [names.index(name) for name in told["document"].tolist()]
    n_layers, n_chunks = signed.shape[1], signed.shape[2] // CHUNK
    rows = []
    for name, offsets in (("one layer", [0]), ("45,000", [0]), ("100,000", [0, 32, 16])):
        found: dict[tuple[str, int, int], list[list[list[float]]]] = {}
        large = None
        if name != "one layer":
            large = view(np.concatenate([entries(signed, at) for at in offsets])[:100_000])
        for layer in range(0, n_layers, 1 if large is None else step):
            here = large or view(entries(signed[:, layer : layer + 1], 0))
            each: dict[tuple[str, int, int], list[list[float]]] = {}
            for question, query in enumerate(asked[:, layer]):
                full = distances(here, query)
                needle = []
                for number, offset in enumerate(offsets):
                    chunks = (signed.shape[2] - offset) // CHUNK
                    first = texts[question] * chunks
                    if large is not None:
                        first = texts[question] * n_layers * chunks + layer * chunks
                        first += sum(
                            signed.shape[0] * n_layers * ((signed.shape[2] - o) // CHUNK)
                            for o in offsets[:number]
                        )
                    low, high = told["answer"][question]
                    for chunk in range((low - offset) // CHUNK, (high - 1 - offset) // CHUNK + 1):
                        if 0 <= chunk < chunks and first + chunk < len(here):
                            needle.append(first + chunk)
                best = np.sort(np.partition(full, TOP)[:TOP])
                is_found = full[needle].min() <= best[-1]
                order = first_tokens(here, query)
                by_few = {
                    (kind, tokens): distances(here, query[order[kind][:tokens]])
                    for kind in order
                    for tokens in (2, 4)
                }
                for shares in SHARES:
                    kept = np.arange(len(here))
                    for tokens, share in zip((2, 4), shares[1:], strict=True):
                        few = by_few[shares[0], tokens]
                        kept = kept[few[kept] <= np.quantile(few, 1 / share, method="lower")]
                    again = np.sort(full[kept])[:TOP]
                    each.setdefault(shares, []).append(
                        [
                            float((again <= best[-1]).sum() / TOP),
                            float(is_found),
                            float(bool((full[np.intersect1d(needle, kept)] <= again[-1]).any())),
                            len(kept) / len(here),
                        ]
                    )
            for key, values in each.items():
                found.setdefault(key, []).append(values)
        size = signed.shape[0] * n_chunks if large is None else len(large)
        for (order_of, two, four), values in found.items():
            by_question = np.mean(values, axis=0)
            mean, low, high = interval(by_question[:, 0].tolist())
            row = {"set": which, "bank": name, "entries": size}
            row |= {"first": order_of, "after_two": f"1/{two}", "after_four": f"1/{four}"}
            row |= {"ranked": by_question[:, 3].mean()}
            row |= {"recall": mean, "low": low, "high": high}
            row |= {"facts": by_question[:, 1].mean(), "facts_staged": by_question[:, 2].mean()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def times() -> dict[str, float]:
    """Milliseconds of a query of 8 tokens, the median of many; signatures and queries are random.

    Counting takes as long whatever the bits are, and who goes on lies anywhere. The time is that of
    the thread on its core, which other work disturbs less.
    """
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (100_000, SPEC.record_bytes), np.uint8)
    small, large = view(records[:10_000]), view(records)
    del records
    cases = {
        "10,000": (small, False),
        "100,000": (large, False),
        "100,000, approximate": (large, True),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(40):
        query = rng.integers(0, 256, (8, BITS // 8), np.uint8)
        for name, (where, approximate) in cases.items():
            start = time.thread_time()
            where.search([query], TOP, approximate=approximate)
            taken[name].append(time.thread_time() - start)
    return {name: 1e3 * float(np.median(some)) for name, some in taken.items()}


def costs() -> list[dict[str, Any]]:
    """Milliseconds of a query over 10,000 entries of 64 tokens, by bits and query tokens."""
    rng = np.random.default_rng(0)
    rows = []
    pooled = SignatureSpec(4096)
    for bits in (64, 128, 256, 512, 1024, 4096):
        spec = pooled if bits == 4096 else SignatureSpec(bits * CHUNK, 1, bits)
        index = LayerIndex(spec)
        for first in range(0, 10_000, 1000):
            records = rng.integers(0, 256, (1000, spec.record_bytes), np.uint8)
            index.extend(np.arange(first + 1, first + 1001), np.full(1000, CHUNK), records)
        for tokens in (1,) if spec is pooled else (1, 2, 4, 8):
            taken = []
            for _ in range(30):
                query = rng.integers(0, 256, (tokens, bits // 8), np.uint8)
                start = time.perf_counter()
                index.view().search([query], TOP)
                taken.append(time.perf_counter() - start)
            row = {"bits": bits, "pooled": spec is pooled, "query_tokens": tokens}
            rows.append(row | {"milliseconds": 1e3 * float(np.median(taken))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.stages", description=__doc__)
    parser.add_argument("what", choices=["recall", "time", "costs"])
    parser.add_argument("--set", choices=["choose", "report"], default="choose")
    parser.add_argument("--layer-step", type=int, default=6, help="ask in every so many layers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.what == "time":
        print(json.dumps({"simd": hybridmem.simd_level(), **times()}))
        return
    if args.what == "costs":
        write_csv(args.out / f"costs-{hybridmem.simd_level()}.csv", costs())
        return
    write_csv(args.out / f"stages-{args.set}.csv", recall(args.results, args.set, args.layer_step))


if __name__ == "__main__":
    main()

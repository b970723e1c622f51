"""Bring the tables of docs/retrieval.md up to date with bench/quality/tables; a test compares them.

Run from anywhere: ``python tools/write_retrieval_docs.py``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "retrieval.md"
TABLES = ROOT / "bench" / "quality" / "tables"
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """Return the rows of a table."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def between(row: Row, name: str, low: str, high: str, form: str = ".2f") -> str:
    """Return a mean and its interval, or nothing where it was not measured."""
    if not row.get(name):
        return ""
    mean, first, last = (float(row[key]) for key in (name, low, high))
    return f"{mean:{form}} ({first:{form}} to {last:{form}})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def all_rankings() -> list[Row]:
    """Return the rows of the runs over the reported questions; what several have came out alike."""
    rows = read("report-q8-r640-c64-s4")
    names = [row["ranking"] for row in rows]
    more: dict[str, Row] = {}
    for run in ("fused", "exact"):
        for row in read(f"report-q8-r640-c64-s4-{run}"):
            if row["ranking"] not in names:
                more.setdefault(row["ranking"], row)
    by_bytes = sorted(more.values(), key=lambda row: -int(row["bytes_per_entry"]))
    signatures = [row for row in by_bytes if not row["ranking"].startswith("exact")]
    keys = [row for row in by_bytes if row["ranking"].startswith("exact")]
    at = names.index("late interaction, exact keys")
    return [*rows[:at], *signatures, *rows[at : at + 2], *keys, *rows[at + 2 :]]


def differences() -> str:
    """What a ranking finds and answers, less what another does: the reported questions."""
    return table(
        (
            "ranking", "less", "facts, own document", "facts, four documents", "answer loss",
        ),
        (
            (
                row["ranking"],
                row["less"],
                between(row, "own", "own_low", "own_high", "+.3f"),
                between(row, "pooled", "pooled_low", "pooled_high", "+.3f"),
                between(row, "loss", "loss_low", "loss_high", "+.2f"),
            )
            for row in read("report-q8-r640-c64-s4-exact-differences")
        ),
    )  # fmt: skip


def rankings() -> str:
    """What each ranking finds and what the model answers from it: the reported questions."""
    return table(
        (
            "ranking", "bytes an entry", "answer loss above full attention", "exact answers",
            "facts, own document", "facts, four documents",
        ),
        (
            (
                row["ranking"],
                f"{int(row['bytes_per_entry']):,}" if row["bytes_per_entry"] else "",
                between(row, "above_full", "above_low", "above_high", "+.2f"),
                f"{row['exact']} of {row['questions']}" if row["exact"] else "",
                between(row, "own", "own_low", "own_high"),
                between(row, "pooled", "pooled_low", "pooled_high"),
            )
            for row in all_rankings()
        ),
    )  # fmt: skip


def fusion() -> str:
    """Ways to let layers decide together, and other ideas: the set to choose with."""
    return table(
        (
            "what a layer goes by", "answer loss above full attention",
            "above what was taken", "exact answers", "facts retrieved",
        ),
        (
            (
                row["variant"],
                between(row, "above_full", "above_full_low", "above_full_high", "+.2f"),
                between(row, "above_taken", "above_taken_low", "above_taken_high", "+.2f"),
                f"{row['exact']} of {row['questions']}",
                f"{float(row['found']):.2f}",
            )
            for row in read("fusion-choose")
            if row["variant"] != "full attention"
        ),
    )  # fmt: skip


def rounding() -> str:
    """How finely a query is rounded, and of how many candidates: the set to choose with."""
    columns = ("own", "pooled", "own_fused", "pooled_fused")
    return table(
        (
            "query", "facts, own document", "facts, four documents", "own, layers fused",
            "four, layers fused",
        ),
        (
            (row["query"], *(between(row, c, f"{c}_low", f"{c}_high") for c in columns))
            for row in read("rounding-choose")
        ),
    )  # fmt: skip


def gemma() -> str:
    """Facts that each ranking finds in another model."""
    return table(
        ("ranking", "facts, own document", "facts, four documents", "by layer: 5, 11, 17"),
        (
            (
                row["ranking"],
                between(row, "own", "own_low", "own_high"),
                between(row, "pooled", "pooled_low", "pooled_high"),
                ", ".join(f"{float(row[f'own_layer_{layer}']):.2f}" for layer in (5, 11, 17)),
            )
            for row in read("gemma")
        ),
    )  # fmt: skip


def sizes() -> str:
    """Bits, tokens of an entry, query tokens, tokens retrieved: the set to choose with."""
    scan = {
        (row["bits"], row["query_tokens"]): f"{float(row['milliseconds']):.1f} ms"
        for row in read("costs-avx2")
    }
    return table(
        (
            "bits a token", "entry", "query tokens", "retrieved", "bytes a token", "scan",
            "facts, own document", "facts, four documents", "output error",
        ),
        (
            (
                row["bits"],
                row["entry_tokens"],
                row["query_tokens"],
                row["retrieved"],
                row["bytes_per_token"],
                scan.get((row["bits"], row["query_tokens"]), ""),
                between(row, "own", "own_low", "own_high"),
                between(row, "pooled", "pooled_low", "pooled_high"),
                between(row, "error", "error_low", "error_high"),
            )
            for row in read("needles-choose")
            if (row["entry_tokens"], row["query_tokens"], row["retrieved"]) == ("64", "8", "640")
            or row["bits"] == "256"
            or (row["entry_tokens"] == "16" and row["bits"] in ("dot", "cosine"))
        ),
    )  # fmt: skip


def stages() -> str:
    """What the search of large layers finds; the shares that it uses are 6 and 16."""
    return table(
        (
            "bank", "entries", "first tokens", "after 2 tokens", "after 4 tokens",
            "compared with all 8", "of the ten best", "facts: all compared", "facts: so",
        ),
        (
            (
                row["bank"],
                f"{int(row['entries']):,}",
                {"last": "the last ones", "telling": "chosen"}[row["first"]],
                row["after_two"],
                row["after_four"],
                f"{100 * float(row['ranked']):.0f} %",
                between(row, "recall", "low", "high", ".3f"),
                f"{float(row['facts']):.3f}",
                f"{float(row['facts_staged']):.3f}",
            )
            for row in read("stages-choose")
            if row["after_two"] == "1/6" or row["after_four"] == "1/16"
        ),
    )  # fmt: skip


def clusters() -> str:
    """What a search by clusters finds of the ten best, in the worst layer and in all."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in read("clusters"):
        rows.setdefault((row["order"], row["entries"]), []).append(row)

    def found(some: list[Row], questions: str) -> str:
        each = [float(row[questions]) for row in some]
        return f"{sum(each) / len(each):.3f}, {min(each):.3f}"

    return table(
        (
            "entries", "in the order of", "read", "of the ten best: questions to choose with",
            "of the ten best: reported questions",
        ),
        (
            (
                f"{int(entries):,}",
                order,
                f"{100 * float(some[0]['read']):.0f} %",
                found(some, "choose"),
                found(some, "report"),
            )
            for (order, entries), some in rows.items()
        ),
    )  # fmt: skip


def clusters_cost() -> str:
    """What a search by clusters costs, and dealing entries to them."""
    return table(
        (
            "entries", "", "scan", "`approximate=True`", "read", "of the ten best",
            "dealing 1,024 entries", "99 of 100 within", "bytes an entry",
        ),
        (
            (
                f"{int(row['entries']):,}",
                row["made"],
                f"{float(row['scan_ms']):.1f} ms",
                f"{float(row['approximate_ms']):.1f} ms",
                f"{100 * float(row['read']):.1f} %",
                f"{float(row['recall']):.3f}",
                f"{float(row['batch_ms']):.0f} ms",
                f"{float(row['batch_99_ms']):.0f} ms",
                f"{float(row['bytes_an_entry']):.0f}",
            )
            for row in read("clusters-cost")
        ),
    )  # fmt: skip


def prefix() -> str:
    """First stages that read the first bits only, of a large layer."""
    recall = {(r["tokens"], r["bits"], r["share"]): r for r in read("prefix")}
    names = {
        "10,000": "10,000 entries, the whole scan",
        "whole scan": "the whole scan",
        "as it is": "`approximate=True`",
        "two tokens": "its first stage alone",
    }
    fast = {row["first"]: row["milliseconds"] for row in read("prefix-avx512")}
    rows = []
    for row in read("prefix-avx2"):
        name, found = names.get(row["first"]), ("", "")
        if name is None:
            tokens, bits, share = row["first"].split(",")
            name = f"{tokens} tokens by {bits} bits, 1/{share}"
            of = recall[tokens, bits, share]
            found = (f"{float(of['large']):.3f}", f"{float(of['one_layer']):.3f}")
        both = (row["milliseconds"], fast[row["first"]])
        rows.append((name, *found, *(f"{float(one):.1f} ms" for one in both)))
    return table(("first stage", "of the ten best", "the same, one layer", "AVX2", "AVX-512"), rows)


def pooled() -> str:
    """One signature an entry: what it finds of the exact order by the mean keys."""
    return table(
        ("ranking", "alone", "of its top 40", "of its top 100"),
        (
            (
                row["ranking"],
                *(
                    between(row, f"top_{times}k", f"top_{times}k_low", f"top_{times}k_high", ".3f")
                    for times in (1, 4, 10)
                ),
            )
            for row in read("pooled")
        ),
    )


def wide() -> str:
    """Folded input against the transform of the whole width."""
    return table(
        (
            "keys", "ten best, folded", "ten best, whole", "difference", "between seeds",
            "facts, folded", "facts, whole", "difference", "64 tokens, folded", "64 tokens, whole",
        ),
        (
            (
                row["keys"],
                f"{float(row['folded_recall']):.3f}",
                f"{float(row['whole_recall']):.3f}",
                between(row, "recall_more", "recall_more_low", "recall_more_high", "+.3f"),
                f"{float(row['recall_between_seeds']):.3f}",
                f"{float(row['folded_facts']):.3f}",
                f"{float(row['whole_facts']):.3f}",
                between(row, "facts_more", "facts_more_low", "facts_more_high", "+.3f"),
                f"{float(took['folded']):.0f} us",
                f"{float(took['whole']):.0f} us",
            )
            for row, took in zip(read("wide"), read("wide-time"), strict=True)
        ),
    )  # fmt: skip


def renewed(page: str) -> str:
    """Return the page with its tables as they are now."""
    made = {
        "rankings": rankings,
        "differences": differences,
        "fusion-choose": fusion,
        "rounding-choose": rounding,
        "gemma": gemma,
        "sizes-choose": sizes,
        "stages": stages,
        "prefix": prefix,
        "pooled": pooled,
        "clusters": clusters,
        "clusters-cost": clusters_cost,
        "wide": wide,
    }
    return _PLACE.sub(lambda found: found[1] + made[found[2]]() + found[4], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))

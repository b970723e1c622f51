"""From the records of a run to CSV and markdown, with confidence intervals.

Intervals are 95 % of a bootstrap over questions (10,000 draws, fixed seed). Losses are compared
with full attention question by question, since most of their spread is between questions.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rankings import all_rankings

DRAWS = 10_000
REFERENCE = "full attention"
Floats = NDArray[np.float64]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval."""
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(0)
    means = array[rng.integers(0, len(array), (DRAWS, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(array.mean()), float(low), float(high)


# What was measured, by ranking and by question (document and number of the fact).
Records = dict[str, dict[tuple[str, int], dict[str, Any]]]


def read(results: Path) -> dict[str, Records]:
    """Records of each run; the files of a run differ in the number of their documents' group."""
    runs: dict[str, Records] = {}
    for file in sorted(results.glob("*.jsonl")):
        which, _, options = file.stem.split("-", 2)
        records = runs.setdefault(f"{which}-{options}", {})
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            question = record["document"], record["fact"]
            records.setdefault(record["ranking"], {})[question] = record
    return runs


def rows(records: Records, chunk: int, top: int) -> list[dict[str, Any]]:
    """One row a ranking: all that is reported of it; a needle is found among the first `top`."""
    sizes = {ranking.name: ranking.entry_bytes(chunk) for ranking in all_rankings()}
    full = records[REFERENCE]
    out = []
    for name, answers in records.items():
        row: dict[str, Any] = {
            "ranking": name,
            "bytes_per_entry": sizes.get(name.split(";")[0], ""),
        }
        questions = [q for q in answers if q in full]
        row["questions"] = len(questions)
        if "loss" in answers[questions[0]]:
            losses = [answers[q]["loss"] for q in questions]
            more = [answers[q]["loss"] - full[q]["loss"] for q in questions]
            row["loss"], row["loss_low"], row["loss_high"] = interval(losses)
            row["above_full"], row["above_low"], row["above_high"] = interval(more)
            row["exact"] = sum(answers[q]["exact"] for q in questions)
        if "errors" in answers[questions[0]]:
            errors = [float(np.mean(answers[q]["errors"])) for q in questions]
            row["output_error"], row["error_low"], row["error_high"] = interval(errors)
        for which in ("own", "pooled"):
            if f"{which}_ranks" in answers[questions[0]]:
                found = [np.mean(np.array(answers[q][f"{which}_ranks"]) < top) for q in questions]
                row[which], row[f"{which}_low"], row[f"{which}_high"] = interval(found)
        out.append(row)
    return out


def by_layer(records: Records, top: int) -> list[dict[str, Any]]:
    """Needle recall of every layer: which layers look facts up at all."""
    out = []
    for name, answers in records.items():
        for which in ("own", "pooled"):
            ranks = [a[f"{which}_ranks"] for a in answers.values() if f"{which}_ranks" in a]
            if ranks:
                recall = (np.array(ranks) < top).mean(axis=0)
                out += [
                    {"ranking": name, "bank": which, "layer": layer, "recall": round(float(r), 4)}
                    for layer, r in enumerate(recall)
                ]
    return out


def pairs() -> list[tuple[str, str]]:
    """Rankings whose difference is reported, the second to be taken off the first."""
    alone, fused = ("tokens x 256", "tokens x 512", "tokens x 256, re-ranked"), ", layers fused"
    whole = "tokens x 256, whole query"
    exact = ("late interaction, exact keys", "late interaction, exact cosine")
    together = ("exact keys, layers fused", "exact cosine, layers fused")
    again = ", re-ranked"
    return [
        *((name, other) for name in (*alone, whole) for other in exact),
        *(
            (name + fused, other)
            for name in (*alone, alone[1] + again, whole)
            for other in together
        ),
        (alone[1], alone[0]),
        (alone[1] + fused, alone[0] + fused),
        (alone[2], alone[0]),
        (alone[2] + fused, alone[0] + fused),
        (alone[2] + fused, whole + fused),
        *((name + fused, name) for name in (*alone, whole)),
    ]


def differences(records: Records, top: int) -> list[dict[str, Any]]:
    """What a ranking finds and answers, less what another does, question by question."""
    out = []
    for name, other in pairs():
        if name not in records or other not in records:
            continue
        mine, others = records[name], records[other]
        row: dict[str, Any] = {"ranking": name, "less": other}
        questions = [q for q in mine if q in others]
        row["questions"] = len(questions)
        for which in ("own", "pooled"):
            found = [
                [np.mean(np.array(each[q][f"{which}_ranks"]) < top) for q in questions]
                for each in (mine, others)
            ]
            ends = interval(np.subtract(*found).tolist())
            row |= dict(zip((which, f"{which}_low", f"{which}_high"), ends, strict=True))
        ends = interval([mine[q]["loss"] - others[q]["loss"] for q in questions])
        row |= dict(zip(("loss", "loss_low", "loss_high"), ends, strict=True))
        out.append(row)
    return out


def markdown(table: list[dict[str, Any]]) -> str:
    """The rows as the table of the docs."""

    def cell(row: dict[str, Any], name: str, low: str, high: str, form: str) -> str:
        if name not in row:
            return ""
        return f"{row[name]:{form}} ({row[low]:{form}} to {row[high]:{form}})"

    lines = [
        "| ranking | bytes an entry | answer loss, nats | above full attention | exact answers "
        "| output error | needle, own document | four documents |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        exact = f"{row['exact']} of {row['questions']}" if "exact" in row else ""
        size = f"{row['bytes_per_entry']:,}" if row["bytes_per_entry"] != "" else ""
        cells = [
            row["ranking"],
            size,
            cell(row, "loss", "loss_low", "loss_high", ".2f"),
            cell(row, "above_full", "above_low", "above_high", "+.2f"),
            exact,
            cell(row, "output_error", "error_low", "error_high", ".2f"),
            cell(row, "own", "own_low", "own_high", ".2f"),
            cell(row, "pooled", "pooled_low", "pooled_high", ".2f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, table: list[dict[str, Any]]) -> None:
    """All columns of all rows; numbers as they are."""
    names = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in table:
            short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(short)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows that `write_csv` wrote; cells that were empty are left out."""

    def value(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    with path.open(encoding="utf-8", newline="") as file:
        rows = [{k: value(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [{"bytes_per_entry": ""} | row for row in rows]


def write_tables(results: Path, out: Path) -> None:
    """Tables of every run whose records lie in ``results``, and of all in ``out`` one page."""
    out.mkdir(parents=True, exist_ok=True)
    for run, records in read(results).items():
        chunk = int(run.split("-c")[1].split("-")[0])
        top = int(run.split("-r")[1].split("-")[0]) // chunk
        write_csv(out / f"{run}.csv", rows(records, chunk, top))
        write_csv(out / f"{run}-layers.csv", by_layer(records, top))
        if less := differences(records, top):
            write_csv(out / f"{run}-differences.csv", less)
        print(f"## {run}\n\n{markdown(read_csv(out / f'{run}.csv'))}\n")
    parts = ["See ../README.md. Intervals are 95 % of a bootstrap over questions.\n"]
    for path in sorted(out.glob("*-q*-r*-c*-s*.csv")):
        if not path.stem.endswith(("-layers", "-differences")):
            parts.append(f"## {path.stem}\n\n{markdown(read_csv(path))}\n")
    (out / "tables.md").write_text("\n".join(parts), encoding="utf-8")

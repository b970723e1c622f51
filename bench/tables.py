"""What was measured, as tables, and beside what was recorded before.

``python bench/tables.py check FILE...`` compares results of ``make bench`` with bench/ratios.json,
and fails where one takes more than `TOLERANCE` times as long, beside its floor or peer, as it took
then; ``record`` writes that file. Ratios are compared and not times, which are of one machine.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("ratios.json")
#: Ratios of the same code differ from run to run by up to a third on a shared machine.
TOLERANCE = 1.5

Ratios = dict[str, dict[str, float]]


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """Join results in JSON; of a case that is in several files the last one counts."""
    joined: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for path in paths:
        joined = json.loads(path.read_text(encoding="utf-8"))
        cases |= {case["fullname"]: case for case in joined["benchmarks"]}
    return joined | {"benchmarks": [cases[name] for name in sorted(cases)]}


def machine(results: Mapping[str, Any]) -> str:
    """Return the line that says what ran, and where."""
    info = results["machine_info"]
    return (
        f"{info['cpu'].get('brand_raw', platform.processor())}, {info['cores']} cores, "
        f"SIMD level {info['simd']}; Python {info['python_version']}, "
        f"numpy {info['numpy']}, hybridmem {info['hybridmem']}."
    )


def alone(results: Mapping[str, Any]) -> list[str]:
    """Return the table of the cases that stand by themselves."""
    lines = ["| case | median | best | floor | best / floor |", "|---|---:|---:|---:|---:|"]
    for case in results["benchmarks"]:
        stats, info = case["stats"], case["extra_info"]
        if "others" in info:
            continue
        per = info.get("per_round", 1)  # a case that does several things in a round says so
        floor = info.get("floor_seconds")
        lines.append(
            f"| {info.get('title', case['name'])} | {_time(stats['median'] / per)} "
            f"| {_time(stats['min'] / per)} "
            + (
                f"| {_time(floor)} ({info['floor']}) | {stats['min'] / per / floor:.2f} |"
                if floor
                else "| | |"
            )
        )
    return lines


def compared(results: Mapping[str, Any]) -> list[str]:
    """Return the table of the cases beside their floors and peers.

    Where it is no time that is compared, `taken` says what is taken.
    """
    lines = [
        "| case | median | beside | median | takes ... times as long |",
        "|---|---:|---|---:|---:|",
    ]
    for case in results["benchmarks"]:
        info = case["extra_info"]
        if "others" not in info:
            continue
        took = info.get("taken") or _time(case["stats"]["median"] / info["per_round"])
        title = info["title"]
        for name, other in info["others"].items():
            kind = "floor: " if other["is_floor"] else ""
            beside = other.get("taken") or _time(other["seconds"])
            lines.append(f"| {title} | {took} | {kind}{name} | {beside} | {other['ratio']:.2f} |")
            title = took = ""
    return lines


def ratios(results: Mapping[str, Any]) -> Ratios:
    """Return how many times as long the floor and the peers of each case take."""
    return {
        case["extra_info"]["title"]: {
            name: round(other["ratio"], 3) for name, other in case["extra_info"]["others"].items()
        }
        for case in results["benchmarks"]
        if "others" in case["extra_info"]
    }


def slower(now: Ratios, before: Ratios, tolerance: float = TOLERANCE) -> list[str]:
    """Return a line for each ratio that fell below what was recorded, tolerance apart."""
    return [
        f"{title}: {name} takes {others[name]:.3g} times as long, was {was:.3g}"
        for title, others in now.items()
        for name, was in before.get(title, {}).items()
        if name in others and others[name] * tolerance < was
    ]


def main(arguments: Sequence[str]) -> int:
    """Run a command; return the exit status."""
    if len(arguments) < 2 or arguments[0] not in ("check", "record"):
        print("usage: python bench/tables.py check|record FILE...", file=sys.stderr)
        return 2
    now = ratios(read(map(Path, arguments[1:])))
    before: Ratios = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    if arguments[0] == "record":
        text = json.dumps(before | now, indent=1, sort_keys=True, ensure_ascii=False)
        RECORDED.write_text(text + "\n", encoding="utf-8")
        return 0
    found = slower(now, before)
    for line in found:
        print(f"slower than recorded: {line}")
    known = sum(title in before for title in now)
    print(f"{known} of {len(now)} cases compared with {RECORDED.name}, tolerance {TOLERANCE}")
    return bool(found)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Bring the table of docs/performance.md up to date with what ``make bench`` measured last.

Run from anywhere: ``python tools/write_performance.py [FILE...]``. The files are results in JSON,
by default bench/results/latest.json; of a case that is in several the last one counts. Rows of
cases that were not measured stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import tables  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
_PLACE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.S)


def main() -> None:
    given = [Path(name) for name in sys.argv[1:]]
    results = tables.read(given or [ROOT / "bench" / "results" / "latest.json"])
    page = PAGE.read_text(encoding="utf-8")
    place = _PLACE.search(page)
    if place is None:
        raise SystemExit(f"{PAGE} must have a place between <!-- figures --> and <!-- end -->")
    head = tables.compared(results)[:2]
    rows = by_case(place[2].splitlines()) | by_case(tables.compared(results))
    lines = [*head, *(line for title in sorted(rows) for line in rows[title])]
    figures = "\n".join([tables.machine(results), "", *lines, ""])
    PAGE.write_text(page[: place.start(2)] + figures + page[place.end(2) :], encoding="utf-8")


def by_case(lines: list[str]) -> dict[str, list[str]]:
    """Return the rows of each case of a table."""
    rows: dict[str, list[str]] = {}
    title = ""
    for line in lines:
        if line.startswith("|") and not line.startswith(("| case", "|---")):
            title = line.split("|")[1].strip() or title
            rows.setdefault(title, []).append(line)
    return rows


if __name__ == "__main__":
    main()

"""Bring the table of docs/performance.md up to date with what ``make bench`` measured last.

Run from anywhere: ``python tools/write_performance.py [FILE...]``. The files are results in JSON,
by default bench/results/latest.json; of a case that is in several the last one counts.
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
    lines = "\n".join(tables.compared(results))
    text, count = _PLACE.subn(
        lambda place: f"{place[1]}{tables.machine(results)}\n\n{lines}\n{place[3]}",
        PAGE.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise SystemExit(f"{PAGE} must have one place between <!-- figures --> and <!-- end -->")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Bring the table of docs/performance.md up to date with what ``make bench`` measured last.

Run from anywhere, after ``make bench``: ``python tools/write_performance.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MEASURED = ROOT / "bench" / "results" / "latest.md"
_PLACE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.S)


def main() -> None:
    machine, *_, compared = MEASURED.read_text(encoding="utf-8").strip().split("\n\n")
    text, count = _PLACE.subn(
        lambda place: f"{place[1]}{machine}\n\n{compared}\n{place[3]}",
        PAGE.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise SystemExit(f"{PAGE} must have one place between <!-- figures --> and <!-- end -->")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

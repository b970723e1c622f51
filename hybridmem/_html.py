"""Tables for notebooks: HTML in which everything that was given is text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["pairs", "table"]

#: Rows of a table that are shown.
_MOST = 20


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of at most 20 rows, and how many more there are."""
    listed = list(rows)
    lines = "".join(_row("td", row) for row in listed[:_MOST])
    if len(listed) > _MOST:
        lines += _row("td", [f"and {len(listed) - _MOST:,} more"])
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead>{_row('th', header)}</thead><tbody>{lines}</tbody></table>"
    )


def pairs(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values."""
    lines = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption><tbody>{lines}</tbody></table>"


def _row(kind: str, cells: Iterable[object]) -> str:
    inside = "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells)
    return f"<tr>{inside}</tr>"

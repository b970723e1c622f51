"""A store as one page: sizes, layers, what is important, what goes next, what is alike.

    hybridmem.report.write(store, "report.html")

The page is one file without scripts and without anything to load; its charts are drawn as SVG and
follow the reader's light or dark mode.
"""

from __future__ import annotations

import os
from pathlib import Path

from hybridmem.report.facts import Facts, gather
from hybridmem.report.page import render
from hybridmem.store import Store

__all__ = ["Facts", "gather", "render", "write"]


def write(store: Store, path: str | os.PathLike[str]) -> Facts:
    """Write the report of a store as an HTML file; return what it was made from.

    Parameters
    ----------
    store : Store
    path : path
        Overwritten if it is there.
    """
    facts = gather(store)
    Path(path).write_text(render(facts), encoding="utf-8")
    return facts

"""Run the code of docs/tour.md and write below each block what it printed.

``python tools/write_outputs.py``; a test finds where the page is not up to date.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tour.md"
_BLOCK = re.compile(r"(```python\n(.*?)```\n\n```text\n)(.*?)(```\n)", re.S)


def renewed(page: str) -> str:
    """Return a page with the outputs of its blocks as they are now."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(found[2], PAGE.name, "exec"), names)
        return found[1] + printed.getvalue() + found[4]

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            return _BLOCK.sub(run, page)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))

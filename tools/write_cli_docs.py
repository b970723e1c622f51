"""Bring the help texts in docs/cli.md up to date; a test finds where they are not.

Run from anywhere: ``python tools/write_cli_docs.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from hybridmem._commands import commands

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
#: A command's section: its heading, and its help in the first block of text below.
_SECTION = re.compile(r"^(## (\w+)\n(?:(?!^## ).)*?```text\n)(.*?)(```\n)", re.M | re.S)


def help_text(name: str) -> str:
    """Return what `hybridmem NAME --help` prints, 80 columns wide."""
    settings: dict[str, Any] = {**commands.context_settings, "terminal_width": 80}
    outer = click.Context(commands, info_name="hybridmem", **settings)
    command = commands.commands[name]
    return command.get_help(click.Context(command, outer, info_name=name, **settings)) + "\n"


def renewed(page: str) -> str:
    """Return the page with each section's help as it is now."""
    return _SECTION.sub(lambda found: found[1] + help_text(found[2]) + found[4], page)


def sections(page: str) -> list[str]:
    """Return the commands that have a section."""
    return [found[2] for found in _SECTION.finditer(page)]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(renewed(text))
    missing = set(commands.commands) - set(sections(text))
    if missing:
        sys.exit(f"{PAGE.name} has no section for {', '.join(sorted(missing))}")

"""The `hybridmem` command. Its commands are in `hybridmem._commands`; they need the extra `cli`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process."""
    try:
        import click  # noqa: F401  (asked for here, so that its absence can be explained)
    except ImportError:
        sys.exit("The hybridmem command needs click: pip install 'hybridmem[cli]'")
    from hybridmem._commands import commands

    commands(prog_name="hybridmem")

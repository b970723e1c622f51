"""Commands that make other things of a store: snapshot."""

from __future__ import annotations

import click

import hybridmem
from hybridmem import _text as text
from hybridmem._commands.group import commands, emit, json_option, read_store, store_argument

#: A writer can remove a shard between the look at the commit and the link; not time after time.
_ATTEMPTS = 10


@commands.command()
@store_argument
@click.argument("target", metavar="DST", type=click.Path())
@click.option("--copy", is_flag=True, help="Copy shards: for another file system.")
@json_option
def snapshot(store: str, target: str, copy: bool) -> None:
    """Make DST, a store of what STORE holds at this moment, while it may be written to.

    Shards are hard links: they take no space, and stay whatever becomes of STORE.
    """
    with read_store(store) as opened:
        for attempt in range(_ATTEMPTS):
            try:
                opened.snapshot(target, copy=copy)
                break
            except hybridmem.SnapshotGoneError:
                if attempt == _ATTEMPTS - 1:
                    raise
                opened.refresh()
        stats = opened.stats()
    entries = text.plural(stats.entries, "entry")
    emit(
        {
            "path": target,
            "generation": stats.generation,
            "entries": stats.entries,
            "shards": stats.shards,
            "copied": copy,
        },
        [f"{target} has {entries} of generation {stats.generation:,}"],
    )

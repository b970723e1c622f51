"""Commands that make other things of a store: snapshot, pack, export, import."""

from __future__ import annotations

import contextlib
import os

import click

import hybridmem
from hybridmem import _text as text
from hybridmem._commands.group import (
    commands,
    emit,
    fail,
    json_option,
    progress_bar,
    read_store,
    store_argument,
    working,
)
from hybridmem.archive import export_store, import_store

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
    with read_store(store) as opened, working("snapshot"):
        for attempt in range(_ATTEMPTS):
            try:
                opened.snapshot(target, copy=copy)
                break
            except hybridmem.SnapshotGoneError:
                if attempt == _ATTEMPTS - 1:
                    raise
                opened.refresh()
            except ValueError as error:
                fail(str(error))
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


@commands.command()
@store_argument
@click.argument("target", metavar="DST", type=click.Path())
@click.option(
    "--like",
    metavar="STORE",
    type=click.Path(),
    help="Centre layers as this store does, so that the two can be layered.",
)
@json_option
def pack(store: str, target: str, like: str | None) -> None:
    """Make DST, a memory pack of what STORE holds: compacted, verified, with checksums.

    A pack is shared by many readers and does not change any more. `sha256sum -c SHA256SUMS` in it
    checks the files; so does `hybridmem verify`.
    """
    with contextlib.ExitStack() as opened, progress_bar("pack") as progress:
        other = None if like is None else opened.enter_context(read_store(like))
        try:
            count = hybridmem.pack(store, target, like=other, progress=progress)
        except ValueError as error:
            fail(str(error))
    with read_store(target) as packed:
        n_bytes = packed.stats().disk_bytes
        store_id = packed.store_id
    emit(
        {"path": target, "store_id": store_id, "entries": count, "bytes": n_bytes},
        [f"{target} has {text.plural(count, 'entry')}, {text.size(n_bytes)}"],
    )


@commands.command("export")
@store_argument
@click.argument("file", type=click.Path())
@click.option("--layer", type=click.IntRange(0), help="Only this layer.")
@json_option
def export(store: str, file: str, layer: int | None) -> None:
    """Write what STORE holds into FILE, one safetensors file that other programs read too.

    A writer may have the store open.
    """
    with progress_bar("export") as progress:
        try:
            count = export_store(store, file, layer_idx=layer, progress=progress)
        except ValueError as error:
            fail(str(error))
    n_bytes = os.path.getsize(file)
    emit(
        {"path": file, "entries": count, "bytes": n_bytes},
        [f"wrote {text.plural(count, 'entry')} to {file}, {text.size(n_bytes)}"],
    )


@commands.command("import")
@click.argument("file", type=click.Path())
@click.argument("store", type=click.Path())
@json_option
def import_file(file: str, store: str) -> None:
    """Make STORE, which must not exist, of an export FILE: the same ids, records and bytes."""
    with progress_bar("import") as progress:
        count = import_store(file, store, progress=progress)
    emit(
        {"path": store, "entries": count},
        [f"{store} has {text.plural(count, 'entry')}"],
    )

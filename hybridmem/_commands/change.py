"""Commands that change a store: compact, evict, delete."""

from __future__ import annotations

import click
import numpy as np

from hybridmem import _text as text
from hybridmem._commands.group import (
    commands,
    emit,
    fail,
    json_option,
    read_store,
    store_argument,
    working,
    write_store,
)
from hybridmem.report.facts import eviction_order

_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@commands.command()
@store_argument
@_dry_run
@json_option
def compact(store: str, dry_run: bool) -> None:
    """Give back the space of entries that were evicted or deleted.

    Afterwards no byte of them is left in the directory. Small shards are merged on the way.
    """
    if dry_run:
        with read_store(store) as opened:
            dead = opened.stats().dead_bytes
        emit(
            {"dry_run": True, "dead_bytes": dead},
            [f"would give back about {text.size(dead)}"],
        )
        return
    with write_store(store) as opened, working("compact"):
        given_back = opened.compact()
        disk = opened.stats().disk_bytes
    emit(
        {"dry_run": False, "bytes_given_back": given_back, "disk_bytes": disk},
        [f"gave back {text.size(given_back)}; the store has {text.size(disk)} now"],
    )


@commands.command()
@store_argument
@click.option(
    "--to", "target", type=click.IntRange(0), required=True, help="Entries that may be left."
)
@_dry_run
@json_option
def evict(store: str, target: int, dry_run: bool) -> None:
    """Evict the least important entries until no more than --to are left.

    The order is importance * (1 + log(1 + accesses)), the lowest first, ties by age.
    """
    if dry_run:
        with read_store(store) as opened:
            records = opened.entries
        going = eviction_order(records)[: max(0, len(records) - target)]
        ids = records["entry_id"][going].tolist()
        tokens = int(records["n_tokens"][going].sum(dtype=np.int64))
        shown = ", ".join(map(str, ids[:20])) + (", ..." if len(ids) > 20 else "")
        emit(
            {"dry_run": True, "evicted": len(ids), "left": len(records) - len(ids), "ids": ids},
            [
                f"would evict {text.plural(len(ids), 'entry')} of {text.plural(tokens, 'token')}"
                + (f": {shown}" if ids else "")
            ],
        )
        return
    with write_store(store) as opened, working("evict"):
        count = opened.evict(target)
        left = len(opened)
    emit(
        {"dry_run": False, "evicted": count, "left": left},
        [f"evicted {text.plural(count, 'entry')}; {text.plural(left, 'entry')} left"],
    )


@commands.command()
@store_argument
@click.argument("entry_ids", type=click.IntRange(1), nargs=-1, required=True)
@_dry_run
@json_option
def delete(store: str, entry_ids: tuple[int, ...], dry_run: bool) -> None:
    """Delete entries by id: all of them, or none if one is not there.

    Their bytes leave the directory with `hybridmem compact`.
    """
    ids = sorted(set(entry_ids))
    with read_store(store) if dry_run else write_store(store) as opened:
        missing = [number for number in ids if number not in opened]
        if missing:
            fail(f"{opened.path} has no entry {', '.join(map(str, missing))}; nothing deleted")
        if not dry_run:
            for number in ids:
                opened.delete(number)
            opened.flush()
        left = len(opened) - (len(ids) if dry_run else 0)
    done = "would delete" if dry_run else "deleted"
    emit(
        {"dry_run": dry_run, "deleted": ids, "left": left},
        [f"{done} {text.plural(len(ids), 'entry')}; {text.plural(left, 'entry')} left"],
    )

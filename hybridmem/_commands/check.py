"""Commands that read every byte: verify, salvage."""

from __future__ import annotations

import dataclasses
import sys

import click

from hybridmem import _text as text
from hybridmem._commands.group import (
    DAMAGED,
    commands,
    emit,
    json_option,
    progress_bar,
    store_argument,
)
from hybridmem.results import Report
from hybridmem.verify import salvage as salvage_store
from hybridmem.verify import verify as verify_store


@commands.command()
@store_argument
@json_option
def verify(store: str) -> None:
    """Check every byte of a store against its checksums, and name each fault.

    Exit code 3 if there is one. Nothing is changed; a writer may have the store open.
    """
    with progress_bar("verify") as progress:
        report = verify_store(store, progress)
    emit({"ok": report.ok, **dataclasses.asdict(report)}, _lines(report))
    if not report.ok:
        sys.exit(DAMAGED)


@commands.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@json_option
def salvage(source: str, target: str) -> None:
    """Copy what verifies of the damaged store SRC into a new one, DST.

    Ids, times and access counts are kept. SRC is not changed.
    """
    with progress_bar("salvage") as progress:
        report = salvage_store(source, target, progress=progress)
    emit(
        {"saved": report.sound, "target": target, **dataclasses.asdict(report)},
        [
            *_lines(report),
            f"{text.plural(report.sound, 'entry')} of {report.entries:,} saved to {target}",
        ],
    )


def _lines(report: Report) -> list[str]:
    lines = []
    for fault in report.faults:
        where = [fault.file]
        if fault.offset is not None:
            where.append(f"at byte {fault.offset:,}")
        if fault.records is not None:
            where.append(f"records {fault.records[0]:,} to {fault.records[1]:,}")
        if fault.entry_id is not None:
            where.append(f"entry {fault.entry_id}")
        lines.append(f"{', '.join(where)}: {fault.message}")
    sound = f"{report.sound:,} of {text.plural(report.entries, 'entry')} verify"
    lines.append(f"{sound}; {text.plural(len(report.faults), 'fault')}")
    if report.orphans:
        files = text.plural(len(report.orphans), "file")
        lines.append(f"{files} that no commit names, which the next writer removes")
    return lines

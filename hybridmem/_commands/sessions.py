"""Commands on sessions, which are stores under one directory: sessions, drop."""

from __future__ import annotations

import dataclasses
import time

import click

import hybridmem
from hybridmem import _text as text
from hybridmem._commands.group import commands, emit, fail, json_option


@commands.command("sessions")
@click.argument("root", type=click.Path())
@json_option
def list_sessions(root: str) -> None:
    """List the sessions under ROOT: what they hold, their size, when they were used last.

    A session is the store ROOT/NAME: all other commands take that.
    """
    told = hybridmem.sessions(root).list()
    now = time.time_ns()
    lines = text.table(
        ("name", "entries", "tokens", "size", "last used"),
        (
            (
                one.name,
                "damaged" if one.error else f"{one.entries:,}",
                "" if one.error else f"{one.tokens:,}",
                text.size(one.disk_bytes),
                f"{text.age((now - one.last_used) / 1e9)} ago",
            )
            for one in told
        ),
    )
    if not told:
        lines = [f"no sessions in {root}"]
    documents = [{**dataclasses.asdict(one), "path": str(one.path)} for one in told]
    emit({"root": root, "sessions": documents}, lines)


@commands.command()
@click.argument("root", type=click.Path())
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@json_option
def drop(root: str, names: tuple[str, ...], dry_run: bool) -> None:
    """Remove the sessions NAME... under ROOT with all their files.

    A session that is open for writing is not dropped.
    """
    sessions = hybridmem.sessions(root)
    missing = [name for name in names if name not in sessions]
    if missing:
        fail(f"no session {', '.join(map(repr, missing))} in {root}; nothing dropped")
    n_bytes = sum(one.disk_bytes for one in sessions.list() if one.name in names)
    if not dry_run:
        for name in dict.fromkeys(names):
            sessions.drop(name)
    done = "would drop" if dry_run else "dropped"
    count = text.plural(len(set(names)), "session")
    emit(
        {"dry_run": dry_run, "dropped": list(dict.fromkeys(names)), "bytes": n_bytes},
        [f"{done} {count}, {text.size(n_bytes)}"],
    )

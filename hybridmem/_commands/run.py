"""Commands that run something of their own: demo."""

from __future__ import annotations

import click

from hybridmem._commands.group import commands, emit, fail, json_option


@commands.command()
@click.argument("directory", type=click.Path(file_okay=False), required=False)
@click.option("-k", "--top-k", type=click.IntRange(1), default=5, show_default=True, help="Hits.")
@json_option
def demo(directory: str | None, top_k: int) -> None:
    """Show the main job on the keys and values of a real language model.

    What left a cache of 256 tokens is stored, found again by a new process and attended to; the
    table compares that with the cache alone and with attention to everything. The stores are kept
    in DIRECTORY if one is given, which must not hold any yet.
    """
    from hybridmem import demo as shown

    if not shown.DATA.exists():
        fail(f"{shown.DATA} is missing: this copy of the package came without its sample")
    result = shown.run(directory, top_k=top_k)
    emit(result, [shown.table(result)])

"""Copies of the last commit of a store: directories that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hybridmem._entries import ENTRIES_NAME, EntryTable
from hybridmem._fileio import Buffer, Directory
from hybridmem._format import shard_name
from hybridmem._manifest import INDEX_NAME, Manifest
from hybridmem._shards import check_files
from hybridmem.errors import SnapshotGoneError, StoreExistsError, StoreIOError

__all__ = ["check_outside", "check_vacant", "new_directory", "snapshot", "unless_compacted"]

_PIECE_RECORDS = 8192
_PIECE_BYTES = 8 << 20


def check_vacant(path: Path) -> None:
    """Raise StoreExistsError where there is something already."""
    if os.path.lexists(path):
        raise StoreExistsError(f"{path} exists; give a path where there is nothing yet")


def check_outside(store: Path, path: Path) -> None:
    """Raise ValueError where a path is inside a store, whose files are its own."""
    real = path.parent.resolve() / path.name
    if store.resolve() in real.parents:
        raise ValueError(f"{path} is inside the store {store}; give a path outside of it")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Directory]:
    """Yield a directory that gets its name, durably, when the block ends, and is gone if it fails.

    A crash leaves at most a directory of a temporary name beside it.

    Raises
    ------
    StoreExistsError
        If there is something of that name.
    """
    check_vacant(path)
    parent = Directory.make(path.parent)
    try:
        directory = parent.make_temporary_directory()
        try:
            yield directory
            directory.sync()
            parent.rename(directory.path.name, path.name)
        except BaseException:
            parent.remove_directory(directory)
            raise
        directory.close()
        parent.sync()
    finally:
        parent.close()


@contextlib.contextmanager
def unless_compacted(store: Path, copy: str) -> Iterator[None]:
    """Say what to do where a writer removes what a reader copies; `copy` names that in a word.

    Raises
    ------
    SnapshotGoneError
        In place of one that says what file is gone.
    """
    try:
        yield
    except SnapshotGoneError as error:
        raise SnapshotGoneError(
            f"the writer compacted {store} meanwhile ({error}): try again, or make a snapshot and "
            f"{copy} that"
        ) from None


def snapshot(
    directory: Directory, manifest: Manifest, table: EntryTable, path: Path, *, copy: bool
) -> None:
    """Make a store of a commit whose records are the first rows of a table.

    Shards never change, so they are linked. Records do, by access counts and by what is appended,
    and index.json is replaced: both are written anew.
    """
    check_outside(directory.path, path)
    with new_directory(path) as target:
        for shard in manifest.shards:
            name = shard_name(shard.number)
            try:
                if copy:
                    target.write_file(name, [(0, _pieces(directory, name))])
                else:
                    directory.link(name, target)
            except FileNotFoundError:
                raise SnapshotGoneError(
                    f"{directory.path / name} was removed by the writer; refresh() and try again"
                ) from None
            except StoreIOError as error:
                if copy:
                    raise
                raise StoreIOError(
                    f"{error}; hard links need one file system that has them: "
                    "copy the shards instead (copy=True, --copy)"
                ) from error
        check_files(target, manifest.shards)
        target.write_file(ENTRIES_NAME, [(0, _records(table, manifest.n_records))])
        target.write_file(INDEX_NAME, [(0, [manifest.encode()])])


def _records(table: EntryTable, count: int) -> Iterator[Buffer]:
    for start in range(0, count, _PIECE_RECORDS):
        rows = np.arange(start, min(start + _PIECE_RECORDS, count))
        yield memoryview(table.records(rows)).cast("B")


def _pieces(directory: Directory, name: str) -> Iterator[Buffer]:
    fd, size = directory.open_file(name)
    try:
        for start in range(0, size, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, size - start))
            count = directory.read_into(fd, memoryview(piece), start, name)
            yield memoryview(piece)[:count]
    finally:
        directory.close_file(fd)

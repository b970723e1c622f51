"""The last commit of a store: made, read, and cleared of what a writer that died left behind."""

from __future__ import annotations

import contextlib
import secrets
from typing import NamedTuple

import numpy as np

from hybridmem._entries import ENTRIES_NAME, EntryTable
from hybridmem._fileio import Directory, is_temporary
from hybridmem._format import shard_number
from hybridmem._manifest import INDEX_NAME, Manifest, read_manifest
from hybridmem._shards import check_files
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError

__all__ = ["Loaded", "initialise", "load", "recover", "rewrite"]


def initialise(directory: Directory, config: Config, store_id: str | None = None) -> Manifest:
    """Make an empty store in a locked directory; it is durable on return."""
    manifest = Manifest(config=config, store_id=store_id or secrets.token_hex(16), generation=1)
    directory.update_file(ENTRIES_NAME, [])
    directory.rename(directory.write_temporary([(0, [manifest.encode()])], INDEX_NAME), INDEX_NAME)
    directory.sync()
    return manifest


class Loaded(NamedTuple):
    """A committed manifest, its records and the name of the file that they are in."""

    manifest: Manifest
    table: EntryTable
    entries_name: str


def load(directory: Directory, io: str) -> Loaded:
    """Read and verify the last commit.

    A commit that is under way in another process can be met half-way: as long as index.json
    changes, the reading is begun anew.
    """
    manifest = read_manifest(directory)
    while True:
        try:
            table, name = _load_records(directory, manifest, io)
            check_files(directory, manifest.shards)
            return Loaded(manifest, table, name)
        except CorruptStoreError:
            newer = read_manifest(directory)
            if newer == manifest:
                raise
            manifest = newer


def _load_records(directory: Directory, manifest: Manifest, io: str) -> tuple[EntryTable, str]:
    # A compaction commits while its records still have the name of their generation; they may get
    # their final name between a look at the one and a look at the other.
    # No error is kept: with its traceback it would keep the map of a store that cannot be opened.
    for name in (ENTRIES_NAME, manifest.entries_name):
        with contextlib.suppress(CorruptStoreError, FileNotFoundError):
            return EntryTable.load(directory, name, manifest, io), name
    with contextlib.suppress(FileNotFoundError):
        return EntryTable.load(directory, ENTRIES_NAME, manifest, io), ENTRIES_NAME
    if manifest.n_records == 0:
        return EntryTable.empty(directory, manifest.config), ENTRIES_NAME
    path = str(directory.path / ENTRIES_NAME)
    raise CorruptStoreError(f"{path} is missing", path=path)


def recover(directory: Directory, loaded: Loaded) -> None:
    """Finish or clear away what a writer that died left behind. The directory is locked."""
    # The commit just read may not be durable yet. Until it is, nothing may go that the one before
    # needs, and nothing be promised on top of it.
    directory.sync()
    manifest, table, entries_name = loaded
    if entries_name != ENTRIES_NAME:
        directory.rename(entries_name, ENTRIES_NAME)
        directory.sync()
    live = {shard.number for shard in manifest.shards}
    for name in directory.names():
        number = shard_number(name)
        orphan = number is not None and number not in live
        if orphan or is_temporary(name) or name.startswith(f"{ENTRIES_NAME}.g"):
            directory.remove(name)
    try:
        size = directory.size(ENTRIES_NAME)
    except FileNotFoundError:
        directory.update_file(ENTRIES_NAME, [])
        directory.sync()
        return
    if size > manifest.n_records * table.dtype.itemsize:
        directory.truncate_file(ENTRIES_NAME, manifest.n_records * table.dtype.itemsize)


def rewrite(directory: Directory, loaded: Loaded) -> None:
    """Commit a snapshot that is in memory in place of a damaged one. The directory is locked."""
    table = loaded.table
    manifest = loaded.manifest.replace(generation=loaded.manifest.generation + 1)
    records = table.records(np.arange(table.n_rows)).tobytes()
    directory.write_file(manifest.entries_name, [(0, [records])])
    directory.sync()
    directory.rename(directory.write_temporary([(0, [manifest.encode()])], INDEX_NAME), INDEX_NAME)
    directory.sync()
    directory.rename(manifest.entries_name, ENTRIES_NAME)
    directory.sync()

"""Making and opening stores."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hybridmem import _snapshot
from hybridmem._commit import RESERVE_NAME
from hybridmem._entries import ENTRIES_NAME
from hybridmem._examine import examine
from hybridmem._fileio import LOCK_NAME, Directory, is_temporary, path_of
from hybridmem._manifest import INDEX_NAME
from hybridmem._sums import SUMS_NAME
from hybridmem.config import Config
from hybridmem.errors import (
    ModelMismatchError,
    ReadOnlyError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
)
from hybridmem.store import Store

__all__ = ["create", "open"]

StrPath = str | os.PathLike[str]


def create(store_dir: StrPath, *, config: Config | None = None, **fields: Any) -> Store:
    """Make a new store and open it for writing.

    Parameters
    ----------
    store_dir : path
        Made with its parents where missing; an empty directory is taken as it is.
    config : Config, optional
    **fields
        Fields of `Config`, `embed_dim` among them, where no `config` is given.

    Raises
    ------
    StoreExistsError
        If the directory holds a store or any other file.
    StoreLockedError
        If another process is making one there.
    TypeError, ValueError
        If a field of the configuration is invalid.
    """
    if config is None:
        config = _configured(fields)
    elif fields:
        raise TypeError(f"give a config or its fields, not both: got config and {sorted(fields)}")
    elif not isinstance(config, Config):
        raise TypeError(f"config must be a hybridmem.Config, got {type(config).__name__}")
    path = path_of(store_dir, "store_dir")
    if os.path.exists(path) and not os.path.isdir(path):  # False where it cannot be looked at
        raise StoreExistsError(
            f"{path} is a file; give a directory that is empty or does not exist"
        )
    directory = Directory.make(path)
    try:
        _check_vacant(directory)
        directory.lock()
        _check_vacant(directory)
        _snapshot.initialise(directory, config)
        return Store(directory, "r+", "mmap", {}, _snapshot.load(directory, "mmap"))
    except BaseException:
        directory.close()
        raise


def _configured(fields: dict[str, Any]) -> Config:
    names = [field.name for field in dataclasses.fields(Config)]
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise TypeError(f"create: no field is called {', '.join(unknown)}; there are {names}")
    if "embed_dim" not in fields:
        raise TypeError(
            "create: embed_dim is missing, the width of one token's keys, all heads side by side"
        )
    return Config(**fields)


def open(
    store_dir: StrPath,
    mode: str = "r+",
    *,
    max_entries: int | None = None,
    max_disk_bytes: int | None = None,
    shard_max_bytes: int | None = None,
    max_open_shards: int | None = None,
    model_id: str | None = None,
    io: str = "mmap",
    salvage: bool = False,
) -> Store:
    """Open a store.

    Parameters
    ----------
    store_dir : path
    mode : {"r+", "r"}
        "r+" is the one writer; "r" one of any number of readers, each of which sees one committed
        snapshot until `refresh`, writes nothing and needs no permission to write.
    max_entries, max_disk_bytes, shard_max_bytes, max_open_shards : int, optional
        New limits. A writer keeps them with the store from the next commit on; a reader for itself.
    model_id : str, optional
        The weights that the caller's keys come from; a store of others is refused.
    io : {"mmap", "pread"}
        "pread" reads files instead of mapping them, for stores that someone else may cut short
        while they are open: that is a CorruptStoreError then and not a bus error. Nothing is
        zero-copy then.
    salvage : bool, default False
        Check everything, and open a damaged store with the entries that verify; a writer commits
        that the others are gone. `hybridmem.verify.salvage` leaves the damaged store as it is.

    Raises
    ------
    StoreNotFoundError, StoreLockedError, VersionError, CorruptStoreError, ModelMismatchError
    ReadOnlyError
        If a memory pack (`hybridmem.pack`) is to be written to.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f'mode must be "r+" or "r", got {mode!r}')
    if io not in ("mmap", "pread"):
        raise ValueError(f'io must be "mmap" or "pread", got {io!r}')
    if model_id is not None and not isinstance(model_id, str):
        raise TypeError(f"model_id must be a string, got {type(model_id).__name__}")
    limits: dict[str, Any] = {
        name: value
        for name, value in (
            ("max_entries", max_entries),
            ("max_disk_bytes", max_disk_bytes),
            ("shard_max_bytes", shard_max_bytes),
            ("max_open_shards", max_open_shards),
        )
        if value is not None
    }
    Config(embed_dim=1, **limits)  # refuses a bad limit before anything is opened
    directory = directory_of(store_dir)
    path = directory.path
    try:
        if mode == "r+":
            names = directory.names()
            if INDEX_NAME not in names:
                raise StoreNotFoundError(
                    f"no store in {path}: it has no {INDEX_NAME}; make one with hybridmem.create"
                )
            if SUMS_NAME in names:
                raise ReadOnlyError(
                    f'{path} is a memory pack, which does not change: open it with mode="r", put a '
                    "private store over it with hybridmem.layered, or make a snapshot to write to"
                )
            directory.lock()
        loaded = _salvaged(directory, mode, io) if salvage else _snapshot.load(directory, io)
        stored_id = loaded.manifest.config.model_id
        if model_id is not None and model_id != stored_id:
            whose = "an unnamed model" if stored_id is None else f"the model {stored_id!r}"
            raise ModelMismatchError(
                f"{path} holds keys and values of {whose}, not of {model_id!r}: "
                "open it without model_id or use this model's own store"
            )
        if mode == "r+":
            _snapshot.recover(directory, loaded)
        return Store(directory, mode, io, limits, loaded)
    except BaseException:
        directory.close()
        raise


def directory_of(store_dir: StrPath) -> Directory:
    """Return the directory of a store that is to be there."""
    path = path_of(store_dir, "store_dir")
    try:
        return Directory(path)
    except FileNotFoundError:
        raise StoreNotFoundError(f"no store in {path}: there is no such directory") from None
    except NotADirectoryError:
        raise StoreNotFoundError(f"no store in {path}: it is a file and no directory") from None
    except OSError as error:
        raise StoreIOError(f"failed opening {path}: {error}") from error


def _salvaged(directory: Directory, mode: str, io: str) -> _snapshot.Loaded:
    """Return what verifies of a store, committed first where it is opened for writing."""
    examined = examine(directory)
    examined.pool.close()
    if not examined.faults:
        return _snapshot.load(directory, io)
    loaded = examined.loaded(directory)
    if mode == "r":
        return loaded
    _snapshot.rewrite(directory, loaded)
    return _snapshot.load(directory, io)


def _check_vacant(directory: Directory) -> None:
    names = directory.names()
    if INDEX_NAME in names:
        raise StoreExistsError(
            f"{directory.path} holds a store: open that one, or give another directory"
        )
    # What a `create` that died has left is no store yet.
    started = {ENTRIES_NAME, LOCK_NAME, RESERVE_NAME}
    others = [name for name in names if name not in started and not is_temporary(name)]
    if others or (ENTRIES_NAME in names and directory.size(ENTRIES_NAME)):
        raise StoreExistsError(
            f"{directory.path} is not empty ({', '.join(sorted(others or names)[:3])}); "
            "give an empty directory"
        )

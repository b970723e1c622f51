"""Sessions: stores under one directory, each of which only its own name leads to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridmem import opening
from hybridmem._entries import ENTRIES_NAME
from hybridmem._fileio import LOCK_NAME, Directory, path_of
from hybridmem._manifest import INDEX_NAME
from hybridmem.config import Config
from hybridmem.errors import (
    CorruptStoreError,
    HybridMemError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
)
from hybridmem.store import Store

__all__ = ["Session", "Sessions", "sessions"]

StrPath = str | os.PathLike[str]
#: What `hybridmem.open` looks at itself.
_TAKEN = ("max_entries", "max_disk_bytes", "shard_max_bytes", "max_open_shards", "model_id")
_MAX_NAME_BYTES = 200
#: How often a session is looked at that goes away meanwhile.
_TRIES = 5
#: Windows takes none of these, and this package none that it could not take there.
_FORBIDDEN = frozenset('/\\:*?"<>|')
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))]
)
_DROPPED_PREFIX, _DROPPED_SUFFIX = ".hybridmem-", ".dropped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is told of a session without opening it for writing.

    Attributes
    ----------
    name : str
    path : Path
    entries, tokens : int
        Of the last commit; 0 if the session is damaged.
    disk_bytes : int
        Sum of the sizes of all files of the directory.
    last_used : int
        When something was last written, in nanoseconds since the Unix epoch: a commit, or accesses
        that were counted.
    error : str or None
        Why it cannot be opened, if so.
    """

    name: str
    path: Path
    entries: int
    tokens: int
    disk_bytes: int
    last_used: int
    error: str | None = None


def sessions(root: StrPath, **config: Any) -> Sessions:
    """Keep a store for each session, or user, or conversation, under one directory.

    Parameters
    ----------
    root : path
        Made with the first session.
    **config
        Fields of `Config` that every session has: those of a new one; a session that has others is
        refused, but for limits, which hold from its opening on.

    Returns
    -------
    Sessions
    """
    return Sessions(root, config)


class Sessions:
    """Stores under one directory: made by `sessions`. It holds nothing open itself.

    Several processes may use one root; a session has one writer at a time, as every store.
    Iteration gives the names, in order.

    Attributes
    ----------
    root : Path
    """

    def __init__(self, root: StrPath, config: dict[str, Any]) -> None:
        self.root = path_of(root, "root")
        if config:
            Config(**{"embed_dim": 1, **config})  # refuses what no session could have
        self._config = config

    def open(self, name: str, mode: str = "r+") -> Store:
        """Open a session; with "r+", make it where there is none.

        Raises
        ------
        ValueError
            If the name is no name for a session, or the session has other fields of `Config`.
        ModelMismatchError
            If it holds keys and values of another model than the `model_id` given to `sessions`.
        StoreNotFoundError
            If there is none and it is not to be made: the mode is "r", or no `embed_dim` was given.
        StoreLockedError
            If it is open for writing.
        """
        for left in reversed(range(_TRIES)):
            try:
                store = self._found_or_made(name, mode)
            except (CorruptStoreError, StoreIOError):
                if not left:
                    raise
                continue  # it may be that it was dropped, and made anew
            if mode == "r" or _is_in_place(store._directory):
                return store
            with contextlib.suppress(HybridMemError):
                store.close()
        raise StoreIOError(f"the session {name!r} was dropped each time that it was opened")

    def _found_or_made(self, name: str, mode: str) -> Store:
        path = self._path(name)
        try:
            return self._opened(path, mode)
        except HybridMemError as error:
            # Of one that is dropped at this moment anything may be missing.
            if not isinstance(error, StoreNotFoundError) and self._is_session(name):
                raise
            if mode == "r" or "embed_dim" not in self._config:
                raise StoreNotFoundError(
                    f"no session {name!r} in {self.root}"
                    + ("" if mode == "r" else "; to make it, give embed_dim to sessions")
                ) from None
        try:
            store = opening.create(path, **self._config)
        except StoreExistsError:  # another process was quicker, maybe with another name
            return self._opened(self._path(name), mode)
        try:
            self._path(name)  # a disk that takes two names for one leads to another session
        except BaseException:
            store.close()
            raise
        return store

    def _opened(self, path: Path, mode: str) -> Store:
        options = {field: value for field, value in self._config.items() if field in _TAKEN}
        store = opening.open(path, mode, **options)
        for field, value in self._config.items():
            got = getattr(store.config, field)
            if got != value:
                store.close()
                raise ValueError(f"{field} of the session in {path} is {got!r}, not {value!r}")
        return store

    def list(self) -> list[Session]:
        """Return what there is to tell of each session, in the order of names."""
        told = []
        for name in self:
            with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
                told.append(self._told(name))
        return told

    def _told(self, name: str) -> Session:
        path = self.root / name
        entries = tokens = 0
        error: str | None = None
        for _ in range(_TRIES):
            try:
                with opening.open(path, mode="r") as store:
                    stats = store.stats()
                entries, tokens, error = stats.entries, stats.tokens, None
                break
            except HybridMemError as failed:
                if not self._is_session(name):
                    raise FileNotFoundError(name) from None
                error = str(failed)  # it may be that it was dropped, and made anew
        sizes, times = [0], [0]
        for file in path.iterdir():
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # its writer removed or renamed it between the two calls
            sizes.append(status.st_size)
            if file.name in (INDEX_NAME, ENTRIES_NAME):
                times.append(status.st_mtime_ns)
        return Session(
            name=name,
            path=path,
            entries=entries,
            tokens=tokens,
            disk_bytes=sum(sizes),
            last_used=max(times),
            error=error,
        )

    def evict(self, name: str, target_entries: int) -> int:
        """Evict entries of a session until no more than these are left, as `Store.evict`."""
        self._check_there(name)
        with opening.open(self._path(name)) as store:
            return store.evict(target_entries)

    def drop(self, name: str) -> None:
        """Remove a session with all its files; when it returns, that is durable.

        After a crash the session is there whole, or not at all; what is left of its files then goes
        with the next session that is dropped. Readers that have it open keep what they read of it.
        Snapshots, packs and export files of it are not touched.

        Raises
        ------
        StoreNotFoundError
            If there is none.
        StoreLockedError
            If it is open for writing.
        StoreIOError
            If files could not be removed.
        """
        self._check_there(name)
        parent = _directory(self.root)
        try:
            directory = _directory(self._path(name))
            try:
                try:
                    directory.lock()
                except StoreIOError:
                    if directory.names():
                        raise
                if not _is_in_place(directory):  # dropped by another process, maybe made anew
                    raise StoreNotFoundError(f"no session {name!r} in {self.root}")
                dropped = f"{_DROPPED_PREFIX}{secrets.token_hex(8)}{_DROPPED_SUFFIX}"
                parent.rename(name, dropped)
                parent.sync()
                # While it is locked: who opened the directory before must not find a store in it.
                directory.remove(INDEX_NAME)
            finally:
                directory.close()
            for left in parent.names():
                if left.startswith(_DROPPED_PREFIX) and left.endswith(_DROPPED_SUFFIX):
                    with contextlib.suppress(StoreNotFoundError):  # by another process
                        parent.remove_directory(_directory(self.root / left))
            parent.sync()
            if dropped in parent.names():
                raise StoreIOError(
                    f"the session {name!r} is gone, but its files could not all be removed; they "
                    f"are in {self.root / dropped}"
                )
        finally:
            parent.close()

    def __contains__(self, name: object) -> bool:
        # The listing has the exact name, which a disk where case does not count also gives others.
        return isinstance(name, str) and self._is_session(name) and name in os.listdir(self.root)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that there are at this moment."""
        try:
            found = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return iter(())
        except OSError as error:
            raise StoreIOError(f"failed listing {self.root}: {error}") from error
        return iter([name for name in found if self._is_session(name)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<hybridmem.Sessions {str(self.root)!r}>"

    def _is_session(self, name: str) -> bool:
        path = self.root / name
        return _fault(name) is None and not path.is_symlink() and (path / INDEX_NAME).is_file()

    def _check_there(self, name: str) -> None:
        self._path(name)
        if not self._is_session(name):
            raise StoreNotFoundError(f"no session {name!r} in {self.root}")

    def _path(self, name: str) -> Path:
        """Return where a session is or would be, and nothing else."""
        if not isinstance(name, str):
            raise TypeError(f"name: got {type(name).__name__}, want a string")
        if (fault := _fault(name)) is not None:
            raise ValueError(f"name: got {name!r:.80}, which {fault}")
        path = self.root / name
        if path.is_symlink():
            raise ValueError(f"name: {path} is a link, and sessions are directories of their own")
        # More than one look, as it may be made or dropped between the two.
        if all(path.exists() and name not in os.listdir(self.root) for _ in range(_TRIES)):
            raise ValueError(f"name: on this disk {name!r} is the name of another session")
        return path


def _is_in_place(directory: Directory) -> bool:
    """Whether the lock that is held is that of the path, and not of what was dropped there."""
    try:
        named = os.stat(directory.path / LOCK_NAME)
    except FileNotFoundError:
        return False
    return directory._lock_fd >= 0 and os.path.samestat(named, os.fstat(directory._lock_fd))


def _directory(path: Path) -> Directory:
    try:
        return Directory(path)
    except FileNotFoundError:
        raise StoreNotFoundError(f"there is no session in {path} any more") from None
    except OSError as error:
        raise StoreIOError(f"failed opening {path}: {error}") from error


def _fault(name: str) -> str | None:
    """Return why a name is none for a session, which must be one on every system, or None."""
    if not name:
        return "is empty"
    if len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        return f"takes more than {_MAX_NAME_BYTES} bytes"
    if not name.isprintable():
        return "has characters that cannot be seen"
    if found := sorted(_FORBIDDEN & set(name)):
        return f"has {' '.join(found)}, of which paths are made"
    if name[0] in ". " or name[-1] in ". ":
        return "begins or ends with a dot or a space"
    if name.partition(".")[0].rstrip().lower() in _DEVICES:
        return "is the name of a device on some systems"
    if unicodedata.normalize("NFC", name) != name:
        return "is not in the normal form NFC, so that another name looks the same"
    return None

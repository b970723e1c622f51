"""The exceptions of HybridMem: one tree under `HybridMemError`."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CorruptStoreError",
    "EntryNotFoundError",
    "HybridMemError",
    "ModelMismatchError",
    "PartitionError",
    "PartitionFullError",
    "ReadOnlyError",
    "SnapshotGoneError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreNotFoundError",
    "VersionError",
]


class HybridMemError(Exception):
    """Base of every error that is about a store and not about an argument."""


class StoreExistsError(HybridMemError):
    """`create` found a store, or something else, where it was to make one."""


class StoreNotFoundError(HybridMemError, FileNotFoundError):
    """There is no store in the directory: it has no index.json."""

    # FileNotFoundError would turn several arguments into errno and file name.
    def __str__(self) -> str:
        return Exception.__str__(self)


class EntryNotFoundError(HybridMemError, KeyError):
    """There is no entry of that id, or no longer."""

    # KeyError would show the message in quotes.
    def __str__(self) -> str:
        return Exception.__str__(self)


def no_entry(where: object, entry_id: int) -> EntryNotFoundError:
    """Return the error for an id that is not in a store, or in what answers as one."""
    return EntryNotFoundError(
        f"{where} has no entry {entry_id}: it was deleted, evicted or never put; iterate over the "
        "store for the ids there are"
    )


class StoreLockedError(HybridMemError):
    """Another writer has the store open."""


class StoreClosedError(HybridMemError):
    """The store was closed before this call."""


class ReadOnlyError(HybridMemError):
    """A write was asked of a reader, or of a writer inherited through fork."""


class CorruptStoreError(HybridMemError):
    """The bytes on disk are not what was committed.

    Attributes
    ----------
    path : str or None
        The file in which the fault lies.
    offset : int or None
        Byte offset of the fault in that file.
    records : tuple of (int, int) or None
        First and last record of `entries.bin` that are affected.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        records: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.records = records

    def __reduce__(self) -> tuple[object, ...]:
        return (_corrupt, (str(self), self.path, self.offset, self.records))


def _corrupt(
    message: str, path: str | None, offset: int | None, records: tuple[int, int] | None
) -> CorruptStoreError:
    return CorruptStoreError(message, path=path, offset=offset, records=records)


class VersionError(HybridMemError):
    """The store was written in a format that this version does not know."""


class ModelMismatchError(HybridMemError):
    """The store holds keys and values of other weights than the caller's."""


class StoreIOError(HybridMemError):
    """The operating system failed a read or a write."""


class StoreFullError(StoreIOError):
    """No space is left for the store; nothing that was committed is affected."""


class SnapshotGoneError(HybridMemError):
    """The writer has removed a file of this reader's snapshot: `refresh()` and ask again."""


class PartitionError(HybridMemError):
    """Partitions of a cluster did not answer, or did not do what they were asked, in time.

    Attributes
    ----------
    partitions : tuple of str
        Those that failed.
    """

    def __init__(self, message: str, partitions: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


class PartitionFullError(PartitionError, StoreFullError):
    """No space is left for partitions of a cluster; what was put is kept until the next flush."""

"""How far partitions have come, and what disks know of it, so that what is older is not taken up.

On the disk of a replica stands its view, which is raised where others are left behind. On every
disk stands the highest view that any replica of a partition has, for those that come back alone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from hybridmem._checksums import crc32c
from hybridmem._fileio import Directory
from hybridmem._manifest import Manifest
from hybridmem.errors import CorruptStoreError
from hybridmem.store import Store

__all__ = [
    "NOTHING",
    "Mark",
    "digest_of",
    "encoded",
    "known_name",
    "mark_of",
    "own_name",
    "read",
    "write",
]


class Mark(NamedTuple):
    """How far a partition has come. None of it ever falls, and whatever is done raises some of it.

    Attributes
    ----------
    next_entry_id : int
    gone : int
        Ids below it that have no entry, or no longer.
    calibrated : int
        Layers that are.
    """

    next_entry_id: int
    gone: int
    calibrated: int

    def holds(self, other: Mark) -> bool:
        """Whether all is in it that was done up to another mark."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


#: Before anything was done.
NOTHING = Mark(0, 0, 0)


def mark_of(manifest: Manifest) -> Mark:
    """Return how far a commit has come."""
    dead = sum(last - first + 1 for first, last in manifest.dead)
    next_entry_id = manifest.next_entry_id
    gone = next_entry_id - (manifest.n_records - dead)
    return Mark(next_entry_id, gone, len(manifest.calibration))


def digest_of(store: Store) -> int:
    """Return a checksum of what entries there are, with their times, and of calibrated layers.

    Equal where two stores hold the same; not where each went on from there by itself.
    """
    with store._lock:
        rows = store._table.alive_rows()
        digest = crc32c(repr(sorted(store.calibration)).encode())
        for name in ("entry_id", "timestamp"):
            digest = crc32c(store._table.column(name)[rows].tobytes(), digest)
        return digest


def own_name(partition: str) -> str:
    """Return the name of the file with the view of the replica that is on a disk."""
    return f"{partition}.json"


def known_name(number: int) -> str:
    """Return the name of the file with the highest view that a disk knows of a partition."""
    return f"known-{number:04d}.json"


def read(directory: Directory, name: str) -> int:
    """Return the view that a file says, 0 where there is none."""
    try:
        view = json.loads(directory.read_file(name, 1 << 10))["view"]
        if type(view) is not int:
            raise TypeError
    except FileNotFoundError:
        return 0
    except (KeyError, TypeError, ValueError, RecursionError):
        path = str(directory.path / name)
        raise CorruptStoreError(f"{path} is damaged: it says no view", path=path) from None
    return view


def encoded(value: dict[str, Any]) -> bytes:
    """Return an object as the files of a cluster hold it."""
    return json.dumps(value, indent=1).encode()


def write(root: Path, name: str, view: int) -> None:
    """Write a view down; it is durable on return."""
    with contextlib.closing(Directory(root)) as directory:
        data = encoded({"view": view})
        directory.rename(directory.write_temporary([(0, [data])], name), name)
        directory.sync()

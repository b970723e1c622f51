"""SHA256SUMS: the checksums of the files of a memory pack, and what makes a store one.

The file is as `sha256sum` writes and checks it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from hybridmem._entries import ENTRIES_NAME
from hybridmem._fileio import Directory
from hybridmem._format import shard_number
from hybridmem._manifest import INDEX_NAME
from hybridmem.errors import CorruptStoreError, StoreIOError
from hybridmem.results import Fault

__all__ = ["SUMS_NAME", "check_sums", "write_sums"]

SUMS_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)", re.ASCII)
_MAX_BYTES = 1 << 25
_PIECE_BYTES = 8 << 20


def write_sums(directory: Directory) -> None:
    """Write the checksums of all files there are."""
    lines = [f"{_sum_of(directory, name)}  {name}\n" for name in sorted(directory.names())]
    directory.write_file(SUMS_NAME, [(0, ["".join(lines).encode()])])


def check_sums(directory: Directory) -> Iterator[Fault]:
    """Yield what of a pack is not as its checksums say; nothing if it is no pack."""
    if SUMS_NAME not in directory.names():
        return
    lines = directory.read_file(SUMS_NAME, _MAX_BYTES).decode(errors="replace").splitlines()
    listed = set()
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            yield Fault(file=SUMS_NAME, message=f"has the line {line!r:.80}")
            continue
        wanted, name = match.groups()
        listed.add(name)
        try:
            found = _sum_of(directory, name)
        except FileNotFoundError:
            yield Fault(file=name, message=f"is missing, though {SUMS_NAME} lists it")
            continue
        except (CorruptStoreError, StoreIOError) as error:
            yield Fault(file=name, message=f"cannot be read: {error}")
            continue
        if found != wanted:
            yield Fault(file=name, message=f"does not match its checksum in {SUMS_NAME}")
    for name in sorted(set(directory.names()) - listed):
        if name in (INDEX_NAME, ENTRIES_NAME) or shard_number(name) is not None:
            yield Fault(file=name, message=f"has no checksum in {SUMS_NAME}")


def _sum_of(directory: Directory, name: str) -> str:
    fd, size = directory.open_file(name)
    try:
        sha256 = hashlib.sha256()
        piece = bytearray(min(size, _PIECE_BYTES))
        for start in range(0, size, _PIECE_BYTES):
            view = memoryview(piece)[: size - start]
            sha256.update(view[: directory.read_into(fd, view, start, name)])
        return sha256.hexdigest()
    finally:
        directory.close_file(fd)

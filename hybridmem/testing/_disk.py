"""A directory tree as a disk keeps it: what is on it, and the changes on their way to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "ROOT",
    "Change",
    "Image",
    "Link",
    "LostSync",
    "Mark",
    "Rename",
    "Resize",
    "Sync",
    "Unlink",
    "Write",
]

#: Number of the directory at the top of the tree.
ROOT = 0


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that happened to a file or a directory, by its number."""

    inode: int


@dataclasses.dataclass(frozen=True)
class Write(Change):
    """Bytes written into a file that had `size` bytes."""

    offset: int
    data: bytes = dataclasses.field(repr=False)
    size: int


@dataclasses.dataclass(frozen=True)
class Resize(Change):
    """A file cut or grown to a length; grown only, where space was reserved for it."""

    length: int
    only_grow: bool


@dataclasses.dataclass(frozen=True)
class Link(Change):
    """A new file or directory under a name in the directory `inode`."""

    name: str
    target: int
    is_directory: bool


@dataclasses.dataclass(frozen=True)
class Rename(Change):
    """A name of the directory `inode` that became another, of the same file."""

    name: str
    target: int
    old: str


@dataclasses.dataclass(frozen=True)
class Unlink(Change):
    """A name removed from the directory `inode`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Sync(Change):
    """All that happened to `inode` before has reached the disk."""


@dataclasses.dataclass(frozen=True)
class LostSync(Change):
    """A sync of `inode` failed: the kernel took what it had not written for written."""


@dataclasses.dataclass(frozen=True)
class Mark(Change):
    """A word about where in its work the program was."""

    text: str


class Image:
    """Files and directories by number.

    Attributes
    ----------
    files : dict of int to bytes
    directories : dict of int to dict of str to int
        Names in each directory, with the number of what they name.
    """

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.directories: dict[int, dict[str, int]] = {ROOT: {}}

    def copy(self) -> Image:
        """Return an image that can be changed without changing this one."""
        image = Image()
        image.files = dict(self.files)
        image.directories = {number: dict(names) for number, names in self.directories.items()}
        return image

    @classmethod
    def scan(cls, root: Path) -> Image:
        """Take in a directory tree of regular files."""
        image = cls()
        image._scan(root, ROOT)
        return image

    def _scan(self, path: Path, number: int) -> None:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            target = self.number()
            self.directories[number][entry.name] = target
            if entry.is_dir(follow_symlinks=False):
                self.directories[target] = {}
                self._scan(path / entry.name, target)
            else:
                self.files[target] = (path / entry.name).read_bytes()

    def number(self) -> int:
        """Return a number that nothing has."""
        return max(max(self.files, default=0), max(self.directories)) + 1

    def apply(self, change: Change) -> None:
        """Let a change happen."""
        if isinstance(change, Write):
            data = self.files.get(change.inode, b"").ljust(change.offset, b"\0")
            end = change.offset + len(change.data)
            self.files[change.inode] = data[: change.offset] + change.data + data[end:]
        elif isinstance(change, Resize):
            data = self.files.get(change.inode, b"").ljust(change.length, b"\0")
            self.files[change.inode] = data if change.only_grow else data[: change.length]
        elif isinstance(change, (Link, Rename)):
            names = self.directories.setdefault(change.inode, {})
            if isinstance(change, Rename) and names.get(change.old) == change.target:
                del names[change.old]
            names[change.name] = change.target
            if isinstance(change, Link) and change.is_directory:
                self.directories.setdefault(change.target, {})
            elif isinstance(change, Link):
                self.files.setdefault(change.target, b"")
        elif isinstance(change, Unlink):
            self.directories.setdefault(change.inode, {}).pop(change.name, None)

    def tree(self) -> dict[str, bytes | None]:
        """Return the contents of each file by its path, None for a directory."""
        found: dict[str, bytes | None] = {}
        self._walk(ROOT, "", found)
        return found

    def _walk(self, number: int, prefix: str, found: dict[str, bytes | None]) -> None:
        for name, target in self.directories[number].items():
            path = prefix + name
            if target in self.directories:
                found[path] = None
                self._walk(target, path + "/", found)
            else:
                found[path] = self.files.get(target, b"")


def build(tree: Iterable[tuple[str, bytes | None]], root: Path) -> None:
    """Make the files of a tree in an empty directory."""
    for path, data in tree:
        if data is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)

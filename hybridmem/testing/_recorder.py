"""Recording what the system calls of an operation do to a disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridmem._fileio import Syscalls
from hybridmem.testing._disk import (
    ROOT,
    Change,
    Image,
    Link,
    LostSync,
    Mark,
    Rename,
    Resize,
    Sync,
    Unlink,
    Write,
    build,
)
from hybridmem.testing._hooks import Hooked

__all__ = ["Recorder"]


class Recorder(Hooked):
    """System calls that are made, and whose changes to a directory tree are recorded.

    Parameters
    ----------
    root : path
        Top of the tree; changes outside of it are not recorded. It must hold no links.
    base : Syscalls, optional
        What makes the calls; only calls that succeed are recorded.

    Attributes
    ----------
    start : Image
        The tree when the recording began; all of it had reached the disk.
    log : list of Change
    """

    def __init__(self, root: Path, base: Syscalls | None = None) -> None:
        super().__init__(base)
        self.root = Path(os.path.abspath(root))
        self.start = Image.scan(self.root)
        self.log: list[Change] = []
        self._live = self.start.copy()
        self._open: dict[int, int] = {}

    def mark(self, text: str) -> None:
        """Note in the log that the program has come to some point."""
        self.log.append(Mark(ROOT, text))

    def fork(self, length: int, root: Path) -> Recorder:
        """Return a recorder that goes on where a process that died after `length` changes left off.

        What had not reached the disk is in the kernel's memory then: the tree is built at `root`
        with all changes, and a new process can open it there.
        """
        other = Recorder.__new__(Recorder)
        Hooked.__init__(other)
        other.root = Path(os.path.abspath(root))
        other.start = self.start
        other.log = self.log[:length]
        other._live = self.start.copy()
        for change in other.log:
            other._live.apply(change)
        other._open = {}
        build(other._live.tree().items(), other.root)
        return other

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().intercept(name, *args, **kwargs)
        except OSError:
            if name in ("fsync", "fdatasync") and args[0] in self._open:
                self.log.append(LostSync(self._open[args[0]]))
            elif name == "close":
                self._open.pop(args[0], None)
            raise
        record = getattr(self, f"_on_{name}", None)
        if record is not None:
            record(result, *args, **kwargs)
        return result

    def _note(self, change: Change) -> None:
        self._live.apply(change)
        self.log.append(change)

    def _find(self, path: str) -> int | None:
        """Return the number of a directory of the tree by its absolute path."""
        number = ROOT
        if path == os.fspath(self.root):
            return number
        if not path.startswith(os.fspath(self.root) + os.sep):
            return None
        for part in Path(path).relative_to(self.root).parts:
            number = self._live.directories[number][part]
        return number

    # -- one method for each call that changes something -------------------------------------------

    def _on_mkdir(self, _: None, path: str, mode: int) -> None:
        parent = self._find(os.path.dirname(path))
        if parent is not None:
            number = self._live.number()
            self._note(Link(parent, os.path.basename(path), number, is_directory=True))

    def _on_open(
        self, fd: int, path: str, flags: int, mode: int = 0, dir_fd: int | None = None
    ) -> None:
        if dir_fd is None:
            number = self._find(path)
        elif dir_fd not in self._open:
            number = None
        else:
            parent = self._open[dir_fd]
            number = self._live.directories[parent].get(path)
            if number is None:
                number = self._live.number()
                self._note(Link(parent, path, number, is_directory=False))
        if number is not None:
            self._open[fd] = number

    def _on_close(self, _: None, fd: int) -> None:
        self._open.pop(fd, None)

    def _on_writev(self, count: int, fd: int, buffers: Sequence[Any], offset: int) -> None:
        if fd in self._open:
            data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)[:count]
            number = self._open[fd]
            self._note(Write(number, offset, data, len(self._live.files[number])))

    def _on_fsync(self, _: None, fd: int) -> None:
        if fd in self._open:
            self._note(Sync(self._open[fd]))

    _on_fdatasync = _on_fsync

    def _on_fallocate(self, _: None, fd: int, length: int) -> None:
        if fd in self._open:
            self._note(Resize(self._open[fd], length, only_grow=True))

    def _on_ftruncate(self, _: None, fd: int, length: int) -> None:
        if fd in self._open:
            self._note(Resize(self._open[fd], length, only_grow=False))

    def _on_rename(self, _: None, src: str, dst: str, dir_fd: int) -> None:
        if dir_fd in self._open:
            parent = self._open[dir_fd]
            self._note(Rename(parent, dst, self._live.directories[parent][src], src))

    def _on_link(self, _: None, name: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        if dst_dir_fd in self._open:
            target = self._live.directories[self._open[src_dir_fd]][name]
            self._note(Link(self._open[dst_dir_fd], name, target, is_directory=False))

    def _on_rmdir(self, _: None, name: str, dir_fd: int) -> None:
        self._on_unlink(_, name, dir_fd)

    def _on_unlink(self, _: None, name: str, dir_fd: int) -> None:
        if dir_fd in self._open:
            self._note(Unlink(self._open[dir_fd], name))

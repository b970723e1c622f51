"""File systems of a test's own: mounted in a process that sees them alone, gone when it ends."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .apart import apart

_NEW_NAMES, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 1 << 14, 1 << 18


def mounted(function: Callable[..., Any], *args: Any, seconds: float = 60) -> Any:
    """Call a function in a process that may mount; skip the test where the system forbids it."""

    def call() -> Any:
        try:
            _enter()
        except OSError as error:
            return error
        return function(*args)

    value = apart(call, seconds=seconds).check()
    if isinstance(value, OSError):
        pytest.skip(f"this system lets no test mount a file system: {value}")
    return value


def mount_full(path: Path, size: int) -> None:
    """Mount an empty file system of so many bytes."""
    path.mkdir()
    _mount(b"none", path, b"tmpfs", 0, b"size=%d" % size)


def make_read_only(path: Path) -> None:
    """Let a directory be read only."""
    _mount(os.fsencode(path), path, None, _BIND, None)
    _mount(None, path, None, _BIND | _REMOUNT | _READ_ONLY, None)


def _enter() -> None:
    """Take names of mounts of one's own; as another user than root, a world of users too."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMES | (_NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(b"none", Path("/"), None, _RECURSIVE | _PRIVATE, None)


def _mount(source: bytes | None, at: Path, kind: bytes | None, flags: int, data: Any) -> None:
    _call("mount", source, os.fsencode(at), kind, ctypes.c_ulong(flags), data)


def _call(name: str, *args: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(0, f"there is no {name}")
    if function(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

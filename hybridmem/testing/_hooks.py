"""Taking the place of the system calls of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hybridmem import _fileio
from hybridmem._fileio import Syscalls

__all__ = ["NAMES", "Hooked", "installed"]

#: The system calls of a store, in the order in which they are defined.
NAMES = tuple(name for name in vars(Syscalls) if not name.startswith("_"))


class Hooked(Syscalls):
    """System calls that pass through one method, `intercept`, on their way to others.

    Parameters
    ----------
    base : Syscalls, optional
        What makes the calls; by default those in use.
    """

    def __init__(self, base: Syscalls | None = None) -> None:
        self.base = base if base is not None else _fileio.calls

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make one call; subclasses do something before, after or instead."""
        return getattr(self.base, name)(*args, **kwargs)


def _through(name: str) -> Callable[..., Any]:
    def method(self: Hooked, *args: Any, **kwargs: Any) -> Any:
        return self.intercept(name, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Pass `{name}` through `intercept`."
    return method


for _name in NAMES:
    setattr(Hooked, _name, _through(_name))


@contextlib.contextmanager
def installed(calls: Syscalls) -> Iterator[None]:
    """Let every store of this process make its system calls through `calls` for a while."""
    before = _fileio.calls
    _fileio.calls = calls
    try:
        yield
    finally:
        _fileio.calls = before

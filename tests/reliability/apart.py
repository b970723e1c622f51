"""Calling a function in a process of its own, with limits on its time and a look at its memory."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: What ru_maxrss counts in.
_UNIT = 1 if sys.platform == "darwin" else 1024
#: How much longer the clock may go on than the process has computed: others compute as well.
_CLOCK = 3
_WAIT = 0.25


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes
    ----------
    value : object
        What it returned.
    failure : str
        The traceback, where it raised; else what ended the process: a signal, or the time limit.
    grown : int
        Bytes by which the memory of the process grew at most.
    """

    value: Any
    failure: str
    grown: int

    def check(self) -> Any:
        """Return the value; AssertionError where there is none."""
        assert not self.failure, self.failure
        return self.value


def apart(
    function: Callable[..., Any], *args: Any, seconds: float = 10, address_space: int = 0
) -> Outcome:
    """Call a function in a forked process.

    Parameters
    ----------
    seconds : float, default 10
        After so many of its own it is killed, and after three times as many of the clock.
    address_space : int, optional
        Bytes of virtual memory that it may take besides what it has.
    """
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(told)
            most = math.ceil(seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
            _answer(tells, function, args, address_space)
        finally:
            os._exit(0)
    os.close(tells)
    try:
        data, is_late = _read(told, _CLOCK * seconds)
    finally:
        os.close(told)
        os.kill(child, signal.SIGKILL)  # it has answered, or is late; else it is dead already
        _, status = os.waitpid(child, 0)
    if data.endswith(b"."):  # a whole pickle
        return pickle.loads(data)  # type: ignore[no-any-return]
    if is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Outcome(None, f"still running after {seconds} s", 0)
    if os.WIFSIGNALED(status):
        return Outcome(None, f"ended by {signal.Signals(os.WTERMSIG(status)).name}", 0)
    return Outcome(None, f"ended with status {os.WEXITSTATUS(status)} and no answer", 0)


def _answer(
    fd: int, function: Callable[..., Any], args: tuple[Any, ...], address_space: int
) -> None:
    before = peak_memory()
    if address_space:
        limit = _virtual_bytes() + address_space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    value, failure = None, ""
    try:
        value = function(*args)
    except BaseException:
        failure = traceback.format_exc()
    grown = peak_memory() - before
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(pickle.dumps(Outcome(value, failure, grown)))


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _read(fd: int, seconds: float) -> tuple[bytes, bool]:
    """Read until the other end is closed or the time is over: bytes, whether it was late.

    Time is counted in short waits, so that a pause of the whole machine counts for little.
    """
    data, waits = b"", round(seconds / _WAIT)
    while waits > 0:
        ready, _, _ = select.select([fd], [], [], _WAIT)
        if not ready:
            waits -= 1
            continue
        part = os.read(fd, 1 << 16)
        if not part:
            return data, False
        data += part
    return data, True

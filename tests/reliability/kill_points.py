"""SIGKILL at chosen system calls: each one of a store's life in turn.

In a forked process that kills itself before, after or within its k-th call; and, where strace is
installed, in a process of its own that knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybridmem
from hybridmem.testing import Hooked, installed

from .crashes import Scratch, found_in
from .histories import HISTORIES, Life

#: What is traced: calls that change something, none of which an interpreter makes as it starts.
TRACED = "pwritev,fsync,fdatasync,renameat,unlinkat,ftruncate,fallocate,mkdir,flock"
WHEN = ("before", "after", "within")


class Teller(Hooked):
    """System calls as they are; marks are told to another process. Counts the calls."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__()
        self.mark = tell
        self.count = 0

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().intercept(name, *args, **kwargs)


class Killer(Teller):
    """Kills its process at the k-th call."""

    def __init__(self, tell: Callable[[str], object], at: int, when: str) -> None:
        super().__init__(tell)
        self.at, self.when = at, when

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.count != self.at:
            return super().intercept(name, *args, **kwargs)
        if self.when == "within" and name == "writev":
            fd, buffers, offset = args
            data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
            self.base.writev(fd, [data[: len(data) // 2]], offset)
        elif self.when == "after":
            with contextlib.suppress(OSError):  # a call that fails is one too
                super().intercept(name, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")


def live(name: str, root: Path, teller: Teller) -> Life:
    """Live through a history."""
    steps, config = HISTORIES[name]
    life = Life(root, teller, **config)
    with installed(teller):
        steps(life)
    return life


def sweep(name: str, when: str, scratch: Scratch, *, first: int = 0, step: int = 1) -> int:
    """Kill at every `step`-th call; check what is left each time; return the number of kills."""
    teller = Teller(lambda text: None)
    reference = live(name, scratch.new(), teller)
    kills = 0
    for at in range(first, teller.count, step):
        root = scratch.new()
        marks = _killed(name, root, at, when)
        if marks is None:  # as many calls as the reference made, but for a few
            assert at > 0.9 * teller.count, f"{name} did not come to call {at}"
            return kills
        check(reference, root, marks, f"{name}, killed {when} call {at}")
        kills += 1
    return kills


def check(reference: Life, root: Path, marks: list[str], what: str) -> None:
    """Open what a killed process has left: as a reader, as a writer, and go on with it."""
    allowed = reference.allowed[marks[-1] if marks else ""]
    path = root / "mem"
    try:
        seen = found_in(path, "r", allowed)
        if seen is not None:
            assert found_in(path, "r+", [seen]) is seen
            with hybridmem.open(path) as store:
                store.put([[1.0] * 4], [[1.0] * 4], 0)
                store.flush()
                assert len(store) >= min(len(seen.items) + 1, store.config.max_entries or 1 << 62)
    except (AssertionError, hybridmem.HybridMemError) as error:
        raise AssertionError(f"{what}, after {marks[-1:]}: {error}") from error
    finally:
        shutil.rmtree(root)


def _killed(name: str, root: Path, at: int, when: str) -> list[str] | None:
    """Let a process live through a history until it kills itself; return its marks.

    None if it came to its end.
    """
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(told)
            live(name, root, Killer(lambda text: os.write(tells, f"{text}\n".encode()), at, when))
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(told) as pipe:
        marks = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    return marks if os.WIFSIGNALED(status) else None


# --- with strace ---------------------------------------------------------------------------------


def traced_sweep(name: str, scratch: Scratch, *, first: int = 1, step: int = 1) -> int:
    """Kill a fresh process at every `step`-th of its traced system calls; return the number."""
    reference = live(name, scratch.new(), Teller(lambda text: None))
    kills = 0
    for at in range(first, 1 << 20, step):
        root = scratch.new()
        marks, was_killed = _traced(name, root, at)
        if not was_killed:
            return kills
        check(reference, root, marks, f"{name}, killed at traced call {at}")
        kills += 1
    return kills


def _traced(name: str, root: Path, at: int) -> tuple[list[str], bool]:
    package = Path(hybridmem.__file__).resolve().parents[1]
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            "strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={TRACED}",
            "-e", f"inject={TRACED}:signal=SIGKILL:when={at}",
            sys.executable, "-m", "tests.reliability.kill_points", name, os.fspath(root),
        ],
        capture_output=True,
        text=True,
        cwd=tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.fspath, (package, tests)))},
        timeout=600,
    )  # fmt: skip
    was_killed = done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert was_killed or done.returncode == 0, done.stderr
    return done.stdout.splitlines(), was_killed


if __name__ == "__main__":
    live(sys.argv[1], Path(sys.argv[2]), Teller(lambda text: print(text, flush=True)))

"""SIGKILL at chosen system calls; at all of them in the torture run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from .crashes import Scratch
from .histories import HISTORIES
from .kill_points import WHEN, sweep, traced_sweep

#: Long lives, and those that differ in sizes only, are left to the torture run.
NAMES = [name for name in HISTORIES if name not in ("failed-syncs", "evictions", "wide-records")]
#: One in so many calls.
STEP = 61


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_a_call(name: str, when: str, scratch: Scratch) -> None:
    first = WHEN.index(when) * 13
    assert sweep(name, when, scratch, first=first, step=STEP) > 0


def test_killed_at_a_traced_call(scratch: Scratch) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    assert traced_sweep("evictions-one-shard", scratch, first=3, step=40) > 1

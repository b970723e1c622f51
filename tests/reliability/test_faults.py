"""Whatever system call fails: a typed error, the old state or the new, everything given back."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from .crashes import Scratch
from .faults import OPENINGS, OPERATIONS, kinds, sweep, sweep_opening


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.parametrize(("kind", "forever"), list(kinds()))
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kth_call_fails(name: str, kind: str, forever: bool, scratch: Scratch) -> None:
    assert sweep(name, kind, forever, scratch, step=1 if name == "flush" else 7) > 0


@pytest.mark.parametrize(("kind", "forever"), list(kinds()))
@pytest.mark.parametrize("name", OPENINGS)
def test_opening_fails(name: str, kind: str, forever: bool, scratch: Scratch) -> None:
    assert sweep_opening(name, kind, forever, scratch, step=3) > 4


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fails_gives_its_memory_back(name: str, scratch: Scratch) -> None:
    """Failing over and over takes no more memory than failing once."""
    sweep(name, "ENOSPC", True, scratch, step=3)
    tracemalloc.start()
    try:
        taken: list[int] = []
        while len(taken) < 3 or (len(taken) < 8 and taken[-1] - taken[-2] >= 1 << 14):
            sweep(name, "ENOSPC", True, scratch, step=3)
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert taken[-1] - taken[-2] < 1 << 14, taken

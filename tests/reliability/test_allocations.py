"""An allocation that fails: MemoryError or an error of ours, then the old state or the new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .allocations import is_possible, sweep
from .crashes import Scratch
from .faults import OPERATIONS


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.skipif(not is_possible(), reason="this interpreter cannot make an allocation fail")
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kth_allocation_fails(name: str, count: int, scratch: Scratch) -> None:
    tally = sweep(name, count, scratch, first=7 * count, step=397)
    assert tally.failed > 1
    assert tally.refused > 0
    assert tally.misnamed <= tally.refused // 4

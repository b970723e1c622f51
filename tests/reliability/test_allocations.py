"""An allocation that fails: MemoryError or an error of ours, then the old state or the new."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hybridmem._slabs import Pool

from .allocations import REFUSALS, _testcapi, is_possible, sweep
from .apart import apart
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
    assert tally.misnamed <= max(1, tally.refused // 4)  # numpy and Cython name some otherwise
    assert tally.died == 0


def no_memory_for_a_tensor(shape: tuple[int, int], at: int) -> None:
    pool = Pool()
    _testcapi.set_nomemory(at, at + 20)
    try:
        pool.empty(shape, np.float32)
    except REFUSALS:
        pass
    finally:
        _testcapi.remove_mem_hooks()


@pytest.mark.skipif(not is_possible(), reason="this interpreter cannot make an allocation fail")
@pytest.mark.parametrize("shape", [(10, 4), (1000, 1000)])
def test_no_memory_for_a_tensor(shape: tuple[int, int]) -> None:
    """numpy's `__array_interface__` ends the interpreter then."""
    Pool().empty(shape, np.float32)
    for at in range(40):
        assert not (failure := apart(no_memory_for_a_tensor, shape, at).failure), (at, failure)

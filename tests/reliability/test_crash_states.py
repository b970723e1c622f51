"""Every crash state of every operation opens, in the last acknowledged state or the one in flight.

`python -m tests.reliability.torture --only crashes` tries many more combinations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .crashes import Scratch, check_kills, check_power
from .histories import HISTORIES

#: One in so many states is opened here, fewer where there are many.
SAMPLES = {"plain": 3, "spills": 60, "evictions": 60, "failed-syncs": 60}


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.parametrize("name", HISTORIES)
def test_power_cut(name: str, scratch: Scratch) -> None:
    assert check_power(name, scratch, limit=8, sample=SAMPLES.get(name, 8)).states > 10


@pytest.mark.parametrize("name", ["plain", "evictions-one-shard", "full-disk"])
def test_power_cut_during_the_recovery_from_a_kill(name: str, scratch: Scratch) -> None:
    assert check_kills(name, scratch, limit=4, sample=4, every=4).states > 3

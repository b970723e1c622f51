"""Every crash state of every operation opens: the last acknowledged state or the one in flight.

One state in so many is opened here; tests.reliability.torture opens all of them, and those of
failed syncs, which take longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .crashes import Scratch, check_kills, check_power
from .histories import HISTORIES

#: One in so many states is opened here, fewer where there are many.
SAMPLES = {"plain": 5, "spills": 90, "evictions": 90}


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.parametrize("name", [name for name in HISTORIES if name != "failed-syncs"])
def test_power_cut(name: str, scratch: Scratch) -> None:
    assert check_power(name, scratch, limit=8, sample=SAMPLES.get(name, 8)).states > 10


def test_power_cut_on_a_disk_that_was_full(scratch: Scratch) -> None:
    """All states, as few of them tell of a sync that is missing."""
    assert check_power("full-disk", scratch, limit=8, deep=False).states > 500


@pytest.mark.parametrize("name", ["plain", "evictions-one-shard", "full-disk"])
def test_power_cut_during_the_recovery_from_a_kill(name: str, scratch: Scratch) -> None:
    assert check_kills(name, scratch, limit=4, sample=4, every=4).states > 3

"""Some hundred damaged stores (ten thousand in the torture run): no answer is silently wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .crashes import Scratch
from .mutations import SPECIMENS, WAYS, look, run, specimen


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


def test_damaged_stores(scratch: Scratch) -> None:
    tally = run(300, 1_000_000, scratch)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["refused"] > 150


@pytest.mark.parametrize("way", WAYS)
def test_stores_that_are_not_damaged(way: str, scratch: Scratch) -> None:
    commits = specimen(scratch.new() / "mem", 1, SPECIMENS["float32"])
    for commit in commits:
        assert look(scratch.new(), commit.files, way, commits, False) == "right"


@pytest.mark.parametrize("way", ["mmap", "pread", "verify", "writer"])
def test_a_source_that_was_changed_is_refused(way: str, scratch: Scratch) -> None:
    """It stands in the header of a shard, and only the checksum of that covers it."""
    commits = specimen(scratch.new() / "mem", 1, SPECIMENS["float32"])
    files = {
        name: data.replace(b"passage 1", b"passage 2") for name, data in commits[0].files.items()
    }
    assert files != commits[0].files
    assert look(scratch.new(), files, way, commits, False) == "refused"


def test_a_wrong_answer_is_found(scratch: Scratch) -> None:
    """One store in the place of another is sound in itself, and holds other things."""
    commits, other = (specimen(scratch.new() / "mem", n, SPECIMENS["float32"]) for n in (1, 2))
    with pytest.raises(AssertionError, match="entry 1 is"):
        look(scratch.new(), other[-1].files, "mmap", commits, False)

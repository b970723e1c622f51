"""Whatever system call fails: a typed error, the old state or the new, everything given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridmem
from hybridmem.testing import Faults, installed

from .crashes import Scratch
from .faults import OPERATIONS, descriptors, kinds, sweep
from .histories import CONFIG


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch()
    yield scratch
    scratch.remove()


@pytest.mark.parametrize(("kind", "forever"), list(kinds()))
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kth_call_fails(name: str, kind: str, forever: bool, scratch: Scratch) -> None:
    assert sweep(name, kind, forever, scratch, step=7) > 0


@pytest.mark.parametrize(("kind", "forever"), list(kinds()))
@pytest.mark.parametrize("mode", ["create", "r", "r+"])
def test_opening_fails(mode: str, kind: str, forever: bool, tmp_path: Path) -> None:
    if mode != "create":
        hybridmem.create(tmp_path / "mem", **CONFIG).close()
    before = descriptors()
    for at in range(60):
        path = tmp_path / f"new{at}" if mode == "create" else tmp_path / "mem"
        faults = Faults(at, kind, forever=forever)
        with installed(faults):
            try:
                if mode == "create":
                    hybridmem.create(path, **CONFIG).close()
                else:
                    hybridmem.open(path, mode=mode).close()
            except hybridmem.HybridMemError:
                pass
        assert descriptors() == before
        if path.joinpath("index.json").exists():
            hybridmem.open(path).close()
        else:
            hybridmem.create(path, **CONFIG).close()
        if len(faults.names) <= at:
            return
    raise AssertionError("never came to an end")

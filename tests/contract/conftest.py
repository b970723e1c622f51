"""Fixtures of the contract tests."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hybridmem
from hybridmem import _fileio

EMBED = 24
HDC = 512


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ from test to test and never from run to run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out syncs: they take most of the time, and show nothing where nothing crashes.

    What they are for is tested where crashes are, and the state machine waits for every one.
    """
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(_fileio.calls, name, lambda descriptor: None)


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """create() under tmp_path with small defaults; every store is closed after the test."""
    made: list[Any] = []

    def create(name: str = "mem", **fields: Any) -> Any:
        fields = {"embed_dim": EMBED, "hdc_dim": HDC, **fields}
        store = hybridmem.create(tmp_path / name, **fields)
        made.append(store)
        return store

    yield create
    for store in made:
        store.close()


@pytest.fixture
def store(new_store: Callable[..., Any]) -> Any:
    return new_store()

"""Small clusters, for all tests of them."""

from __future__ import annotations

import pytest

from hybridmem import _clusters, _index


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred entries fill many blocks, clusters and groups."""
    monkeypatch.setattr(_index, "FIRST_BLOCK_BYTES", 1)
    monkeypatch.setattr(_index, "HUGE_PAGE", 1)
    monkeypatch.setattr(_index, "BLOCK_BYTES", 1)
    values = {"LARGE": 100, "READ": 1, "BATCH": 16, "ROOM": 8, "GROUP": 5, "SPARSE": 2}
    for name, value in values.items():
        monkeypatch.setattr(_clusters, name, value)

"""One Ray cluster of several nodes on this machine, for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Three nodes, `head` among them, with a disk each."""
    from .nodes import Nodes

    made = Nodes(tmp_path_factory.mktemp("disks"))
    try:
        made.add("a")
        made.add("b")
        yield made
    finally:
        made.stop()


@pytest.fixture
def root(nodes: object, tmp_path: Path) -> str:
    """A directory of its own for a test, on every node's disk."""
    return f"$HYBRIDMEM_DISK/{tmp_path.name}"

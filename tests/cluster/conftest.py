"""One Ray cluster of several nodes on this machine, for all tests of this directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Three nodes, `head` among them, with a disk each; ended before others start a Ray."""
    from .nodes import Nodes

    made = Nodes(tmp_path_factory.mktemp("disks"))
    try:
        made.add("a")
        made.add("b")
        yield made
    finally:
        made.stop()


@pytest.fixture
def three_nodes(nodes: Any) -> Any:
    """The nodes, none of which is gone; a test may kill `b`."""
    if "b" not in nodes:
        nodes.add("b")
    return nodes


@pytest.fixture
def create(nodes: object, root: str) -> Iterator[Callable[..., Any]]:
    """Make clusters; they are ended however the test leaves them."""
    from hybridmem.integrations import ray as hm

    from .helpers import CONFIG

    made: list[Any] = []

    def create(**options: Any) -> Any:
        options = {"partitions": 2, "deadline_s": 60, "write_deadline_s": 60} | options
        made.append(hm.create(root, **CONFIG, **options))
        return made[-1]

    yield create
    for memory in made:
        memory._owners.end()


@pytest.fixture
def root(nodes: object, tmp_path: Path) -> str:
    """A directory of its own for a test, on every node's disk."""
    return f"$HYBRIDMEM_DISK/{tmp_path.name}"

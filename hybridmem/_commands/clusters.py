"""What commands look at: a cluster on Ray, or stores that answer as one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hybridmem import Layered
from hybridmem._commands.group import fail, read_stores

if TYPE_CHECKING:
    from hybridmem.integrations.ray import Cluster

__all__ = ["read_memory"]


@contextlib.contextmanager
def read_memory(paths: Sequence[str], io: str = "mmap") -> Iterator[Layered | Cluster]:
    """Open a cluster by its directory, or one or several stores, as readers."""
    if len(paths) == 1 and os.path.exists(f"{os.path.expandvars(paths[0])}/cluster.json"):
        with _joined(paths[0]) as cluster:
            yield cluster
    else:
        with read_stores(paths, io) as stores:
            yield stores


@contextlib.contextmanager
def _joined(path: str) -> Iterator[Cluster]:
    """Open a cluster by the Ray that runs on this machine."""
    otherwise = f"or name the partitions that this machine has, as in {path}/partition-*"
    try:
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        from hybridmem.integrations import ray as clusters
    except ImportError:
        fail(f"{path} is of a cluster, which needs Ray: pip install 'hybridmem[ray]', {otherwise}")
    joining = not ray.is_initialized()
    if joining:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            fail(f"{path} is of a cluster, and Ray does not run here: `ray start`, {otherwise}")
    try:
        root = path if path.startswith("$") else os.path.abspath(path)
        with clusters.open(root, mode="r") as memory:
            yield memory
    finally:
        if joining:
            ray.shutdown()

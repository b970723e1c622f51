"""Nodes of a Ray cluster on this machine, each with a directory for its disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

HOW = "needs Ray: pip install 'hybridmem[ray]'"
ray: Any = pytest.importorskip("ray", reason=HOW)

#: Ray ends no process of ours where others take nearly all memory of the machine.
ANY_MEMORY = {"RAY_memory_monitor_refresh_ms": "0"}
#: Offline, on loopback, with short paths of sockets.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_METRICS_COLLECTION": "0",
    **ANY_MEMORY,
}
_STORE_BYTES = 80 << 20
#: A node whose processes were killed is known to be gone after a second, not half a minute. One
#: that is only slow has the usual 10 s for each of three answers.
_SYSTEM = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """A cluster whose nodes can be added and killed."""

    def __init__(self, disks: Path) -> None:
        from ray.cluster_utils import Cluster

        os.environ.update(_ENVIRONMENT)
        self._sockets = tempfile.TemporaryDirectory(prefix="hm", dir="/tmp")
        os.environ["RAY_TMPDIR"] = self._sockets.name
        self.disks = disks
        self._by_name: dict[str, Any] = {}
        self._cluster = Cluster()
        self.add("head", include_dashboard=False, _system_config=_SYSTEM)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def add(self, name: str, **options: Any) -> None:
        """Start a node, on the disk of its name."""
        path = self.disks / name
        path.mkdir(exist_ok=True)
        options |= {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
        for attempt in range(3):
            try:
                self._by_name[name] = self._cluster.add_node(
                    env_vars={"HYBRIDMEM_DISK": str(path)}, **options
                )
                return
            except Exception:  # as Ray raises after 30 s, which a busy machine may not make
                if attempt == 2:
                    raise

    def kill(self, name: str) -> None:
        """Kill a node: its raylet, and with it all of its processes; wait until Ray knows."""
        node = self._by_name.pop(name)
        self._cluster.remove_node(node, allow_graceful=False)
        ends = time.monotonic() + 120
        while node.node_id in self.alive():
            assert time.monotonic() < ends, "Ray did not take note"
            time.sleep(0.2)

    @property
    def address(self) -> str:
        """Where other nodes find the head."""
        address: str = self._cluster.address
        return address

    @staticmethod
    def alive() -> set[str]:
        """Return the Ray ids of the nodes that are up."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def stop(self) -> None:
        """End all of it."""
        ray.shutdown()
        self._cluster.shutdown()
        del os.environ["RAY_TMPDIR"]
        self._sockets.cleanup()

"""A memory over three nodes, one of which goes: what answers, what is missing, what comes back.

Starts a Ray cluster of three nodes on this machine, each with a directory for its disk; on real
machines `ray start` does that, and every node uses its own disk under the same path::

    pip install '.[ray]'
    python examples/ray_three_nodes.py [--entries 300]

Every partition has two replicas at first. Then the same once more with one replica, where queries
say which partition did not answer, until a node with the same disk is there again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

# Offline, and on this machine only.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")

import ray
from ray.cluster_utils import Cluster

import hybridmem
from hybridmem.integrations import ray as clusters

WIDTH, TOKENS = 64, 16


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=300)
    entries = parser.parse_args().entries
    with tempfile.TemporaryDirectory(prefix="hm", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        # Ray's workers look for modules first in the directory that a program was started in, where
        # a copy of the source may be that was never built.
        os.chdir(folder)
        nodes = Cluster()
        try:
            by_name = {name: add(nodes, Path(folder), name) for name in "abc"}
            ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
            print("three nodes, and each partition on two of them")
            two_replicas(nodes, by_name.pop("c"), entries)
            by_name["d"] = add(nodes, Path(folder), "d")
            print("\nthree nodes, and each partition on one of them")
            one_replica(nodes, by_name.pop("d"), Path(folder), entries)
        finally:
            ray.shutdown()
            nodes.shutdown()


def add(nodes: Any, folder: Path, disk: str, **options: Any) -> Any:
    """Start a node with a directory for its disk."""
    path = folder / f"disk-{disk}"
    path.mkdir(exist_ok=True)
    return nodes.add_node(
        num_cpus=1, object_store_memory=80 << 20, env_vars={"DISK": str(path)}, **options
    )


def remove(nodes: Any, node: Any) -> None:
    """Take a node away, with all of its processes."""
    nodes.remove_node(node)
    print("  a node is gone")


def two_replicas(nodes: Any, victim: Any, entries: int) -> None:
    """Nothing is missing, and new replicas are made of what is left."""
    with clusters.create("$DISK/two", partitions=3, replicas=2, embed_dim=WIDTH) as memory:
        rng = np.random.default_rng(0)
        keys = rng.standard_normal((entries, TOKENS, WIDTH), np.float32)
        for layer, chunk in enumerate(keys):
            memory.put(chunk, chunk, layer % 6)
        memory.flush()
        ask(memory, keys)
        remove(nodes, victim)
        ask(memory, keys)
        try:
            memory.flush()
        except hybridmem.PartitionError as error:
            print(f"  flush: {len(error.partitions)} replicas did not commit")
        until_gone(victim)
        for made in memory.repair():
            print(f"  made again: {made.split(' (')[0]}")
        memory.flush()
        ask(memory, keys)


def one_replica(nodes: Any, victim: Any, folder: Path, entries: int) -> None:
    """Answers name what is missing; it is back with the disk."""
    with clusters.create(
        "$DISK/one", partitions=3, route="hash", embed_dim=WIDTH, deadline_s=5
    ) as memory:
        rng = np.random.default_rng(1)
        keys = rng.standard_normal((entries, TOKENS, WIDTH), np.float32)
        for chunk in keys:
            memory.put(chunk, chunk, 0)
        ask(memory, keys)
        remove(nodes, victim)
        try:
            memory.query(keys[0], 0)
        except hybridmem.PartitionError as error:
            print(f"  query: {', '.join(error.partitions)} did not answer")
        memory.on_missing = "report"
        hits = memory.query(keys[0], 0, entries)
        print(f"  query: {len(hits)} hits, missing: {', '.join(hits.missing)}")
        until_gone(victim)
        add(nodes, folder, "d")
        memory.on_missing, memory.deadline_s = "raise", 30
        for made in memory.repair():
            print(f"  there again: {made.split(' (')[0]}")
        ask(memory, keys)


def until_gone(node: Any) -> None:
    """Wait until Ray has taken note that a node is gone, which takes up to half a minute."""
    while any(one["Alive"] and one["NodeID"] == node.node_id for one in ray.nodes()):
        time.sleep(0.5)


def ask(memory: Any, keys: Any) -> None:
    """Look for some entries by their own keys."""
    layers = len(memory.stats().entries_by_layer)
    begun = time.perf_counter()
    at = range(0, len(keys), max(1, len(keys) // 20))
    right = sum(
        np.array_equal(memory.query(keys[one], one % layers, 1)[0].keys, keys[one]) for one in at
    )
    each = (time.perf_counter() - begun) / len(at)
    print(f"  {len(memory)} entries; {right} of {len(at)} found; {1e3 * each:.1f} ms a query")


if __name__ == "__main__":
    main()

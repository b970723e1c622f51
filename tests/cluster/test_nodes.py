"""Nodes that are killed: their partitions are answered for, named, and brought back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hybridmem

from .helpers import answers, at, inside, matrix, put, replicas, wait_until, within_deadline
from .nodes import HOW, Nodes

ray: Any = pytest.importorskip("ray", reason=HOW)


def on(memory: Any, nodes: Nodes, name: str) -> list[int]:
    """The partitions of which a replica is on the disk of a node."""
    root = str(nodes.disks / name)
    return [
        number
        for number in range(len(memory.replicas()))
        if any(one.disk.root.startswith(root) for one in replicas(memory, number))
    ]


def test_other_replicas_answer_for_a_node_that_is_gone(three_nodes: Nodes, create: Any) -> None:
    nodes = three_nodes
    memory = create(partitions=3, replicas=2, route="hash")
    put(memory, range(30))
    memory.flush()
    put(memory, range(30, 45))
    wanted = answers(memory)
    lost = on(memory, nodes, "b")
    assert len(lost) == 2
    nodes.kill("b")
    assert answers(memory) == wanted
    put(memory, range(45, 48))
    with pytest.raises(hybridmem.PartitionError) as caught:
        memory.flush()
    assert len(caught.value.partitions) == 2
    assert all("/b/" in one for one in caught.value.partitions)
    made = memory.repair()
    assert sorted(int(one.split("-")[1][:4]) for one in made) == lost
    memory.flush()
    assert on(memory, nodes, "b") == []
    wanted = answers(memory)
    for number in lost:  # what was made holds all of it
        memory._owners.all[number].replicas.reverse()
    assert answers(memory) == wanted
    assert sum(map(len, wanted)) == 48
    nodes.add("b")  # what is on its disk is out of date, and known to be
    memory.close()
    from hybridmem.integrations import ray as hm

    with hm.open(memory.path, deadline_s=60) as again:
        assert answers(again) == wanted
        assert on(again, nodes, "b") == []


def test_partition_of_a_node_that_comes_back(three_nodes: Nodes, create: Any) -> None:
    nodes = three_nodes
    memory = create(partitions=3, route="hash")
    put(memory, range(30))
    memory.flush()
    put(memory, range(30, 45))  # not flushed: kept here
    wanted = answers(memory)
    (lost,) = on(memory, nodes, "b")
    nodes.kill("b")
    name = f"partition-{lost:04d}"
    with pytest.raises(hybridmem.PartitionError, match=name):
        memory.query(matrix(1, 1), 0)
    memory.on_missing = "report"
    left = [one[0] for one in wanted[0] if one[0] % 3 != lost]

    def reported() -> None:
        begun = time.monotonic()
        hits = memory.query(matrix(1000, 1), 0, 50)
        assert time.monotonic() - begun < 40
        assert hits.missing == (name,)
        assert [hit.entry_id for hit in hits] == left

    within_deadline(memory, reported)
    with pytest.raises(hybridmem.PartitionError, match=name):
        memory.repair()
    nodes.add("b")  # another node, with the same disk
    memory.deadline_s = 60
    (made,) = memory.repair()
    assert made.startswith(name)
    assert answers(memory) == wanted
    memory.flush()
    assert put(memory, range(45, 46)) == [46]


def test_partition_is_fetched_from_where_copies_are(
    three_nodes: Nodes, create: Any, root: str, tmp_path: Path
) -> None:
    nodes = three_nodes
    pytest.importorskip("fsspec", reason="needs fsspec: pip install 'hybridmem[remote]'")
    memory = create(partitions=3, remote=f"file://{tmp_path}/copies", shard_max_bytes=2000)
    ids = put(memory, range(30))
    memory.delete(ids[0])
    memory.flush()
    before = {one: one.stat().st_mtime_ns for one in (tmp_path / "copies").rglob("shard_*")}
    assert len(before) > 6
    put(memory, range(30, 33))
    memory.flush()
    after = {one: one.stat().st_mtime_ns for one in (tmp_path / "copies").rglob("shard_*")}
    assert all(after[one] == before[one] for one in before)  # what never changes is copied once
    assert len(list((tmp_path / "copies").rglob("index.json"))) == 3
    put(memory, range(33, 36))
    wanted = answers(memory)
    (lost,) = on(memory, nodes, "b")
    nodes.kill("b")
    shutil.rmtree(nodes.disks / "b")
    (made,) = memory.repair()
    assert made.startswith(f"partition-{lost:04d}")
    assert answers(memory) == wanted
    assert sum(map(len, wanted)) == 35
    memory.flush()


def test_copy_that_fails_is_named(create: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: pip install 'hybridmem[remote]'")
    memory = create(partitions=1, remote=f"file://{tmp_path}/copies")
    put(memory, range(3))
    (tmp_path / "copies" / "partition-0000").write_text("in the way")
    with pytest.raises(hybridmem.PartitionError, match=r"partition-0000.*copying to"):
        memory.flush()
    assert memory._owners.all[0].journal
    (tmp_path / "copies" / "partition-0000").unlink()
    memory.flush()
    assert not memory._owners.all[0].journal


def test_disk_that_is_really_full(nodes: Nodes, create: Any) -> None:
    before = nodes.alive()
    with subprocess.Popen(
        [sys.executable, "-c", SMALL_DISK, str(nodes.disks / "small"), nodes.address],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            wait_until(lambda: process.poll() is not None or nodes.alive() > before)
            if process.poll() == REFUSED:
                pytest.skip("this system lets no test mount a file system")
            check_full_disk(nodes, create)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            wait_until(lambda: nodes.alive() <= before)


#: How a program ends that may not mount.
REFUSED = 77
#: Starts a node on a file system of 1 MiB, which it and its processes alone see.
SMALL_DISK = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, ".")
from reliability import mounts
path, address = sys.argv[1:]
try:
    mounts._enter()
except OSError:
    sys.exit({REFUSED})
mounts.mount_full(Path(path), 1 << 20)
os.environ["HYBRIDMEM_DISK"] = path
del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
options = ["--block", "--num-cpus=1", "--object-store-memory=80000000", "--address=" + address]
os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", "start", *options])
"""


def check_full_disk(nodes: Nodes, create: Any) -> None:
    def fill(self: Any) -> None:
        """Leave not a byte on the disk of an actor."""
        import contextlib

        path = self._path.parent / "filler"
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    memory = create(partitions=4, route="hash")
    (small,) = on(memory, nodes, "small")
    put(memory, range(20))
    memory.flush()
    inside(at(memory, small), fill)
    put(memory, range(20, 60))
    wanted = answers(memory)
    with pytest.raises(hybridmem.PartitionFullError) as caught:
        memory.flush()
    assert caught.value.partitions == (str(replicas(memory, small)[0]),)
    assert answers(memory) == wanted
    inside(at(memory, small), lambda self: (self._path.parent / "filler").unlink())
    memory.flush()
    ray.kill(at(memory, small), no_restart=False)
    assert answers(memory) == wanted
    memory.close()


def test_more_replicas_than_disks_are_refused(create: Any) -> None:
    with pytest.raises(ValueError, match=r"replicas: got 9, but the nodes have \d disks of their"):
        create(replicas=9)


def test_a_second_cluster_in_one_place_is_refused(create: Any) -> None:
    create(partitions=1)
    with pytest.raises(hybridmem.StoreExistsError, match="holds a cluster"):
        create(partitions=1)

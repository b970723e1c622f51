"""The actor that holds one replica of a partition, and the task that looks at a node's disk."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridmem._fileio import Directory, path_of
from hybridmem.integrations.ray._partition import Partition, Reply, pieces_of, replied
from hybridmem.integrations.ray._remote import download

__all__ = ["CLUSTER_NAME", "START_S", "Disk", "Places", "claim", "disks", "partition_name"]

CLUSTER_NAME = "cluster.json"
_NAMESPACE = "hybridmem"
#: Seconds for starting workers on every node.
START_S = 60.0


class Disk(NamedTuple):
    """A directory on the disk of a node.

    Attributes
    ----------
    node_id : str
    host : str
    root : str
        The directory, environment variables of the node expanded.
    identity : tuple of int
        Device and inode: nodes that share a file system have one disk.
    about : dict or None
        What cluster.json in it says.
    partitions : tuple of int
        The partitions that are there.
    """

    node_id: str
    host: str
    root: str
    identity: tuple[int, int]
    about: dict[str, Any] | None
    partitions: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.host}:{self.root} (node {self.node_id[:8]})"


def partition_name(number: int) -> str:
    """Return the name of a partition's directory."""
    return f"partition-{number:04d}"


def _look(root: str, make: bool) -> tuple[str, tuple[int, int], Any, tuple[int, ...]] | str:
    """Say what of a cluster is on the disk of this node."""
    path = path_of(os.path.expandvars(root), "root")
    if "$" in str(path):
        return f"root: {root!r} names an environment variable that this node does not have"
    try:
        directory = Directory.make(path) if make else Directory(path)
    except FileNotFoundError:
        return f"there is no directory {path}"
    with contextlib.closing(directory):
        names = directory.names()
        about = None
        if CLUSTER_NAME in names:
            about = json.loads(directory.read_file(CLUSTER_NAME, 1 << 20))
    held = [
        int(name.removeprefix("partition-"))
        for name in names
        if name.startswith("partition-") and (path / name / "index.json").exists()
    ]
    at = os.stat(path)
    return str(path), (at.st_dev, at.st_ino), about, tuple(sorted(held))


def _found(root: str, about: dict[str, Any]) -> None:
    """Write down which cluster the directory belongs to."""
    with contextlib.closing(Directory(Path(root))) as directory:
        data = json.dumps(about, indent=1).encode()
        directory.rename(directory.write_temporary([(0, [data])], CLUSTER_NAME), CLUSTER_NAME)
        directory.sync()


def _at(node_id: str) -> Any:
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


_TASK = {"num_cpus": 0, "max_retries": 0}


def disks(root: str, *, make: bool, seconds: float) -> tuple[list[Disk], dict[str, str]]:
    """Look at every node that is up.

    Returns
    -------
    list of Disk
        One for each disk, whichever nodes share it.
    dict of str to str
        Why a node has none, by the node.
    """
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    look = ray.remote(**_TASK)(_look)
    refs = {
        look.options(scheduling_strategy=_at(node_id)).remote(root, make): node_id
        for node_id in nodes
    }
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
    found: dict[tuple[int, int], Disk] = {}
    without = {nodes[refs[ref]]: "it did not answer" for ref in refs if ref not in ready}
    for ref in ready:
        node_id = refs[ref]
        try:
            said = ray.get(ref)
        except ray.exceptions.RayError as error:
            said = f"{error}".splitlines()[0]
        if isinstance(said, str):
            without[nodes[node_id]] = said
        else:
            found.setdefault(said[1], Disk(node_id, nodes[node_id], *said))
    return sorted(found.values(), key=lambda disk: (disk.host, disk.root)), without


def claim(disk: Disk, about: dict[str, Any]) -> None:
    """Write down which cluster a disk belongs to."""
    task = ray.remote(**_TASK)(_found).options(scheduling_strategy=_at(disk.node_id))
    ray.get(task.remote(disk.root, about), timeout=START_S)


class _Actor:
    """A partition as Ray calls it: every answer is a Reply."""

    def __init__(self, path: str, mode: str) -> None:
        self._partition: Partition | None = None
        self._path, self._mode = Path(path), mode
        self._open()

    def _open(self) -> Reply:
        """Open what is on the disk; what is wrong with it is said when it is asked."""

        def opened() -> None:
            self._partition = Partition(self._path, self._mode)

        self._opened = replied(opened)
        return self._opened

    def call(self, asked: tuple[str, tuple[Any, ...]]) -> Reply:
        """Call a method of the partition; in one argument, as each costs Ray some 50 us."""
        method, args = asked
        partition = self._partition
        if partition is None:  # it may be that the process before has not let go of it yet
            if self._open()[0] != "ok":
                return self._opened
            partition = self._partition
        return replied(lambda: getattr(partition, method)(*args))

    def copy_from(self, source: Any) -> Reply:
        """Take a copy of the partition that another actor holds in place of what is here."""

        def piece(name: str, offset: int) -> Any:
            return _value(ray.get(source.call.remote(("piece", (name, offset)))))

        def copied() -> None:
            files = _value(ray.get(source.call.remote(("lend", ()))))
            try:
                assert self._partition is not None
                self._partition.replace(
                    (name, pieces_of(name, size, piece)) for name, size in files
                )
            finally:
                source.call.remote(("end_loan", ()))

        return replied(copied)

    def fetch(self, url: str) -> Reply:
        """Take the copy at a URL in place of what is here."""

        def fetched() -> None:
            assert self._partition is not None
            self._partition.replace(download(f"{url}/{self._path.name}"))

        return replied(fetched)


def _value(reply: Reply) -> Any:
    kind, value = reply
    if kind == "error":
        raise value
    return value


class Places(NamedTuple):
    """Where the partitions of a cluster are, and how their actors are started.

    Attributes
    ----------
    root : str
        As the caller gave it.
    about : dict
        What cluster.json says.
    mode : {"r+", "r"}
    threads : int
        Searches that a partition runs at the same time.
    """

    root: str
    about: dict[str, Any]
    mode: str
    threads: int

    @property
    def remote(self) -> str | None:
        """The URL of copies."""
        url: str | None = self.about["remote"]
        return url

    def disks(self, *, make: bool) -> list[Disk]:
        """Return the disks of this cluster; those that belong to none are taken."""
        found, _ = disks(self.root, make=make, seconds=START_S)
        mine = []
        for disk in found:
            if disk.about is None and make:
                claim(disk, self.about)
                disk = disk._replace(about=self.about)
            if disk.about is not None and disk.about["cluster_id"] == self.about["cluster_id"]:
                mine.append(disk)
        return mine

    def start(self, disk: Disk, number: int) -> Any:
        """Start the actor of a partition on the node of a disk."""
        actor = ray.remote(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups={"search": self.threads, "put": 1, "commit": 1},
        )(_Actor)
        # One of its own: a reader has actors for the same partition, on the same node.
        name = f"{self.about['cluster_id'][:8]}/{partition_name(number)}/{secrets.token_hex(4)}"
        return actor.options(
            name=name, namespace=_NAMESPACE, scheduling_strategy=_at(disk.node_id)
        ).remote(str(Path(disk.root) / partition_name(number)), self.mode)

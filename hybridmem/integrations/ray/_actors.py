"""The actor that holds one replica of a partition, and the task that looks at a node's disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridmem._fileio import Directory, path_of
from hybridmem.config import Config
from hybridmem.errors import (
    CorruptStoreError,
    HybridMemError,
    PartitionError,
    StoreExistsError,
    StoreLockedError,
)
from hybridmem.integrations.ray import _views as views
from hybridmem.integrations.ray._partition import Partition, Reply, pieces_of, replied
from hybridmem.integrations.ray._remote import download

__all__ = [
    "CLUSTER_NAME",
    "FORMAT",
    "ROUTES",
    "START_S",
    "Disk",
    "Places",
    "abandon",
    "claim",
    "disks",
    "partition_name",
    "reason",
]

CLUSTER_NAME, _DISK_NAME = "cluster.json", "disk.json"
FORMAT = {"format": "hybridmem-cluster", "format_version": 1}
ROUTES = ("layer", "hash")
_NAMESPACE = "hybridmem"
#: Seconds for starting workers on every node, and for the lock of a disk that nodes share.
START_S, _LOCK_S = 60.0, 10.0
_PARTITION = re.compile(r"partition-(\d{4,9})", re.ASCII)
_KNOWN = re.compile(r"known-(\d{4,9})\.json", re.ASCII)


class Disk(NamedTuple):
    """A directory on the disk of a node.

    Attributes
    ----------
    node_id : str
    host : str
    root : str
        The directory, environment variables of the node expanded.
    identity : tuple of (str, int)
        What is written in disk.json, and the inode: nodes that share a file system have one disk.
        Device and inode alone are the same on nodes that were set up alike.
    about : dict or None
        What cluster.json in it says.
    partitions : tuple of int
        The partitions that are there.
    views : dict of int to int
        By partition the highest view that is known here of any replica.
    """

    node_id: str
    host: str
    root: str
    identity: tuple[str, int]
    about: dict[str, Any] | None
    partitions: tuple[int, ...]
    views: dict[int, int]

    def __str__(self) -> str:
        return f"{self.host}:{self.root} (node {self.node_id[:8]})"


def partition_name(number: int) -> str:
    """Return the name of a partition's directory."""
    return f"partition-{number:04d}"


def reason(error: Exception) -> str:
    """Return in one line what Ray says of a failure, or what failed in a task of ours."""
    cause = getattr(error, "cause", error)
    return f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"


_Seen = tuple[str, tuple[str, int], dict[str, Any] | None, tuple[int, ...], dict[int, int]]


def _look(root: str, make: bool) -> _Seen | str:
    """Say what of a cluster is on the disk of this node, or why nothing is."""
    path = path_of(os.path.expandvars(root), "root")
    if "$" in str(path):
        return f"root: {root!r} names an environment variable that this node does not have"
    try:
        directory = Directory.make(path) if make else Directory(path)
    except FileNotFoundError:
        return f"there is no directory {path}"
    except (HybridMemError, OSError) as error:
        return str(error)
    with contextlib.closing(directory):
        try:
            if make:
                _identify(directory)
            names = directory.names()
            known = (match for name in names if (match := _KNOWN.fullmatch(name)))
            return (
                str(path),
                (_json_of(directory, _DISK_NAME).get("disk_id", ""), os.stat(path).st_ino),
                _about(directory) if CLUSTER_NAME in names else None,
                tuple(
                    sorted(
                        int(match[1])
                        for name in names
                        if (match := _PARTITION.fullmatch(name))
                        and partition_name(int(match[1])) == name
                        and (path / name / "index.json").exists()
                    )
                ),
                {int(match[1]): views.read(directory, match[0]) for match in known},
            )
        except (HybridMemError, OSError) as error:
            return str(error)


def _json_of(directory: Directory, name: str) -> dict[str, Any]:
    """Return the object that a file holds, an empty one where there is none."""
    try:
        value = json.loads(directory.read_file(name, 1 << 20))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        path = str(directory.path / name)
        raise CorruptStoreError(f"{path} is damaged: it is no JSON object", path=path)
    return value


def _about(directory: Directory) -> dict[str, Any]:
    """Return what cluster.json says, checked as far as this version knows it."""
    about = _json_of(directory, CLUSTER_NAME)
    wanted: dict[str, Any] = {"cluster_id": str, "format_version": int}
    if about.get("format_version") == FORMAT["format_version"]:
        wanted |= {"partitions": int, "replicas": int, "route": str, "remote": (str, type(None))}
        wanted |= {"config": dict}
    wrong = [
        name
        for name, kind in wanted.items()
        if name not in about
        or not isinstance(about[name], kind)
        or (kind is int and (isinstance(about[name], bool) or about[name] < 1))
    ]
    if about.get("route", ROUTES[0]) not in ROUTES:
        wrong.append("route")
    try:
        Config(**about.get("config", {"embed_dim": 1}))
    except (TypeError, ValueError):
        wrong.append("config")
    if about.get("format") != FORMAT["format"] or wrong:
        path = str(directory.path / CLUSTER_NAME)
        raise CorruptStoreError(
            f"{path} is damaged: it says no valid {', '.join(wrong) or 'format'}", path=path
        )
    return about


def _write(directory: Directory, name: str, value: dict[str, Any]) -> None:
    data = views.encoded(value)
    directory.rename(directory.write_temporary([(0, [data])], name), name)
    directory.sync()


def _lock(directory: Directory) -> None:
    """Keep out whoever looks at the same disk from another node; closing lets go."""
    ends = time.monotonic() + _LOCK_S
    while True:
        try:
            return directory.lock()
        except StoreLockedError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


def _identify(directory: Directory) -> None:
    """Give a disk what tells it from all others, if it has nothing yet."""
    _lock(directory)
    if _DISK_NAME not in directory.names():
        _write(directory, _DISK_NAME, {"disk_id": secrets.token_hex(16)})
    directory.drop_lock()


def _found(root: str, about: dict[str, Any]) -> None:
    """Write down which cluster the directory belongs to, if that is none yet."""
    with contextlib.closing(Directory(Path(root))) as directory:
        _lock(directory)
        if CLUSTER_NAME in directory.names() and _about(directory) != about:
            raise StoreExistsError(f"{root} holds a cluster; open it, or give another directory")
        _write(directory, CLUSTER_NAME, about)


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
    if not ray.is_initialized():
        raise HybridMemError(
            "Ray does not run in this program: call ray.init() first, which joins the cluster that "
            "`ray start` made on this machine, or starts one"
        )
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    look = ray.remote(**_TASK)(_look)
    refs = {
        look.options(scheduling_strategy=_at(node_id)).remote(root, make): node_id
        for node_id in nodes
    }
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
    found: dict[tuple[str, int], Disk] = {}
    without = {nodes[refs[ref]]: "it did not answer" for ref in refs if ref not in ready}
    for ref in ready:
        node_id = refs[ref]
        try:
            said = ray.get(ref)
        except ray.exceptions.RayError as error:
            said = reason(error)
        if isinstance(said, str):
            without[nodes[node_id]] = said
        else:
            found.setdefault(said[1], Disk(node_id, nodes[node_id], *said))
    return sorted(found.values(), key=lambda disk: (disk.host, disk.root)), without


def claim(disk: Disk, about: dict[str, Any]) -> None:
    """Write down which cluster a disk belongs to.

    Raises
    ------
    StoreExistsError
        If it belongs to another one.
    PartitionError
        If its node did not answer.
    """
    task = ray.remote(**_TASK)(_claimed).options(scheduling_strategy=_at(disk.node_id))
    try:
        reply = ray.get(task.remote(disk.root, about), timeout=START_S)
    except ray.exceptions.RayError as error:
        first = (str(error).splitlines() or [""])[0]
        raise PartitionError(f"{disk}: {type(error).__name__}: {first}", [str(disk)]) from None
    _value(reply)


def _claimed(root: str, about: dict[str, Any]) -> Reply:
    return replied(lambda: _found(root, about))


def abandon(disk: Disk, about: dict[str, Any]) -> None:
    """Remove what was made of a cluster that could not be made whole, as far as that goes."""
    task = ray.remote(**_TASK)(_abandoned).options(scheduling_strategy=_at(disk.node_id))
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(task.remote(disk.root, about), timeout=START_S)


def _abandoned(root: str, about: dict[str, Any]) -> None:
    with contextlib.closing(Directory(Path(root))) as directory:
        if _about(directory) != about:
            return  # another cluster's
        for name in directory.names():
            if _PARTITION.fullmatch(name) and (Path(root) / name / "index.json").exists():
                directory.remove_directory(Directory(Path(root) / name))
        directory.remove(CLUSTER_NAME)
        directory.sync()


class _Actor:
    """A partition as Ray calls it: every answer is a Reply."""

    def __init__(self, path: str, mode: str) -> None:
        self._partition: Partition | None = None
        self._path, self._mode = Path(path), mode
        self._opening = threading.Lock()
        self._open()

    def _open(self) -> Reply:
        """Open what is on the disk; what is wrong with it is said when it is asked."""

        def opened() -> None:
            if self._partition is None:  # another thread may have been quicker
                self._partition = Partition(self._path, self._mode)

        with self._opening:
            return replied(opened)

    def call(self, asked: tuple[str, tuple[Any, ...]]) -> Reply:
        """Call a method of the partition; in one argument, as each costs Ray some 50 us."""
        method, args = asked
        partition = self._partition
        if partition is None:  # it may be that the process before has not let go of it yet
            reply = self._open()
            if reply[0] != "ok":
                return reply
            partition = self._partition
        return replied(lambda: getattr(partition, method)(*args))

    def copy_from(self, source: Any) -> Reply:
        """Take a copy of the partition that another actor holds in place of what is here."""

        def piece(name: str, offset: int) -> Any:
            return _value(ray.get(source.call.remote(("piece", (name, offset)))))

        def copied() -> None:
            files = _value(ray.get(source.call.remote(("lend", ()))))
            try:
                self._to_replace().replace(
                    (name, pieces_of(name, size, piece)) for name, size in files
                )
            finally:
                source.call.remote(("end_loan", ()))

        return replied(copied)

    def fetch(self, url: str) -> Reply:
        """Take the copy at a URL in place of what is here."""

        def fetched() -> None:
            self._to_replace().replace(download(f"{url}/{self._path.name}"))

        return replied(fetched)

    def _to_replace(self) -> Partition:
        """Return the partition, also where what is on the disk cannot be opened."""
        ends = time.monotonic() + _LOCK_S
        while self._partition is None:
            _, trouble = self._open()
            if isinstance(trouble, StoreLockedError):  # by a process that ends just now
                if time.monotonic() > ends:
                    raise trouble
                time.sleep(0.05)
            elif self._partition is None:
                self._partition = Partition(self._path, self._mode, take_up=False)
        return self._partition


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

"""A memory over several machines, on Ray Core.

Entries are spread over partitions: stores on the disks of nodes, each held by an actor. All of them
together answer as one store would.

    from hybridmem.integrations import ray as hm
    memory = hm.create("/data/mem", partitions=8, embed_dim=3584)    # or hm.open("/data/mem")

See docs/scale.md.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

try:
    import ray  # noqa: F401  (its absence is explained)
except ImportError as error:
    raise ImportError(
        f"{error}; hybridmem.integrations.ray needs Ray: pip install 'hybridmem[ray]'"
    ) from error

from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, StoreExistsError, StoreNotFoundError, VersionError
from hybridmem.integrations.ray import _actors
from hybridmem.integrations.ray._actors import FORMAT, ROUTES, START_S, Disk, Places
from hybridmem.integrations.ray._calls import Owner, Replica
from hybridmem.integrations.ray._cluster import Cluster
from hybridmem.integrations.ray._owners import Owners
from hybridmem.integrations.ray._remote import abandon, check_url, claim

__all__ = ["Cluster", "create", "open"]

_ON_MISSING = ("raise", "report")
#: A year: what is longer is more than the system can wait.
_MAX_S = 31_536_000


class _Limits(NamedTuple):
    """How long and how much is waited for, as given to `create` and `open`."""

    deadline_s: float
    write_deadline_s: float
    on_missing: str
    max_inflight_bytes: int
    max_unflushed_bytes: int
    search_threads: int

    def check(self) -> None:
        """Refuse what is no limit."""
        _check_one_of(_ON_MISSING, "on_missing", self.on_missing)
        for name in ("deadline_s", "write_deadline_s"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= _MAX_S:
                raise ValueError(
                    f"{name}: got {value!r}, want seconds, more than 0 and at most {_MAX_S}"
                )
        _check_counts(
            max_inflight_bytes=(self.max_inflight_bytes, 0),
            max_unflushed_bytes=(self.max_unflushed_bytes, 0),
            search_threads=(self.search_threads, 1),
        )


def create(
    root: str,
    *,
    partitions: int,
    replicas: int = 1,
    route: str = "layer",
    remote: str | None = None,
    config: Config | None = None,
    deadline_s: float = 5.0,
    write_deadline_s: float = 60.0,
    on_missing: str = "raise",
    max_inflight_bytes: int = 64 << 20,
    max_unflushed_bytes: int = 256 << 20,
    search_threads: int = 2,
    **fields: Any,
) -> Cluster:
    """Make a new memory on the disks of all nodes of the Ray cluster, and open it for writing.

    Parameters
    ----------
    root : str
        A directory on every node's own disk, made where missing. Environment variables in it are
        expanded on each node.
    partitions : int
        Fixed for ever: take some more than nodes.
    replicas : int, default 1
        Nodes that hold each partition.
    route : {"layer", "hash"}, default "layer"
        "layer" puts layer n into partition n modulo `partitions`: a query asks one partition.
        "hash" spreads the entries of each layer over all partitions by their ids: all search at the
        same time.
    remote : str, optional
        A URL that fsspec knows, such as "s3://bucket/mem" (`pip install 'hybridmem[remote]'`):
        every flush copies there what is new, and `repair` fetches partitions whose disks are gone.
    config : Config, optional
    deadline_s : float, default 5
        Seconds in which a query is answered, whatever happens. With `on_missing="report"` the
        partitions of a layer have half of it, as what the others found is fetched then.
    write_deadline_s : float, default 60
        Seconds for a flush, and for a put that waits for room.
    on_missing : {"raise", "report"}, default "raise"
        What a query does without the answer of a partition: raise PartitionError, or name it in
        `Hits.missing`.
    max_inflight_bytes : int, default 64 MiB
        Keys and values on their way to partitions; a put waits where it would be more.
    max_unflushed_bytes : int, default 256 MiB
        Keys and values kept here for each partition until they are durable there; a put flushes
        where it would be more.
    search_threads : int, default 2
        Searches that a partition runs at the same time.
    **fields
        Fields of `Config`, `embed_dim` among them, where no `config` is given.

    Raises
    ------
    StoreExistsError
        If there is one, or `remote` holds copies of another.
    PartitionError
        If a node did not make its part.
    TypeError, ValueError
        If an argument is invalid, or there are fewer disks than replicas.
    """
    if config is None:
        config = Config(**fields)
    elif fields:
        raise TypeError(f"give a config or its fields, not both: got config and {sorted(fields)}")
    if config.max_entries or config.max_disk_bytes:
        raise ValueError(
            "max_entries and max_disk_bytes must be 0: a cluster evicts nothing; delete entries"
        )
    _check_root(root)
    _check_counts(partitions=(partitions, 1), replicas=(replicas, 1))
    _check_one_of(ROUTES, "route", route)
    limits = _Limits(
        deadline_s, write_deadline_s, on_missing, max_inflight_bytes, max_unflushed_bytes,
        search_threads,
    )  # fmt: skip
    limits.check()
    if remote is not None:
        check_url(remote)
    found, without = _actors.disks(root, make=True, seconds=START_S)
    if len(found) < replicas:
        raise ValueError(
            f"replicas: got {replicas}, but the nodes have {len(found)} disks of their own: "
            f"{[str(disk) for disk in found]}{_reasons(without)}"
        )
    for disk in found:
        if disk.about is not None or disk.partitions or disk.views:
            raise StoreExistsError(f"{disk} holds a cluster; open it, or give another directory")
    about = {
        **FORMAT,
        "cluster_id": secrets.token_hex(16),
        "partitions": partitions,
        "replicas": replicas,
        "route": route,
        "remote": remote,
        "config": config.to_dict(),
    }
    places = Places(root, about, "r+", limits.search_threads)
    if remote is not None:
        claim(remote, _actors.CLUSTER_NAME, about)
    try:
        for disk in found:
            _actors.claim(disk, about)
        owners = []
        for number in range(partitions):
            chosen = [found[(number + turn) % len(found)] for turn in range(replicas)]
            owners.append(Owner(number, [_replica(places, disk, number) for disk in chosen]))
        return _opened(places, owners, limits, config)
    except BaseException:
        for disk in found:
            _actors.abandon(disk, about)
        if remote is not None:
            abandon(remote, _actors.CLUSTER_NAME)
        raise


def open(
    root: str,
    mode: str = "r+",
    *,
    deadline_s: float = 5.0,
    write_deadline_s: float = 60.0,
    on_missing: str = "raise",
    max_inflight_bytes: int = 64 << 20,
    max_unflushed_bytes: int = 256 << 20,
    search_threads: int = 2,
) -> Cluster:
    """Open a memory from what is on the disks of the nodes that are up.

    Parameters
    ----------
    root : str
        As it was given to `create`.
    mode : {"r+", "r"}
        One writer, or any number of readers.
    deadline_s, write_deadline_s, on_missing, max_inflight_bytes, max_unflushed_bytes, \
search_threads
        As for `create`.

    Raises
    ------
    StoreNotFoundError
        If there is none on any node.
    StoreLockedError
        If another writer has it open.
    VersionError
        If a newer version made it.
    CorruptStoreError
        If nodes do not say the same of it.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f'mode must be "r+" or "r", got {mode!r}')
    _check_root(root)
    limits = _Limits(
        deadline_s, write_deadline_s, on_missing, max_inflight_bytes, max_unflushed_bytes,
        search_threads,
    )  # fmt: skip
    limits.check()
    found, without = _actors.disks(root, make=False, seconds=START_S)
    about = _about(root, found, without)
    if about["format_version"] != FORMAT["format_version"]:
        raise VersionError(
            f"the cluster in {root} has format_version {about['format_version']}: install a newer "
            "hybridmem"
        )
    places = Places(root, about, mode, limits.search_threads)
    owners = []
    for number in range(about["partitions"]):
        chosen = [disk for disk in found if number in disk.partitions]
        owner = Owner(number, [_replica(places, disk, number) for disk in chosen])
        owner.view = max(disk.views.get(number, 0) for disk in found)
        owner.absent += _reasons(without)
        owners.append(owner)
    return _opened(places, owners, limits, None)


def _about(root: str, found: Sequence[Disk], without: dict[str, str]) -> dict[str, Any]:
    """Return what the disks say of their cluster, all the same."""
    told = [disk for disk in found if disk.about is not None]
    if not told:
        raise StoreNotFoundError(f"no cluster in {root} on any node{_reasons(without)}")
    first, about = told[0], told[0].about
    assert about is not None
    ids = sorted({disk.about["cluster_id"] for disk in told if disk.about is not None})
    if len(ids) > 1:
        raise ValueError(f"root: nodes hold different clusters in {root}: {ids}")
    for disk in told:
        if disk.about != about:
            raise CorruptStoreError(
                f"{_actors.CLUSTER_NAME} of {first} and of {disk} differ: {about} and {disk.about}"
            )
        if about.get("partitions", math.inf) <= max(disk.partitions, default=-1):
            raise CorruptStoreError(
                f"{disk} holds a partition {max(disk.partitions)}, and {_actors.CLUSTER_NAME} says "
                f"that there are {about['partitions']}"
            )
    return about


def _check_root(root: object) -> None:
    if not isinstance(root, str):
        raise TypeError(f"root must be a string, got {type(root).__name__}")
    if not os.path.isabs(root) and not root.startswith("$"):
        raise ValueError(f"root: got {root!r}, want a path from the root: nodes have no common one")


def _check_one_of(known: tuple[str, ...], name: str, value: object) -> None:
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, want one of {known}")


def _check_counts(**given: tuple[object, int]) -> None:
    for name, (value, least) in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: got {value!r}, want an integer of at least {least}")


def _reasons(without: dict[str, str]) -> str:
    return "".join(f"; {host}: {why}" for host, why in without.items())


def _replica(places: Places, disk: Disk, number: int) -> Replica:
    return Replica(number, disk, places.start(disk, number))


def _opened(
    places: Places,
    owners: list[Owner],
    limits: _Limits,
    config: Config | None,
) -> Cluster:
    """Take up what the disks hold, or make stores of a configuration."""
    made = Owners(
        owners,
        replicas=places.about["replicas"],
        remote=places.remote,
        write_deadline_s=limits.write_deadline_s,
        max_inflight_bytes=limits.max_inflight_bytes,
        max_unflushed_bytes=limits.max_unflushed_bytes,
    )
    try:
        if config is not None:
            made.everywhere("create", config)
        joined = made.join(places.mode == "r", Config(**places.about["config"]))
        cluster = Cluster(
            made,
            places=places,
            config=joined.config,
            next_id=joined.mark.next_entry_id,
            deadline_s=limits.deadline_s,
            on_missing=limits.on_missing,
        )
    except BaseException:
        made.end()
        raise
    return cluster

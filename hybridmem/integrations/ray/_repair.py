"""Bringing partitions back: from another replica, from a disk that is there again, from a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ray

from hybridmem.errors import HybridMemError, PartitionError
from hybridmem.integrations.ray._actors import Disk, Places
from hybridmem.integrations.ray._calls import Job, Owner, Replica
from hybridmem.integrations.ray._owners import Owners, failures
from hybridmem.integrations.ray._partition import State

__all__ = ["repair"]

#: Seconds in which a replica says what it has.
_LOOK_S = 10.0


def repair(owners: Owners, places: Places) -> tuple[list[str], int]:
    """Give every partition as many replicas as it is to have, as far as there are disks for them.

    Returns
    -------
    list of str
        The replicas that were made, or found again.
    int
        The highest next id among them.

    Raises
    ------
    PartitionError
        Naming the partitions that are short of replicas still, and why.
    """
    with owners.committing:
        return _repaired(owners, places)


def _repaired(owners: Owners, places: Places) -> tuple[list[str], int]:
    _leave(owners)
    found = places.disks(make=True)
    failed: dict[Owner, Exception] = {}
    made: list[str] = []
    next_id = 0
    for owner in owners.all:
        changed = False
        while len(owner.replicas) < owners.replicas:
            try:
                replica, state = _another(owners, places, owner, found)
            except HybridMemError as error:
                failed[owner] = error
                break
            next_id = max(next_id, state.next_entry_id)
            made.append(str(replica))
            changed = True
        if changed:
            # Whatever disks come back with what is older are told by it.
            owner.view += 1
            owners.everywhere("set_view", owner.view, of=[owner])
    if failed:
        raise failures("repair", failed)
    return made, next_id


def _leave(owners: Owners) -> None:
    """Give up replicas on nodes that are gone, and those whose store is gone or damaged."""
    up = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    _, failed = owners.gather(owners.jobs("state"), _LOOK_S)
    for owner in owners.all:
        gone = [
            one
            for one in owner.replicas
            if one.disk.node_id not in up
            or not isinstance(failed.get(one, PartitionError("")), PartitionError)
        ]
        owners.give_up(owner, gone)


def _another(
    owners: Owners, places: Places, owner: Owner, found: Sequence[Disk]
) -> tuple[Replica, State]:
    """Return one more replica of a partition, up to date."""
    holding = {one.disk.identity for one in owner.replicas}
    loads = {disk.identity: 0 for disk in found}
    for other in owners.all:
        for one in other.replicas:
            loads[one.disk.identity] = loads.get(one.disk.identity, 0) + 1
    free = sorted(
        (disk for disk in found if disk.identity not in holding),
        key=lambda disk: loads[disk.identity],
    )
    again = [disk for disk in free if owner.number in disk.partitions]
    if not free:
        raise PartitionError(f"no disk is free for it: there are {len(found)}")
    if owner.replicas:
        replica = _on(places, owner, free[0])
        begin, source = replica.actor.copy_from, owner.replicas[0].actor
    elif again:
        replica = _on(places, owner, again[0])
        begin = source = None
    elif places.remote is not None:
        replica = _on(places, owner, free[0])
        begin, source = replica.actor.fetch, places.remote
    else:
        raise PartitionError("no disk that is up holds it")
    try:
        if begin is not None:
            start = begin.options(concurrency_group="commit").remote
            _, failed = owners.gather(
                [Job(replica, owner, [replica], lambda *_: start(source))], math.inf
            )
            if failed:
                raise failures("copying", failed)
        return replica, owners.take_in(owner, replica)
    except BaseException:
        ray.kill(replica.actor, no_restart=True)
        raise


def _on(places: Places, owner: Owner, disk: Disk) -> Replica:
    return Replica(owner.number, disk, places.start(disk, owner.number))

"""Bringing partitions back: from another replica, from a disk that is there again, from a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ray

from hybridmem.errors import HybridMemError, PartitionError
from hybridmem.integrations.ray._actors import Disk, Places
from hybridmem.integrations.ray._calls import Dead, Job, Owner, Replica
from hybridmem.integrations.ray._owners import LEFT_BEHIND, Owners, failures
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
        Naming the partitions that are short of replicas still, and replicas that do not answer;
        and why.
    """
    with owners.committing:
        return _repaired(owners, places)


def _repaired(owners: Owners, places: Places) -> tuple[list[str], int]:
    failed: dict[Any, Exception] = dict(_leave(owners))
    found = places.disks(make=True)
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
            next_id = max(next_id, state.mark.next_entry_id)
            made.append(str(replica))
            changed = True
        if changed:
            # Whatever disks come back with what is older are told by it.
            owner.view += 1
            owner.lack_noted = len(owner.replicas) < owners.replicas
            untold = owners.set_view(owner, owner.replicas)
            if untold:
                raise failures("set_view", untold)
    if failed:
        raise failures("repair", failed)
    return made, next_id


def _leave(owners: Owners) -> dict[Replica, Exception]:
    """Give up replicas on nodes that are gone, dead ones, and damaged or older ones.

    Returns
    -------
    dict of Replica to Exception
        Those that are left and do not answer.
    """
    up = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    states, failed = owners.gather(owners.jobs("state"), _LOOK_S)
    for owner in owners.all:
        gone = [
            one
            for one in owner.replicas
            if one.disk.node_id not in up
            or isinstance(failed.get(one), Dead)
            or not isinstance(failed.get(one, PartitionError("")), PartitionError)
            or (one in states and not states[one].mark.holds(owner.mark))
        ]
        owners.give_up(owner, gone)
    left = [one for owner in owners.all for one in owner.replicas]
    return {one: failed[one] for one in left if one in failed}


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
        key=lambda disk: (owner.number not in disk.partitions, loads[disk.identity]),
    )
    again = [disk for disk in free if owner.number in disk.partitions]
    if not free:
        raise PartitionError(f"no disk is free for it: there are {len(found)}")
    ways: list[tuple[Disk, str, Any]] = [(disk, "found", None) for disk in again]
    if owner.replicas:
        ways = [(free[0], "copy_from", owner.replicas[0].actor)]
    elif places.remote is not None:
        ways.append((free[0], "fetch", places.remote))
    errors = []
    for disk, way, source in ways:
        try:
            return _made(
                owners, Replica(owner.number, disk, places.start(disk, owner.number)), way, source
            )
        except HybridMemError as error:
            errors.append(str(error))
    raise PartitionError("; ".join(errors) or "no disk that is up holds it")


def _made(owners: Owners, replica: Replica, way: str, source: Any) -> tuple[Replica, State]:
    """Return a replica that is up to date, made or found on its disk."""
    owner = owners.all[replica.number]
    alone = Owner(replica.number, [replica])
    try:
        if way == "found":
            if owners.everywhere("state", of=[alone])[replica].view < owner.view:
                raise PartitionError(f"{replica}: {LEFT_BEHIND}")
        else:
            start = getattr(replica.actor, way).options(concurrency_group="commit").remote
            _, failed = owners.gather(
                [Job(replica, alone, [replica], lambda *_: start(source))], math.inf
            )
            if failed:
                raise failures("copying", failed)
        return replica, owners.take_in(owner, replica)
    except BaseException:
        ray.kill(replica.actor, no_restart=True)
        raise

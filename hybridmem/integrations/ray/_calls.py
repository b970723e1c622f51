"""Calls of partitions: with a deadline, of whichever replica answers, caught up if it is behind."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from hybridmem.errors import HybridMemError, PartitionError
from hybridmem.integrations.ray._actors import Disk, partition_name, reason
from hybridmem.integrations.ray._partition import Op
from hybridmem.integrations.ray._views import NOTHING, Mark

__all__ = ["TICK_S", "Calls", "Dead", "Job", "Owner", "Replica"]

#: Seconds between looks at answers, and before a replica that failed is asked again.
TICK_S, _PAUSE_S = 0.1, 0.05
#: Seconds after which is looked again which nodes are up.
_LOOK_S = 1.0


class Dead(PartitionError):
    """The actor of a replica is dead, and Ray does not start it again."""


@dataclasses.dataclass(eq=False)
class Replica:
    """A replica of a partition, and the actor that holds it."""

    number: int
    disk: Disk
    actor: Any
    #: Whether others have committed what it has not, which is written down on their disks.
    left_behind: bool = False

    def __str__(self) -> str:
        return f"{partition_name(self.number)} at {self.disk}"

    def call(self, group: str, method: str, *args: Any) -> Any:
        """Begin a call of the partition."""
        return self.actor.call.options(concurrency_group=group).remote((method, args))


@dataclasses.dataclass(eq=False)
class Owner:
    """All replicas of a partition, the one to ask first in front."""

    number: int
    replicas: list[Replica]
    #: Number of the last operation, and those that may not be durable, with their numbers.
    last: int = 0
    journal: deque[tuple[int, Op]] = dataclasses.field(default_factory=deque)
    journal_bytes: int = 0
    #: What all replicas have on disk at least, before the first operation of the journal.
    mark: Mark = NOTHING
    #: Of the replicas that were not left behind, and whether lacking ones are known by it.
    view: int = 0
    lack_noted: bool = False
    #: Why there is nothing to ask; "" where something was found of it.
    absent: str = "it is on no node that is up"

    def __str__(self) -> str:
        return partition_name(self.number)

    def add(self, op: Op) -> None:
        """Take down an operation."""
        self.last += 1
        self.journal.append((self.last, op))
        self.journal_bytes += op.nbytes

    def shorten(self, last: int) -> None:
        """Let go of what is durable."""
        while self.journal and self.journal[0][0] <= last:
            self.journal_bytes -= self.journal.popleft()[1].nbytes


@dataclasses.dataclass(eq=False)
class Job:
    """A call that one of some replicas is to answer."""

    key: Any
    owner: Owner
    replicas: Sequence[Replica]
    call: Callable[[Replica, float], Any]
    turn: int = 0
    hedged: bool = False
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.several = len(self.replicas) > 1

    def next(self) -> Replica:
        """Return the replica whose turn it is."""
        return self.replicas[self.turn % len(self.replicas)]


class Calls:
    """Asks partitions. Thread-safe.

    Attributes
    ----------
    all : list of Owner
    lock : RLock
        Held for a moment where journals are added to, or replicas change.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        self.all = list(owners)
        self.lock = threading.RLock()
        self._up: set[str] = set()
        self._looked_at = -math.inf

    def read(
        self, wanted: Mapping[int, tuple[Any, ...]], seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Ask partitions; return the answers, and why there is none.

        Parameters
        ----------
        wanted : mapping of int to tuple
            By partition: the method `read_...` and its arguments.
        """
        jobs = [
            Job(number, owner, list(owner.replicas), _reading(owner, args))
            for number, args in wanted.items()
            for owner in [self.all[number]]
        ]
        return self.gather(jobs, seconds)

    def gather(
        self, jobs: Iterable[Job], seconds: float
    ) -> tuple[dict[Any, Any], dict[Any, Exception]]:
        """Wait for the answer of each job, from whichever replica, until the deadline.

        Raises
        ------
        TypeError, ValueError, KeyError
            As a partition answered.
        """
        begun = time.monotonic()
        ends = begun + seconds
        answers: dict[Any, Any] = {}
        failed: dict[Any, Exception] = {}
        pending: dict[Any, tuple[Job, Replica, bool]] = {}
        again: list[tuple[float, Job]] = []
        waiting = {job.key: job for job in jobs}

        def ask(job: Job, now: float) -> None:
            replica = job.next()
            pending[job.call(replica, max(0.0, ends - now))] = (job, replica, False)

        for job in list(waiting.values()):
            if job.replicas:
                ask(job, begun)
            else:
                job.failure = PartitionError(job.owner.absent or "all its replicas are gone")
        while (pending or again) and waiting and (now := time.monotonic()) < ends:
            for due, job in [one for one in again if one[0] <= now]:
                again.remove((due, job))
                ask(job, now)
            if pending:
                ready, _ = ray.wait(
                    list(pending), num_returns=len(pending), timeout=min(TICK_S, ends - now)
                )
            else:
                ready = []
                time.sleep(min(_PAUSE_S, ends - now))
            for ref in ready:
                job, replica, caught_up = pending.pop(ref)
                if job.key not in waiting or replica not in job.replicas:
                    continue
                kind, value = _outcome(ref)
                if kind == "ok" and not caught_up:
                    answers[job.key] = value
                    del waiting[job.key]
                    if job.several:
                        self._prefer(job.owner, replica)
                elif kind == "ok":
                    pending[job.call(replica, ends - time.monotonic())] = (job, replica, False)
                elif kind == "behind":
                    pending[self._catch_up(job.owner, replica)] = (job, replica, True)
                elif kind == "error" and (
                    isinstance(value, KeyError) or not isinstance(value, HybridMemError)
                ):
                    raise value
                else:
                    job.failure = value
                    if kind == "gone" and self._is_up(replica):
                        job.turn += 1  # it may be starting again
                    else:
                        job.replicas = [one for one in job.replicas if one is not replica]
                    if job.replicas:
                        pause = _PAUSE_S if job.next() is replica else 0.0
                        again.append((time.monotonic() + pause, job))
                    else:
                        failed[job.key] = value
                        del waiting[job.key]
            if now - begun > seconds / 2:
                for job, replica, _ in list(pending.values()):
                    if job.key in waiting and not job.hedged and len(job.replicas) > 1:
                        job.hedged = True
                        job.turn = list(job.replicas).index(replica) + 1
                        ask(job, now)
        for key, job in waiting.items():
            failed[key] = job.failure or PartitionError(
                f"no answer within {seconds:.2g} s from {', '.join(map(str, job.replicas))}"
            )
        return answers, failed

    def _is_up(self, replica: Replica) -> bool:
        """Whether Ray takes a replica's node for one that is up."""
        now = time.monotonic()
        if now > self._looked_at + _LOOK_S:
            self._up = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            self._looked_at = now
        return replica.disk.node_id in self._up

    def _catch_up(self, owner: Owner, replica: Replica) -> Any:
        with self.lock:
            return replica.call("put", "catch_up", list(owner.journal), owner.last, owner.mark)

    def _prefer(self, owner: Owner, replica: Replica) -> None:
        if owner.replicas[:1] == [replica]:
            return
        with self.lock:
            if replica in owner.replicas:
                owner.replicas.remove(replica)
                owner.replicas.insert(0, replica)


def _reading(owner: Owner, args: tuple[Any, ...]) -> Callable[[Replica, float], Any]:
    method, *rest = args
    return lambda replica, left: replica.call(
        "search", "read", owner.last, left, method, tuple(rest)
    )


def _outcome(ref: Any) -> tuple[str, Any]:
    """Return what came of a call: "ok", "behind", "error"; "gone" or "dead" where nobody answered.

    Ray starts the actor again where it is gone; where it is dead `Cluster.repair` does.
    """
    try:
        kind, value = ray.get(ref)
    except ActorDiedError as error:
        why = str(error).strip().splitlines()[-1]
        return "dead", Dead(f"{why} Ray starts no other; repair() does, or opening it again")
    except RayError as error:
        return "gone", PartitionError(reason(error))
    return kind, value

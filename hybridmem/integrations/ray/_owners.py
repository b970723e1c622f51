"""The partitions of a cluster as their writer sees them: what they are told, and what is durable.

Each partition has a journal of what its replicas may not have on disk yet. Whoever was started
again, or missed something, says that it is behind, and is given the journal before it is asked
once more. The journal gets shorter when all replicas have flushed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from hybridmem.config import Config
from hybridmem.errors import PartitionError, PartitionFullError, StoreFullError, StoreLockedError
from hybridmem.integrations.ray._calls import TICK_S, Calls, Job, Owner, Replica
from hybridmem.integrations.ray._partition import Op, State
from hybridmem.integrations.ray._views import NOTHING, Mark

__all__ = ["LEFT_BEHIND", "Owners", "failures"]

#: Seconds in which replicas begin, and in which they end.
_BEGIN_S, _END_S = 60.0, 10.0
#: Seconds in which disks are told what may be of use to them later.
_TELL_S = 10.0
LEFT_BEHIND = "replicas of it were left behind: others have committed what they have not"


class Owners(Calls):
    """The partitions of a cluster, as their one writer or a reader sees them. Thread-safe.

    Parameters
    ----------
    replicas : int
        How many each partition is to have.
    remote : str or None
        Where a copy of each commit goes.
    write_deadline_s : float
        For puts that wait for room, and flushes.
    max_inflight_bytes, max_unflushed_bytes : int
        Bytes on their way to a partition, over all of them, and of the journal of each partition.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        *,
        replicas: int,
        remote: str | None,
        write_deadline_s: float,
        max_inflight_bytes: int,
        max_unflushed_bytes: int,
    ) -> None:
        super().__init__(owners)
        self.replicas = replicas
        #: Held while replicas commit, or come and go.
        self.committing = threading.RLock()
        self.remote = remote
        self.write_deadline_s = write_deadline_s
        self._max_inflight = max_inflight_bytes
        self._max_unflushed = max_unflushed_bytes
        self._inflight: dict[Any, tuple[Owner, int]] = {}

    # -- beginning and ending ---------------------------------------------------------------------

    def join(self, reading: bool, config: Config) -> State:
        """Take up every replica that is up to date, and give up those that were left behind.

        Parameters
        ----------
        config : Config
            Of the cluster, for where no partition is up that could say it.

        Returns
        -------
        State
            Of some partition, with the highest next id of all.
        """
        states, failed = self.gather(self.jobs("state"), _BEGIN_S)
        for error in failed.values():
            if isinstance(error, StoreLockedError):
                raise error
        if failed and not states:
            raise failures("opening", failed)
        for owner in self.all:
            up = {one: states[one] for one in owner.replicas if one in states}
            best = max(up.values(), key=lambda state: (state.view, state.mark), default=None)
            if best is not None and best.view < owner.view:
                owner.absent = f"{LEFT_BEHIND}, and no other is up"
                best = None
            elif best is not None:
                owner.view, owner.absent = best.view, ""
            elif owner.replicas:
                owner.absent = str(failed[owner.replicas[0]])
            older = [one for one in owner.replicas if not _equal(up.get(one), best)]
            self.give_up(owner, older)
        if not reading:
            self.everywhere("catch_up", [], 0, NOTHING)
        return max(
            states.values(),
            key=lambda state: state.mark.next_entry_id,
            default=State(config, 0, Mark(1, 0, 0), 0),
        )

    def give_up(self, owner: Owner, replicas: Sequence[Replica]) -> None:
        """Let go of replicas."""
        for one in replicas:
            with self.lock:
                owner.replicas.remove(one)
            ray.kill(one.actor, no_restart=True)

    def jobs(self, method: str, *args: Any, of: Sequence[Owner] | None = None) -> list[Job]:
        """Return calls of a method of every replica."""
        return [
            Job(one, owner, [one], lambda at, _: at.call("put", method, *args))
            for owner in (self.all if of is None else of)
            for one in owner.replicas
        ]

    def everywhere(self, method: str, *args: Any, of: Sequence[Owner] | None = None) -> Any:
        """Call a method of every replica; return the answers.

        Raises
        ------
        PartitionError
            Naming those that failed.
        """
        answers, failed = self.gather(self.jobs(method, *args, of=of), _BEGIN_S)
        if failed:
            raise failures(method, failed)
        return answers

    def take_in(self, owner: Owner, replica: Replica) -> State:
        """Let one more replica of a partition answer, and tell it what its commit lacks."""
        alone = Owner(owner.number, [replica])
        with self.lock:
            ops, last = list(owner.journal), owner.last
            self.everywhere("catch_up", ops, last, owner.mark, of=[alone])
            owner.replicas.append(replica)
            owner.absent = ""
        state: State = self.everywhere("state", of=[alone])[replica]
        return state

    def end(self) -> None:
        """Close what is open, as far as that goes, and end the actors."""
        self.gather(self.jobs("close"), min(self.write_deadline_s, _END_S))
        for owner in self.all:
            self.give_up(owner, list(owner.replicas))

    # -- telling ----------------------------------------------------------------------------------

    def make_room(self, owner: Owner, nbytes: int) -> None:
        """Wait until an operation of so many bytes may be sent to a partition.

        Raises
        ------
        PartitionError
            If partitions did not take what they were sent, or could not flush, in time.
        """
        if owner.absent:  # which of its ids are used is not known
            raise PartitionError(f"{owner}: {owner.absent}; repair() looks again", [str(owner)])
        if owner.journal_bytes + nbytes > self._max_unflushed and owner.journal:
            self.flush([owner])
        ends = time.monotonic() + self.write_deadline_s
        self._reap(0)
        while self._inflight and nbytes + self.inflight_bytes > self._max_inflight:
            left = ends - time.monotonic()
            if left <= 0:
                slow = sorted({str(one) for one, _ in self._inflight.values()})
                raise PartitionError(
                    f"{', '.join(slow)} did not take what was put within "
                    f"{self.write_deadline_s:g} s; nothing more was put",
                    partitions=slow,
                )
            self._reap(min(TICK_S, left))

    @property
    def inflight_bytes(self) -> int:
        """Bytes on their way to partitions."""
        return sum(nbytes for _, nbytes in self._inflight.values())

    def _reap(self, seconds: float) -> None:
        if self._inflight:
            refs = list(self._inflight)
            ready, _ = ray.wait(
                refs, num_returns=1 if seconds else len(refs), timeout=seconds, fetch_local=False
            )
            for ref in ready:
                # Whatever failed is found when the partition is asked, or flushed: it is behind.
                del self._inflight[ref]

    def tell(self, owner: Owner, op: Op) -> None:
        """Send an operation to all replicas; whoever misses it is given it later."""
        with self.lock:
            owner.add(op)
            for replica in owner.replicas:
                ref = replica.call("put", "apply", owner.last, op)
                self._inflight[ref] = (owner, op.nbytes)

    def flush(
        self, owners: Sequence[Owner] | None = None, method: str = "flush", *args: Any
    ) -> Any:
        """Let every replica of partitions commit what they were told.

        Returns
        -------
        dict of Replica to object
            What each answered.

        Raises
        ------
        PartitionError
            Naming each replica that did not, and why. What is not durable on all replicas stays in
            the journal: flush again.
        """
        with self.committing:
            return self._flush(self.all if owners is None else owners, method, args)

    def _flush(self, chosen: Sequence[Owner], method: str, args: tuple[Any, ...]) -> Any:
        with self.lock:
            last = {owner.number: owner.last for owner in chosen}
            jobs = [
                Job(replica, owner, [replica], _writing(owner, method, args))
                for owner in chosen
                for replica in owner.replicas
            ]
        answers, failed = self.gather(jobs, self.write_deadline_s)
        done = [
            owner
            for owner in chosen
            if owner.replicas and not any(one in failed for one in owner.replicas)
        ]
        unsent: dict[Any, Exception] = {}
        if self.remote is not None:
            sending = [
                Job(owner, owner, owner.replicas[:1], _sending(self.remote)) for owner in done
            ]
            _, unsent = self.gather(sending, self.write_deadline_s)
        for owner in chosen:
            if owner in done and owner not in unsent:
                marks = [answers[one][0] for one in owner.replicas]
                with self.lock:
                    owner.shorten(last[owner.number])
                    owner.mark = Mark(*map(min, zip(*marks, strict=True)))
            if owner.last or method == "calibrate":  # else there is nothing that one could lack
                self._note(owner, [one for one in owner.replicas if one in failed])
        short = {
            owner: PartitionError(
                f"it has {len(owner.replicas)} of {self.replicas} replicas; repair() makes others"
            )
            for owner in chosen
            if len(owner.replicas) < self.replicas
        }
        if failed or short or unsent:
            raise failures(method, {**failed, **short, **unsent})
        return {replica: value for replica, (_, value) in answers.items()}

    def _note(self, owner: Owner, behind: Sequence[Replica]) -> None:
        """Write down on the disks of replicas which of them have the last commit."""
        new = [one for one in behind if not one.left_behind]
        caught_up = [one for one in owner.replicas if one.left_behind and one not in behind]
        current = [one for one in owner.replicas if one not in behind]
        lacking = len(owner.replicas) < self.replicas and not owner.lack_noted
        if not current or not (new or caught_up or lacking):
            return
        rises = bool(new) or lacking
        owner.view += rises
        failed = self.set_view(owner, current if rises else caught_up)
        if rises:
            owner.lack_noted = len(failed) < len(current)
        for one in owner.replicas:
            one.left_behind = one in behind or (one.left_behind and one in failed)

    def set_view(self, owner: Owner, told: Sequence[Replica]) -> dict[Any, Exception]:
        """Write the view of a partition on the disks of replicas, then on all disks that it is.

        Those that come back without any of these replicas are told by what other disks know.
        """
        jobs = [
            Job(one, owner, [one], lambda at, _: at.call("commit", "set_view", owner.view))
            for one in told
        ]
        _, failed = self.gather(jobs, self.write_deadline_s)
        if len(failed) < len(told):
            disks = {
                one.disk.identity: one
                for other in self.all
                for one in other.replicas
                if one not in failed and not one.left_behind
            }
            knows = ("commit", "know_view", owner.number, owner.view)
            jobs = [Job(one, owner, [one], lambda at, _: at.call(*knows)) for one in disks.values()]
            self.gather(jobs, min(self.write_deadline_s, _TELL_S))
        return failed


def failures(what: str, failed: Mapping[Any, Exception]) -> PartitionError:
    """Return the error that names all that failed."""
    full = failed and all(isinstance(error, StoreFullError) for error in failed.values())
    kind = PartitionFullError if full else PartitionError
    said = "; ".join(
        f"{where}: {why}"
        if isinstance(why, PartitionError)
        else f"{where}: {type(why).__name__}: {why}"
        for where, why in failed.items()
    )
    return kind(f"{what} failed: {said}", partitions=[str(where) for where in failed])


def _equal(state: State | None, best: State | None) -> bool:
    if state is None or best is None:
        return False
    return (state.view, state.digest) == (best.view, best.digest)


def _sending(url: str) -> Callable[[Replica, float], Any]:
    return lambda replica, _: replica.call("commit", "upload", url)


def _writing(owner: Owner, method: str, args: tuple[Any, ...]) -> Callable[[Replica, float], Any]:
    return lambda replica, left: replica.call("commit", "commit", owner.last, left, method, args)

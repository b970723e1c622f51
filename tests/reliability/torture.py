"""The long form of the reliability tests: `python -m tests.reliability.torture --minutes 30`.

Prints a line for each figure: what was counted, what is wanted, how long it took. Each part has a
share of the time; what is left over goes to the crash states, which are last. Ends with an error at
the first failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hybridmem

from . import allocations, kill_points, mutants, mutations, readers
from .crashes import Scratch, check_kills, check_power, summary
from .faults import OPERATIONS, kinds, sweep
from .histories import CONFIG, HISTORIES
from .kills import kill_often

FOR_EVER = float("inf")


@dataclasses.dataclass
class Figure:
    """What a part counted.

    Attributes
    ----------
    text : str
    count : int
        Of what is wanted in some number.
    """

    text: str
    count: int


def flat(scratch: Scratch, until: float) -> Figure:
    """Open and close; get: descriptors and mappings stay as they are."""
    path = scratch.new() / "mem"
    with hybridmem.create(path, **CONFIG) as store:
        for i in range(20):
            store.put([[float(i)] * 4], [[1.0] * 4], 0)
    hybridmem.open(path).close()
    before = _held()
    cycles = gets = 0
    while cycles < 1000 and (not cycles or time.monotonic() < until):
        with hybridmem.open(path, "r" if cycles % 2 else "r+") as store:
            store.get(1 + cycles % 20)
        cycles += 1
    assert _held() == before, "descriptors or mappings were left by open and close"
    with hybridmem.open(path, "r") as store:
        store.get(1)
        before = _held()
        while gets < 10_000 and (not gets or time.monotonic() < until):
            store.get(1 + gets % 20)
            gets += 1
        assert _held() == before, "descriptors or mappings were left by get"
    return Figure(f"{cycles} open/close, {gets} gets, descriptors and mappings flat", cycles)


def _held() -> tuple[int, int]:
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().count("/mem/") if maps.exists() else 0
    return len(os.listdir("/proc/self/fd" if maps.exists() else "/dev/fd")), mapped


def faults(scratch: Scratch, until: float) -> Figure:
    count = done = 0
    pairs = [(name, *kind) for name in OPERATIONS for kind in kinds()]
    for name, kind, forever in pairs:
        count += sweep(name, kind, forever, scratch)
        done += 1
        if time.monotonic() > until:
            break
    return Figure(f"{count} failing calls, {done} of {len(pairs)} sweeps", done)


def failing_allocations(scratch: Scratch, until: float) -> Figure:
    if not allocations.is_possible():
        return Figure("this interpreter cannot make one fail", 0)
    total = allocations.Tally()
    for step in (1009, 211, 53):
        for name in OPERATIONS:
            for count in (1, 20):
                one = allocations.sweep(name, count, scratch, first=step // 2, step=step)
                total.failed += one.failed
                total.refused += one.refused
                total.died += one.died
                if time.monotonic() > until:
                    return Figure(f"{total}", total.failed)
    return Figure(f"{total}", total.failed)


def kills(scratch: Scratch, until: float) -> Figure:
    counts = kill_often(scratch.new() / "mem", 1000, until=until)
    return Figure(f"{counts}, 0 unreadable, 0 acknowledged commits lost", counts["kills"])


def kills_at_calls(scratch: Scratch, until: float) -> Figure:
    """All calls of the short lives, some of the long ones; then the traced ones."""
    own = traced = 0
    is_traced = shutil.which("strace") is not None
    for step in (97, 13, 3, 1):
        for name in HISTORIES:
            for when in kill_points.WHEN:
                stride = step * (20 if name == "failed-syncs" else 1)
                own += kill_points.sweep(name, when, scratch, first=step // 2, step=stride)
                if time.monotonic() > until:
                    return Figure(f"{own} kills before, within, after a call; {traced} traced", own)
            if is_traced and name != "failed-syncs":
                traced += kill_points.traced_sweep(name, scratch, first=1 + step // 2, step=step)
    return Figure(f"{own} kills before, within, after a call; {traced} traced", own)


def mutated_stores(scratch: Scratch, until: float) -> Figure:
    tally = mutations.run(10_000, 0, scratch, until=until)
    assert not tally.failures, "\n".join(tally.failures[:20])
    total = sum(tally.outcomes.values())
    return Figure(f"{tally}; 0 signals, 0 hangs, 0 wrong answers", total)


def reading_processes(scratch: Scratch, until: float) -> Figure:
    seconds = max(1.0, until - time.monotonic())
    counts = readers.run(scratch.new() / "mem", 1_000_000, seconds=seconds)
    return Figure(f"{counts}, 0 mixed snapshots", counts["reads"])


def mutants_of_the_code(scratch: Scratch, until: float) -> Figure:
    found = mutants.run(until=until)
    survivors = [name for name, test in found.items() if not test]
    assert not survivors, f"no test fails with {survivors}"
    return Figure(f"{len(found)} mutants, each fails some test", len(found))


def crash_states(scratch: Scratch, until: float) -> Figure:
    """One in so many states of each life, and with the time that is left one in fewer."""
    checkers, texts = [], []
    for sample in (32, 8, 1):
        checkers, done = [], 0
        for name in HISTORIES:
            limit = 8 if sample > 1 else 48
            checkers.append(check_power(name, scratch, limit=limit, sample=sample, until=until))
            checkers.append(
                check_kills(
                    name, scratch, limit=limit // 2, sample=sample, every=sample, until=until
                )
            )
            done += time.monotonic() < until
            if time.monotonic() > until:
                break
        counts = summary(checkers)
        texts.append(f"1 in {sample}: {counts}, {done} of {len(HISTORIES)} lives")
        if time.monotonic() > until:
            break
    text = "; ".join(texts)
    return Figure(f"{text}; all open, none lost what was acknowledged", summary(checkers)["states"])


#: Name, share of the time, what is wanted of the count, and what counts it.
PARTS: Sequence[tuple[str, float, int, Callable[[Scratch, float], Figure]]] = (
    ("descriptors", 0.02, 1000, flat),
    ("failing calls", 0.1, len(OPERATIONS) * len(list(kinds())), faults),
    ("failing allocations", 0.05, 0, failing_allocations),
    ("kills at random", 0.1, 1000, kills),
    ("kills at calls", 0.1, 0, kills_at_calls),
    ("mutated stores", 0.15, 10_000, mutated_stores),
    ("8 reading processes", 0.15, 1_000_000, reading_processes),
    ("mutants of the code", 0.15, len(mutants.MUTANTS), mutants_of_the_code),
    ("crash states", 0.18, 0, crash_states),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="time for all parts")
    parser.add_argument("--only", default="", help="only parts whose name holds this")
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if options.only in part[0]]
    left = sum(share for _, share, _, _ in parts)
    end = time.monotonic() + 60 * options.minutes
    for name, share, wanted, part in parts:
        start = time.monotonic()
        scratch = Scratch()
        try:
            figure = part(scratch, start + max(0.0, end - start) * share / left)
        finally:
            scratch.remove()
        left -= share
        seconds = time.monotonic() - start
        reached = "" if figure.count >= wanted else f" (OUT OF TIME: {wanted} are wanted)"
        print(f"{name}: {figure.text}{reached} [{seconds:.0f} s]", flush=True)


if __name__ == "__main__":
    main()

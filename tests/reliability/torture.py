"""The long form of the reliability tests: `python -m tests.reliability.torture --minutes 60`.

Prints a line for each figure: what was counted, what was reached of what is wanted, how long it
took. Each part has a share of the time; what it does not need goes to the later ones, and in the
end to the mutated stores. A fault that is found ends its part. The exit status is 1 if there was
one, or if a figure was not reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import hybridmem

from . import allocations, kill_points, mutants, mutations, readers
from .crashes import Scratch, check_kills, check_power, summary
from .faults import OPENINGS, OPERATIONS, held, kinds, sweep, sweep_opening
from .histories import CONFIG, HISTORIES
from .kills import kill_often
from .mutants import ROOT

#: Mutated stores that are wanted, and in a long run.
MUTATED, MUTATED_LONG = 10_000, 1_000_000


@dataclasses.dataclass
class Figure:
    """What a part counted.

    Attributes
    ----------
    text : str
    reached, wanted : int
        0 are wanted where a part has no figure to reach, or cannot run here.
    """

    text: str
    reached: int = 0
    wanted: int = 0


def flat(scratch: Scratch, until: float) -> Figure:
    """Open and close; get: descriptors and mappings stay as they are."""
    path = scratch.new() / "mem"
    with hybridmem.create(path, **CONFIG) as store:
        for i in range(20):
            store.put([[float(i)] * 4], [[1.0] * 4], 0)
    hybridmem.open(path).close()
    before = held()
    cycles = gets = 0
    while cycles < 1000 and (not cycles or time.monotonic() < until):
        with hybridmem.open(path, "r" if cycles % 2 else "r+") as store:
            store.get(1 + cycles % 20)
        cycles += 1
    assert held() == before, "descriptors or mappings were left by open and close"
    with hybridmem.open(path, "r") as store:
        store.get(1)
        before = held()
        while gets < 10_000 and (not gets or time.monotonic() < until):
            store.get(1 + gets % 20)
            gets += 1
        assert held() == before, "descriptors or mappings were left by get"
    text = f"{cycles} open/close, {gets} gets, descriptors and mappings flat"
    return Figure(text, cycles + gets, 11_000)


def faults(scratch: Scratch, until: float) -> Figure:
    sweeps: list[Callable[[], int]] = []
    for kind, forever in kinds():
        for name in OPERATIONS:
            sweeps.append(functools.partial(sweep, name, kind, forever, scratch))
        for name in OPENINGS:
            sweeps.append(functools.partial(sweep_opening, name, kind, forever, scratch))
    count = done = 0
    for one in sweeps:
        count += one()
        done += 1
        if time.monotonic() > until:
            break
    return Figure(f"{count} failing calls: sweeps of all calls of an operation", done, len(sweeps))


def failing_allocations(scratch: Scratch, until: float) -> Figure:
    if not allocations.is_possible():
        return Figure("this interpreter cannot make one fail")
    # One alone, each in turn; and twenty in a row, so that what is done about the first fails too.
    pairs = [(name, count) for name in OPERATIONS for count in (1, 20)]
    whole = 0
    total = allocations.Tally()
    for every in (False, True):
        for name, count in pairs:
            if time.monotonic() > until and total.failed:
                break
            step = max(1, count // 2) if every else 997
            one = allocations.sweep(name, count, scratch, step=step, until=until)
            total.add(one)
            whole += one.whole * every
    text = (
        f"{total.failed} allocations failed, {total.refused} operations with them "
        f"({total.misnamed} with an error of another name), {total.died} ended the interpreter "
        "outside numpy"
    )
    return Figure(f"{text}: sweeps of all allocations of an operation", whole, len(pairs))


def kills(scratch: Scratch, until: float) -> Figure:
    counts = kill_often(scratch.new() / "mem", 1000, until=until)
    text = f"{counts}, 0 unreadable, 0 acknowledged commits lost"
    return Figure(text, counts["kills"], 1000)


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
                    return Figure(f"{own} kills before, within, after a call; {traced} traced")
            if is_traced and name != "failed-syncs":
                traced += kill_points.traced_sweep(name, scratch, first=1 + step // 2, step=step)
    return Figure(f"{own} kills before, within, after a call; {traced} traced")


def mutated_stores(scratch: Scratch, until: float) -> Figure:
    tally = mutations.run(MUTATED_LONG, 0, scratch, until=until)
    assert not tally.failures, "\n".join(tally.failures[:20])
    text = f"{tally}; 0 signals, 0 hangs, 0 wrong answers"
    return Figure(text, sum(tally.outcomes.values()), MUTATED)


def guided_mutations(scratch: Scratch, until: float) -> Figure:
    if importlib.util.find_spec("atheris") is None:
        return Figure("atheris is not installed")
    seconds = max(1, int(until - time.monotonic()))
    command = [sys.executable, "-m", "tests.reliability.coverage_guided", "-timeout=10",
               "-rss_limit_mb=1000", f"-max_total_time={seconds}"]  # fmt: skip
    done = subprocess.run(
        command, cwd=scratch.new(), env=os.environ | {"PYTHONPATH": os.fspath(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    runs = re.search(r"Done (\d+) (?:runs|in)", done.stdout + done.stderr)
    assert runs, done.stderr[-4000:]
    text = "index.json, records, headers, led by coverage: 0 signals, hangs, errors not ours"
    return Figure(text, int(runs[1]), 1)


def reading_processes(scratch: Scratch, until: float) -> Figure:
    seconds = max(1.0, until - time.monotonic())
    counts = readers.run(scratch.new() / "mem", 1_000_000, seconds=seconds)
    return Figure(f"{counts}, 0 mixed snapshots", counts["reads"], 1_000_000)


def mutants_of_the_code(scratch: Scratch, until: float) -> Figure:
    found = mutants.run(until=until)
    survivors = [name for name, test in found.items() if not test]
    assert not survivors, f"no test fails with {survivors}"
    return Figure("edits of the code, each fails some test", len(found), len(mutants.MUTANTS))


def crash_states(scratch: Scratch, until: float) -> Figure:
    """One in so many states of each life; then all of them, as far as the time goes."""
    texts = []
    for sample in (64, 1):
        checkers, whole = [], 0
        for name in HISTORIES:
            checkers.append(check_power(name, scratch, limit=48, sample=sample, until=until))
            checkers.append(
                check_kills(name, scratch, limit=24, sample=sample, every=sample, until=until)
            )
            if time.monotonic() > until:
                break
            whole += 1
        counts = summary(checkers)
        texts.append(f"1 in {sample}: {counts}")
        if time.monotonic() > until:
            whole *= sample == 1
            break
    text = f"{'; '.join(texts)}; all open, none lost what was acknowledged: all states of lives"
    return Figure(text, whole, len(HISTORIES))


#: Name, share of the time (of what is left when it begins, beside the later ones), what counts it.
PARTS: Sequence[tuple[str, float, Callable[[Scratch, float], Figure]]] = (
    ("descriptors", 0.02, flat),
    ("failing calls", 0.05, faults),
    ("failing allocations", 0.14, failing_allocations),
    ("kills at random", 0.06, kills),
    ("8 reading processes", 0.12, reading_processes),
    ("mutants of the code", 0.13, mutants_of_the_code),
    ("crash states", 0.4, crash_states),
    ("kills at calls", 0.06, kills_at_calls),
    ("guided mutations", 0.06, guided_mutations),
    ("mutated stores", 0.1, mutated_stores),
)
#: In a long run the mutated stores need more than all other parts together.
SHARE_LONG = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="time for all parts")
    parser.add_argument("--only", default="", help="only parts whose name holds this")
    parser.add_argument(
        "--long", action="store_true", help=f"{MUTATED_LONG:,} mutated stores are wanted"
    )
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if options.only in part[0]]
    if options.long:
        parts = [
            (name, SHARE_LONG if part is mutated_stores else share, part)
            for name, share, part in parts
        ]
    left = sum(share for _, share, _ in parts)
    end = time.monotonic() + 60 * options.minutes
    missed = []
    for name, share, part in parts:
        start = time.monotonic()
        scratch = Scratch()
        try:
            figure = part(scratch, start + max(0.0, end - start) * share / left)
        except Exception:
            traceback.print_exc()
            print(f"{name}: A FAULT WAS FOUND [{time.monotonic() - start:.0f} s]", flush=True)
            missed.append(name)
            continue
        finally:
            scratch.remove()
            left -= share
        if name == "mutated stores" and options.long:
            figure.wanted = MUTATED_LONG
        of = f": {figure.reached:,} of {figure.wanted:,}" if figure.wanted else ""
        if figure.reached < figure.wanted:
            of += " (OUT OF TIME)"
            missed.append(name)
        print(f"{name}: {figure.text}{of} [{time.monotonic() - start:.0f} s]", flush=True)
    print(f"not reached: {', '.join(missed)}" if missed else "all reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

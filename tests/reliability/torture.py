"""The long form of the reliability tests: `python -m tests.reliability.torture --minutes 30`.

Prints one line for each kind of test, and stops the run at the first failure.
"""

from __future__ import annotations

import argparse
import time

from .crashes import Scratch, check_kills, check_power
from .faults import OPERATIONS, kinds, sweep
from .histories import HISTORIES
from .kills import kill_often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="begin nothing after so long")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=48, help="combinations at each crash point")
    parser.add_argument("--sample", type=int, default=1, help="open one in so many crash states")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    scratch = Scratch()
    try:
        counts = kill_often(scratch.new() / "mem", options.kills)
        print("kills", counts, flush=True)
        faults = 0
        for name in OPERATIONS:
            for kind, forever in kinds():
                if time.monotonic() < end:
                    faults += sweep(name, kind, forever, scratch)
        print("faults", faults, flush=True)
        for name in HISTORIES:
            if time.monotonic() > end:
                print("out of time before", name)
                break
            one = check_power(name, scratch, limit=options.limit, sample=options.sample)
            two = check_kills(name, scratch, limit=options.limit // 2, sample=options.sample)
            print(
                f"crash states of {name}: {one.states} of power cuts with {one.deep_states} "
                f"recoveries, {two.states} of recoveries after kills",
                flush=True,
            )
    finally:
        scratch.remove()


if __name__ == "__main__":
    main()

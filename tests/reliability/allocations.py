"""Operations whose k-th allocation fails, and what must hold afterwards.

The interpreter itself can make an allocation fail (`_testcapi.set_nomemory`); each time in a
process of its own, since not every extension outlives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hybridmem

from .apart import apart
from .book import State, read
from .crashes import Scratch
from .faults import OPERATIONS

try:
    import _testcapi
except ImportError:  # an interpreter without its tests
    _testcapi = None

#: What an operation is to end in. numpy names another error in places, or none at all.
REFUSALS = (MemoryError, SystemError, hybridmem.HybridMemError)

#: Allocations after which none is reached any more.
_MOST = 1 << 20
#: Where a process that dies says in what.
_WHERE = "died"


@dataclasses.dataclass
class Tally:
    """How often an allocation failed, and how often the operation failed with it.

    `misnamed` counts errors of another kind among these, `died` ends of the interpreter that are
    not in Python code of numpy's, `whole` the sweeps that came to the last allocation of their
    operation.
    """

    failed: int = 0
    refused: int = 0
    misnamed: int = 0
    died: int = 0
    whole: int = 0

    def add(self, other: Tally) -> None:
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


def is_possible() -> bool:
    return _testcapi is not None and hasattr(_testcapi, "set_nomemory")


def sweep(
    name: str,
    count: int,
    scratch: Scratch,
    *,
    first: int = 0,
    step: int = 1,
    until: float = float("inf"),
) -> Tally:
    """Fail every `step`-th allocation of an operation in turn, and those that follow: `count`.

    Not all that follow: an interpreter that never gets memory again cannot even raise.
    """
    tally = Tally()
    case = OPERATIONS[name](scratch.new())  # what is made once in a process is made here
    case.act()
    case.store.close()
    for at in range(first, _MOST, step):
        root = scratch.new()
        try:
            outcome = apart(_one, name, root, at, count, seconds=60)
            what = f"{name}, allocations {at} to {at + count}"
            if outcome.failure.startswith("ended by SIG"):
                # An abort of the interpreter: what it leaves is what a kill leaves.
                tally.died += not _was_in_numpy(root)
                tally.failed += 1
                hybridmem.open(root / "mem").close()
                continue
            assert not outcome.failure, f"{what}: {outcome.failure}"
            was_refused, is_misnamed, is_over = outcome.value
            tally.refused += was_refused
            tally.misnamed += is_misnamed
            if is_over:
                tally.whole += 1
                return tally
            tally.failed += 1
            if time.monotonic() > until:
                return tally
        finally:
            shutil.rmtree(root, ignore_errors=True)
    raise AssertionError("never came to an end")


def _one(name: str, root: Path, at: int, count: int) -> tuple[bool, bool, bool]:
    """Return whether the operation failed, with what error, and whether it made fewer allocations.

    The second is True where the error is none of `REFUSALS`.
    """
    # A generator that is thrown away may ask for memory in vain; the interpreter reports that.
    sys.unraisablehook = lambda _: None
    faulthandler.enable((root / _WHERE).open("w"))
    case = OPERATIONS[name](root)
    store, book = case.store, case.book
    states: list[State] = [book.before(), book.state()]
    was_refused = is_misnamed = False
    _testcapi.set_nomemory(at, at + count)
    try:
        case.act()
    except Exception as error:
        was_refused, is_misnamed = True, not isinstance(error, REFUSALS)
    finally:
        _testcapi.remove_mem_hooks()
    states.append(case.done())  # what comes last may fail after all is done
    found = read(store)
    if was_refused and name == "evict" and _is_between(found, states[1], states[-1]):
        states.append(
            states[1].without(states[1].items.keys() - found.keys())
        )  # cut short, it has evicted some of what it was to
    assert any(state.fits(found) for state in states[1:]), f"memory holds {sorted(found)}"
    assert was_refused or states[-1].fits(found)
    try:
        store.flush()
        states = [state for state in states if state.items.keys() == found.keys()]
    except hybridmem.StoreIOError:
        assert was_refused, "an operation that succeeded left a store that is not usable"
    store.close()
    with hybridmem.open(root / "mem") as again:
        durable = read(again)
        assert any(state.fits(durable) for state in states), f"the disk holds {sorted(durable)}"
        again.put([[1.0] * 4], [[1.0] * 4], 0)
    return was_refused, is_misnamed, not was_refused and _made_fewer(name, root, at)


def _was_in_numpy(root: Path) -> bool:
    """Whether a process died in Python code of numpy, some of which is not made for this."""
    frames = re.findall(r'^  File "(.*)", line', (root / _WHERE).read_text(), re.MULTILINE)
    return "numpy" in Path(frames[0]).parts if frames else False


def _is_between(found: Mapping[int, Any], old: State, new: State) -> bool:
    return new.items.keys() <= found.keys() <= old.items.keys()


def _made_fewer(name: str, root: Path, at: int) -> bool:
    """Whether the operation makes fewer than `at` allocations, so that no failure is met."""
    other: Any = OPERATIONS[name](root / "other")
    _testcapi.set_nomemory(at, at + 1000)
    try:
        other.act()
    except Exception:
        return False
    finally:
        _testcapi.remove_mem_hooks()
        with contextlib.suppress(hybridmem.HybridMemError):
            other.store.close()
    return True

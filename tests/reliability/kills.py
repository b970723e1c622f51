"""Killing a writer at random points, against what it had acknowledged."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import hybridmem

from .kill_writer import content, work


def kill_often(
    path: Path, times: int, seed: int = 0, *, until: float = float("inf")
) -> dict[str, int]:
    """Kill a writer so many times, or until some time, and check the store after each."""
    rng = random.Random(seed)
    hybridmem.create(path, embed_dim=8, hdc_dim=256, shard_max_bytes=2000).close()
    counts = {"kills": 0, "commits": 0, "in_flight": 0}
    for number in range(times):
        lines = _run(path, rng.randrange(1 << 30), rng.uniform(0.0, 0.06))
        counts["kills"] += 1
        allowed = _allowed(lines)
        counts["commits"] += sum(line[0] == "done" for line in lines)
        counts["in_flight"] += lines[-1][0] == "begin" if lines else 0
        for mode in ("r", "r+"):
            with hybridmem.open(path, mode=mode) as store:
                found = sorted(store)
                for entry_id in found:
                    entry = store.get(entry_id)
                    keys, values = content(entry_id)
                    assert entry.keys.tobytes() == keys.tobytes(), f"keys of {entry_id} differ"
                    assert entry.values.tobytes() == values.tobytes()
            assert any(_fits(found, *one) for one in allowed), (
                f"kill {number}: holds {found}, allowed {allowed}"
            )
        if time.monotonic() > until:
            break
    return counts


def _run(path: Path, seed: int, seconds: float) -> list[list[object]]:
    """Let a writer work for a while after it has opened the store; return what it told."""
    told, tells = os.pipe()
    child = os.fork()  # no fresh interpreter: a kill costs milliseconds
    if not child:
        try:
            os.dup2(tells, 1)
            work(os.fspath(path), seed, os.fdopen(1, "w"))
        finally:
            os._exit(1)
    os.close(tells)
    with os.fdopen(told) as pipe:
        first = pipe.readline()
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        rest = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    assert first, "the writer could not open the store"
    lines = (first + rest).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _allowed(lines: list[list[object]]) -> list[tuple[list[int], list[int], int]]:
    """Return what may be found: (ids that may be there, ids that must, fewest)."""
    acknowledged: list[int] = []
    for line in lines:
        if line[0] in ("open", "done"):
            acknowledged = line[1]  # type: ignore[assignment]
    allowed = [(acknowledged, acknowledged, len(acknowledged))]
    if lines and lines[-1][0] == "begin":
        ids, fewest = lines[-1][1:]
        allowed.append((ids, [], fewest))  # type: ignore[arg-type]
    return allowed


def _fits(found: list[int], may: list[int], must: list[int], fewest: int) -> bool:
    return set(found) <= set(may) and set(must) <= set(found) and len(found) in (fewest, len(may))

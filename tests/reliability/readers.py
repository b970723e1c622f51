"""One writer beside eight processes that read: no reader ever sees a mixture of two commits."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hybridmem

READERS = 8
COMMITS = 3  # that a reader sees at least, however quick it is beside the writer
Floats = NDArray[np.float32]


def content(entry_id: int) -> tuple[Floats, Floats]:
    keys = np.full((1 + entry_id % 3, 8), entry_id, np.float32)
    return keys, keys + np.float32(0.5)


def check(entry: Any) -> None:
    keys, values = content(entry.entry_id)
    assert entry.keys.tobytes() == keys.tobytes(), f"keys of entry {entry.entry_id}"
    assert entry.values.tobytes() == values.tobytes(), f"values of entry {entry.entry_id}"


def _fingerprint(ids: list[int]) -> int:
    return hash(tuple(ids))  # of integers: the same in every process


class Watch:
    """What a reader has seen.

    Attributes
    ----------
    reads, gone : int
        Entries that were read, and how often the writer had removed their shard before.
    seen : dict of int to int
        Fingerprints of the ids of each commit.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.reads = self.gone = 0
        self.seen: dict[int, int] = {}
        self._held: list[Any] = []

    def look(self, store: Any) -> None:
        """Read at random of one commit."""
        rng = self.rng
        generation, ids = store.stats().generation, list(store)
        fingerprint = _fingerprint(ids)
        assert self.seen.setdefault(generation, fingerprint) == fingerprint, (
            "one commit, two contents"
        )
        try:
            for entry_id in sorted(rng.choices(ids, k=200)) if ids else ():
                check(store.get(entry_id))
                self.reads += 1
            query = np.full(8, rng.choice([-1.0, 1.0]), np.float32)
            hits = store.query(query, rng.randrange(2), 5)
        except hybridmem.SnapshotGoneError:
            self.gone += 1
            return
        for hit in hits:
            check(hit)
            assert hit.entry_id in ids
            self.reads += 1
        self._held += hits[:1]
        if len(self._held) > 100:
            self.check_held()

    def check_held(self) -> None:
        """Look at views again whose shards are long gone."""
        for entry in self._held:
            check(entry)
            self.reads += 1
        self._held.clear()


def reader(path: Path, seed: int, reads: int, end: float) -> dict[str, Any]:
    """Read until it is enough; return which commits were seen and how much was read.

    Enough is `reads` entries, of several commits, and a shard that was removed before it was read:
    how soon that happens is the machine's affair.
    """
    watch = Watch(seed)

    def enough() -> bool:
        return watch.reads >= reads and len(watch.seen) >= COMMITS

    def is_over() -> bool:
        return time.monotonic() > end

    while not (enough() or is_over()):
        io, max_open = watch.rng.choice([("mmap", 64), ("mmap", 2), ("pread", 64)])
        with hybridmem.open(path, "r", io=io, max_open_shards=max_open) as store:
            for _ in range(watch.rng.randrange(1, 20)):
                watch.look(store)
                if enough() or is_over():
                    break
                store.refresh()
    looks = 1
    while not (watch.gone or is_over()):
        looks *= 2  # a writer that is slow removes little meanwhile
        with hybridmem.open(path, "r", max_open_shards=1) as store:
            for _ in range(looks):
                watch.look(store)
                if watch.gone or is_over():
                    break
    watch.check_held()
    return {"reads": watch.reads, "gone": watch.gone, "seen": list(watch.seen.items())}


def change(store: Any, rng: random.Random, log: set[int]) -> None:
    """Change the store and commit; note which ids a commit may hold."""
    for _ in range(rng.randrange(1, 6)):
        entry_id = store._writer.next_entry_id
        assert store.put(*content(entry_id), entry_id % 2, 1 + entry_id % 7) == entry_id
    kind = rng.choice(["flush", "flush", "delete", "evict", "compact"])
    if kind == "delete":
        store.delete(rng.choice(list(store)))
    log.add(_fingerprint(list(store)))
    store.flush()
    if kind == "evict":
        store.evict(max(1, min(60, len(store) - 3)))
    elif kind == "compact":
        store.compact()
    log.add(_fingerprint(list(store)))


def run(path: Path, reads: int, *, seconds: float = 3600, seed: int = 0) -> dict[str, int]:
    """Let eight processes read so often in all while one writes; check what they saw."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    hybridmem.create(path, embed_dim=8, hdc_dim=256, shard_max_bytes=5000).close()
    running = {}
    for number in range(READERS):
        child, told = _started(path, seed + number, -(-reads // READERS), end)
        running[child] = told
    log = {_fingerprint([])}
    commits, answers = 0, []
    try:
        with hybridmem.open(path) as store:
            while running:
                change(store, rng, log)
                commits += 1
                for child in list(running):
                    if os.waitpid(child, os.WNOHANG)[0]:
                        with os.fdopen(running.pop(child)) as pipe:
                            answers.append(json.loads(pipe.read() or "null"))
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert all(answers), "a reader failed"
    seen: dict[int, int] = {}
    for answer in answers:
        for generation, fingerprint in answer["seen"]:
            assert fingerprint in log, f"commit {generation} is a mixture"
            assert seen.setdefault(generation, fingerprint) == fingerprint, "readers differ"
    return {
        "readers": READERS,
        "reads": sum(answer["reads"] for answer in answers),
        "snapshots": sum(len(answer["seen"]) for answer in answers),
        "gone": sum(answer["gone"] for answer in answers),
        "commits": commits,
    }


def _started(path: Path, seed: int, reads: int, end: float) -> tuple[int, int]:
    """Start a reader; return its process and the end of a pipe on which it answers."""
    told, tells = os.pipe()
    child = os.fork()
    if child:
        os.close(tells)
        return child, told
    try:
        os.close(told)
        with os.fdopen(tells, "w") as pipe:
            json.dump(reader(path, seed, reads, end), pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)

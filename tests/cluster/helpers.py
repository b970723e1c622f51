"""Entries, and what tests do to actors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hybridmem

from .nodes import ray

WIDTH = 16
CONFIG: dict[str, Any] = {"embed_dim": WIDTH, "hdc_dim": 256}
LAYERS = 3


def matrix(seed: int, n: int = 2) -> Any:
    rng = np.random.default_rng([seed, n])
    return rng.standard_normal((n, WIDTH)).astype(np.float32)


def put(memory: Any, seeds: range) -> list[int]:
    """Put entries of all layers in turn."""
    return [memory.put(matrix(seed), matrix(seed + 1), seed % LAYERS) for seed in seeds]


def answers(memory: Any) -> list[Any]:
    """Everything that queries of all layers give, timestamps and access counts left out."""
    return [
        [
            (hit.entry_id, hit.score, hit.keys.tobytes(), hit.values.tobytes())
            for hit in memory.query(matrix(1000 + layer, 1), layer, 50)
        ]
        for layer in range(LAYERS)
    ]


def replicas(memory: Any, number: int) -> list[Any]:
    """The replicas of a partition, the one asked first in front."""
    return list(memory._owners.all[number].replicas)


def at(memory: Any, number: int, turn: int = 0) -> Any:
    """The actor of a replica of a partition."""
    return replicas(memory, number)[turn].actor


def inside(actor: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function in the process of an actor."""
    return ray.get(actor.__ray_call__.remote(function), timeout=60)


def pid(actor: Any) -> int:
    number: int = inside(actor, lambda self: os.getpid())
    return number


@contextmanager
def stopped(actor: Any) -> Iterator[None]:
    """Let an actor hang meanwhile."""
    process = pid(actor)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def within_deadline(memory: Any, check: Callable[[], object]) -> None:
    """Make a check with a second for answers, and with more where a busy machine takes that."""
    for memory.deadline_s in (1.0, 4.0):
        try:
            check()
            return
        except (AssertionError, pytest.fail.Exception, hybridmem.PartitionError):
            continue
    memory.deadline_s = 30.0
    check()


def fill_disk(actor: Any) -> None:
    """Let the disk of an actor's process have no space from now on."""

    def full(self: Any) -> None:
        from hybridmem.testing import Faults, installed

        self.full = installed(Faults(0, "full"))
        self.full.__enter__()

    inside(actor, full)


def free_disk(actor: Any) -> None:
    """Let it have space again."""
    inside(actor, lambda self: self.full.__exit__(None, None, None))


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it did not become true"
        time.sleep(0.1)

"""What the benchmarks move: sizes, random rows, filled stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import hybridmem

Floats = npt.NDArray[np.float32]

#: Width of a token's keys in RWKV-X 3.6B and in many models of 7 billion parameters.
WIDTH = 3584
TOKENS = 64


class Sizes:
    """How much the benchmarks move; little where they only run as tests."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.entries = 100_000 if full else 400
        self.layers = 4
        self.large_entries = 200 if full else 8
        self.flush_entries = 64 if full else 2
        self.late_entries = 10_000 if full else 100
        self.cache_tokens = 4096 if full else 64

    def scaled(self, n: int) -> int:
        """Return a number of entries, small where this is a test."""
        return n if self.full else max(40, n // 1000)


def chunk(rng: np.random.Generator, tokens: int = TOKENS, width: int = WIDTH) -> Floats:
    """Return random rows."""
    return rng.standard_normal((tokens, width), np.float32)


def fill(
    store: hybridmem.Store, n: int, layers: int, rng: np.random.Generator, tokens: int
) -> None:
    """Put entries of random keys, spread over layers, and flush."""
    width = store.config.embed_dim
    for at in range(n):
        rows = rng.standard_normal((2, tokens, width), np.float32)
        store.put(rows[0], rows[1], at % layers)
    store.flush()


def times(n: int, call: Callable[[], object]) -> Callable[[], None]:
    """A call so short that it is timed by the many."""

    def run() -> None:
        for _ in range(n):
            call()

    return run

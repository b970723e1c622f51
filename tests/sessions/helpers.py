"""A width, a row, and sessions with something in them."""

from __future__ import annotations

import numpy as np

import hybridmem

WIDTH = 16
ROW = np.ones((1, WIDTH), np.float32)


def use(sessions: hybridmem.Sessions, name: str, count: int = 2) -> None:
    rng = np.random.default_rng(len(name))
    with sessions.open(name) as store:
        for _ in range(count):
            store.put(*rng.standard_normal((2, 3, WIDTH)).astype(np.float32), 0)

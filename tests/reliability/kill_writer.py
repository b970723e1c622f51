"""A writer that works until it is killed, telling its parent what was acknowledged.

Each line that it writes is a JSON list: `begin` and the ids that the store may hold once the next
commit is done, `done` when it was acknowledged.
"""

from __future__ import annotations

import json
import random
from typing import Any, TextIO

import numpy as np

import hybridmem

LIMIT = 24


def content(entry_id: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(entry_id)
    keys, values = rng.standard_normal((2, 1 + entry_id % 3, 8)).astype(np.float32)
    return keys, values


def work(path: str, seed: int, pipe: TextIO) -> None:
    """Put, delete, query, flush, evict and compact until killed."""

    def tell(*words: object) -> None:
        pipe.write(json.dumps(words) + "\n")
        pipe.flush()

    rng = random.Random(seed)
    store = hybridmem.open(path)
    tell("open", sorted(store))
    used = store._writer.next_entry_id - 1  # ids of entries that are gone are not given again
    while True:
        for _ in range(rng.randrange(1, 6)):
            # An id of what was put and lost by a kill is given again: contents follow the id.
            entry_id = used + 1
            used = store.put(*content(entry_id), entry_id % 3)
            assert used == entry_id
            if len(store) > LIMIT:
                store.delete(rng.choice(list(store)))
        if rng.random() < 0.3:
            store.query(content(used)[0], used % 3, 3)
        before = sorted(store)
        kind = rng.choice(["flush", "flush", "flush", "evict", "compact"])
        if kind == "evict":
            # What goes is known by the rule only: any subset of so many may be found meanwhile.
            tell("begin", before, max(1, len(before) - 3))
            store.evict(max(1, len(before) - 3))
        else:
            tell("begin", before, len(before))
            store.flush() if kind == "flush" else store.compact()
        tell("done", sorted(store))

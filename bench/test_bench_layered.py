"""What several stores that answer as one cost beside the queries of each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cases import Sizes, fill

import hybridmem


def test_layered_query_of_one_store(
    versus: Callable[..., None], tmp_path: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    entries = sizes.scaled(1000)
    query = rng.standard_normal((1, 64), np.float32)
    with hybridmem.create(tmp_path / "a", embed_dim=64) as store:
        fill(store, entries, 1, rng, tokens=2)
        memory = hybridmem.layered([store])
        versus(
            f"query of one layered store of {entries:,} entries, top 5",
            lambda: memory.query(query, 0),
            {"the query of that store": lambda: store.query(query, 0)},
            rounds=1000,
        )


def test_layered_query_of_own_entries(
    versus: Callable[..., None], tmp_path: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    entries = sizes.scaled(4000)
    for name in "abc":
        with hybridmem.create(tmp_path / name, embed_dim=64) as store:
            fill(store, entries, 1, rng, tokens=2)
    query = rng.standard_normal((1, 64), np.float32)
    with (
        hybridmem.open(tmp_path / "c") as mine,
        hybridmem.layered([tmp_path / "a", tmp_path / "b", mine]) as memory,
    ):
        ids = np.array(list(mine))
        assert len(memory.query(query, 0, entry_ids=ids)) == 5
        versus(
            f"the same, among the {entries:,} of the private store",
            lambda: memory.query(query, 0, entry_ids=ids),
            {"the query of that store": lambda: mine.query(query, 0, entry_ids=ids)},
            rounds=200,
        )


def test_layered_query(
    versus: Callable[..., None], tmp_path: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    entries = sizes.scaled(4000)
    for name in "abc":
        with hybridmem.create(tmp_path / name, embed_dim=64) as store:
            fill(store, entries, 1, rng, tokens=2)
    asked = itertools.cycle(rng.standard_normal((64, 64), np.float32))
    with contextlib.ExitStack() as opened:
        stores = [opened.enter_context(hybridmem.open(tmp_path / name, mode="r")) for name in "abc"]
        memory = opened.enter_context(hybridmem.layered(stores))

        def each() -> None:
            query = next(asked)
            for store in stores:
                store.query(query, 0)

        assert len(memory.query(next(asked), 0)) == 5
        versus(
            f"query of 3 layered stores of {entries:,} entries, top 5",
            lambda: memory.query(next(asked), 0),
            {"the same query of each store": each},
            rounds=200,
        )

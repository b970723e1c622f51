"""What must hold at 100,000 entries, counted and not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _kernels

COUNT, LAYERS = 100_000, 4


@pytest.fixture
def large(new_store: Callable[..., Any], rng: np.random.Generator) -> Any:
    """100,000 entries, the layers taking turns as they do in a model."""
    store = new_store(embed_dim=4, hdc_dim=64)
    x = rng.standard_normal((COUNT // LAYERS, 1, 4)).astype(np.float32)
    pairs = list(zip(x, x, strict=True))
    for start in range(0, len(pairs), 500):
        for layer_idx in range(LAYERS):
            store.put_many(pairs[start : start + 500], layer_idx=layer_idx)
    assert len(store) == COUNT
    return store


class Spy:
    """Counts the signatures that are handed to a kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel, self.rows = kernel, 0

    def __call__(self, signatures: Any, *arguments: Any) -> Any:
        self.rows += len(signatures)
        return self.kernel(signatures, *arguments)


@pytest.mark.parametrize("kernel", ["hamming_topk"])
def test_a_query_costs_its_own_layer_only(
    kernel: str, large: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    queries = rng.standard_normal((8, 4)).astype(np.float32)
    first = [[hit.entry_id for hit in large.query(query, 2, 5)] for query in queries]
    large.close()
    with hybridmem.open(large.path, mode="r") as reader:
        spy = Spy(getattr(_kernels, kernel))
        monkeypatch.setattr(_kernels, kernel, spy)
        for number, query in enumerate(queries, 1):
            assert [hit.entry_id for hit in reader.query(query, 2, 5)] == first[number - 1]
            assert spy.rows == number * COUNT // LAYERS
        before = spy.rows
        found = reader.query_many(queries, 2, 5)  # one pass over the index for the batch
        assert spy.rows - before == COUNT // LAYERS
        assert [[hit.entry_id for hit in hits] for hits in found] == first
        reader.query(queries[0], 77, 5)
        assert spy.rows - before == COUNT // LAYERS

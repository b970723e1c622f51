"""Fixtures of the transformers client's tests.

This directory must not become a package: it would hide the real `transformers` from imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """One thread and no gradients."""
    import torch

    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Tiny random models by name, each made once."""
    from tiny_models import make

    made: dict[Any, Any] = {}

    def get(name: str = "llama", attention: str = "sdpa", **changes: Any) -> Any:
        key = (name, repr(sorted(changes.items())))
        if key not in made:
            made[key] = make(name, **changes)
        made[key].set_attn_implementation(attention)
        return made[key]

    return get


@pytest.fixture
def new_cache(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """HybridCache over a store of its own, with a window far smaller than any test's text."""
    from hybridmem.integrations.transformers import HybridCache

    caches: list[Any] = []

    def make(model: Any, **changes: Any) -> Any:
        options = {"window": 5, "chunk_tokens": 4, "top_k": 1000, "sink_tokens": 2} | changes
        path = options.pop("path", tmp_path / f"store_{len(caches)}")
        caches.append(HybridCache(model.config, path, **options))
        return caches[-1]

    yield make
    for cache in reversed(caches):  # the first may own the store of others
        cache.close()

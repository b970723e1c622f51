"""Fixtures of the transformers client's tests.

This directory must not become a package: it would hide the real `transformers` from imports.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOW = "needs PyTorch and transformers: pip install hybridmem[transformers]"
# The origin, because this very directory passes for a package of that name, though for one without.
MISSING = any(
    getattr(importlib.util.find_spec(name), "origin", None) is None
    for name in ("torch", "transformers")
)


class NamedTest(pytest.Item):
    """A test that is known by name and line only."""

    def __init__(self, *, line: int, **options: Any) -> None:
        super().__init__(**options)
        self.line = line

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line, self.name

    def runtest(self) -> None:
        pytest.skip(HOW)


class NamedTests(pytest.File):
    """The tests of a file that cannot be imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        for node in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test = NamedTest.from_parent(self, name=node.name, line=node.lineno - 1)
                for mark in ("torch", "transformers"):
                    test.add_marker(mark)
                test.add_marker(pytest.mark.skip(reason=HOW))
                yield test


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Name the tests without importing them where what they need is missing."""
    return NamedTests.from_parent(parent, path=module_path) if MISSING else None


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

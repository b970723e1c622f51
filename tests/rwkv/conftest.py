"""Fixtures of the RWKV-X tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint: 2 heads, 4 RWKV and 2 attention layers."""
    from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint

    path = tmp_path_factory.mktemp("rwkv") / "small.pth"
    random_checkpoint(path, vocab=97)
    return path

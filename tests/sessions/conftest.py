from __future__ import annotations

from pathlib import Path

import pytest

import hybridmem

from .helpers import WIDTH


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "agents"


@pytest.fixture
def sessions(root: Path) -> hybridmem.Sessions:
    return hybridmem.sessions(root, embed_dim=WIDTH, hdc_dim=64)

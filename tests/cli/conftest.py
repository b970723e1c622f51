"""A store to look at and to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem

from . import ENTRIES, TOKENS, WIDTH


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of three layers; entries 2 and 5 are deleted but not compacted away."""
    rng = np.random.default_rng(11)
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=WIDTH, model_id="toy") as opened:
        for number in range(ENTRIES):
            keys, values = rng.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
            opened.put(keys, values, layer_idx=number % 3, importance=float(rng.random()))
        opened.flush()
        for number in (2, 5):
            opened.delete(number)
        # Equal importance: age and id decide.
        opened.query(opened.get(1).keys, layer_idx=0, top_k=4)
    return path

"""What may happen between two steps of a call, made to happen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _chunks


def test_a_put_that_meets_a_calibration_is_centred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(4, 16)) + 5
    with hybridmem.create(tmp_path / "s", embed_dim=16) as store:
        prepare = _chunks.prepare

        def meets_calibration(*args: Any) -> Any:
            chunk = prepare(*args)
            if 0 not in store.calibration:
                store.calibrate(0, keys=np.full((1, 16), 5.0))
            return chunk

        monkeypatch.setattr(_chunks, "prepare", meets_calibration)
        during, after = store.put(keys, keys, 0), store.put(keys, keys, 0)
        assert store.get(during).signature == store.get(after).signature
        assert store.get(during).padding == store.get(after).padding != 0

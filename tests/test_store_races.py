"""What may happen between two steps of a call, made to happen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _chunks
from hybridmem._view import IndexView


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


@pytest.mark.parametrize("order", ["hamming", "norm"])
def test_a_query_that_meets_a_refresh_is_of_the_new_commit(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    query, means = rng.normal(size=16), {"keys": np.full((1, 16), 5.0), "queries": np.ones((1, 16))}
    with hybridmem.create(tmp_path / "s", embed_dim=16) as writer:
        if order == "norm":
            writer.calibrate(0, **means)
        writer.put(rng.normal(size=(2, 16)), np.ones((2, 16)), 0)
        writer.flush()
        with hybridmem.open(tmp_path / "s", "r") as reader:
            for _ in range(20):
                writer.put(rng.normal(size=(2, 16)), np.ones((2, 16)), 0)
            if order == "hamming":
                writer.calibrate(0, **means)
            writer.flush()
            search = IndexView.search

            def meets_refresh(*args: Any) -> Any:
                monkeypatch.setattr(IndexView, "search", search)
                found = search(*args)
                assert reader.refresh()
                return found

            monkeypatch.setattr(IndexView, "search", meets_refresh)
            during, after = (
                [(hit.entry_id, hit.score) for hit in reader.query(query, 0, order=order)]
                for _ in range(2)
            )
            assert during == after
            assert len(after) == 5

"""No commit writes an index.json that cannot be read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem import _fileio, _manifest

from .book import Book, read


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(_fileio.calls, name, lambda descriptor: None)


def test_means_of_too_many_wide_layers_are_refused(tmp_path: Path) -> None:
    path, width = tmp_path / "mem", 20_000
    store = hybridmem.create(path, embed_dim=width, hdc_dim=64)
    mean = np.ones((1, width), np.float32)
    store.put(mean, mean, 0)
    n_layers = 7
    for layer in range(n_layers):
        store.calibrate(layer, keys=mean, queries=mean)
    with pytest.raises(ValueError, match="8 calibrated layers"):
        store.calibrate(n_layers, keys=mean, queries=mean)
    store.evict(0)  # with less on the disk, a smaller index.json is read
    store.compact()
    store.close()
    with hybridmem.open(path) as store:
        assert len(store.calibration) == n_layers
        store.put(mean, mean, 0)


def test_a_commit_that_could_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a million shards of one small entry each."""
    monkeypatch.setattr(_manifest, "_limit", lambda total_bytes: 1500)
    path, book = tmp_path / "mem", Book()
    store = hybridmem.create(path, embed_dim=4, hdc_dim=64, shard_max_bytes=1)
    for _ in range(30):
        book.put(store)
        store.flush()
        book.commit()
    for _ in range(30):
        book.put(store)
    with pytest.raises(hybridmem.StoreIOError, match="shard_max_bytes"):
        store.flush()
    assert read(store).keys() == book.live.keys()
    with hybridmem.open(path, mode="r") as reader:
        assert book.committed.fits(read(reader))
    store.close()  # after a write that failed it only lets go
    with hybridmem.open(path, shard_max_bytes=10_000) as store:
        store.compact()
        book.drop(range(31, 61))
        book.used = 30
        for _ in range(10):
            book.put(store)
    with hybridmem.open(path, mode="r") as reader:
        assert book.state().fits(read(reader))

"""What is written goes to the disk early, and the sync alone decides."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem._fileio import Directory
from hybridmem.testing import Hooked, installed

MIB = 1 << 20


class Calls(Hooked):
    """Notes writes and syncs; a start of writing fails where that is asked for."""

    def __init__(self, error: int = 0) -> None:
        super().__init__()
        self.log: list[tuple[str, int, int]] = []
        self._error = error

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "start_writing":
            self.log.append((name, args[1], args[2]))
            if self._error:
                raise OSError(self._error, "injected")
        result = super().intercept(name, *args, **kwargs)
        if name == "writev":
            self.log.append((name, args[2], result))
        elif name in ("fsync", "fdatasync"):
            self.log.append((name, 0, 0))
        return result


@pytest.mark.parametrize("error", [0, errno.EIO, errno.ENOSPC])
def test_a_large_file_goes_to_the_disk_while_it_is_written(error: int, tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(21 * MIB)
    parts = [memoryview(data)[at : at + 700_001] for at in range(0, len(data), 700_001)]
    directory = Directory.make(tmp_path / "d")
    calls = Calls(error)
    with installed(calls):
        directory.write_file("f", [(4096, parts), (0, [b"h" * 4096])])
    directory.close()
    assert (tmp_path / "d" / "f").read_bytes() == b"h" * 4096 + data
    started = [(offset, size) for name, offset, size in calls.log if name == "start_writing"]
    assert len(started) == 2
    assert all(size >= 8 * MIB for _, size in started)
    assert started[0][0] == 4096
    assert started[1][0] == sum(started[0])
    for number, (name, offset, size) in enumerate(calls.log):
        if name == "start_writing":  # of bytes that were written before
            written = [call for call in calls.log[:number] if call[0] == "writev"]
            assert offset + size == sum(written[-1][1:])
    assert calls.log[-1][0] == "fsync"


def test_small_files_are_left_to_the_sync(tmp_path: Path) -> None:
    calls = Calls()
    with installed(calls), hybridmem.create(tmp_path / "mem", embed_dim=64) as store:
        store.put(np.ones((5, 64), np.float32), np.ones((5, 64), np.float32), 0)
    assert "start_writing" not in {name for name, *_ in calls.log}


def test_tensors_are_written_before_the_header_that_describes_them(tmp_path: Path) -> None:
    calls = Calls()
    rows = np.ones((700, 1024), np.float32)
    with hybridmem.create(tmp_path / "mem", embed_dim=1024) as store:
        store.put(rows, rows, 0)
        with installed(calls):
            store.flush()
    offsets = [offset for name, offset, _ in calls.log if name == "writev"]
    assert offsets[0] > 0
    assert offsets[2] == 0
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        np.testing.assert_array_equal(store.get(1).keys, rows)


class Advice(Hooked):
    """Notes what of a map is asked for, and fails where that is wanted."""

    def __init__(self, error: int = 0) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self._error = error

    def intercept(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "advise":
            self.asked.append(args[1:])
            if self._error:
                raise OSError(self._error, "injected")
        return super().intercept(name, *args, **kwargs)


def stored(path: Path, **config: Any) -> Any:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((9, 20, 64)).astype(np.float32)
    with hybridmem.create(path, embed_dim=64, **config) as store:
        for one in rows:
            store.put(one, 2 * one, 0)
    return rows


@pytest.mark.parametrize("error", [0, errno.EIO])
@pytest.mark.parametrize("config", [{}, {"quantize_stored": True}, {"kv_dtype": "float16"}])
def test_a_query_asks_for_all_it_returns_before_it_reads(
    config: dict[str, Any], error: int, tmp_path: Path
) -> None:
    rows = stored(tmp_path / "mem", **config)
    advice = Advice(error)
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        header = store._pool.header(0)
        with installed(advice):
            hits = store.query(rows[3, 0], 0, 4)
            first = len(advice.asked)
            for hit in hits:
                parts = [part for _, part in header.parts_of(header.find(hit.entry_id))]
                for part in parts:
                    assert any(
                        at <= part.start and part.start + part.length <= at + size
                        for at, size in advice.asked[: first // 2]
                    )
            again = store.query(rows[3, 0], 0, 4)
        assert len(advice.asked) == first  # what was verified is in memory, as far as it may be
        for hit, same in zip(hits, again, strict=True):
            np.testing.assert_array_equal(hit.keys, same.keys)


def test_what_is_asked_for_beforehand(tmp_path: Path) -> None:
    stored(tmp_path / "mem", shard_max_bytes=30_000)
    advice = Advice()
    with hybridmem.open(tmp_path / "mem", max_open_shards=2) as store:
        store.put(np.ones((2, 64), np.float32), np.ones((2, 64), np.float32), 0)
        with installed(advice):
            store.prefetch([])
            store.prefetch([10, 77])  # not written yet, and none
            assert advice.asked == []
            store.prefetch(range(1, 10))  # of two shards, two entries each
            assert len(advice.asked) == 4
            store.get(1)
            assert len(advice.asked) == 5
            store.prefetch([1])
            assert len(advice.asked) == 5
        for wrong in ("1", 3, [1.5]):
            with pytest.raises(TypeError, match="entry_ids"):
                store.prefetch(wrong)


def test_without_maps_nothing_is_asked_for(tmp_path: Path) -> None:
    rows = stored(tmp_path / "mem")
    advice = Advice()
    with hybridmem.open(tmp_path / "mem", mode="r", io="pread") as store, installed(advice):
        store.query(rows[0, 0], 0)
        store.prefetch([1])
    assert advice.asked == []

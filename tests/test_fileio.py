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

"""A store of a million entries, and what a process pays before its first call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Sizes, fill, times

import hybridmem

Versus = Callable[..., None]


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory, sizes: Sizes) -> Path:
    """A million entries of one token."""
    path = tmp_path_factory.mktemp("million") / "mem"
    with hybridmem.create(path, embed_dim=8) as store:
        fill(store, sizes.scaled(1_000_000), 4, np.random.default_rng(5), 1)
    return path


def test_open(versus: Versus, million: Path) -> None:
    buffer = bytearray(1 << 20)

    def ours() -> int:
        with hybridmem.open(million, mode="r") as store:
            return len(store)

    def read() -> None:
        with open(million / "entries.bin", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    versus(
        f"open {ours():,} entries",
        ours,
        {"entries.bin into new memory": (million / "entries.bin").read_bytes},
        floor=("reading entries.bin through a buffer", read),
        rounds=7,
    )


RESIDENT = """
import sys, numpy, hybridmem

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10

before = resident()
with hybridmem.open(sys.argv[1], mode="r") as store:
    for i in range(1000):
        store.query(numpy.random.default_rng(i).standard_normal(8), i % 4)
    print(resident() - before, 512 * len(store))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_resident(benchmark: Any, million: Path) -> None:
    """Memory, not time: after 1,000 queries a process holds the signatures and little more."""
    command = [sys.executable, "-c", RESIDENT, os.fspath(million)]
    done = benchmark.pedantic(subprocess.check_output, args=(command,), rounds=1)
    grown, signatures = map(int, done.split())
    benchmark.extra_info["title"] = f"memory after 1,000 queries of {signatures // 512:,} entries"
    benchmark.extra_info["taken"] = f"{grown / 1e6:.0f} MB"
    benchmark.extra_info["others"] = {
        "their signatures": {
            "taken": f"{signatures / 1e6:.0f} MB",
            "ratio": signatures / grown,
            "is_floor": True,
        }
    }
    assert grown <= 1.1 * signatures + (64 << 20)


def test_import(versus: Versus, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPYCACHEPREFIX": os.fspath(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled

    def python(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    versus(
        "start Python and import hybridmem",
        python("import hybridmem"),
        {"start Python": python("pass")},
        floor=("import numpy and safetensors", python("import numpy, safetensors")),
    )


def test_put_to_a_million(versus: Versus, million: Path, tmp_path: Path) -> None:
    row = np.ones((1, 8), np.float32)
    shutil.copytree(million, tmp_path / "large")
    with (
        hybridmem.open(tmp_path / "large") as store,
        hybridmem.create(tmp_path / "small", embed_dim=8) as small,
    ):
        n = len(store)
        for _ in range(1000):
            small.put(row, row, 0)
        versus(
            f"put a token to {n:,} entries",
            times(20, lambda: store.put(row, row, 0)),
            {"put to 1,000 entries": times(20, lambda: small.put(row, row, 0))},
            per={"": 20, "put to 1,000 entries": 20},
            rounds=41,
        )

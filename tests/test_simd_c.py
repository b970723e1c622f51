"""The instruction sets as plain C; under emulation also those that this machine has not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "c" / "run.sh"


def levels(cc: str, run: list[str]) -> list[str]:
    """Compile and run the comparison; the levels that were compared."""
    for tool in (cc, *run[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    done = subprocess.run(
        [SCRIPT],
        env={**os.environ, "CC": cc, "RUN": " ".join(run)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_native() -> None:
    assert levels("cc", [])[-1] == "ok"


@pytest.mark.slow
def test_aarch64_under_emulation() -> None:
    run = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
    assert levels("aarch64-linux-gnu-gcc", run) == ["scalar", "neon", "ok"]


@pytest.mark.slow
def test_big_endian_under_emulation() -> None:
    run = ["qemu-s390x-static", "-L", "/usr/s390x-linux-gnu"]
    assert levels("s390x-linux-gnu-gcc", run) == ["scalar", "ok"]


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 only")
@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("qemu64", ["scalar", "ok"]),
        ("Nehalem", ["scalar", "popcnt", "ok"]),
        ("max", ["scalar", "popcnt", "avx2", "ok"]),
    ],
)
def test_older_processors_under_emulation(processor: str, expected: list[str]) -> None:
    assert levels("cc", ["qemu-x86_64-static", "-cpu", processor]) == expected

"""The codec as plain C: the same bytes from every compiler, instruction set and processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hybridmem import _kernels

SOURCE = Path(__file__).parent / "c" / "codec.c"
#: What is stored must not change with a version either.
HASH = "f6e2df1cf8829e7e"


def hashes(
    tmp_path: Path, cc: str, levels: list[str], run: tuple[str, ...] = (), options: str = "-O3"
) -> list[str]:
    for tool in (cc, *run[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    binary = str(tmp_path / "codec")
    flags = ["-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run([cc, *flags, *options.split(), "-o", binary, str(SOURCE)], check=True)
    done = subprocess.run([*run, binary, *levels], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("cc", "options"),
    [("cc", "-O0"), ("cc", "-O3"), ("clang", "-O3"), ("cc", "-O1 -fsanitize=address,undefined")],
)
def test_every_compiler_and_level_gives_the_same_bytes(
    tmp_path: Path, cc: str, options: str
) -> None:
    levels = list(_kernels.simd_levels())
    assert hashes(tmp_path, cc, levels, options=options) == [HASH] * len(levels)


@pytest.mark.slow
def test_aarch64_gives_the_same_bytes(tmp_path: Path) -> None:
    run = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
    assert hashes(tmp_path, "aarch64-linux-gnu-gcc", ["neon"], run) == [HASH]

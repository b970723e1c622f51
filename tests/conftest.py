"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import hybridmem
from hybridmem import _kernels

ROOT = Path(__file__).resolve().parent.parent

# The same examples in every run, however slow the machine is; others are looked for with
# HYPOTHESIS_PROFILE=thorough.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("ci"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the source tree where the package under test is an installed one.

    A process that a test starts would else find the source first, which is not compiled there.
    """
    if Path(hybridmem.__file__).is_relative_to(ROOT / "hybridmem"):
        yield
        return
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(params=_kernels.simd_levels())
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine can run, in turn."""
    before = _kernels.simd_level()
    _kernels.set_simd_level(request.param)
    assert _kernels.simd_level() == request.param
    yield request.param
    _kernels.set_simd_level(before)

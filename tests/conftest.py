"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridmem import _kernels


@pytest.fixture(params=_kernels.simd_levels())
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine can run, in turn."""
    before = _kernels.simd_level()
    _kernels.set_simd_level(request.param)
    assert _kernels.simd_level() == request.param
    yield request.param
    _kernels.set_simd_level(before)

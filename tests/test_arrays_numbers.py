"""The boundary: numbers that are taken, and those that are refused, in which words."""

from __future__ import annotations

import decimal
import fractions
import math
from typing import Any

import numpy as np
import pytest

from hybridmem._arrays import count, importance, layer_index

FLOAT_MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("v", [0, 7, 2**32 - 1, np.int8(7), np.uint64(9), np.array(3)])
def test_integers_are_taken(v: Any) -> None:
    for got in (layer_index(v), count(v, "top_k", 0)):
        assert type(got) is int
        assert got == int(v)


class Hostile:
    def __index__(self) -> int:
        raise KeyError("x")

    def __float__(self) -> float:
        raise KeyError("x")

    def __repr__(self) -> str:
        raise KeyError("x")


NO_INTEGER = [
    True,
    np.True_,
    1.0,
    np.float32(1),
    "1",
    b"1",
    None,
    [1],
    np.array([1]),
    1j,
    Hostile(),
]


@pytest.mark.parametrize("v", NO_INTEGER, ids=lambda v: type(v).__name__)
def test_no_integers_are_refused(v: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^layer_idx: got .*, want an integer from 0 to 2\*\*32 - 1$"
    ):
        layer_index(v)
    with pytest.raises(TypeError, match=r"^top_k: got .*, want an integer >= 1$"):
        count(v, "top_k", 1)


def test_integers_out_of_range_are_refused() -> None:
    for v in (-1, 2**32, 10**30, np.int64(-5)):
        with pytest.raises(
            ValueError, match=r"^layer_idx: got .*, want an integer from 0 to 2\*\*32"
        ):
            layer_index(v)
    with pytest.raises(ValueError, match=r"^top_k: got 0 \(int\), want an integer >= 1$"):
        count(0, "top_k", 1)
    assert count(10**30, "top_k", 1) == 10**30


@pytest.mark.parametrize(
    "v",
    [0, 1, 0.1, 1e-60, FLOAT_MAX, np.float16(0.5), np.float64(0.1), np.int32(4), np.array(0.25),
     np.longdouble(2), fractions.Fraction(1, 3), decimal.Decimal("0.7")],
    ids=repr,
)  # fmt: skip
def test_importances_are_rounded_to_float32(v: Any) -> None:
    got = importance(v)
    assert type(got) is float
    assert got == np.float32(float(v))


def test_importance_has_no_negative_zero() -> None:
    assert math.copysign(1, importance(-0.0)) == 1


@pytest.mark.parametrize(
    "v",
    [math.nan, math.inf, -math.inf, -1, -1e-60, 1e39, 10**400, np.float32("nan"), np.float64(4e38)],
)
def test_importances_that_are_no_weight_are_refused(v: Any) -> None:
    with pytest.raises(ValueError, match=r"^importance: got .*, want a finite number >= 0"):
        importance(v)


@pytest.mark.parametrize(
    "v",
    [True, np.True_, "0.5", np.str_("0.5"), b"1", None, 1j, np.complex64(1), np.array("0.5"), [1.0],
     np.array([1.0]), np.datetime64(5, "s"), np.timedelta64(5, "s"), np.array(True), np.void(b"1"),
     Hostile()],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_importances_that_are_no_number_are_refused(v: Any) -> None:
    with pytest.raises(TypeError, match=r"^importance: got .*, want a finite number >= 0"):
        importance(v)

"""The boundary: what is taken, bit for bit, and what is refused, in which words."""

from __future__ import annotations

import array
import collections
import ctypes
import math
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hybridmem import _arrays
from hybridmem._arrays import matrix

F32 = NDArray[np.float32]
N, W = 5, 12
FLOAT_MAX = float(np.finfo(np.float32).max)


def data(n: int = N, w: int = W, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=(n, w)).astype(np.float32)


def unaligned(x: F32) -> F32:
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    raw[:] = x.view(np.uint8).reshape(-1)
    return raw.view(np.float32).reshape(x.shape)


def strided(x: F32) -> F32:
    wide = np.zeros((3 * x.shape[0], 2 * x.shape[1]), np.float32)
    wide[::3, ::2] = x
    return wide[::3, ::2]


class HasArray:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self.x, Exception):
            raise self.x
        return self.x


class OnlyDLPack:
    def __init__(self, x: F32) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __len__(self) -> int:
        raise RuntimeError("is no sequence")


def assert_is(got: F32, want: F32) -> None:
    """Same bits, and the layout that everything behind the boundary relies on."""
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    assert got.dtype.isnative
    assert got.flags.c_contiguous
    assert got.flags.aligned
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


# -- taken ----------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[F32], Any]] = {
    "plain": lambda x: x,
    "fortran": np.asfortranarray,
    "strided": strided,
    "negative rows": lambda x: x[::-1].copy()[::-1],
    "negative columns": lambda x: x[:, ::-1].copy()[:, ::-1],
    "big-endian": lambda x: x.astype(">f4"),
    "unaligned": unaligned,
    "float64": lambda x: x.astype(np.float64),
    "big-endian float64": lambda x: x.astype(">f8"),
    "longdouble": lambda x: x.astype(np.longdouble),
    "masked, nothing masked": np.ma.masked_array,
    "leading axes": lambda x: x[None, None],
    "nested lists": lambda x: x.astype(np.float64).tolist(),
    "nested tuples": lambda x: tuple(tuple(row) for row in x.tolist()),
    "list of arrays": list,
    "list of float64 arrays and lists": lambda x: [x[0].astype("f8"), *x[1:].tolist()],
    "list of scalars": lambda x: [list(row) for row in x],
    "deque": lambda x: collections.deque(x.tolist()),
    "memoryview": memoryview,
    "ctypes": lambda x: (ctypes.c_float * W * N).from_buffer_copy(x.tobytes()),
    "__array__": HasArray,
    "DLPack": OnlyDLPack,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_matrix(form: str) -> None:
    x = data()
    x[1, 2], x[2, 3], x[3, 4] = -0.0, 1e-45, -1e-40  # a sign and subnormals to lose
    if "list" in form or "tuple" in form or form == "deque":
        x[2, 3] = 0.5
    assert_is(matrix(FORMS[form](x), "keys", W), x)


def test_read_only_memory_is_taken(tmp_path: Any) -> None:
    x = data()
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=x.shape)
    assert_is(matrix(mapped, "keys", W), x)
    x.flags.writeable = False
    assert np.shares_memory(matrix(x, "keys", W), x)
    assert_is(matrix(memoryview(x.tobytes()).cast("f", [N, W]), "keys", W), x)


@pytest.mark.parametrize("form", ["plain", "leading axes", "memoryview", "__array__", "DLPack"])
def test_what_is_right_already_is_not_copied(form: str) -> None:
    x = data()
    assert np.shares_memory(matrix(FORMS[form](x), "keys", W), x)


def test_broadcast_arrays_are_written_out() -> None:
    row = data(1)
    assert_is(matrix(np.broadcast_to(row, (7, W)), "k", W), np.repeat(row, 7, axis=0))
    assert_is(matrix(np.broadcast_to(np.float32(2), (7, W)), "k", W), np.full((7, W), 2, "f4"))


def test_float16_is_widened_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(np.float16)
    x = x[np.isfinite(x)].reshape(-1, 4)
    assert_is(matrix(x, "keys", 4), x.astype(np.float32))
    assert_is(matrix(x.astype(">f2"), "keys", 4), x.astype(np.float32))


def test_ml_dtypes_are_widened_exactly() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        x = data().astype(getattr(ml_dtypes, name))
        assert_is(matrix(x, "keys", W), x.astype(np.float32))
        assert_is(matrix(list(x), "keys", W), x.astype(np.float32))
    with pytest.raises(TypeError, match="int4"):
        matrix(data().astype(ml_dtypes.int4), "keys", W)


@given(hnp.arrays(np.float64, (3, 4), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_float64_is_rounded_or_refused(x: NDArray[np.float64]) -> None:
    with np.errstate(over="ignore"):
        want = x.astype(np.float32)
    if np.isfinite(want).all():
        assert_is(matrix(x, "keys", 4, finite=False), want)
    else:
        for finite in (True, False):
            with pytest.raises(ValueError, match="overflows float32"):
                matrix(x, "keys", 4, finite=finite)


def test_float64_rounds_half_to_even_at_the_edge_of_float32() -> None:
    edge = FLOAT_MAX + 2.0**102  # nearer to the largest float32 than to infinity
    assert matrix([[edge]], "keys", 1)[0, 0] == FLOAT_MAX
    with pytest.raises(ValueError, match=r"row 0, column 0 is .*, which overflows float32"):
        matrix([[FLOAT_MAX + 2.0**103]], "keys", 1)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1, 1)])
def test_vectors_where_they_are_allowed(lead: tuple[int, ...]) -> None:
    x = data(1)
    vector = x.reshape(*lead, W)
    assert_is(matrix(vector, "query", W, vector_ok=True), x)
    assert_is(matrix(array.array("f", x[0]), "query", W, vector_ok=True), x)
    assert_is(matrix(array.array("d", x[0]), "query", W, vector_ok=True), x)
    if not lead:
        with pytest.raises(ValueError, match=rf"query: got shape \[{W}\], want \[n_tokens, {W}\]$"):
            matrix(vector, "query", W)


def test_pandas_and_polars_frames_are_taken() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    x = data()
    for frame in (pandas.DataFrame(x), polars.DataFrame(x)):
        assert_is(matrix(frame, "keys", W), x)


@pytest.mark.parametrize("finite", [True, False])
def test_finite_false_leaves_nan_to_the_caller(finite: bool) -> None:
    x = data()
    x[3, 7] = np.nan
    if finite:
        with pytest.raises(ValueError, match=r"^keys: row 3, column 7 is nan, want finite values"):
            matrix(x, "keys", W)
    else:
        assert_is(matrix(x, "keys", W, finite=False), x)


# -- refused --------------------------------------------------------------------------------------

RAGGED: list[Any] = [[1.0] * W, [1.0] * (W - 1)]
LOOP: list[Any] = []
LOOP.append(LOOP)

WRONG_TYPE: dict[str, Any] = {
    "int64": np.zeros((N, W), np.int64),
    "uint8": np.zeros((N, W), np.uint8),
    "bool": np.zeros((N, W), bool),
    "complex": np.zeros((N, W), np.complex64),
    "object": np.zeros((N, W), object),
    "datetime": np.zeros((N, W), "M8[s]"),
    "structured": np.zeros((N, W), [("x", "f4")]),
    "void": np.zeros((N, W), "V4"),
    "text array": np.full((N, W), "1.0"),
    "bytes array": np.full((N, W), b"1.0"),
    "string": "1.0",
    "bytes": b"\0\0\x80\x3f" * N * W,
    "bytearray": bytearray(4 * N * W),
    "None": None,
    "dict": {"x": 1.0},
    "set": {1.0},
    "generator": (x for x in [1.0]),
    "object()": object(),
    "a class": dict,
    "list of ints": [[1] * W] * N,
    "list of bools": [[True] * W] * N,
    "list of strings": [["1.0"] * W] * N,
    "list with None": [[1.0, None]],
    "list of int arrays": [np.zeros(W), np.zeros(W, int)],
    "int too large": [[1.0, 10**400]],
    "array.array of ints": array.array("i", range(W)),
    "__array__ raises": HasArray(RuntimeError("no values on this device")),
    "__array__ raises KeyError": HasArray(KeyError("x")),
    "__array__ is no array": HasArray("text"),
    "__array__ of ints": HasArray(np.zeros((N, W), int)),
    "DLPack of ints": OnlyDLPack(np.zeros((N, W), np.int32)),  # type: ignore[arg-type]
    "released memoryview": memoryview(bytearray(8)),
}
WRONG_TYPE["released memoryview"].release()


@pytest.mark.parametrize("what", WRONG_TYPE)
def test_wrong_types_are_named(what: str) -> None:
    with pytest.raises(TypeError) as caught:
        matrix(WRONG_TYPE[what], "keys", W)
    text = str(caught.value)
    assert text.startswith("keys")
    assert "got" in text
    assert f"want floats (float16, bfloat16, float32 or float64) of shape [n_tokens, {W}]" in text


WRONG_SHAPE: dict[str, Any] = {
    "[0, 12]": np.zeros((0, W)),
    "[12]": np.zeros(W),
    "[]": 1.0,
    "[5, 11]": np.zeros((N, W - 1)),
    "[5, 13]": np.zeros((N, W + 1)),
    "[12, 5]": np.zeros((W, N)),
    "[2, 5, 12]": np.zeros((2, N, W)),
    "[1, 2, 5, 12]": np.zeros((1, 2, N, W)),
    "[5, 12, 1]": np.zeros((N, W, 1)),
    "[0]": [],
    "[1, 0]": [[]],
    "[4294967296, 12]": np.broadcast_to(np.float32(0), (1 << 32, W)),
    "[1099511627776, 12]": np.broadcast_to(np.float64(0), (1 << 40, W)),
}


@pytest.mark.parametrize(
    ("shape", "vector_ok"),
    [*((s, False) for s in WRONG_SHAPE), *((s, True) for s in WRONG_SHAPE if s != "[12]")],
)
def test_wrong_shapes_are_named(shape: str, vector_ok: bool) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # its whole text is looked at
        matrix(WRONG_SHAPE[shape], "keys", W, vector_ok=vector_ok)
    assert str(caught.value).startswith(f"keys: got shape {shape}, want [n_tokens, {W}]")


@pytest.mark.parametrize(
    "x",
    [
        RAGGED,
        [np.zeros(W), np.zeros(W - 1)],
        [[1.0], 2.0],
        LOOP,
        np.ma.masked_array(np.zeros((N, W)), np.eye(N, W)),
    ],
)
def test_ragged_and_masked_are_values_of_the_wrong_kind(x: Any) -> None:
    with pytest.raises(ValueError, match=r"^keys: got .*want floats .* of shape \[n_tokens, 12\]"):
        matrix(x, "keys", W)


@pytest.mark.parametrize("name", ["numpy.ma", "torch"])
def test_a_module_that_another_thread_is_importing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert matrix(data(), "keys", W).shape == (N, W)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8", "list"])
def test_the_first_value_that_is_not_finite_is_named(bad: float, dtype: str) -> None:
    x = data()
    x[2, 9] = x[2, 11] = x[4, 0] = bad
    given = x.tolist() if dtype == "list" else x.astype(dtype)
    with pytest.raises(ValueError, match=rf"^keys: row 2, column 9 is {bad}, want finite"):
        matrix(given, "keys", W)


def test_memory_errors_pass() -> None:
    with pytest.raises(MemoryError):
        matrix(HasArray(MemoryError()), "keys", W)
    with pytest.raises(MemoryError):
        matrix(np.broadcast_to(np.float64(0), ((1 << 32) - 1, 1 << 20)), "keys", 1 << 20)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy as np; from hybridmem import _arrays as a\n"
        "a.matrix([[1.0]], 'x', 1); a.concatenate_like([np.ones((1, 1), 'f4')], np.ones((2, 1)))\n"
        "assert not {'torch', 'ml_dtypes', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- caches ---------------------------------------------------------------------------------------


def read_only(x: F32) -> F32:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", ">f4", ">f2", "g", "bfloat16", "float8_e4m3fn"]
)
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
@pytest.mark.parametrize("n", [0, 3])
def test_rows_go_before_the_cache_in_its_type(dtype: str, lead: tuple[int, ...], n: int) -> None:
    kind = np.dtype(dtype) if len(dtype) < 4 else np.dtype(
        getattr(pytest.importorskip("ml_dtypes"), dtype)
    )  # fmt: skip
    cache = data(n, seed=1).astype(kind).reshape(*lead, n, W)
    rows = [read_only(data(2, seed=2)), read_only(data(4, seed=3))]
    got = _arrays.concatenate_like(rows, cache, name="cache_k")
    assert got.dtype == cache.dtype
    assert got.shape == (*lead, 6 + n, W)
    np.testing.assert_array_equal(got[..., :6, :].reshape(6, W), np.concatenate(rows).astype(kind))
    np.testing.assert_array_equal(got[..., 6:, :], cache)
    assert not np.shares_memory(got, cache)


def test_strided_caches_and_lists_are_taken() -> None:
    cache, rows = data(seed=1), [data(2)]
    want = np.concatenate([*rows, cache])
    for form in ("fortran", "strided", "negative rows", "unaligned", "memoryview"):
        got = _arrays.concatenate_like(rows, FORMS[form](cache))
        assert_is(got, want)
    assert _arrays.concatenate_like(rows, cache.tolist()).dtype == np.float64


@pytest.mark.parametrize("form", ["plain", "fortran", "leading axes", "nested lists", "memoryview"])
def test_the_cache_itself_comes_back_where_nothing_was_found(form: str) -> None:
    cache = FORMS[form](data())
    assert _arrays.concatenate_like([], cache) is cache


@pytest.mark.parametrize("found", [0, 2])
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nan_in_a_cache_is_named(found: int, dtype: str, bad: float) -> None:
    cache = data()[None].astype(dtype)
    cache[0, 3, 7] = bad
    rows = [data()] * found
    with pytest.raises(ValueError, match=f"^cache_v: row 3, column 7 is {bad}, want finite values"):
        _arrays.concatenate_like(rows, cache, name="cache_v")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_rows_too_large_for_the_cache_are_refused(dtype: str) -> None:
    kind = np.dtype("f2") if dtype == "float16" else np.dtype(
        getattr(pytest.importorskip("ml_dtypes"), dtype)
    )  # fmt: skip
    rows = [data(), np.full((1, W), -FLOAT_MAX, np.float32)]
    with pytest.raises(
        ValueError, match=f"^cache_k: .* of magnitude 3.40282347e[+]38 overflows its {dtype}"
    ):
        _arrays.concatenate_like(rows, data().astype(kind), name="cache_k")


def test_caches_of_the_wrong_kind_are_refused() -> None:
    for function in (
        lambda x: _arrays.cache_tokens(x, "cache_k", W),
        lambda x: _arrays.concatenate_like([data()], x, name="cache_k"),
    ):
        for what in ("int64", "object", "string", "None", "list of ints"):
            with pytest.raises(TypeError, match=r"^cache_k: got .*want floats"):
                function(WRONG_TYPE[what])
        for shape in ("[12]", "[5, 11]", "[2, 5, 12]", "[]"):
            with pytest.raises(ValueError, match=r"^cache_k: got shape .*, want \[n_tokens, 12\]$"):
                function(WRONG_SHAPE[shape])
    assert _arrays.cache_tokens(np.zeros((1, 1, 0, W)), "cache_k", W) == 0
    assert _arrays.cache_tokens(np.zeros((1, 7, W)), "cache_k", W) == 7

"""Stored forms: kernels against their twins, errors against bounds, layouts against the format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import twins_codec as twins
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hybridmem import _kernels
from hybridmem._codec import Codec, Tensor, group_width

F32 = NDArray[np.float32]
FLOAT_MAX = float(np.finfo(np.float32).max)

SHAPES = [(1, 1), (1, 2), (2, 3), (3, 31), (1, 64), (5, 96), (15, 97), (16, 1), (16, 2), (16, 63),
          (17, 64), (20, 65), (33, 130), (64, 192), (64, 200), (130, 300), (3, 6200)]  # fmt: skip

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def matrices(magnitudes: st.SearchStrategy[float] = finite) -> st.SearchStrategy[F32]:
    sides = st.tuples(st.integers(1, 40), st.integers(1, 140))
    return hnp.arrays(np.float32, sides, elements=magnitudes)


def model_like(n: int, d: int, seed: int = 0) -> tuple[F32, F32]:
    """Keys with strong offsets and outlier channels, values with tokens of unequal size."""
    rng = np.random.default_rng(seed)
    offsets = rng.normal(0, 3, d) * (rng.random(d) < 0.5)
    spread = np.where(rng.random(d) < 0.03, 8.0, 1.0) * rng.uniform(0.5, 1.5, d)
    keys = offsets + spread * rng.normal(size=(n, d))
    values = rng.normal(size=(n, d)) * rng.uniform(0.1, 2.0, (n, 1))
    return keys.astype(np.float32), values.astype(np.float32)


def round_trip(codec: Codec, keys: F32, values: F32) -> tuple[F32, F32]:
    return codec.decode(codec.encode(keys, values), *keys.shape)


def by_suffix(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {tensor.suffix: tensor for tensor in tensors}


def relative(a: F32, b: F32) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def worst(a: F32, b: F32) -> float:
    """Largest difference as a share of the largest magnitude."""
    peak = np.abs(b.astype(np.float64)).max()
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max() / (peak or 1.0))


# -- kernels and twins ----------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantise_by_channel_is_the_twin(simd: str, shape: tuple[int, int], wide: bool) -> None:
    x, _ = model_like(*shape)
    d = shape[1]
    stored = "f4" if wide else "f2"
    q, scale, zero = (
        np.empty(shape, np.int8),
        np.empty((1, -(-d // 2)), stored),
        np.empty((1, d), stored),
    )
    parameters = scale.view(np.uint8), zero.view(np.uint8)
    peak = _kernels.quantize_channels(x, wide, q, *parameters)
    want = twins.quantize_channels(x, wide)
    assert peak == np.abs(x).max()
    for got, expected in zip((q, scale, zero), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    out = np.empty(shape, np.float32)
    _kernels.dequantize(q, *parameters, 0, wide, out)
    np.testing.assert_array_equal(out, twins.dequantize(q, scale, zero))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantise_by_row_is_the_twin(
    simd: str, shape: tuple[int, int], width: int, wide: bool
) -> None:
    _, x = model_like(*shape)
    groups = -(-shape[1] // width)
    q = np.empty(shape, np.int8)
    scale, zero = np.empty((2, shape[0], groups), "f4" if wide else "f2")
    parameters = scale.view(np.uint8), zero.view(np.uint8)
    peak = _kernels.quantize_rows(x, width, wide, q, *parameters)
    assert peak == np.abs(x).max()
    for got, expected in zip((q, scale, zero), twins.quantize_rows(x, width, wide), strict=True):
        np.testing.assert_array_equal(got, expected)
    out = np.empty(shape, np.float32)
    _kernels.dequantize(q, *parameters, width, wide, out)
    columns = np.arange(shape[1]) // width
    exact = zero[:, columns].astype(np.float64) + scale[:, columns].astype(np.float64) * q
    np.testing.assert_array_equal(out, exact.astype(np.float32))


@pytest.mark.parametrize("rows", [16, 40])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 31, 70, 129])
@pytest.mark.parametrize("wide", [False, True])
def test_quantise_sees_what_is_not_finite(
    simd: str, rows: int, bad: float, column: int, wide: bool
) -> None:
    for row in range(0, rows, 5):
        x = np.ones((rows, 130), np.float32)
        x[row, column] = bad
        q = np.empty(x.shape, np.int8)
        parameters = np.empty((2, rows, 1040), np.uint8)
        by_channel = _kernels.quantize_channels(x, wide, q, *parameters)
        by_row = _kernels.quantize_rows(x, 96, wide, q, *parameters)
        assert not np.isfinite(by_channel)
        assert not np.isfinite(by_row)


def test_float16_widens_and_rounds_as_numpy_does(simd: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    out = np.empty(bits.shape, np.float32)
    _kernels.from_float16(bits, out)
    np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(out), bits >= 0x8000)

    values = out[np.isfinite(out)]
    near = np.concatenate([np.nextafter(values, np.float32(side)) for side in (-1e9, 0, 1e9)])
    middles = ((values + np.roll(values, 1)) / 2).astype(np.float32)  # ties among them
    x = np.concatenate([values, near, middles, middles + near[: len(middles)] * 1e-7])
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    x, want = x[None, np.isfinite(want)], want[np.isfinite(want)]
    got = np.empty(x.shape, np.uint16)
    assert _kernels.to_float16(x, got)
    np.testing.assert_array_equal(got[0], want.view(np.uint16))


@pytest.mark.parametrize(
    ("kernel", "largest"),
    [
        ("to_float16", np.nextafter(np.float32(65520), np.float32(0))),
        ("to_bfloat16", np.nextafter(np.float32(2.0**127 * (2 - 2.0**-8)), np.float32(0))),
    ],
)
def test_half_precision_overflows_where_it_rounds_to_infinity(
    simd: str, kernel: str, largest: np.float32
) -> None:
    beyond = np.nextafter(largest, np.float32(np.inf))
    for at in (0, 17, 99):
        for value, fits in ((largest, True), (beyond, False), (np.inf, False), (np.nan, False)):
            for sign in (1, -1):
                x = np.zeros((1, 100), np.float32)
                x[0, at] = sign * value
                assert getattr(_kernels, kernel)(x, np.empty(x.shape, np.uint16)) is fits


@given(x=matrices(), level=st.sampled_from(_kernels.simd_levels()))
def test_bfloat16_is_the_twin(x: F32, level: str) -> None:
    before = _kernels.simd_level()
    _kernels.set_simd_level(level)
    got = np.empty(x.shape, np.uint16)
    fits = _kernels.to_bfloat16(x, got)
    _kernels.set_simd_level(before)
    want = [twins.bfloat16(value) for value in x.ravel().tolist()]
    assert fits is (None not in want)
    if fits:
        assert got.ravel().tolist() == want
        out = np.empty(x.shape, np.float32)
        _kernels.from_bfloat16(got, out)
        np.testing.assert_array_equal(out.view(np.uint32) >> 16, got)


# -- float stores ---------------------------------------------------------------------------------


@given(keys=matrices())
def test_float32_is_kept_bit_for_bit(keys: F32) -> None:
    codec = Codec("float32")
    values = -keys
    tensors = codec.encode(keys, values)
    assert not any(np.shares_memory(t.data, x) for t in tensors for x in (keys, values))
    k, v = codec.decode(tensors, *keys.shape)
    np.testing.assert_array_equal(k.view(np.uint32), keys.view(np.uint32))
    np.testing.assert_array_equal(v.view(np.uint32), values.view(np.uint32))
    assert np.shares_memory(k, tensors[0].data)
    assert [(t.suffix, t.dtype) for t in tensors] == [("k", "F32"), ("v", "F32")]


@given(x=matrices(st.floats(-64992, 64992, width=16)))
def test_float16_values_are_kept_exactly_in_a_float16_store(x: F32) -> None:
    k, _ = round_trip(Codec("float16"), x, x)
    np.testing.assert_array_equal(k.view(np.uint32), x.view(np.uint32))


def test_bfloat16_agrees_with_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(5).normal(size=(40, 70)).astype(np.float32) * 1e-3
    k, _ = round_trip(Codec("bfloat16"), x, x)
    np.testing.assert_array_equal(k, x.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize(
    ("codec", "value", "why"),
    [
        (Codec("float32"), np.nan, "nan, want finite values only"),
        (Codec("float32"), -np.inf, "-inf, want finite values only"),
        (Codec("float16"), 70000.0, "70000.0, which overflows float16"),
        (Codec("float16"), 1e30, "which overflows float16"),
        (Codec("float16"), np.inf, "inf, want finite values only"),
        (Codec("float16"), np.nan, "nan, want finite values only"),
        (Codec("bfloat16"), 3.4e38, "which overflows bfloat16"),
        (Codec("bfloat16"), np.nan, "nan, want finite values only"),
        (Codec("bfloat16"), -np.inf, "-inf, want finite values only"),
        (Codec(quantize_stored=True), np.nan, "nan, want finite values only"),
        (Codec(quantize_stored=True), np.inf, "inf, want finite values only"),
    ],
)
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("argument", ["keys", "values"])
def test_what_cannot_be_kept_is_named(
    codec: Codec, value: float, why: str, rows: int, argument: str
) -> None:
    both = {"keys": np.ones((rows, 70), np.float32), "values": np.ones((rows, 70), np.float32)}
    both[argument][2, 66] = value
    with pytest.raises(ValueError, match=f"^entry 7: {argument}: row 2, column 66 is ") as caught:
        codec.encode(both["keys"], both["values"], "entry 7: ")
    assert why in str(caught.value)


def test_a_negative_nan_with_all_bits_set_is_found() -> None:
    x = np.ones((1, 8), np.float32)
    x.view(np.uint32)[0, 3] = 0xFFFFFFFF
    for codec in (Codec(), Codec("float16"), Codec("bfloat16"), Codec(quantize_stored=True)):
        with pytest.raises(ValueError, match="row 0, column 3 is nan"):
            codec.encode(x, x)


# -- INT8 -----------------------------------------------------------------------------------------

INT8 = Codec(quantize_stored=True)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 15, 16, 64, 128, 300])
def test_int8_errors_on_keys_with_offsets_and_outlier_channels(n: int) -> None:
    keys, values = model_like(n, 192, seed=n)
    k, v = round_trip(INT8, keys, values)
    assert relative(k, keys) < 0.007
    if n >= 16:  # against a scale of its own for each channel, which takes twice the scales
        middle, reach = keys.min(axis=0) / 2 + keys.max(axis=0) / 2, np.ptp(keys, axis=0) / 2
        alone = middle + reach / 127 * np.rint((keys - middle) / (reach / 127))
        assert relative(k, keys) < 1.42 * relative(alone, keys)
    assert relative(v, values) < 0.008
    assert worst(k, keys) < 0.01
    assert worst(v, values) < 0.01


def test_int8_of_64_tokens_takes_at_most_1_05_bytes_an_element() -> None:
    for width in (192, 768, 3584):
        keys, values = model_like(64, width)
        tensors = INT8.encode(keys, values)
        stored = sum(t.data.nbytes for t in tensors)
        assert stored / (2 * 64 * width) <= 1.05
        assert stored == INT8.nbytes(64, width)


def test_int8_layouts_are_those_of_the_format() -> None:
    for n in (15, 16):
        for d in (1, 2, 3, 64, 96, 97, 192, 200):
            x = np.random.default_rng(d).normal(size=(n, d)).astype(np.float32)
            parts = by_suffix(INT8.encode(x, x))
            shapes = {suffix: tensor.shape for suffix, tensor in parts.items()}
            by_row = (n, -(-d // 32))
            assert shapes["k"] == shapes["v"] == (n, d)
            assert shapes["k_zero"] == ((1, d) if n >= 16 else by_row)
            assert shapes["k_scale"] == ((1, -(-d // 2)) if n >= 16 else by_row)
            assert shapes["v_zero"] == shapes["v_scale"] == (n, -(-d // 96))
            assert all(part.data.shape == part.shape for part in parts.values())
            assert {part.dtype for part in parts.values()} == {"I8", "F16"}


def test_int8_is_decoded_as_the_format_says() -> None:
    for n in (1, 3, 15, 16, 70):
        for d in (1, 2, 3, 33, 64, 97, 192, 200, 300):
            for factor in (1.0, 1e-30, 1e30):
                x = (factor * np.random.default_rng(n * d).normal(size=(n, d))).astype(np.float32)
                tensors = INT8.encode(x, -x)
                parts = {t.suffix: t.data for t in tensors}
                for letter, got in zip("kv", INT8.decode(tensors, n, d), strict=True):
                    scale, zero = parts[f"{letter}_scale"], parts[f"{letter}_zero"]
                    want = twins.dequantize(parts[letter], scale, zero)
                    np.testing.assert_array_equal(got, want)
                    assert worst(got, x if letter == "k" else -x) < 0.005


@pytest.mark.parametrize("n", [1, 2, 3, 16, 20])
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -3.25, 1e-3, 1e-45, 3e-42, 1.1754944e-38, 65504, 1e38, FLOAT_MAX]
)
def test_int8_of_constants(n: int, value: float) -> None:
    x = np.full((n, 130), value, np.float32)
    k, v = round_trip(INT8, x, -x)
    for got, want in ((k, x), (v, -x)):
        assert np.isfinite(got).all()
        if value == 0:
            assert not got.any()
            assert {t.dtype for t in INT8.encode(x, x)} == {"I8", "F16"}
        np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("n", [1, 3, 16, 64])
@pytest.mark.parametrize("outlier", [1e-40, 1.0, 1e4, 1e20, FLOAT_MAX, -FLOAT_MAX])
def test_int8_of_a_single_outlier(n: int, outlier: float) -> None:
    x = np.zeros((n, 200), np.float32)
    x[n // 2, 150] = outlier
    for got in round_trip(INT8, x, x):
        assert np.isfinite(got).all()
        assert worst(got, x) < 1e-3
        assert not got[:, :96].any()  # of a group without the outlier


@pytest.mark.parametrize("n", [1, 20])
def test_int8_of_the_largest_floats(n: int) -> None:
    rng = np.random.default_rng(n)
    for low in (-FLOAT_MAX, -FLOAT_MAX / 3, 0.0, FLOAT_MAX * 0.999, FLOAT_MAX * (1 - 2.0**-20)):
        x = rng.uniform(low, FLOAT_MAX, (n, 130)).astype(np.float32)
        x[0, :5], x[-1, 5:9] = FLOAT_MAX, low
        k, v = round_trip(INT8, x, -x)
        assert np.isfinite(k).all()
        assert np.isfinite(v).all()
        assert worst(k, x) < 0.01
        assert worst(v, -x) < 0.01


@given(
    keys=matrices(),
    exponent=st.integers(-149, 0),
)
def test_int8_is_within_one_percent_of_the_largest_magnitude(keys: F32, exponent: int) -> None:
    for x in (keys, keys * np.float32(2.0**exponent)):
        k, v = round_trip(INT8, x, -x)
        assert np.isfinite(k).all()
        assert np.isfinite(v).all()
        assert worst(k, x) < 0.01
        assert worst(v, -x) < 0.01


@given(st.integers(1, 600), st.integers(1, 140), st.integers(0, 2**32))
def test_int8_of_few_units_of_the_smallest_subnormal(top: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for n in (1, 2, 17):
        units = rng.integers(-top, top, (n, d), endpoint=True)
        x = (units * 2.0**-149).astype(np.float32)
        for got in round_trip(INT8, x, x):
            assert worst(got, x) < 0.01


def test_all_instruction_sets_store_the_same_bytes() -> None:
    before = _kernels.simd_level()
    stored = []
    for level in _kernels.simd_levels():
        _kernels.set_simd_level(level)
        tensors = []
        for n, d in SHAPES:
            for factor in (1, 1e-20, 1e20):
                keys, values = (np.float32(factor) * x for x in model_like(n, d, seed=d))
                tensors += INT8.encode(keys, values)
        stored.append(b"".join(t.data.tobytes() for t in tensors))
    _kernels.set_simd_level(before)
    assert len(set(stored)) == 1


# -- layouts, claims, memory ----------------------------------------------------------------------


def test_group_width_is_the_rule_of_the_format() -> None:
    for d in range(1, 700):
        assert group_width(d, d) == 1
        if d > 1:
            assert group_width(d, (d + 1) // 2) == 2
        for width in (32, 64, 96, 128):
            groups = -(-d // width)
            if groups in (d, (d + 1) // 2):
                continue
            found = group_width(d, groups)
            assert found % 32 == 0
            assert found * groups >= d > (found - 32) * groups
            assert found <= width


@pytest.mark.parametrize("codec", [Codec(), Codec("float16"), Codec("bfloat16"), INT8])
@pytest.mark.parametrize("n", [3, 20])
def test_tensors_of_an_entry_are_recognised(codec: Codec, n: int) -> None:
    tensors = codec.encode(*model_like(n, 130))
    keys = [tensor for tensor in tensors if tensor.suffix[0] == "k"]
    for some in (keys, tensors):
        alone = codec.decode_keys(some, n, 130)
        np.testing.assert_array_equal(alone, codec.decode(tensors, n, 130)[0])
    assert codec.mismatch(tensors, n, 130) is None
    assert codec.mismatch(tensors[::-1], n, 130) is None
    for claim in ((n + 1, 130), (n, 129), (130, n)):
        assert codec.mismatch(tensors, *claim) is not None
        with pytest.raises(ValueError, match="its tensor k is"):
            codec.decode(tensors, *claim)
        with pytest.raises(ValueError, match="its tensor k is"):
            codec.decode_keys(keys, *claim)
    assert "it has tensors" in str(codec.mismatch(tensors[:-1], n, 130))
    assert "it has tensors" in str(codec.mismatch([*tensors, tensors[0]], n, 130))
    others = {"F32", "F16", "BF16", "I8"} - {tensors[0].dtype}
    for dtype in sorted(others):
        wrong = [tensors[0]._replace(dtype=dtype), *tensors[1:]]
        assert "its tensor k is" in str(codec.mismatch(wrong, n, 130))


def test_keys_without_their_scale_are_refused() -> None:
    tensors = INT8.encode(*model_like(20, 130))[:2]
    with pytest.raises(ValueError, match="it has tensors"):
        INT8.decode_keys(tensors, 20, 130)


def claimed(n: int, d: int, scale: tuple[str, tuple[int, int]], zero: Any = None) -> str | None:
    tensors = [Tensor("k", "I8", (n, d), None), Tensor("v", "I8", (n, d), None)]
    for letter in "kv":
        for suffix, (dtype, shape) in (("scale", scale), ("zero", zero or scale)):
            tensors.append(Tensor(f"{letter}_{suffix}", dtype, shape, None))
    return INT8.mismatch(tensors, n, d)


def test_scales_that_an_entry_cannot_have_are_refused() -> None:
    assert claimed(20, 200, ("F16", (1, 100)), ("F16", (1, 200))) is None
    for shape in ((20, 1), (20, 2), (20, 3), (20, 4), (20, 7), (1, 7), (1, 1)):
        assert claimed(20, 200, ("F32", shape)) is None, shape
    for shape in (
        (20, 5),
        (20, 6),
        (20, 8),
        (20, 0),
        (0, 1),
        (19, 2),
        (2, 20),
        (20, 200),
        (1, 200),
    ):
        assert claimed(20, 200, ("F32", shape)) is not None, shape
    assert claimed(20, 200, ("F16", (20, 2)), ("F32", (20, 2))) is not None
    assert claimed(20, 200, ("BF16", (20, 2))) is not None
    assert claimed(20, 200, ("I8", (20, 2))) is not None
    assert claimed(20, 200, ("F16", (20, 2)), ("F16", (20, 3))) is not None
    assert claimed(20, 200, ("F16", (1, 100)), ("F16", (20, 200))) is not None


@pytest.mark.parametrize("codec", [Codec(), Codec("float16"), Codec("bfloat16"), INT8])
@pytest.mark.parametrize("n", [3, 20])
def test_results_are_read_only_and_need_no_alignment(codec: Codec, n: int) -> None:
    keys, values = model_like(n, 97)
    tensors = codec.encode(keys, values)
    assert not any(t.data.flags.writeable for t in tensors)
    crooked = []
    for t in tensors:
        raw = np.empty(t.data.nbytes + 1, np.uint8)[1:]
        raw[:] = t.data.view(np.uint8).reshape(-1)
        crooked.append(t._replace(data=raw.view(t.data.dtype).reshape(t.shape)))
    for got, want in zip(codec.decode(crooked, n, 97), codec.decode(tensors, n, 97), strict=True):
        assert not got.flags.writeable
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert got.flags.aligned
        assert got.ctypes.data % 64 == 0 or codec.dtype == "F32"
        np.testing.assert_array_equal(got, want)


def test_the_callers_read_only_arrays_are_not_touched() -> None:
    data = np.ones((2, 3), np.float32)
    tensors = [Tensor("k", "F32", (2, 3), data), Tensor("v", "F32", (2, 3), data)]
    keys, _ = Codec().decode(tensors, 2, 3)
    assert data.flags.writeable
    assert not keys.flags.writeable


@pytest.mark.parametrize("codec", [Codec(), Codec("float16"), Codec("bfloat16"), INT8])
def test_nbytes_is_what_an_entry_takes(codec: Codec) -> None:
    for n in (1, 15, 16, 100):
        for d in (1, 31, 96, 200):
            tensors = codec.encode(*model_like(n, d))
            assert codec.nbytes(n, d) == sum(t.data.nbytes for t in tensors)

"""Projector, similarity and the signatures of entries and queries."""

from __future__ import annotations

import ctypes
import ctypes.util
import pickle
import platform

import numpy as np
import pytest
import twins

from hybridmem import hdc
from hybridmem.hdc import (
    Projector,
    SignatureSpec,
    mean_pool,
    round_query,
    sign_entry,
    sign_query,
    similarity,
)

SEED = hdc.DEFAULT_SEED


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# The projection


@pytest.mark.parametrize("embed_dim", [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100, 192, 257, 3584])
@pytest.mark.parametrize("hdc_dim", [64, 192, 320, 4096])
def test_bits_are_those_of_the_twin(simd: str, embed_dim: int, hdc_dim: int) -> None:
    x = normal(embed_dim, 2, embed_dim)
    got = Projector(embed_dim, hdc_dim).project(x)
    assert got.shape == (2, hdc_dim // 8)
    for i in range(2):
        np.testing.assert_array_equal(got[i], twins.project(x[i], hdc_dim, SEED))


@pytest.mark.parametrize(
    ("embed_dim", "hdc_dim", "seed"),
    [(10_000, 64, 0), (10_000, 1024, 1), (5000, 960, 2**64 - 1), (4097, 16384, 7), (7, 10_048, 3)],
)
def test_wide_and_long(simd: str, embed_dim: int, hdc_dim: int, seed: int) -> None:
    x = normal(1, embed_dim)
    got = Projector(embed_dim, hdc_dim, seed).project(x)
    np.testing.assert_array_equal(got, twins.project(x, hdc_dim, seed))


@pytest.mark.parametrize("embed_dim", [1, 2, 3, 17, 33])
def test_more_flips_than_are_kept(embed_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1, 3, embed_dim)
    hdc_dim = 64 * 331
    wanted = Projector(embed_dim, hdc_dim).project(x)
    monkeypatch.setattr(hdc, "_KEPT_WORDS", 3 * 64)
    projector = Projector(embed_dim, hdc_dim)
    assert len(projector._flips) == 3 * 64
    np.testing.assert_array_equal(projector.project(x), wanted)
    np.testing.assert_array_equal(wanted[0], twins.project(x[0], hdc_dim, SEED))
    values = projector.values_of_rows(x)
    np.testing.assert_array_equal(values[0], twins.projected(x[0], hdc_dim, SEED))


def test_golden_bits() -> None:
    """Bits written down once: they may never change."""
    x = np.arange(-40, 60, dtype=np.float32) / 7
    assert Projector(100, 128).project(x).tobytes().hex() == "c1ec730dc40c7bbb62f63c463804c1a4"
    wide = np.arange(3000, dtype=np.float32) % 97 - 48
    assert Projector(3000, 64, seed=12345).project(wide).tobytes().hex() == "15a504225c0917bd"


def test_generator_is_splitmix64() -> None:
    # First outputs of SplitMix64 for seed 1234567, as published with the generator.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hdc.splitmix64(1234567, 4).tolist() == known
    assert hdc.splitmix64(2**64 - 1, 5).tolist() == twins.splitmix64(2**64 - 1, 5)


def extreme_rows(width: int) -> np.ndarray:
    big, tiny = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    rows = np.zeros((9, width), np.float32)
    rows[1] = -0.0
    rows[2] = big
    rows[3, ::2], rows[3, 1::2] = big, -big
    rows[4, 0] = tiny
    rows[5] = tiny * np.arange(width)
    rows[6, 0], rows[6, 1:] = big, tiny
    rows[7] = np.finfo(np.float32).tiny
    rows[8] = normal(3, width) * np.float32(1e-38)
    return rows


@pytest.mark.parametrize("width", [20, 192, 1000])
@pytest.mark.parametrize("hdc_dim", [64, 512])
def test_extreme_magnitudes(simd: str, width: int, hdc_dim: int) -> None:
    rows = extreme_rows(width)
    got = Projector(width, hdc_dim).project(rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(got[i], twins.project(row, hdc_dim, SEED), err_msg=str(i))


def test_scaling_by_a_power_of_two_changes_nothing(simd: str) -> None:
    x = normal(0, 300)
    p = Projector(300, 512)
    for e in (-60, -1, 1, 100):
        np.testing.assert_array_equal(p.project(np.ldexp(x, e)), p.project(x))


def test_batch_is_the_rows(simd: str) -> None:
    x = normal(2, 17, 200)
    p = Projector(200, 448)
    batch = p.project(x)
    for i in range(17):
        np.testing.assert_array_equal(batch[i], p.project(x[i]))
    assert p.project(x[:0]).shape == (0, 56)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets MXCSR through fesetenv of x86-64")
def test_flush_to_zero_in_the_thread_changes_nothing(simd: str) -> None:
    libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    saved, changed = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    x = extreme_rows(100)
    spec = SignatureSpec(256, 1, 256)

    def rounded() -> np.ndarray:
        return round_query(spec.projector(100), spec, x)

    want = Projector(100, 256).project(x), mean_pool(x, 2), rounded()
    assert libm.fegetenv(saved) == 0
    changed.raw = saved.raw
    mxcsr = int.from_bytes(saved.raw[28:32], "little") | 0x8040 | 0x6000
    changed[28:32] = mxcsr.to_bytes(4, "little")
    assert libm.fesetenv(changed) == 0
    try:
        got = Projector(100, 256).project_rows(x), mean_pool(x, 2), rounded()
        again = ctypes.create_string_buffer(64)
        libm.fegetenv(again)
    finally:
        libm.fesetenv(saved)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2], want[2])
    assert int.from_bytes(again.raw[28:32], "little") & 0xE040 == 0xE040  # the caller's own again


def test_similarity_follows_the_angle() -> None:
    p = Projector(192, 16384)
    x, y = normal(1, 192), normal(2, 192)
    for mix in (0.0, 0.3, 0.7, 1.0):
        z = mix * x + (1 - mix) * y
        cosine = float(x @ z / np.linalg.norm(x) / np.linalg.norm(z))
        got = float(similarity(p.project(x), p.project(z)))
        assert got == pytest.approx(1 - 2 * np.arccos(min(cosine, 1)) / np.pi, abs=0.03)


# What goes in


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", ">f8"])
def test_floating_types_and_layouts(dtype: str) -> None:
    x = np.round(normal(4, 6, 50), 2).astype(np.float16)
    want = Projector(50, 128).project(x.astype(np.float32))
    y = x.astype(dtype)
    for z in (y, np.asfortranarray(y), y[::-1][::-1], np.repeat(y, 2, axis=1)[:, ::2], y.tolist()):
        np.testing.assert_array_equal(Projector(50, 128).project(z), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_not_finite_is_refused(bad: float) -> None:
    x = np.zeros((3, 10))
    x[2, 9] = bad
    with pytest.raises(ValueError, match=r"row 2, column 9 .* (finite|overflows float32)"):
        Projector(10, 64).project(x)


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (np.zeros(9, np.float32), ValueError, r"x: got shape \[9\], want \[10\] or \[n, 10\]"),
        (np.zeros((2, 2, 10), np.float32), ValueError, r"got shape \[2, 2, 10\]"),
        (np.zeros((1, 2, 10), np.float32), ValueError, r"got shape \[1, 2, 10\]"),
        (np.float32(1), ValueError, r"got shape \[\]"),
        (np.ma.masked_array(np.zeros(10), mask=[1] + 9 * [0]), ValueError, "masked"),
        (np.zeros(10, np.int64), TypeError, "int64"),
        (np.zeros(10, np.complex64), TypeError, "complex64"),
        (["a"] * 10, TypeError, "<U1"),
    ],
)
def test_wrong_input(x: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Projector(10, 64).project(x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((0,), ValueError, "embed_dim must be between 1"),
        ((2**24 + 1,), ValueError, "embed_dim"),
        ((2**70,), ValueError, "embed_dim"),
        ((8.0,), TypeError, "embed_dim must be an integer, got 8.0"),
        ((True,), TypeError, "embed_dim"),
        ((8, 0), ValueError, "hdc_dim"),
        ((8, 100), ValueError, "multiple of 64, got 100"),
        ((8, 2**40), ValueError, "hdc_dim"),
        ((8, 64, -1), ValueError, "seed"),
        ((8, 64, 2**64), ValueError, "seed"),
        ((8, 64, "x"), TypeError, "seed"),
    ],
)
def test_wrong_parameters(arguments: tuple, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Projector(*arguments)


def test_projector_is_a_value() -> None:
    p = Projector(np.int64(8), np.uint16(128), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert p == Projector(8, 128, 2**64 - 1) != Projector(8, 128)
    assert p != "p"
    assert len({p, pickle.loads(pickle.dumps(p))}) == 1
    assert "embed_dim=8, hdc_dim=128" in repr(p)


# similarity


@pytest.mark.torch
def test_tensors_are_projected_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 10).to(torch.bfloat16).requires_grad_()
    projector = Projector(10, 128)
    wanted = projector.project(x.detach().float().numpy())
    assert np.array_equal(projector.project(x), wanted)
    assert np.array_equal(projector.project(x[1]), wanted[1])
    assert np.array_equal(projector.project([x[0], x[2]]), wanted[[0, 2]])


def test_no_vectors_have_no_signatures() -> None:
    assert Projector(10, 128).project(np.empty((0, 10), np.float32)).shape == (0, 16)


def test_similarity_takes_the_bytes_that_entries_hold() -> None:
    a, b = np.random.default_rng(0).integers(0, 256, (2, 16), np.uint8)
    b[-1] = a[-1] = 0  # which a fixed-width string of numpy would drop
    assert similarity(a.tobytes(), b) == similarity(a, bytearray(b)) == similarity(a, b)


def test_similarity_broadcasts() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (3, 1, 24), dtype=np.uint8)
    b = rng.integers(0, 256, (5, 24), dtype=np.uint8)
    got = similarity(a, b)
    assert got.shape == (3, 5)
    assert got.dtype == np.float64
    want = 1 - 2 * twins.hamming(a[:, 0], b) / 192
    np.testing.assert_array_equal(got, want)
    assert similarity(b[0], b[0]) == 1.0
    assert similarity(b[0], ~b[0]) == -1.0
    assert similarity(b[:0], b[0]).shape == (0,)


def test_similarity_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdc, "_CHUNK_BYTES", 100)
    test_similarity_broadcasts()


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (np.zeros(8, np.int8), np.zeros(8, np.uint8), TypeError),
        (np.zeros(8, np.uint8), np.zeros(16, np.uint8), ValueError),
        (np.uint8(1), np.uint8(1), ValueError),
        (np.zeros((2, 0), np.uint8), np.zeros((2, 0), np.uint8), ValueError),
        (np.zeros((2, 8), np.uint8), np.zeros((3, 8), np.uint8), ValueError),
    ],
)
def test_similarity_refuses(a: np.ndarray, b: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error):
        similarity(a, b)


# Signatures of entries and queries


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 64])
def test_pooled_entry(simd: str, n: int) -> None:
    spec = SignatureSpec(256)
    keys = normal(n, n, 40)
    want = twins.project(twins.mean_pool(keys, n)[0], 256, SEED)
    p = spec.projector(40)
    np.testing.assert_array_equal(sign_entry(p, spec, keys), want)
    np.testing.assert_array_equal(sign_query(p, spec, keys), want[None])


@pytest.mark.parametrize(
    ("hdc_dim", "tokens", "bits"),
    [(512, 1, 64), (512, 3, 128), (512, 5, 0), (320, 2, 192), (4096, 16, 1024)],
)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 17])
def test_sub_signatures(hdc_dim: int, tokens: int, bits: int, n: int) -> None:
    spec = SignatureSpec(hdc_dim, tokens, bits)
    width = bits or hdc_dim
    assert (spec.bits, spec.slots, spec.pooled) == (width, hdc_dim // width, False)
    keys = normal(n, n, 30)
    means = twins.mean_pool(keys, tokens)[: hdc_dim // width]
    assert spec.used_slots(n) == len(means)
    want = np.zeros(hdc_dim // 8, np.uint8)
    for i, mean in enumerate(means):
        want[i * width // 8 : (i + 1) * width // 8] = twins.project(mean, width, SEED)
    p = spec.projector(30)
    np.testing.assert_array_equal(sign_entry(p, spec, keys), want)
    query = sign_query(p, spec, keys)
    np.testing.assert_array_equal(query, [twins.project(k, width, SEED) for k in keys])


@pytest.mark.parametrize("width", [1, 3, 30, 192, 1500])
@pytest.mark.parametrize(
    "spec", [SignatureSpec(320), SignatureSpec(512, 1, 64), SignatureSpec(4096, 4, 1024)], ids=str
)
def test_a_rounded_query_is_that_of_the_twin(simd: str, width: int, spec: SignatureSpec) -> None:
    query, centre = normal(width, 5, width), normal(1, width)
    query[1] = centre
    for middle in (None, centre):
        rows = twins.mean_pool(query, 5) if spec.pooled else query
        rows = rows if middle is None else rows - middle
        want = [twins.rounded(twins.projected(row, spec.bits, SEED), 15) for row in rows]
        got = round_query(spec.projector(width), spec, query, middle)
        assert got.dtype == np.int8
        np.testing.assert_array_equal(got, want)
    if not spec.pooled:
        assert not got[1].any()  # of a zero


def test_a_rounded_query_has_the_signs_of_its_signature() -> None:
    spec, query = SignatureSpec(4096, 1, 256), normal(3, 8, 192)
    p = spec.projector(192)
    got = round_query(p, spec, query)
    signs = np.unpackbits(sign_query(p, spec, query), axis=1, bitorder="little")
    np.testing.assert_array_equal((got > 0)[got != 0], (signs == 1)[got != 0])
    assert (np.abs(got).max(axis=1) == 15).all()
    assert (got == 0).mean() < 0.1


def test_score() -> None:
    assert SignatureSpec(4096).score(1024, 9) == 0.5
    spec = SignatureSpec(4096, 1, 256)
    np.testing.assert_array_equal(spec.score(np.array([0, 1024, 2048]), 8), [1.0, 0.0, -1.0])


@pytest.mark.parametrize(
    "arguments",
    [(100,), (0,), (256, -1), (256, 1, 100), (256, 1, 320), (256, 0, 64), (256, 2**32)],
)
def test_wrong_spec(arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"hdc_dim|signature_tokens|signature_bits"):
        SignatureSpec(*arguments)


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros((0, 40), np.float32),
        np.zeros((2, 41), np.float32),
        np.zeros((2, 40), np.float64),
        np.zeros((4, 40), np.float32)[::2],
        np.zeros(40, np.float32),
    ],
)
def test_untrusted_keys_are_refused(keys: np.ndarray) -> None:
    spec = SignatureSpec(256)
    with pytest.raises((TypeError, ValueError), match="keys must be"):
        sign_entry(spec.projector(40), spec, keys)
    with pytest.raises(ValueError, match="256 bits"):
        sign_entry(spec.projector(40), SignatureSpec(256, 1, 64), np.zeros((1, 40), np.float32))


def test_mean_pool_checks() -> None:
    with pytest.raises(TypeError, match="C-contiguous"):
        mean_pool(np.zeros((4, 4), np.float32).T[:, ::2])
    with pytest.raises(ValueError, match="run"):
        mean_pool(np.zeros((4, 4), np.float32), 0)
    np.testing.assert_array_equal(mean_pool(np.ones((3, 2), np.float32), 2**62), np.ones((1, 2)))

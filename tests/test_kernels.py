"""The compiled kernels against their numpy twins, at every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import twins
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmem import _kernels, _slabs

EMPTY = 2**32 - 1


def signatures(rng: np.random.Generator, n: int, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, (n, nbytes), dtype=np.uint8)


def running(m: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((m, k), EMPTY, np.uint32), np.full((m, k), -1, np.int64)


def chosen_rows(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Any order with repetitions; all; runs with gaps."""
    return [rng.integers(0, n, 2 * n), np.arange(n), np.flatnonzero(rng.random(n) < 0.8)]


def pack(subs: list[np.ndarray], lanes: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """A block of entries with these sub-signatures; unused bytes are rubbish."""
    groups = np.full((-(-len(subs) * lanes // 64), nbytes, 64), 0xA5, np.uint8)
    used = np.array([len(s) for s in subs], np.uint32)
    records = np.zeros((len(subs), lanes * nbytes), np.uint8)
    for record, s in zip(records, subs, strict=True):
        record[: s.size] = s.reshape(-1)
    half = len(subs) // 2
    _kernels.late_pack(records[:half], used[:half], 0, lanes, groups)
    _kernels.late_pack(records[half:], used[half:], half, lanes, groups)
    return groups, used


# Instruction sets


@pytest.mark.parametrize("level", ["scalar", "popcnt", "avx2", "avx512", "neon"])
def test_levels_tested_on_this_machine(level: str) -> None:
    if level not in _kernels.simd_levels():
        pytest.skip(f"SIMD level {level} is not available here")
    before = _kernels.simd_level()
    _kernels.set_simd_level(level)
    assert _kernels.simd_level() == level
    _kernels.set_simd_level(before)


def test_unknown_level_is_refused() -> None:
    before = _kernels.simd_level()
    with pytest.raises(ValueError, match="'mmx' is not available"):
        _kernels.set_simd_level("mmx")
    assert _kernels.simd_level() == before


@pytest.mark.parametrize("level", [*_kernels.simd_levels(), "auto", ""])
def test_environment_forces_the_level(level: str) -> None:
    code = "from hybridmem import _kernels; print(_kernels.simd_level())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HYBRIDMEM_SIMD": level},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == (level if level in _kernels.simd_levels() else best())


def best() -> str:
    return _kernels.simd_levels()[-1]


def test_environment_with_an_unknown_level_fails_at_import() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import hybridmem._kernels"],
        env={**os.environ, "HYBRIDMEM_SIMD": "fast"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "HYBRIDMEM_SIMD='fast' is not available on this machine" in run.stderr


# Pooling and copies


@pytest.mark.parametrize(
    ("n", "d", "run"),
    [(1, 1, 1), (3, 7, 3), (7, 33, 2), (64, 129, 64), (65, 65, 16), (9, 1000, 4), (17, 64, 8)],
)
def test_mean_pool(simd: str, n: int, d: int, run: int) -> None:
    rng = np.random.default_rng(n * d)
    x = rng.standard_normal((n, d)).astype(np.float32)
    x *= np.float32(10) ** rng.integers(-20, 20, (n, d)).astype(np.float32)
    out = np.empty((-(-n // run), d), np.float32)
    _kernels.mean_pool(x, run, out)
    np.testing.assert_array_equal(out, twins.mean_pool(x, run))


def test_mean_does_not_overflow(simd: str) -> None:
    x = np.full((5, 40), np.finfo(np.float32).max, np.float32)
    out = np.empty((1, 40), np.float32)
    _kernels.mean_pool(x, 5, out)
    np.testing.assert_array_equal(out[0], x[0])


@pytest.mark.parametrize("size", [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 1000])
def test_copy_finite_finds_every_place(simd: str, size: int) -> None:
    x = np.linspace(-3e38, 3e38, size, dtype=np.float32).reshape(1, -1)
    out = np.zeros_like(x)
    assert _kernels.copy_finite(x, out)
    np.testing.assert_array_equal(out, x)
    assert _kernels.all_finite(x)
    for place in range(size):
        for bad in (np.nan, np.inf, -np.inf):
            broken = x.copy()
            broken[0, place] = bad
            assert not _kernels.copy_finite(broken, out)
            assert not _kernels.all_finite(broken)


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 17) + 45])
def test_large_copies_go_around_the_caches_and_are_the_same(simd: str, size: int) -> None:
    x = np.linspace(-3e38, 3e38, size, dtype=np.float32).reshape(1, -1)
    for kept in (np.full(size + 64, 7, np.float32), _slabs.empty((size + 64,), np.float32).fill):
        kept[...] = 7
        out = kept[:size].reshape(1, -1)
        assert _kernels.copy_finite(x, out)
        np.testing.assert_array_equal(out, x)
        assert (kept[size:] == 7).all()
        for place in (0, 15, 16, size // 2, size - 33, size - 1):
            broken = x.copy()
            broken[0, place] = np.nan
            assert not _kernels.copy_finite(broken, out)


def test_nothing_is_finite() -> None:
    assert _kernels.all_finite(np.empty((0, 5), np.float32))
    assert _kernels.copy_finite(np.empty((5, 0), np.float32), np.empty((5, 0), np.float32))


@pytest.mark.parametrize("most", [1, 15, 127])
@pytest.mark.parametrize("size", [1, 7, 64, 257])
def test_round_rows(size: int, most: int) -> None:
    x = np.random.default_rng(size).standard_normal((5, size)).astype(np.float32)
    x[1] *= np.float32(2.0**100)
    x[2] *= np.float32(2.0**-100)
    x[3] = 0
    x[4] = np.arange(size) / (2 * most)  # ties
    x[4, -1] = 1
    got = np.empty(x.shape, np.int8)
    _kernels.round_rows(x, most, got)
    np.testing.assert_array_equal(got, [twins.rounded(row, most) for row in x])
    assert np.abs(got[[0, 1, 2, 4]]).max(axis=1).tolist() == [most] * 4


# Hamming distances


@pytest.mark.parametrize("words", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 129, 256])
def test_hamming(simd: str, words: int) -> None:
    rng = np.random.default_rng(words)
    for n, m in ((1, 1), (2, 3), (5, 4), (67, 5), (130, 33)):
        rows, queries = signatures(rng, n, 8 * words), signatures(rng, m, 8 * words)
        rows[0], queries[0] = 0, 255  # the largest distance there is
        want = twins.hamming(rows, queries)
        for q in range(m):
            got = np.empty(n, np.uint32)
            _kernels.hamming_all(rows, queries[q], got)
            np.testing.assert_array_equal(got, want[:, q])
            for at in chosen_rows(rng, n):
                got = np.empty(len(at), np.uint32)
                _kernels.hamming_at(rows, at, queries[q], got)
                np.testing.assert_array_equal(got, want[at, q])
        distance, slot = running(m, n)
        _kernels.hamming_topk(rows, queries, np.ones(n, np.uint8), 0, distance, slot)
        for q in range(m):
            want_distance, want_slot = twins.top_k(want[:, q], np.arange(n), n)
            np.testing.assert_array_equal(distance[q], want_distance)
            np.testing.assert_array_equal(slot[q], want_slot)


def test_unaligned_rows(simd: str) -> None:
    rng = np.random.default_rng(5)
    raw = signatures(rng, 1, 1 + 30 * 512).reshape(-1)
    rows = raw[1:].reshape(30, 512)
    query = signatures(rng, 2, 513).reshape(-1)[3 : 3 + 512]
    got = np.empty(30, np.uint32)
    _kernels.hamming_all(rows, query, got)
    np.testing.assert_array_equal(got, twins.hamming(rows, query[None])[:, 0])


@settings(max_examples=60)
@given(
    n=st.integers(0, 200),
    m=st.integers(1, 40),
    k=st.integers(1, 70),
    values=st.sampled_from([1, 2, 256]),
    seed=st.integers(0, 2**32 - 1),
)
def test_running_top_k(n: int, m: int, k: int, values: int, seed: int) -> None:
    """Over several blocks, with dead rows and, where few values are drawn, many ties."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, values, (n, 16), dtype=np.uint8)
    queries = signatures(rng, m, 16)
    alive = (rng.random(n) < 0.7).astype(np.uint8) * 3
    distance, slot = running(m, k)
    cuts = [0, *np.sort(rng.integers(0, n + 1, 3)).tolist(), n]
    for low, high in pairwise(cuts):
        _kernels.hamming_topk(rows[low:high], queries, alive[low:high], low + 7, distance, slot)
    want = twins.hamming(rows, queries)
    live = np.flatnonzero(alive)
    for q in range(m):
        found = slot[q] >= 0
        want_distance, want_slot = twins.top_k(want[live, q], live + 7, k)
        np.testing.assert_array_equal(distance[q][found], want_distance)
        np.testing.assert_array_equal(slot[q][found], want_slot)
        assert (distance[q][~found] == EMPTY).all()


@settings(max_examples=60)
@given(n=st.integers(0, 300), k=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_select_smallest(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    distances = rng.integers(0, 40, n).astype(np.uint32)
    alive = (rng.random(n) < 0.8).astype(np.uint8)
    out = np.empty(k, np.int64)
    count = _kernels.select_smallest(distances, alive, 39, out)
    live = np.flatnonzero(alive)
    np.testing.assert_array_equal(out[:count], twins.top_k(distances[live], live, k)[1])


# Late interaction


@pytest.mark.parametrize(
    ("lanes", "nbytes"),
    [
        (1, 512),
        (2, 64),
        (4, 128),
        (8, 24),
        (16, 40),
        (32, 32),
        (64, 8),
        (64, 24),
        (64, 32),
        (64, 40),
        (64, 64),
        (64, 72),
        (128, 16),
        (192, 32),
        (1, 544),
        (1, 552),
        (64, 552),
        (1, 8200),
    ],
)
def test_late(simd: str, lanes: int, nbytes: int) -> None:
    rng = np.random.default_rng(lanes * nbytes)
    n = 2 * 64 // lanes + 3 if nbytes < 1000 else 3
    subs = [signatures(rng, rng.integers(1, lanes + 1), nbytes) for _ in range(n)]
    subs[0] = np.zeros((1, nbytes), np.uint8)
    subs[-1] = signatures(rng, lanes, nbytes)
    groups, used = pack(subs, lanes, nbytes)
    queries = [signatures(rng, t, nbytes) for t in (1, 3, 8, 9, 20)]
    queries.append(np.full((2, nbytes), 255, np.uint8))  # every bit differs from subs[0]
    want = np.array([[twins.late(s, q) for s in subs] for q in queries])
    alive = (rng.random(n) < 0.8).astype(np.uint8)
    for q, query in enumerate(queries):
        got = np.empty(n, np.uint32)
        _kernels.late_all(groups, used, lanes, query, got)
        np.testing.assert_array_equal(got, want[q])
        for at in chosen_rows(rng, n):
            got = np.empty(len(at), np.uint32)
            _kernels.late_at(groups, used, lanes, at, query, got)
            np.testing.assert_array_equal(got, want[q][at])
        numbers = rng.integers(-15, 16, (len(query), 8 * nbytes)).astype(np.int8)
        if q == len(queries) - 1:  # the largest sums there are, against subs[0]
            numbers[0], numbers[1] = 15, -15
        dots = np.array([twins.dots(s, numbers) for s in subs])
        for at in chosen_rows(rng, n):
            got = np.empty((len(at), len(query)), np.int32)
            _kernels.late_dots(groups, used, lanes, at, numbers, got)
            np.testing.assert_array_equal(got, dots[at])
    for query, ends in ((queries[3], [2, 4]), (queries[1], [1]), (queries[4], [8, 11])):
        so_far = np.array([[twins.late(s, query[:end]) for s in subs] for end in ends])
        limits = np.median(so_far, axis=1).astype(np.uint32)
        want_gated = np.array([twins.late(s, query) for s in subs])
        want_gated[(so_far > limits[:, None]).any(axis=0)] = 2**32 - 1
        for at in (None, *chosen_rows(rng, n)):
            got = np.empty(n if at is None else len(at), np.uint32)
            _kernels.late_gated(
                groups, used, lanes, at, query, np.array(ends, np.uint32), limits, got
            )
            np.testing.assert_array_equal(got, want_gated if at is None else want_gated[at])
    distance, slot = running(len(queries), 5)
    starts = np.cumsum([0, *map(len, queries)])
    rows = np.concatenate(queries)
    _kernels.late_topk(groups, used, lanes, rows, starts, alive, 11, distance, slot)
    live = np.flatnonzero(alive)
    for q in range(len(queries)):
        want_distance, want_slot = twins.top_k(want[q][live], live + 11, 5)
        found = slot[q] >= 0
        np.testing.assert_array_equal(distance[q][found], want_distance)
        np.testing.assert_array_equal(slot[q][found], want_slot)


# Rows by head


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 64])
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 5), (2, 16), (12, 64), (5, 33)])
def test_rows_by_head(n: int, heads: int, size: int) -> None:
    rng = np.random.default_rng(n)
    width, room, at = heads * size, n + 9, 4
    keys, values = rng.standard_normal((2, n, width), np.float32)
    columns, by_head = (
        np.zeros((width, room), np.float32),
        np.zeros((heads, room, size), np.float32),
    )
    _kernels.write_by_head(keys, values, columns, by_head, at)
    for rows, written in ((keys, columns.T), (values, by_head.transpose(1, 0, 2))):
        expected = np.zeros((room, width), np.float32)
        expected[at : at + n] = rows
        np.testing.assert_array_equal(written.reshape(room, width), expected)


def test_a_row_by_head_goes_to_its_own_too() -> None:
    rng = np.random.default_rng(0)
    heads, size, room = 3, 7, 11
    rows = rng.standard_normal((3, 1, heads * size), np.float32)
    columns, by_head = np.zeros((21, room), np.float32), np.zeros((heads, room, size), np.float32)
    own = np.zeros((3, 6, 21), np.float32)
    _kernels.append_by_head(*rows, columns, by_head, 10, own, 2, 5)
    others = np.zeros((21, room), np.float32), np.zeros((heads, room, size), np.float32)
    _kernels.write_by_head(rows[0], rows[1], *others, 10)
    np.testing.assert_array_equal(columns, others[0])
    np.testing.assert_array_equal(by_head, others[1])
    expected = np.zeros((3, 6, 21), np.float32)
    expected[0, 2], expected[1, 2], expected[2, 5] = rows[:, 0]
    np.testing.assert_array_equal(own, expected)

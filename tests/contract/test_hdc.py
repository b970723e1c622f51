"""FORMAT-AND-API: hybridmem.hdc.Projector and similarity, usable without a store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from model import DEFAULT_SEED, ReferenceProjector, hamming

from hybridmem import hdc

from .helpers import run_python

DIMS = [1, 2, 3, 24, 31, 63, 64, 65, 128, 200, 576, 1000]


@pytest.mark.parametrize("hdc_dim", [64, 192, 512, 4096])
@pytest.mark.parametrize("embed_dim", DIMS)
def test_bits_are_those_of_the_specification(
    embed_dim: int, hdc_dim: int, rng: np.random.Generator
) -> None:
    mine = ReferenceProjector(embed_dim, hdc_dim)
    x = rng.standard_normal((5, embed_dim)).astype(np.float32)
    x[3] = 0
    x[4] *= np.float32(1e30)
    bits = hdc.Projector(embed_dim, hdc_dim).project(x)
    assert bits.dtype == np.uint8
    assert bits.shape == (5, hdc_dim // 8)
    assert np.array_equal(bits, [mine.project(row) for row in x])


@pytest.mark.parametrize(("embed_dim", "hdc_dim"), [(3584, 4096), (3584, 256), (5000, 64)])
def test_wide_models(embed_dim: int, hdc_dim: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, embed_dim)).astype(np.float32)
    mine = ReferenceProjector(embed_dim, hdc_dim)
    bits = hdc.Projector(embed_dim, hdc_dim).project(x)
    assert np.array_equal(bits, [mine.project(row) for row in x])


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, DEFAULT_SEED])
def test_seed(seed: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal(24).astype(np.float32)
    bits = hdc.Projector(24, 512, seed).project(x)
    assert np.array_equal(bits, ReferenceProjector(24, 512, seed).project(x))
    assert np.array_equal(bits, hdc.Projector(24, 512, seed=seed).project(x))


def test_defaults(rng: np.random.Generator) -> None:
    x = rng.standard_normal(24).astype(np.float32)
    bits = hdc.Projector(24).project(x)
    assert bits.shape == (512,)
    assert np.array_equal(bits, hdc.Projector(24, 4096, DEFAULT_SEED).project(x))


def test_the_bits_never_change() -> None:
    """Fixed for ever: a store of years ago must find its entries."""
    digest = hashlib.sha256()
    for embed_dim, hdc_dim in ((1, 64), (24, 512), (100, 192), (768, 4096), (3584, 256)):
        x = (np.arange(3 * embed_dim) * 37 % 101 - 50).astype(np.float32).reshape(3, -1)
        digest.update(hdc.Projector(embed_dim, hdc_dim).project(x).tobytes())
    assert digest.hexdigest() == FROZEN


FROZEN = "73c24e67b7269c8cb99e9b077fb2d71bd1055467f548c789ee73a209aaae727f"


def test_one_row_and_batches_give_the_same_bits(rng: np.random.Generator) -> None:
    projector = hdc.Projector(100, 512)
    x = rng.standard_normal((70, 100)).astype(np.float32)
    whole = projector.project(x)
    assert np.array_equal(whole, [projector.project(row) for row in x])
    for n in (1, 2, 7, 16, 33):
        assert np.array_equal(projector.project(x[:n]), whole[:n])
        assert np.array_equal(projector.project(x[70 - n :]), whole[70 - n :])
    assert projector.project(x[:0]).shape == (0, 64)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "Fortran": np.asfortranarray,
    "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "big-endian": lambda x: x.astype(">f4"),
    "read-only": lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
    "float64": lambda x: x.astype(np.float64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_does_not_matter(layout: str, rng: np.random.Generator) -> None:
    projector = hdc.Projector(65, 512)
    x = rng.standard_normal((6, 65)).astype(np.float32)
    assert np.array_equal(projector.project(LAYOUTS[layout](x)), projector.project(x))


@pytest.mark.parametrize("exponent", [-149, -126, -64, 0, 64, 100])
def test_a_power_of_two_changes_no_bit(exponent: int, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 10, (4, 24)).astype(np.float32)
    projector = hdc.Projector(24, 512)
    scaled = np.ldexp(x, exponent)
    assert np.isfinite(scaled).all()
    assert np.array_equal(projector.project(scaled), projector.project(x))


def test_finite_input_never_overflows() -> None:
    largest = np.finfo(np.float32).max
    for embed_dim in (1, 24, 1000, 4096):
        signs = np.where(np.arange(embed_dim) % 3, 1, -1).astype(np.float32)
        projector = hdc.Projector(embed_dim, 512)
        for scale in (np.float32(2.0**127), np.float32(1e-45)):
            assert np.array_equal(projector.project(signs * scale), projector.project(signs))
        wanted = ReferenceProjector(embed_dim, 512).project(signs * largest)
        assert np.array_equal(projector.project(signs * largest), wanted)


@pytest.mark.parametrize("shape", [(23,), (25,), (2, 23), (2, 25), (2, 2, 24), ()])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, TypeError), match="24"):
        hdc.Projector(24, 512).project(np.ones(shape, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad: float) -> None:
    x = np.ones((3, 24), np.float32)
    x[2, 23] = bad
    with pytest.raises(ValueError, match=r"finite|NaN|inf"):
        hdc.Projector(24, 512).project(x)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 64), "embed_dim"),
        ((-1, 64), "embed_dim"),
        ((1.5, 64), "embed_dim"),
        ((8, 0), "hdc_dim"),
        ((8, 100), "hdc_dim"),
        ((8, 64, -1), "seed"),
        ((8, 64, 2**64), "seed"),
    ],
)
def test_wrong_parameters(arguments: Any, name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        hdc.Projector(*arguments)


def test_similarity(rng: np.random.Generator) -> None:
    a = rng.integers(0, 256, (5, 24), np.uint8)
    b = rng.integers(0, 256, (7, 24), np.uint8)
    wanted = np.array([[1 - 2 * hamming(x, y) / 192 for y in b] for x in a])
    got = hdc.similarity(a[:, None], b[None])
    assert got.dtype == np.float64
    assert np.allclose(got, wanted, rtol=0, atol=1e-12)
    assert np.allclose(hdc.similarity(a[0], b), wanted[0], rtol=0, atol=1e-12)
    assert hdc.similarity(a[0], a[0]) == 1.0
    assert hdc.similarity(a[0], ~a[0]) == -1.0
    assert np.ndim(hdc.similarity(a[0], b[0])) == 0


def test_hdc_needs_no_store() -> None:
    code = (
        "import numpy as np\n"
        "from hybridmem import hdc\n"
        "print(hdc.Projector(3, 64).project(np.ones(3, np.float32)).tobytes().hex())\n"
    )
    expected = ReferenceProjector(3, 64).project(np.ones(3, np.float32)).tobytes().hex()
    assert run_python(code) == expected

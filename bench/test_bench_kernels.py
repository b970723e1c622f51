"""The compiled loops: pooling, projection, INT8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import TOKENS, WIDTH, chunk

from hybridmem import hdc
from hybridmem._codec import Codec

Note = Callable[[str, float], None]


def test_project(benchmark: Any, rng: np.random.Generator) -> None:
    benchmark.extra_info["title"] = f"project one vector, {WIDTH} to 4096 bits"
    row = chunk(rng, 1)
    assert benchmark(hdc.Projector(WIDTH).project_rows, row).shape == (1, 512)


def test_dense_projection(benchmark: Any, rng: np.random.Generator) -> None:
    benchmark.extra_info["title"] = f"the same as a matrix product in numpy, {WIDTH} x 4096"
    matrix, row = chunk(rng, 4096), chunk(rng, 1)[0]
    assert benchmark(np.dot, matrix, row).shape == (4096,)


def test_pool_and_project(benchmark: Any, floor: Note, rng: np.random.Generator) -> None:
    benchmark.extra_info["title"] = f"pool {TOKENS} x {WIDTH} and project"
    keys = chunk(rng)
    floor("read", keys.nbytes)
    projector, spec = hdc.Projector(WIDTH), hdc.SignatureSpec()
    assert len(benchmark(hdc.sign_entry, projector, spec, keys)) == 512


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_encode(benchmark: Any, floor: Note, rng: np.random.Generator, form: str) -> None:
    benchmark.extra_info["title"] = f"encode {TOKENS} x {WIDTH} keys and values as {form}"
    codec = Codec("float32" if form == "int8" else form, quantize_stored=form == "int8")
    keys, values = chunk(rng), chunk(rng)
    tensors = benchmark(codec.encode, keys, values)
    # A copy reads and writes the same number of bytes; here fewer are written.
    out = sum(tensor.data.nbytes for tensor in tensors)
    floor("copy", (keys.nbytes + values.nbytes + out) / 2)


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_decode(benchmark: Any, floor: Note, rng: np.random.Generator, form: str) -> None:
    benchmark.extra_info["title"] = f"decode {TOKENS} x {WIDTH} keys and values from {form}"
    codec = Codec("float32" if form == "int8" else form, quantize_stored=form == "int8")
    tensors = codec.encode(chunk(rng), chunk(rng))
    keys, values = benchmark(codec.decode, tensors, TOKENS, WIDTH)
    stored = sum(tensor.data.nbytes for tensor in tensors)
    floor("copy", (keys.nbytes + values.nbytes + stored) / 2)

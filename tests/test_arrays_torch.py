"""The boundary and torch: tensors in, tensors out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridmem import _arrays
from hybridmem._arrays import concatenate_like, importance, layer_index, matrix

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch

F32 = NDArray[np.float32]
N, W = 5, 12
DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def data(n: int = N, w: int = W, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=(n, w)).astype(np.float32)


def tensor(dtype: str = "float32", n: int = N, seed: int = 0) -> Any:
    return torch.from_numpy(data(n, seed=seed)).to(getattr(torch, dtype))


def assert_is(got: F32, want: Any) -> None:
    want = want.detach().to(torch.float32).numpy()
    assert type(got) is np.ndarray
    assert got.flags.c_contiguous
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), want.copy().view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_tensors_are_taken(dtype: str) -> None:
    x = tensor(dtype)
    assert_is(matrix(x, "keys", W), x)
    assert_is(matrix(x[None, None], "keys", W), x)
    assert_is(matrix(x[0], "query", W, vector_ok=True), x[:1])
    assert_is(matrix(list(x), "keys", W), x)
    assert_is(matrix(x.repeat(2, 2)[::2, ::2], "keys", W), x.repeat(2, 2)[::2, ::2])
    wide = torch.zeros(W, N, dtype=x.dtype)
    wide.copy_(x.T)
    assert_is(matrix(wide.T, "keys", W), x)
    assert_is(matrix(x[:1].expand(7, W), "keys", W), x[:1].expand(7, W))


def test_float32_shares_memory() -> None:
    x = tensor()
    assert np.shares_memory(matrix(x, "keys", W), x.numpy())


def test_tensors_of_autograd_and_inference_are_taken() -> None:
    x = tensor()
    assert_is(matrix(x.clone().requires_grad_(), "keys", W), x)
    assert_is(matrix(torch.nn.Parameter(x.clone()) * 1, "keys", W), x)
    assert_is(matrix(torch.nn.Parameter(x.clone()), "keys", W), x)
    assert_is(matrix(torch.nn.Parameter(x.to(torch.bfloat16)), "keys", W), x.to(torch.bfloat16))
    with torch.inference_mode():
        inner = x + 0
        assert_is(matrix(inner, "keys", W), x)
    assert inner.is_inference()
    assert_is(matrix(inner, "keys", W), x)


def test_lazily_negated_tensors_are_taken() -> None:
    x = torch.complex(tensor(seed=1), tensor(seed=2)).conj().imag
    assert x.is_neg()
    assert_is(matrix(x, "keys", W), x.resolve_neg())


def wrong() -> dict[str, Any]:
    x = tensor()
    return {
        "torch.int64": x.long(),
        "torch.bool": x > 0,
        "torch.complex64": x.to(torch.complex64),
        "torch.quint8": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "sparse_coo": x.to_sparse(),
        "sparse_csr": x.to_sparse_csr(),
        "jagged": torch.nested.nested_tensor([x, x], layout=torch.jagged),
        "meta device": x.to("meta"),
    }


@pytest.mark.parametrize(
    "what",
    ["torch.int64", "torch.bool", "torch.complex64", "torch.quint8", "sparse_coo", "sparse_csr",
     "jagged", "meta device"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_other_tensors_are_refused(what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = wrong()[what]
    with pytest.raises(TypeError, match=f"^keys: got torch.*{what}"):
        matrix(x, "keys", W)
    with pytest.raises(TypeError, match=f"^cache_k: got torch.*{what}"):
        concatenate_like([data()], x, name="cache_k")


def test_fake_tensors_are_refused() -> None:
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        x = torch.zeros(N, W)
    with pytest.raises(TypeError, match=r"^keys: cannot read torch"):
        matrix(x, "keys", W)


def test_shapes_are_looked_at_before_values() -> None:
    huge = torch.zeros(1, 1, dtype=torch.bfloat16).expand(1 << 40, W)
    with pytest.raises(ValueError, match=r"want \[n_tokens, 12\], 1 to 2\*\*32 - 1 rows"):
        matrix(huge, "keys", W)
    with pytest.raises(ValueError, match=r"^keys: got shape \[5, 12\], want \[n_tokens, 13\]$"):
        matrix(tensor(), "keys", 13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_found(dtype: str) -> None:
    x = tensor("float32")
    x[3, 7] = float("nan")
    with pytest.raises(ValueError, match=r"^keys: row 3, column 7 is nan"):
        matrix(x.to(getattr(torch, dtype)), "keys", W)
    with pytest.raises(ValueError, match=r"^cache_k: row 3, column 7 is nan"):
        concatenate_like([data()], x.to(getattr(torch, dtype)), name="cache_k")
    with pytest.raises(ValueError, match=r"^cache_k: row 3, column 7 is nan"):
        concatenate_like([], x.to(getattr(torch, dtype)), name="cache_k")


def test_numbers_of_torch() -> None:
    assert layer_index(torch.tensor(3)) == 3
    assert importance(torch.tensor(0.25, dtype=torch.bfloat16)) == 0.25
    assert importance(torch.tensor(2)) == 2
    for v in (torch.tensor(True), torch.tensor(1.5), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=r"^layer_idx: got "):
            layer_index(v)
    for v in (torch.tensor(True), torch.tensor(1j), torch.tensor([1.0])):
        with pytest.raises(TypeError, match=r"^importance: got "):
            importance(v)


# -- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (1,)])
@pytest.mark.parametrize("n", [0, 3])
def test_rows_go_before_the_cache_in_its_type(dtype: str, lead: tuple[int, ...], n: int) -> None:
    cache = tensor(dtype, n, seed=1).reshape(*lead, n, W)
    rows = [data(2, seed=2), data(4, seed=3)]
    for part in rows:
        part.flags.writeable = False
    got = concatenate_like(rows, cache)
    assert type(got) is torch.Tensor
    assert (got.dtype, got.device) == (cache.dtype, cache.device)
    assert got.shape == (*lead, 6 + n, W)
    found = torch.tensor(np.concatenate(rows)).to(cache.dtype)
    assert_is(matrix(got, "keys", W), torch.cat([found.float(), cache.float().reshape(n, W)]))
    assert concatenate_like([], cache) is cache
    assert _arrays.cache_tokens(cache, "cache_k", W) == n


def test_caches_that_are_not_contiguous() -> None:
    cache = torch.from_numpy(data(W, N)).T[None]
    got = concatenate_like([data(2)], cache)
    assert_is(got[0].numpy(), torch.cat([torch.from_numpy(data(2)), cache[0]]))


def test_gradients_go_through_to_the_cache() -> None:
    cache = tensor().requires_grad_()
    concatenate_like([data(2)], cache).sum().backward()
    assert bool((cache.grad == 1).all())
    with torch.inference_mode():
        assert concatenate_like([data(2)], tensor() + 0).is_inference()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_too_large_for_the_cache_are_refused(dtype: str) -> None:
    rows = [data(), np.full((1, W), 3.4e38, np.float32)]
    with pytest.raises(ValueError, match=f"^cache_v: .*overflows its torch.{dtype}"):
        concatenate_like(rows, tensor(dtype), name="cache_v")


def test_shapes_of_caches() -> None:
    for x in (tensor()[:, :-1], tensor()[0], torch.zeros(2, N, W)):
        with pytest.raises(ValueError, match=r"^cache_k: got shape .*want \[n_tokens, 12\]$"):
            concatenate_like([data()], x, name="cache_k")

"""FORMAT-AND-API "Arrays in" and "Input": what is taken as it is meant, what is refused by name."""

from __future__ import annotations

import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model

import hybridmem

from .helpers import Floats, contents, fill, pair, photograph, record

WIDTH = 24


class OnlyArray:
    """An object that numpy knows through __array__ alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.x if dtype is None else self.x.astype(dtype)


class OnlyDLPack:
    """An object that can be had through DLPack alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def every_second(x: Floats) -> Floats:
    wide = np.full((2 * len(x), 3 * WIDTH), np.nan, np.float32)
    wide[::2, 1::3] = x
    return wide[::2, 1::3]


def unaligned(x: Floats) -> Floats:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    out = raw[1:].view(np.float32).reshape(x.shape)
    out[:] = x
    return out


def read_only(x: Floats) -> Floats:
    x = x.copy()
    x.flags.writeable = False
    return x


class Subclass(np.ndarray):  # type: ignore[type-arg]
    """A subclass whose own arithmetic must not be used."""


FORMS: dict[str, Callable[[Floats], Any]] = {
    "C order": lambda x: x,
    "Fortran order": np.asfortranarray,
    "slices": every_second,
    "negative strides": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "negative row stride": lambda x: x[::-1].copy()[::-1],
    "transposed": lambda x: x.T.copy().T,
    "big-endian": lambda x: x.astype(">f4"),
    "big-endian float64": lambda x: x.astype(">f8"),
    "float16": lambda x: x.astype(np.float16),
    "float64": lambda x: x.astype(np.float64),
    "strided float64": lambda x: np.asfortranarray(x.astype(np.float64)),
    "unaligned": unaligned,
    "read-only": read_only,
    "subclass": lambda x: x.view(Subclass),
    "__array__": OnlyArray,
    "DLPack": OnlyDLPack,
    "memoryview": memoryview,
    "strided memoryview": lambda x: memoryview(every_second(x)),
    "nested lists": lambda x: x.tolist(),
    "nested tuples": lambda x: tuple(map(tuple, x.tolist())),
    "list of rows": list,
    "leading axis of 1": lambda x: x[None],
    "three leading axes of 1": lambda x: x[None, None, None],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 4])
def test_forms_of_one_matrix(n: int, form: str, store: Any, rng: np.random.Generator) -> None:
    """Everywhere an array goes in, every form of it gives what the plain one gives."""
    keys, values = pair(rng, n, WIDTH)
    make = FORMS[form]
    store.put(keys, values, layer_idx=0)
    store.put(make(keys), make(values), layer_idx=0)
    store.put_many([(make(keys), make(values))], layer_idx=0)
    for entry_id in (1, 2, 3):
        entry = store.get(entry_id)
        assert entry.keys.tobytes() == keys.tobytes()
        assert entry.values.tobytes() == values.tobytes()
    signatures = {bytes(s) for s in store.entries["signature"]}
    assert signatures == {Model(WIDTH, 512).signature(keys).tobytes()}
    hits = [(hit.entry_id, hit.score) for hit in store.query(make(keys), layer_idx=0)]
    assert hits == [(1, 1.0), (2, 1.0), (3, 1.0)]
    (batch,) = store.query_many([make(keys)], layer_idx=0)
    assert [(hit.entry_id, hit.score) for hit in batch] == hits
    store.flush()
    assert len({entry[1:] for entry in contents(store).values()}) == 1


ROWS: dict[str, Callable[[Floats], Any]] = {
    "1-d": lambda x: x,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "strided": lambda x: np.repeat(x, 3)[::3],
    "array.array": lambda x: array.array("f", x.tolist()),
    "array.array of double": lambda x: array.array("d", x.tolist()),
    "list": lambda x: x.tolist(),
    "[1, embed_dim]": lambda x: x[None],
    "[1, 1, embed_dim]": lambda x: x[None, None],
}


@pytest.mark.parametrize("form", ROWS)
def test_forms_of_one_query_vector(form: str, store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 1, WIDTH)
    store.put(keys, values, layer_idx=0)
    hits = store.query(ROWS[form](keys[0]), layer_idx=0)
    assert [(hit.entry_id, hit.score) for hit in hits] == [(1, 1.0)]


def test_broadcast_and_zero_stride_arrays(store: Any, rng: np.random.Generator) -> None:
    """safetensors' own writer ignores strides and would store foreign memory here."""
    row = pair(rng, 1, WIDTH)[0]
    for x in (
        np.broadcast_to(row, (5, WIDTH)),
        np.broadcast_to(row[:, :1], (5, WIDTH)),
        np.broadcast_to(np.float32(0.5), (5, WIDTH)),
        np.lib.stride_tricks.as_strided(row, (5, WIDTH), (0, 4)),
    ):
        entry_id = store.put(x, x, layer_idx=0)
        for _ in range(2):
            assert store.get(entry_id).keys.tobytes() == np.ascontiguousarray(x).tobytes()
            assert store.get(entry_id).values.tobytes() == np.ascontiguousarray(x).tobytes()
            store.flush()


def test_overlapping_windows(store: Any, rng: np.random.Generator) -> None:
    series = rng.standard_normal(WIDTH + 6).astype(np.float32)
    x = np.lib.stride_tricks.sliding_window_view(series, WIDTH)
    store.put(x, x[::-1], layer_idx=0)
    store.flush()
    assert np.array_equal(store.get(1).keys, x)
    assert np.array_equal(store.get(1).values, x[::-1])


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_mapped_files(mode: Any, store: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, WIDTH)).astype(np.float32)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, mode=mode, shape=x.shape)
    store.put(mapped, mapped[::-1], layer_idx=0)
    store.flush()
    assert np.array_equal(store.get(1).keys, x)
    assert np.array_equal(store.get(1).values, x[::-1])
    assert type(store.get(1).keys) is np.ndarray


def test_hits_go_in_again(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    store.flush()
    hit = store.query(pair(rng, 1)[0], 0)[0]
    store.put(hit.keys, hit.values, layer_idx=1)
    assert np.array_equal(store.get(2).keys, hit.keys)


def test_bfloat16_of_ml_dtypes(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = rng.standard_normal((4, WIDTH)).astype(bfloat16)
    for kv_dtype in ("float32", "bfloat16"):
        store = new_store(kv_dtype, kv_dtype=kv_dtype)
        for form in (x, np.asfortranarray(x), x[::-1].copy()[::-1]):
            entry_id = store.put(form, form, layer_idx=0)
            assert np.array_equal(store.get(entry_id).keys, x.astype(np.float32))
        assert store.query(x, layer_idx=0)[0].score == 1.0


def test_float64_is_rounded_to_float32(store: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, WIDTH)) * 3
    x[0, :3] = [1 + 2**-24, 1 + 3 * 2**-24, 1e-50]
    store.put(x, -x, layer_idx=0)
    assert store.get(1).keys.tobytes() == x.astype(np.float32).tobytes()
    assert store.get(1).values.tobytes() == (-x).astype(np.float32).tobytes()
    assert (
        bytes(store.entries["signature"][0])
        == Model(WIDTH, 512).signature(x.astype(np.float32)).tobytes()
    )


def test_the_ends_of_float32(store: Any) -> None:
    """Finite input never overflows: not in the mean, not in the projection, not in the score."""
    model = Model(WIDTH, 512)
    largest = np.finfo(np.float32).max
    signs = np.where(np.arange(WIDTH) % 3, 1, -1).astype(np.float32)
    cases = [signs * largest, signs * np.float32(1e-45), signs * np.finfo(np.float32).tiny]
    mixed = signs * np.float32(1e-45)
    mixed[5] = largest
    for row in [*cases, mixed]:
        keys = np.repeat(row[None], 9, axis=0)
        entry_id = store.put(keys, keys, layer_idx=0)
        assert store.get(entry_id).keys.tobytes() == keys.tobytes()
        hits = {hit.entry_id: hit.score for hit in store.query(keys, layer_idx=0)}
        assert hits[entry_id] == 1.0
        signature = bytes(record(store, entry_id, "signature"))
        assert signature == model.signature(keys).tobytes()


def test_negative_zero_and_subnormals_are_kept(store: Any) -> None:
    x = np.array([[-0.0, 0.0, 1e-45, -1e-45] * 6], np.float32)
    store.put(x, x, layer_idx=0)
    store.flush()
    assert store.get(1).keys.tobytes() == x.tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(dtype: str, store: Any, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    keys, values = pair(rng, 4, WIDTH)
    kind = getattr(torch, dtype)
    forms: list[Callable[[Any], Any]] = [
        lambda t: t,
        lambda t: t.T.contiguous().T,
        lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
        lambda t: t[None],
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t),
        lambda t: (-t).neg() if kind == torch.float32 else t,
        lambda t: torch.utils._pytree.tree_map(lambda y: y, t),
    ]
    for form in forms:
        k, v = form(torch.tensor(keys).to(kind)), form(torch.tensor(values).to(kind))
        entry_id = store.put(k, v, layer_idx=0)
        assert store.get(entry_id).keys.tobytes() == keys.tobytes()
        assert store.get(entry_id).values.tobytes() == values.tobytes()
        assert store.query(k, layer_idx=0, top_k=1)[0].score == 1.0
    with torch.inference_mode():
        inference = torch.tensor(keys).to(kind) * 1
        store.put(inference, inference, layer_idx=0)
    expanded = torch.tensor(keys[:1]).to(kind).expand(3, WIDTH)
    entry_id = store.put(expanded, expanded, layer_idx=0)
    assert np.array_equal(store.get(entry_id).keys, np.repeat(keys[:1], 3, axis=0))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["int64", "complex64", "bool", "meta", "sparse"])
def test_torch_tensors_that_are_refused(kind: str, store: Any) -> None:
    torch = pytest.importorskip("torch")
    good = torch.ones(2, WIDTH)
    bad = {
        "meta": lambda: torch.ones(2, WIDTH, device="meta"),
        "sparse": lambda: good.to_sparse(),
    }.get(kind, lambda: good.to(getattr(torch, kind)))()
    with pytest.raises((ValueError, TypeError), match="keys"):
        store.put(bad, good, layer_idx=0)
    with pytest.raises((ValueError, TypeError), match="values"):
        store.put(good, bad, layer_idx=0)
    assert len(store) == 0


def test_a_put_changes_none_of_its_arguments(store: Any, rng: np.random.Generator) -> None:
    keys, values = rng.standard_normal((2, 3, WIDTH))
    before = keys.tobytes(), values.tobytes()
    store.put(keys, values, layer_idx=0)
    store.query(keys, layer_idx=0)
    assert (keys.tobytes(), values.tobytes()) == before


def test_refused_input_leaves_the_directory_as_it_was(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    before = photograph(Path(store.path))
    bad = np.zeros((2, WIDTH), np.float32)
    bad[1, 1] = np.inf
    with pytest.raises(ValueError, match="keys"):
        store.put(bad, bad, layer_idx=0)
    with pytest.raises(ValueError, match="query"):
        store.query(bad, layer_idx=0)
    store.flush()
    assert photograph(Path(store.path)) == before
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1, 2]

"""FORMAT-AND-API section 3: augmented_kv."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from model import Model, stored_form, to_bfloat16_bits

import hybridmem

from .helpers import fill, pair, run_python


def prepared(store: Any, rng: np.random.Generator) -> Model:
    model = Model(24, 512)
    for i in range(12):
        keys, values = pair(rng, 1 + i % 4)
        entry_id = store.put(keys, values, layer_idx=i % 2)
        model.put(keys, values, i % 2, 1.0, store.get(entry_id).timestamp)
    return model


@pytest.mark.parametrize("top_k", [1, 3, 100])
@pytest.mark.parametrize("flushed", [False, True])
def test_oldest_first_then_the_cache(
    flushed: bool, top_k: int, store: Any, rng: np.random.Generator
) -> None:
    model = prepared(store, rng)
    if flushed:
        store.flush()
    for layer_idx in (0, 1):
        query = pair(rng, 2)[0]
        cache_k, cache_v = pair(rng, 7)
        keys, values = hybridmem.augmented_kv(query, cache_k, cache_v, store, layer_idx, top_k)
        wanted = model.augmented(query, cache_k, cache_v, layer_idx, top_k)
        assert keys.shape == wanted[0].shape
        assert keys.dtype == values.dtype == np.float32
        assert keys.tobytes() == wanted[0].tobytes()
        assert values.tobytes() == wanted[1].tobytes()
    counts = [row.access_count for row in model.rows.values()]
    assert store.entries["access_count"].tolist() == counts
    assert (store.stats().queries, store.stats().hits) == (model.queries, model.hits)


def test_top_k_defaults_to_five_and_arguments_have_their_names(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 9, n=1)
    cache_k, cache_v = pair(rng, 2)
    keys, values = hybridmem.augmented_kv(
        query=cache_k, cache_k=cache_k, cache_v=cache_v, store=store, layer_idx=0
    )
    assert keys.shape == values.shape == (7, 24)


def test_oldest_is_by_timestamp_then_id(
    store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [500, 300, 300, 100]
    marks = []
    for now in times:
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        keys, values = pair(rng, 1)
        store.put(keys, values, layer_idx=0)
        marks.append(keys[0].tobytes())
    monkeypatch.undo()
    cache = np.zeros((1, 24), np.float32)
    keys, _ = hybridmem.augmented_kv(cache, cache, cache, store, 0)
    assert [row.tobytes() for row in keys[:4]] == [marks[i] for i in (3, 1, 2, 0)]


def test_nothing_found_gives_the_cache_as_given(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1, layer_idx=1)
    cache_k, cache_v = pair(rng, 3)
    for k, v in ((cache_k, cache_v), (cache_k[None], cache_v[None]), (cache_k.T.copy().T, cache_v)):
        keys, values = hybridmem.augmented_kv(cache_k, k, v, store, layer_idx=0)
        assert keys is k
        assert values is v


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f2"])
@pytest.mark.parametrize("leading", [0, 1, 2])
def test_type_in_is_type_out(
    leading: int, dtype: Any, store: Any, rng: np.random.Generator
) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    cache_k, cache_v = (x.astype(dtype)[(None,) * leading] for x in pair(rng, 2))
    out_k, out_v = hybridmem.augmented_kv(keys, cache_k, cache_v, store, layer_idx=0)
    for out, entry, cache in ((out_k, keys, cache_k), (out_v, values, cache_v)):
        assert type(out) is np.ndarray
        assert out.dtype.newbyteorder("=") == np.dtype(dtype).newbyteorder("=")
        assert out.shape == (1,) * leading + (5, 24)
        assert np.array_equal(out.reshape(5, 24)[:3], entry)
        assert np.array_equal(out.reshape(5, 24)[3:], cache.reshape(2, 24))


def test_ml_dtypes_bfloat16(store: Any, rng: np.random.Generator) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    keys, values = rng.standard_normal((2, 3, 24)).astype(np.float32)
    store.put(keys, values, layer_idx=0)
    cache = pair(rng, 2)[0].astype(bfloat16)
    out_k, out_v = hybridmem.augmented_kv(keys, cache, cache, store, layer_idx=0)
    assert out_k.dtype == out_v.dtype == bfloat16
    assert np.array_equal(out_k[:3].view(np.uint16), to_bfloat16_bits(keys))
    assert np.array_equal(out_v[:3].view(np.uint16), to_bfloat16_bits(values))
    assert np.array_equal(out_k[3:].view(np.uint16), cache.view(np.uint16))


def test_retrieved_rows_are_rounded_to_a_float16_cache(
    store: Any, rng: np.random.Generator
) -> None:
    keys, values = rng.standard_normal((2, 3, 24)).astype(np.float32)
    store.put(keys, values, layer_idx=0)
    cache = pair(rng, 2)[0].astype(np.float16)
    out_k, out_v = hybridmem.augmented_kv(keys, cache, cache, store, layer_idx=0)
    assert np.array_equal(out_k[:3].astype(np.float32), stored_form(keys, "float16"))
    assert np.array_equal(out_v[:3].astype(np.float32), stored_form(values, "float16"))


def test_any_strides_of_the_cache(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    big = rng.standard_normal((8, 48)).astype(np.float32)
    one_row = np.broadcast_to(big[0, :24], (4, 24))
    for cache in (big[::-2, ::2], np.asfortranarray(big[:, :24]), one_row):
        out_k, out_v = hybridmem.augmented_kv(keys, cache, cache[::-1], store, layer_idx=0)
        assert np.array_equal(out_k, np.concatenate([keys, cache]))
        assert np.array_equal(out_v, np.concatenate([values, cache[::-1]]))


def test_an_empty_cache(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    empty = np.zeros((0, 24), np.float32)
    out_k, out_v = hybridmem.augmented_kv(keys, empty, empty, store, layer_idx=0)
    assert out_k.tobytes() == keys.tobytes()
    assert out_v.tobytes() == values.tobytes()


def test_the_result_is_the_callers_own(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    cache_k, cache_v = pair(rng, 2)
    out_k, out_v = hybridmem.augmented_kv(keys, cache_k, cache_v, store, layer_idx=0)
    kept = cache_k.copy(), cache_v.copy()
    out_k[:] = 9
    out_v[:] = 9
    assert np.array_equal(store.get(1).keys, keys)
    assert np.array_equal(cache_k, kept[0])
    assert np.array_equal(cache_v, kept[1])


BAD: dict[str, Callable[[np.random.Generator], tuple[Any, Any, str]]] = {
    "width of cache_k": lambda r: (np.zeros((2, 23), "f4"), np.zeros((2, 24), "f4"), "cache_k"),
    "width of cache_v": lambda r: (np.zeros((2, 24), "f4"), np.zeros((2, 25), "f4"), "cache_v"),
    "unequal rows": lambda r: (np.zeros((2, 24), "f4"), np.zeros((3, 24), "f4"), "cache"),
    "rank": lambda r: (np.zeros(24, "f4"), np.zeros((1, 24), "f4"), "cache_k"),
    "batch of two": lambda r: (np.zeros((2, 3, 24), "f4"), np.zeros((2, 3, 24), "f4"), "cache_k"),
    "integers": lambda r: (np.zeros((2, 24), int), np.zeros((2, 24), int), "cache_k"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("found", [False, True])
def test_bad_caches(case: str, found: bool, store: Any, rng: np.random.Generator) -> None:
    if found:
        fill(store, rng, 2)
    cache_k, cache_v, name = BAD[case](rng)
    with pytest.raises((ValueError, TypeError), match=name):
        hybridmem.augmented_kv(pair(rng, 1)[0], cache_k, cache_v, store, layer_idx=0)
    assert store.stats().queries == 0
    assert not store.entries["access_count"].any()


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("name", ["cache_k", "cache_v"])
def test_a_cache_with_nan_costs_no_access(
    name: str, found: bool, store: Any, rng: np.random.Generator
) -> None:
    if found:
        fill(store, rng, 2)
        store.query(pair(rng, 1)[0], layer_idx=0, top_k=1)
    before = store.stats(), store.entries["access_count"].tolist()
    caches = {"cache_k": pair(rng, 2)[0], "cache_v": pair(rng, 2)[1]}
    caches[name][1, 3] = np.nan
    with pytest.raises(ValueError, match=f"{name}: row 1, column 3 is nan"):
        hybridmem.augmented_kv(pair(rng, 1)[0], store=store, layer_idx=0, **caches)
    assert (store.stats(), store.entries["access_count"].tolist()) == before


@pytest.mark.parametrize("bad", ["query", "layer_idx", "top_k"])
def test_bad_queries(bad: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    cache = pair(rng, 2)[0]
    arguments = {"query": cache, "layer_idx": 0, "top_k": 5}
    arguments[bad] = {"query": np.zeros(25, np.float32), "layer_idx": -1, "top_k": 0}[bad]
    with pytest.raises((ValueError, TypeError), match=bad):
        hybridmem.augmented_kv(cache_k=cache, cache_v=cache, store=store, **arguments)
    assert store.stats().queries == 0


def test_numpy_callers_do_not_load_torch(store: Any) -> None:
    assert (
        run_python(
            "import sys, numpy as np, hybridmem\n"
            "store = hybridmem.create(sys.argv[1], embed_dim=4)\n"
            "x = np.ones((2, 4), np.float32)\n"
            "store.put(x, x, layer_idx=0)\n"
            "hybridmem.augmented_kv(x, x, x, store, layer_idx=0)\n"
            "store.close()\n"
            "print('torch' in sys.modules)\n",
            str(store.path) + "-other",
        )
        == "False"
    )


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("leading", [0, 1])
def test_torch_in_is_torch_out(
    leading: int, dtype: str, store: Any, rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    caches = [torch.tensor(x).to(getattr(torch, dtype))[(None,) * leading] for x in pair(rng, 2)]
    query = torch.tensor(keys, requires_grad=True)
    out_k, out_v = hybridmem.augmented_kv(query, *caches, store, layer_idx=0)
    for out, entry, cache in ((out_k, keys, caches[0]), (out_v, values, caches[1])):
        assert isinstance(out, torch.Tensor)
        assert out.dtype == cache.dtype
        assert out.device == cache.device
        assert tuple(out.shape) == (1,) * leading + (5, 24)
        assert np.array_equal(out.reshape(5, 24)[:3].float().numpy(), entry)
        assert torch.equal(out.reshape(5, 24)[3:], cache.reshape(2, 24))
    none_k, none_v = hybridmem.augmented_kv(query, *caches, store, layer_idx=7)
    assert none_k is caches[0]
    assert none_v is caches[1]


def buffers(
    rng: np.random.Generator, n: int, room: int, lead: tuple[int, ...] = (), dtype: Any = np.float32
) -> tuple[Any, Any]:
    keys, values = rng.standard_normal((2, *lead, room + n, 24)).astype(dtype)
    return keys.copy(), values.copy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
@pytest.mark.parametrize("n", [0, 7])
def test_a_buffer_that_ends_with_the_cache(
    n: int, lead: tuple[int, ...], dtype: Any, store: Any, rng: np.random.Generator
) -> None:
    prepared(store, rng)
    room = 20
    out = buffers(rng, n, room, lead, dtype)
    before = [one.copy() for one in out]
    cache_k, cache_v = (one[..., room:, :] for one in out)
    query = pair(rng, 2)[0]
    wanted = hybridmem.augmented_kv(query, cache_k.copy(), cache_v.copy(), store, 0, 3)
    got = hybridmem.augmented_kv(query, cache_k, cache_v, store, 0, 3, out=out)
    for array, same, buffer, was in zip(got, wanted, out, before, strict=True):
        assert array.dtype == dtype
        assert array.base is buffer or array.base is buffer.base
        np.testing.assert_array_equal(array, same)
        free = buffer.shape[-2] - array.shape[-2]
        assert free > 0
        np.testing.assert_array_equal(buffer[..., :free, :], was[..., :free, :])


def test_a_buffer_without_room_counts_no_query(store: Any, rng: np.random.Generator) -> None:
    prepared(store, rng)
    out = buffers(rng, 5, 2)
    before = [one.copy() for one in out]
    caches = [one[2:] for one in out]
    counts = store.entries["access_count"].tolist()
    with pytest.raises(ValueError, match=r"out: \d+ tokens were found, there is room for 2"):
        hybridmem.augmented_kv(pair(rng, 2)[0], *caches, store, 0, 5, out=out)
    assert store.entries["access_count"].tolist() == counts
    assert store.stats().queries == 0
    for one, was in zip(out, before, strict=True):
        np.testing.assert_array_equal(one, was)


def test_what_is_too_large_for_the_buffers_type(store: Any, rng: np.random.Generator) -> None:
    keys = np.full((1, 24), 1e6, np.float32)
    store.put(keys, keys, 0)
    out = buffers(rng, 3, 4, (), np.float16)
    with pytest.raises(ValueError, match="cache_k: a retrieved value of magnitude 1000000"):
        hybridmem.augmented_kv(keys, out[0][4:], out[1][4:], store, 0, out=out)
    assert store.stats().queries == 0


@pytest.mark.parametrize("wrong", ["elsewhere", "the beginning", "type", "short", "axes", "list"])
def test_a_cache_that_is_not_the_end_of_its_buffer(
    wrong: str, store: Any, rng: np.random.Generator
) -> None:
    prepared(store, rng)
    out_k, out_v = buffers(rng, 4, 9)
    cache_k, cache_v = out_k[9:], out_v[9:]
    buffer: Any = out_k
    if wrong == "elsewhere":
        cache_k = cache_k.copy()
    elif wrong == "the beginning":
        cache_k = out_k[:4]
    elif wrong == "type":
        buffer = out_k.astype(np.float64)
    elif wrong == "short":
        buffer = out_k[11:]
    elif wrong == "axes":
        buffer = out_k[None]
    else:
        buffer = out_k.tolist()
    with pytest.raises(ValueError, match="out: cache_k must be the end of its buffer"):
        hybridmem.augmented_kv(pair(rng, 2)[0], cache_k, cache_v, store, 0, out=(buffer, out_v))
    assert store.stats().queries == 0


def test_buffers_come_in_pairs(store: Any, rng: np.random.Generator) -> None:
    out_k, out_v = buffers(rng, 4, 9)
    for wrong in (out_k, (out_k,), (out_k, out_v, out_v)):
        with pytest.raises(TypeError, match=r"out: got .*, want a pair of buffers"):
            hybridmem.augmented_kv(out_k[0], out_k[9:], out_v[9:], store, 0, out=wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_torch_buffer(dtype: str, store: Any, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    prepared(store, rng)
    kind = getattr(torch, dtype)
    out = tuple(torch.from_numpy(one).to(kind) for one in buffers(rng, 6, 30, (1,)))
    caches = [one[:, 30:] for one in out]
    query = pair(rng, 2)[0]
    wanted = hybridmem.augmented_kv(query, *(one.clone() for one in caches), store, 1, 3)
    got = hybridmem.augmented_kv(query, *caches, store, 1, 3, out=out)
    for tensor, same, buffer in zip(got, wanted, out, strict=True):
        assert torch.equal(tensor, same)
        assert tensor.data_ptr() > buffer.data_ptr()
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

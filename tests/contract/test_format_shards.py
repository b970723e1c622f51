"""FORMAT-AND-API section 2, shards: plain safetensors that any program reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import stored_form
from reader import ForeignReader, safetensors_header
from safetensors import safe_open
from safetensors.numpy import load_file

import hybridmem

from .helpers import fill, pair, shards

STORED = [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]


def only_shard(store: Any) -> Path:
    (path,) = shards(Path(store.path)).values()
    return path


@pytest.mark.parametrize(("kv_dtype", "tag"), STORED)
def test_names_shapes_and_dtypes(
    kv_dtype: str, tag: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(kv_dtype=kv_dtype)
    for n in (1, 4, 7):
        store.put(*pair(rng, n), layer_idx=n)
    store.flush()
    with safe_open(only_shard(store), framework="numpy") as file:
        assert set(file.keys()) == {"k_1", "v_1", "k_2", "v_2", "k_3", "v_3"}
        for entry_id, n in ((1, 1), (2, 4), (3, 7)):
            for letter in "kv":
                tensor = file.get_slice(f"{letter}_{entry_id}")
                assert tensor.get_shape() == [n, 24]
                assert tensor.get_dtype() == tag


def test_f32_bytes_are_the_callers(store: Any, rng: np.random.Generator) -> None:
    pairs = [tuple(rng.standard_normal((2, n, 24)).astype(np.float32)) for n in (1, 2, 17)]
    for keys, values in pairs:
        store.put(keys, values, layer_idx=0)
    store.flush()
    tensors = load_file(only_shard(store))
    for entry_id, (keys, values) in enumerate(pairs, 1):
        assert tensors[f"k_{entry_id}"].tobytes() == keys.tobytes()
        assert tensors[f"v_{entry_id}"].tobytes() == values.tobytes()


@pytest.mark.parametrize(("kv_dtype", "tag"), STORED)
def test_rounded_to_nearest_even(
    kv_dtype: str, tag: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(kv_dtype=kv_dtype)
    keys = rng.standard_normal((40, 24)).astype(np.float32)
    # Halfway cases of both types, up and down, and float16 subnormals.
    keys[0, :8] = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2049, 2051, -2049, 257]
    keys[1, :4] = [2**-25, 3 * 2**-25, 2**-24, -(2**-26)]
    keys[2, :3] = [0.0, -0.0, 65504]
    values = -keys[::-1].copy()
    store.put(keys, values, layer_idx=0)
    unflushed = store.get(1)
    expected = stored_form(keys, kv_dtype), stored_form(values, kv_dtype)
    assert unflushed.keys.tobytes() == expected[0].tobytes()
    assert unflushed.values.tobytes() == expected[1].tobytes()
    store.flush()
    reader = ForeignReader(store.path)
    assert reader.keys(1).tobytes() == expected[0].tobytes()
    assert reader.values(1).tobytes() == expected[1].tobytes()
    store.close()
    with hybridmem.open(store.path) as again:
        assert again.get(1).keys.tobytes() == expected[0].tobytes()
        assert again.get(1).values.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_is_kept_exactly_at_half_the_bytes(
    kv_dtype: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    x = stored_form(rng.standard_normal((256, 24)).astype(np.float32), kv_dtype)
    sizes = {}
    for dtype in ("float32", kv_dtype):
        store = new_store(dtype, kv_dtype=dtype)
        store.put(x, x, layer_idx=0)
        store.flush()
        sizes[dtype] = only_shard(store).stat().st_size
        hit = store.query(x, layer_idx=0)[0]
        assert hit.keys.dtype == np.float32
        assert hit.keys.tobytes() == x.tobytes()
    assert sizes[kv_dtype] < 0.55 * sizes["float32"]


@pytest.mark.parametrize("n", [1, 2, 15, 16, 64])
@pytest.mark.parametrize("embed_dim", [1, 24, 64, 65, 200])
def test_int8_tensors_and_what_undoes_them(
    n: int, embed_dim: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(embed_dim=embed_dim, quantize_stored=True)
    keys, values = rng.standard_normal((2, n, embed_dim)).astype(np.float32) * 3
    store.put(keys, values, layer_idx=0)
    unflushed = store.get(1)
    as_put = unflushed.keys.copy(), unflushed.values.copy()
    store.flush()
    with safe_open(only_shard(store), framework="numpy") as file:
        names = {f"{x}_1{suffix}" for x in "kv" for suffix in ("", "_scale", "_zero")}
        assert set(file.keys()) == names
        for letter in "kv":
            assert file.get_slice(f"{letter}_1").get_dtype() == "I8"
            assert file.get_slice(f"{letter}_1").get_shape() == [n, embed_dim]
            assert file.get_slice(f"{letter}_1_scale").get_dtype() in ("F16", "F32")
    reader = ForeignReader(store.path)
    for given, put, read in (
        (keys, as_put[0], reader.keys(1)),
        (values, as_put[1], reader.values(1)),
    ):
        assert np.abs(put - given).max() <= 0.01 * np.abs(given).max()
        assert read.tobytes() == put.tobytes()
    store.close()
    with hybridmem.open(store.path, mode="r") as again:
        assert again.get(1).keys.tobytes() == as_put[0].tobytes()
        assert again.get(1).values.tobytes() == as_put[1].tobytes()


def hard_for_int8(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    normal = rng.standard_normal((20, 130)).astype(np.float32)
    outlier = normal.copy()
    outlier[3, 70] = 1e6
    constant_rows = np.repeat(normal[:, :1], 130, axis=1)
    return {
        "zero": np.zeros((20, 130), np.float32),
        "constant": np.full((20, 130), -7.25, np.float32),
        "constant rows": constant_rows,
        "constant channels": np.repeat(normal[:1], 20, axis=0),
        "outlier": outlier,
        "huge": normal * np.float32(5e37),
        "largest": np.full((20, 130), np.finfo(np.float32).max, np.float32),
        "both ends": np.where(normal > 0, 1, -1) * np.finfo(np.float32).max,
        "tiny": normal * np.float32(1e-38),
        "subnormal": np.full((20, 130), 1e-45, np.float32),
        "offset": normal + np.float32(1000),
        "wide range": normal * np.float32(10) ** rng.integers(-30, 30, (20, 130)),
    }


@pytest.mark.parametrize("rows", [1, 20])
def test_int8_is_within_one_percent_of_anything(
    rows: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(embed_dim=130, quantize_stored=True)
    cases = {name: x[:rows].astype(np.float32) for name, x in hard_for_int8(rng).items()}
    ids = {name: store.put(x, x[::-1], layer_idx=0) for name, x in cases.items()}
    store.flush()
    for name, x in cases.items():
        entry = store.get(ids[name])
        limit = 0.01 * np.abs(x.astype(np.float64)).max()
        for got, given in ((entry.keys, x), (entry.values, x[::-1])):
            assert np.isfinite(got).all(), name
            assert np.abs(got.astype(np.float64) - given).max() <= limit, name
    assert not store.get(ids["zero"]).keys.any()


def test_committed_shards_never_change_and_numbers_are_never_used_twice(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    path = Path(store.path)
    seen: dict[int, tuple[int, str]] = {}
    gone: set[int] = set()

    def check() -> None:
        now = {
            number: (p.stat().st_ino, hashlib.sha256(p.read_bytes()).hexdigest())
            for number, p in shards(path).items()
        }
        for number, what in now.items():
            assert number not in gone, "a shard number came back"
            assert seen.setdefault(number, what) == what, "a committed shard changed"
        gone.update(seen.keys() - now.keys())

    for turn in range(4):
        fill(store, rng, 12)
        store.flush()
        check()
        for entry_id in list(store)[::2]:
            store.delete(entry_id)
        store.flush()
        check()
        store.evict(len(store) - 2)
        check()
        store.compact()
        check()
        if turn == 1:  # no shard is left that could tell which numbers were used
            store.evict(0)
            check()
        store.close()
        store = hybridmem.open(path)
        check()
    store.close()
    assert gone, "nothing was ever compacted: the test shows nothing"


def test_numbers_have_four_digits(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    store.flush()
    assert only_shard(store).name in ("shard_0000.safetensors", "shard_0001.safetensors")
    assert ForeignReader(store.path).records[1].shard_idx == int(only_shard(store).name[6:10])


def test_every_named_shard_exists_and_holds_its_entries(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=3000)
    fill(store, rng, 30)
    store.evict(17)
    fill(store, rng, 5)
    store.flush()
    reader = ForeignReader(store.path)
    assert reader.ids() == sorted(store)
    assert len(shards(Path(store.path))) > 3
    for entry_id in reader.ids():
        assert {f"k_{entry_id}", f"v_{entry_id}"} <= reader.names(reader.shard(entry_id))


def test_rollover_at_shard_max_bytes(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=8192)
    fill(store, rng, 60, n=4)
    store.flush()
    for path in shards(Path(store.path)).values():
        header, _ = safetensors_header(path)
        entries = (len(header) - ("__metadata__" in header)) // 2
        assert path.stat().st_size <= 8192 or entries == 1
        assert entries > 1


def test_an_entry_larger_than_shard_max_bytes(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=1000)
    small, big = pair(rng, 1), pair(rng, 500)
    for keys, values in (small, big, small):
        store.put(keys, values, layer_idx=0)
    store.flush()
    store.close()
    with hybridmem.open(store.path) as again:
        assert again.get(2).keys.tobytes() == big[0].tobytes()
        assert again.get(2).values.tobytes() == big[1].tobytes()
        assert again.get(3).keys.tobytes() == small[0].tobytes()
    assert ForeignReader(store.path).ids() == [1, 2, 3]


def test_mapped_tensors_are_aligned(store: Any, rng: np.random.Generator) -> None:
    """numpy wants float32 aligned to 4 bytes; safetensors itself promises nothing."""
    fill(store, rng, 5, n=1)
    store.flush()
    for hit in store.query(pair(rng, 1)[0], layer_idx=0):
        assert hit.keys.flags.aligned
        assert hit.values.flags.aligned

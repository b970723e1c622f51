"""FORMAT-AND-API and CLIENTS section 3: other programs and other libraries."""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader
from safetensors.numpy import load_file

import hybridmem

from .helpers import contents, fill, mapped_files, open_descriptors, pair, run_python, shards

STORED = [{}, {"kv_dtype": "float16"}, {"kv_dtype": "bfloat16"}, {"quantize_stored": True}]
STORED += [{"signature_tokens": 1, "signature_bits": 64}]


@pytest.mark.parametrize("fields", STORED, ids=str)
def test_a_reader_that_knows_only_struct_json_and_safetensors(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=6000, **fields)
    for turn in range(4):
        for i in range(15):
            x = rng.standard_normal((2, 1 + i % 5, 24)).astype(np.float32)
            store.put(*x, layer_idx=i % 3, importance=float(rng.random()))
        store.query(pair(rng, 1)[0], turn % 3, 4)
        store.delete(list(store)[turn])
        store.evict(len(store) - 3 * turn)
        if turn == 2:
            store.compact()
        store.flush()
        reader = ForeignReader(store.path)
        assert reader.ids() == list(store)
        signatures = {int(row["entry_id"]): bytes(row["signature"]) for row in store.entries}
        for entry_id, record in reader.records.items():
            entry = store.get(entry_id)
            for name in ("layer_idx", "n_tokens", "importance", "timestamp", "access_count"):
                assert getattr(record, name) == getattr(entry, name)
            assert record.signature == signatures[entry_id]
            assert reader.keys(entry_id).tobytes() == entry.keys.tobytes()
            assert reader.values(entry_id).tobytes() == entry.values.tobytes()


def test_safetensors_itself_loads_every_shard(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=6000)
    fill(store, rng, 30)
    store.flush()
    found = {}
    for path in shards(Path(store.path)).values():
        found.update(load_file(path))
    assert found.keys() == {f"{x}_{i}" for x in "kv" for i in store}
    for entry_id in store:
        assert found[f"k_{entry_id}"].tobytes() == store.get(entry_id).keys.tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_torch_loads_every_shard(
    kv_dtype: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    store = new_store(kv_dtype=kv_dtype)
    fill(store, rng, 5)
    store.flush()
    (path,) = shards(Path(store.path)).values()
    tensors = load(path)
    for entry_id in store:
        tensor = tensors[f"k_{entry_id}"]
        assert tensor.dtype == getattr(torch, kv_dtype)
        assert np.array_equal(tensor.float().numpy(), store.get(entry_id).keys)


# --- arrays out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
def test_dlpack_shares_memory(flushed: bool, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    if flushed:
        store.flush()
    keys = store.get(1).keys
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = np.from_dlpack(keys)
    assert np.shares_memory(other, keys)
    assert np.array_equal(other, keys)


def test_hits_have_the_buffer_protocol(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 2)
    store.put(keys, values, layer_idx=0)
    store.flush()
    view = memoryview(store.get(1).keys)
    assert view.readonly
    assert (view.format, view.shape) == ("f", (2, 24))
    assert view.tobytes() == keys.tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("flushed", [False, True])
def test_torch_shares_memory(flushed: bool, store: Any, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    fill(store, rng, 1)
    if flushed:
        store.flush()
    keys = store.get(1).keys
    address = keys.__array_interface__["data"][0]
    # Newer torch warns in asarray of read-only memory, as it always did in from_numpy.
    for take, action in ((torch.from_dlpack, "error"), (torch.asarray, "ignore")):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            tensor = take(keys)
        assert tensor.data_ptr() == address
        assert np.array_equal(tensor.numpy(), keys)


# --- the table of entries ------------------------------------------------------------------------


def table(store: Any, rng: np.random.Generator) -> None:
    for i in range(4):
        store.put(*pair(rng, 1 + i), layer_idx=i % 2, importance=i / 4)
    store.query(pair(rng, 1)[0], 0, 1)
    store.flush()


def test_pandas(store: Any, rng: np.random.Generator) -> None:
    pandas = pytest.importorskip("pandas")
    table(store, rng)
    for wanted in (4, 0):
        frame = pandas.DataFrame(store.entries)
        assert list(frame.columns) == list(store.entries.dtype.names)
        assert len(frame) == wanted
        assert frame["n_tokens"].tolist() == store.entries["n_tokens"].tolist()
        store.evict(0)
    store.close()
    with hybridmem.open(store.path) as again:
        fill(again, rng, 3, n=2)
        frame = pandas.DataFrame(again.entries)
        assert frame.groupby("layer_idx")["n_tokens"].sum().to_dict() == {0: 6}
        assert frame.sort_values("entry_id", ascending=False)["entry_id"].tolist() == [7, 6, 5]


def test_pandas_prints_the_table(store: Any, rng: np.random.Generator) -> None:
    pandas = pytest.importorskip("pandas")
    table(store, rng)
    frame = pandas.DataFrame(store.entries)
    assert "entry_id" in repr(frame)
    assert "n_tokens" in frame.to_csv()


def test_polars(store: Any, rng: np.random.Generator) -> None:
    polars = pytest.importorskip("polars")
    table(store, rng)
    frame = polars.DataFrame(store.entries)
    assert frame.columns == list(store.entries.dtype.names)
    assert frame["n_tokens"].to_list() == [1, 2, 3, 4]
    assert frame.filter(polars.col("layer_idx") == 1)["entry_id"].to_list() == [2, 4]
    assert frame["timestamp"].to_list() == store.entries["timestamp"].tolist()
    assert "n_tokens" in repr(frame)


# --- what is given back --------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Private memory of this process that no file stands behind."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous in smaps_rollup")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("fields", STORED[:4], ids=str)
def test_ten_thousand_gets_leak_nothing(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """16 KB a get: a leak of every array would be 160 MB (32 MB with other stored forms)."""
    store = new_store(embed_dim=128, shard_max_bytes=60_000, max_open_shards=2, **fields)
    fill(store, rng, 20, n=16)
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:

        def gets(count: int) -> None:
            for i in range(count):
                reader.get(1 + (7 * i) % 20)

        gets(500)
        gc.collect()
        for _ in range(3):  # what leaks grows each time, what the allocator keeps does not
            before = anonymous_bytes(), open_descriptors(), len(mapped_files(Path(store.path)))
            gets(2_000 if fields else 10_000)
            after = anonymous_bytes(), open_descriptors(), len(mapped_files(Path(store.path)))
            if after[0] - before[0] < 8 * 2**20:
                break
    assert after[0] - before[0] < 8 * 2**20
    assert after[1:] <= before[1:]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_keys_and_values_never_become_resident(
    mode: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Puts and queries that touch 48 MB of them leave a small part in memory of our own."""
    store = new_store(embed_dim=256, shard_max_bytes=2**22)
    row = rng.standard_normal((16, 256)).astype(np.float32)
    store.put(row, row, layer_idx=0)
    store.flush()
    before = anonymous_bytes()
    for i in range(1, 1500):
        store.put(np.roll(row, i, axis=1), row, layer_idx=i % 2)
    store.flush()
    assert anonymous_bytes() - before < 12 * 2**20
    if mode == "r":
        store.close()
        store = hybridmem.open(store.path, mode="r")
    seen = set()
    for i in range(1000):
        query = np.roll(row, i, axis=1)
        seen.update(hit.entry_id for hit in store.query(query, layer_idx=i % 2, top_k=5))
    store.close()
    assert len(seen) > 1000
    assert anonymous_bytes() - before < 12 * 2**20


def test_import_loads_no_framework() -> None:
    loaded = run_python(
        "import sys, hybridmem\n"
        "print(*{'torch', 'transformers', 'pandas', 'polars', 'jax', 'click'} & set(sys.modules))"
    )
    assert loaded == ""


def test_a_store_written_here_is_read_by_another_process(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 5)
    store.flush()
    code = (
        "import sys, hashlib, hybridmem\n"
        "with hybridmem.open(sys.argv[1], mode='r') as s:\n"
        "    h = hashlib.sha256()\n"
        "    for i in s:\n"
        "        e = s.get(i); h.update(e.keys.tobytes()); h.update(e.values.tobytes())\n"
        "    print(list(s), h.hexdigest())\n"
    )
    digest = hashlib.sha256()
    for _, keys, values in contents(store).values():
        digest.update(keys)
        digest.update(values)
    assert run_python(code, store.path) == f"[1, 2, 3, 4, 5] {digest.hexdigest()}"

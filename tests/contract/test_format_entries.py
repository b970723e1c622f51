"""FORMAT-AND-API section 2, entries.bin: the bytes of a record."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model, ReferenceProjector, mean_pool
from reader import HEAD, ForeignReader, record_size

import hybridmem

from .helpers import fill, pair

MAX32 = 2**32 - 1


def records(store: Any) -> bytes:
    return (Path(store.path) / "entries.bin").read_bytes()


@pytest.mark.parametrize("hdc_dim", [64, 192, 512, 4096, 16384])
def test_record_is_40_bytes_and_the_signature(
    hdc_dim: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(hdc_dim=hdc_dim)
    fill(store, rng, 3)
    store.flush()
    assert len(records(store)) == 3 * (40 + hdc_dim // 8)


def test_default_record_is_552_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    with hybridmem.create(tmp_path / "mem", embed_dim=24) as store:
        fill(store, rng, 2)
        store.flush()
        assert len(records(store)) == 2 * 552


def test_every_field_where_the_table_says(store: Any, rng: np.random.Generator) -> None:
    store.put(*pair(rng, 3), layer_idx=0)
    keys, values = pair(rng, 5)
    before = time.time_ns()
    entry_id = store.put(keys, values, layer_idx=0x0102_0304, importance=0.7)
    after = time.time_ns()
    store.flush()
    size = record_size(512)
    data = records(store)[size : 2 * size]
    assert struct.unpack_from("<Q", data, 0) == (entry_id,) == (2,)
    assert struct.unpack_from("<I", data, 8) == (0x0102_0304,)
    assert struct.unpack_from("<I", data, 12) == (5,)
    assert struct.unpack_from("<f", data, 16) == (float(np.float32(0.7)),)
    (timestamp,) = struct.unpack_from("<Q", data, 20)
    assert before <= timestamp <= after
    assert struct.unpack_from("<I", data, 28) == (0,)
    (shard_idx,) = struct.unpack_from("<I", data, 32)
    shard = Path(store.path) / f"shard_{shard_idx:04d}.safetensors"
    assert f'"k_{entry_id}"'.encode() in shard.read_bytes()
    assert struct.unpack_from("<I", data, 36) == (0,)
    assert data[40:] == Model(24, 512).signature(keys).tobytes()


def test_signature_bit_order(store: Any, rng: np.random.Generator) -> None:
    """Bit j is bit j%8 of byte j//8, and 1 where the projection is >= 0."""
    keys, values = pair(rng, 4)
    store.put(keys, values, layer_idx=0)
    store.flush()
    signature = records(store)[40 : record_size(512)]
    bits = [signature[j // 8] >> (j % 8) & 1 for j in range(512)]
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little")
    assert packed.tobytes() == signature
    expected = ReferenceProjector(24, 512).project(mean_pool(keys))
    assert np.array_equal(np.unpackbits(expected, bitorder="little"), bits)


def test_a_projection_of_zero_gives_one(store: Any) -> None:
    zero = np.zeros((2, 24), np.float32)
    store.put(zero, zero, layer_idx=0)
    store.flush()
    assert records(store)[40:] == b"\xff" * 64


@pytest.mark.parametrize("embed_dim", [1, 2, 24, 64, 100, 768])
def test_signature_is_the_projected_mean(
    embed_dim: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(embed_dim=embed_dim)
    keys = rng.standard_normal((7, embed_dim)).astype(np.float32)
    store.put(keys, keys, layer_idx=0)
    store.flush()
    assert records(store)[40:] == Model(embed_dim, 512).signature(keys).tobytes()


@pytest.mark.parametrize(("n_tokens", "used"), [(1, 1), (2, 1), (3, 2), (8, 4), (9, 4), (30, 4)])
def test_sub_signatures_lie_side_by_side(
    n_tokens: int, used: int, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Those of the first tokens first; what does not fit is left out; unused bits are 0."""
    store = new_store(hdc_dim=512, signature_tokens=2, signature_bits=128)
    keys = rng.standard_normal((n_tokens, 24)).astype(np.float32)
    store.put(keys, keys, layer_idx=0)
    store.flush()
    signature = records(store)[40:]
    projector = ReferenceProjector(24, 128)
    for i in range(used):
        expected = projector.project(mean_pool(keys[2 * i : 2 * i + 2]))
        assert signature[16 * i : 16 * i + 16] == expected.tobytes()
    assert signature[16 * used :] == bytes(64 - 16 * used)


def test_access_count_is_written_in_place(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    store.flush()
    before = records(store)
    for _ in range(3):
        store.query(keys, layer_idx=0)
    store.flush()
    after = records(store)
    assert struct.unpack_from("<I", after, 28) == (3,)
    assert before[:28] == after[:28]
    assert before[32:] == after[32:]


def set_access_count(path: Path, row: int, count: int, hdc_dim: int = 512) -> None:
    with open(path / "entries.bin", "r+b") as file:
        file.seek(row * record_size(hdc_dim) + 28)
        file.write(struct.pack("<I", count))


def test_access_count_saturates(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    """The field lies outside the checksums, so another program may write it."""
    store = new_store()
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=0)
    store.close()
    set_access_count(Path(store.path), 0, MAX32 - 1)
    with hybridmem.open(store.path) as again:
        assert again.get(1).access_count == MAX32 - 1
        for _ in range(3):
            assert len(again.query(keys, layer_idx=0)) == 1
        again.query_many([keys, keys], layer_idx=0)
        assert again.get(1).access_count == MAX32
    with hybridmem.open(store.path, mode="r") as reader:
        assert reader.get(1).access_count == MAX32
        assert reader.entries["access_count"].tolist() == [MAX32]
    assert struct.unpack_from("<I", records(store), 28) == (MAX32,)


def test_a_count_written_by_others_decides_eviction(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 3)
    store.close()
    set_access_count(Path(store.path), 0, 10)
    with hybridmem.open(store.path) as again:
        assert again.evict(1) == 2
        assert list(again) == [1]


def test_rows_keep_to_the_order_of_ids(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 5)
    store.flush()
    fill(store, rng, 5)
    store.flush()
    size = record_size(512)
    data = records(store)
    ids = [HEAD.unpack_from(data, i)[0] for i in range(0, len(data), size)]
    assert ids == list(range(1, 11))


def test_a_torn_tail_is_ignored_and_cut(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 2)
    store.close()
    entries = Path(store.path) / "entries.bin"
    whole = entries.read_bytes()
    torn = whole + b"torn record" * 50  # longer than a record
    entries.write_bytes(torn)
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1, 2]
    assert entries.read_bytes() == torn
    with hybridmem.open(store.path) as writer:
        assert entries.read_bytes() == whole
        fill(writer, rng, 1)
    assert entries.read_bytes()[: len(whole)] == whole
    assert len(entries.read_bytes()) == 3 * record_size(512)
    assert ForeignReader(store.path).ids() == [1, 2, 3]

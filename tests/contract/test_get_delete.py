"""FORMAT-AND-API section 3: get, delete, in, iteration, len, entries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model
from reader import HEAD, ForeignReader

import hybridmem

from .helpers import contents, fill, pair, record

FIELDS = [
    "entry_id",
    "layer_idx",
    "n_tokens",
    "importance",
    "timestamp",
    "access_count",
    "shard_idx",
    "padding",
    "signature",
]
MISSING = [0, 4, 10**6, 2**63, 2**64 - 1, 2**64, 10**30, -1]


def test_get_gives_the_record_and_its_arrays(store: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 5)
    store.put(keys, values, layer_idx=6, importance=0.5)
    store.flush()
    entry = store.get(1)
    assert (entry.entry_id, entry.layer_idx, entry.n_tokens) == (1, 6, 5)
    assert (entry.importance, entry.access_count) == (0.5, 0)
    stored = ForeignReader(store.path).records[1]
    assert (entry.timestamp, entry.shard_idx) == (stored.timestamp, stored.shard_idx)
    assert bytes(entry.signature) == stored.signature
    assert entry.keys.tobytes() == keys.tobytes()
    assert entry.values.tobytes() == values.tobytes()
    for array in (entry.keys, entry.values):
        assert type(array) is np.ndarray
        assert (array.dtype, array.shape) == (np.dtype(np.float32), (5, 24))
        assert not array.flags.writeable


def test_get_is_no_access(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    for _ in range(3):
        assert store.get(1).access_count == 0
    assert store.stats().queries == store.stats().hits == 0


def test_get_takes_numpy_integers(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    for kind in (np.uint64, np.int32, np.int64):
        assert store.get(kind(2)).entry_id == 2
        assert kind(2) in store
    assert store.get(store.entries["entry_id"][1]).entry_id == 2


@pytest.mark.parametrize("entry_id", MISSING)
@pytest.mark.parametrize("flushed", [False, True])
def test_a_missing_id_is_keyerror(
    entry_id: int, flushed: bool, store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 3)
    if flushed:
        store.flush()
    assert entry_id not in store
    wanted = f"mem has no entry {entry_id}: it was deleted, evicted or never put; iterate"
    for call in (store.get, store.delete, store.source):
        with pytest.raises(KeyError, match=wanted) as caught:
            call(entry_id)
        assert isinstance(caught.value, hybridmem.EntryNotFoundError)
    assert list(store) == [1, 2, 3]


@pytest.mark.parametrize("kind", [int, np.uint64, np.int8, np.array])
def test_what_get_takes_is_in_the_store(kind: Any, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    assert store.get(kind(1)).entry_id == 1
    assert kind(1) in store
    assert kind(2) not in store


@pytest.mark.parametrize("thing", ["1", 1.5, None, b"1", (1,), True])
def test_what_is_no_id_is_not_in_the_store(
    thing: object, store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 1)
    assert thing not in store
    with pytest.raises((KeyError, TypeError)):
        store.get(thing)
    with pytest.raises((KeyError, TypeError)):
        store.delete(thing)
    assert list(store) == [1]


@pytest.mark.parametrize("flushed", [False, True])
def test_delete(flushed: bool, store: Any, rng: np.random.Generator) -> None:
    pairs = [pair(rng, 2) for _ in range(4)]
    store.put_many(pairs, layer_idx=0)
    if flushed:
        store.flush()
    store.delete(2)
    for _ in range(2):
        assert 2 not in store
        assert list(store) == [1, 3, 4]
        assert len(store) == 3
        assert store.entries["entry_id"].tolist() == [1, 3, 4]
        assert sorted(hit.entry_id for hit in store.query(pairs[1][0], layer_idx=0)) == [1, 3, 4]
        with pytest.raises(KeyError):
            store.get(2)
        with pytest.raises(KeyError):
            store.delete(2)
        assert store.stats().entries == 3
        store.flush()
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 3, 4]
        with pytest.raises(KeyError):
            again.get(2)


def test_delete_is_committed_by_the_next_flush(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    store.delete(1)
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1, 2]
        store.flush()
        assert list(reader) == [1, 2]
        reader.refresh()
        assert list(reader) == [2]


def test_delete_then_compact_leaves_no_byte(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    secret = rng.standard_normal((2, 24)).astype(np.float32)
    fill(store, rng, 3)
    store.put(secret, secret * 2, layer_idx=0, source={"text": "what nobody may read"})
    fill(store, rng, 3)
    store.flush()
    signature = bytes(record(store, 4, "signature"))
    marks = [secret.tobytes()[:16], (secret * 2).tobytes()[-16:], signature[:16], b"nobody may"]

    def places() -> list[str]:
        files = [(p.name, p.read_bytes()) for p in Path(store.path).iterdir()]
        return [name for name, data in files for mark in marks if mark in data]

    assert len(places()) == 4
    store.delete(4)
    store.compact()
    assert places() == []
    assert list(store) == [1, 2, 3, 5, 6, 7]


def test_iteration_is_over_ids_and_is_a_snapshot(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 5)
    assert list(store) == [1, 2, 3, 4, 5]
    assert all(type(i) is int for i in store)
    for entry_id in store:
        store.delete(entry_id)
    assert list(store) == []


def test_entries_has_the_fields_of_the_table(store: Any, rng: np.random.Generator) -> None:
    model = Model(24, 512)
    pairs = [pair(rng, n) for n in (1, 3, 2)]
    for i, (keys, values) in enumerate(pairs):
        store.put(keys, values, layer_idx=i, importance=i / 2)
        model.put(keys, values, i, i / 2)
    store.query(pairs[2][0], layer_idx=2)
    for flushed in (False, True):
        entries = store.entries
        assert type(entries) in (np.ndarray, np.recarray)
        assert list(entries.dtype.names) == FIELDS
        assert entries.shape == (3,)
        assert entries["entry_id"].tolist() == [1, 2, 3]
        assert entries["layer_idx"].tolist() == [0, 1, 2]
        assert entries["n_tokens"].tolist() == [1, 3, 2]
        assert entries["importance"].tolist() == [0.0, 0.5, 1.0]
        assert entries["access_count"].tolist() == [0, 0, 1]
        assert entries["padding"].tolist() == [0, 0, 0]
        assert [bytes(s) for s in entries["signature"]] == [
            row.signature.tobytes() for row in model.rows.values()
        ]
        assert not entries.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            entries["importance"][0] = 9
        if not flushed:
            store.flush()
    assert entries["shard_idx"].tolist() == [
        ForeignReader(store.path).records[i].shard_idx for i in (1, 2, 3)
    ]


def test_entries_of_an_empty_store(store: Any) -> None:
    assert store.entries.shape == (0,)
    assert list(store.entries.dtype.names) == FIELDS


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_entries_equal_the_records_on_disk(
    mode: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 6)
    store.delete(3)
    store.close()
    with hybridmem.open(store.path, mode=mode) as again:
        records = ForeignReader(store.path).records
        assert again.entries["entry_id"].tolist() == list(records)
        for row in again.entries:
            stored = records[int(row["entry_id"])]
            head = [row[name] for name in FIELDS[:-1]]
            assert HEAD.pack(*head) == HEAD.pack(*[getattr(stored, n) for n in FIELDS[:-1]])
            assert bytes(row["signature"]) == stored.signature


def test_entries_once_taken_stay_as_they_were(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    entries = store.entries
    store.delete(1)
    fill(store, rng, 3)
    store.compact()
    assert entries["entry_id"].tolist() == [1, 2, 3]


def test_deleting_everything(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 5)
    store.flush()
    for entry_id in list(store):
        store.delete(entry_id)
    assert len(store) == 0
    assert store.query(pair(rng, 1)[0], layer_idx=0) == []
    store.flush()
    store.compact()
    store.close()
    with hybridmem.open(store.path) as again:
        assert contents(again) == {}
        assert fill(again, rng, 1) == [6]

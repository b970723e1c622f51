"""FORMAT-AND-API "Errors": one tree, damage named, no other library's exception."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import record_size, safetensors_header

import hybridmem

from .helpers import contents, fill, pair, photograph, shard_of, shards

NAMES = [
    "StoreExistsError",
    "StoreNotFoundError",
    "StoreLockedError",
    "StoreClosedError",
    "ReadOnlyError",
    "CorruptStoreError",
    "VersionError",
    "ModelMismatchError",
    "StoreFullError",
    "StoreIOError",
    "SnapshotGoneError",
    "EntryNotFoundError",
]


@pytest.mark.parametrize("name", NAMES)
def test_one_tree(name: str) -> None:
    kind = getattr(hybridmem, name)
    assert issubclass(kind, hybridmem.HybridMemError)
    assert issubclass(kind, FileNotFoundError) == (name == "StoreNotFoundError")
    assert issubclass(kind, KeyError) == (name == "EntryNotFoundError")
    assert name in hybridmem.__all__


def test_the_root() -> None:
    assert hybridmem.HybridMemError.__mro__[1] is Exception
    assert not issubclass(hybridmem.HybridMemError, (OSError, ValueError, KeyError))


@pytest.mark.parametrize("name", NAMES)
def test_errors_travel_between_processes(name: str) -> None:
    error = getattr(hybridmem, name)("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == "what happened"


def test_everything_of_the_api_is_exported() -> None:
    for name in ("create", "open", "Config", "augmented_kv", "Store", "Hit", "Stats", "hdc"):
        assert hasattr(hybridmem, name), name
    exported = hybridmem.__all__
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert hasattr(hybridmem, name), name


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture
def closed(new_store: Callable[..., Any], rng: np.random.Generator) -> Any:
    """A closed store of 20 entries in several shards, some of them dead."""
    store = new_store(shard_max_bytes=6000)
    fill(store, rng, 20)
    store.flush()
    store.delete(2)
    store.close()
    return store


def change(path: Path, place: int, by: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] = (data[place] + by) % 256
    path.write_bytes(data)


def opened_and_used(path: Path, mode: str) -> None:
    with hybridmem.open(path, mode=mode) as store:
        contents(store)
        store.query(np.ones(24, np.float32), 0, 100)


FIELDS = {"entry_id": 0, "layer_idx": 8, "n_tokens": 12, "importance": 16, "timestamp": 20}
FIELDS |= {"shard_idx": 32, "padding": 36, "signature": 40, "last byte": 103}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_record(field: str, mode: str, closed: Any) -> None:
    path = Path(closed.path)
    change(path / "entries.bin", 7 * record_size(512) + FIELDS[field])
    with pytest.raises(hybridmem.CorruptStoreError, match=r"entries\.bin") as caught:
        hybridmem.open(path, mode=mode)
    error = caught.value
    assert Path(str(error.path)).name == "entries.bin"
    assert error.records is not None or error.offset is not None


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("cut", [1, 104, 500, 10_000])
def test_entries_cut_short(cut: int, mode: str, closed: Any) -> None:
    entries = Path(closed.path) / "entries.bin"
    data = entries.read_bytes()
    entries.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(hybridmem.CorruptStoreError, match=r"entries\.bin"):
        hybridmem.open(closed.path, mode=mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_entries_missing(mode: str, closed: Any) -> None:
    (Path(closed.path) / "entries.bin").unlink()
    with pytest.raises(hybridmem.CorruptStoreError, match=r"entries\.bin"):
        hybridmem.open(closed.path, mode=mode)


def last_shard(store: Any) -> Path:
    return max(shards(Path(store.path)).items())[1]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("where", ["length", "brace", "name", "middle"])
def test_a_changed_shard_header(where: str, mode: str, closed: Any) -> None:
    shard = last_shard(closed)
    _, base = safetensors_header(shard)
    place = {"length": 0, "brace": 8, "name": 8 + 2, "middle": base // 2}[where]
    change(shard, place)
    with pytest.raises(hybridmem.CorruptStoreError, match=shard.name) as caught:
        opened_and_used(Path(closed.path), mode)
    assert Path(str(caught.value.path)).name == shard.name


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("call", ["get", "query", "query_many", "augmented_kv"])
def test_changed_keys_are_noticed_at_first_touch(call: str, io: str, closed: Any) -> None:
    shard = last_shard(closed)
    change(shard, shard.stat().st_size - 1)
    entry_id = 20
    row = np.ones((1, 24), np.float32)
    calls: dict[str, Callable[[Any], object]] = {
        "get": lambda s: s.get(entry_id),
        "query": lambda s: s.query(row, 0, 100),
        "query_many": lambda s: s.query_many([row], 0, 100),
        "augmented_kv": lambda s: hybridmem.augmented_kv(row, row, row, s, 0, 100),
    }
    with hybridmem.open(closed.path, mode="r", io=io) as reader:
        for _ in range(2):  # and not only the first time
            with pytest.raises(hybridmem.CorruptStoreError, match=shard.name):
                calls[call](reader)
        assert reader.get(1).n_tokens == 3


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("kind", ["missing", "short", "empty", "huge header", "directory", "link"])
def test_a_broken_shard(kind: str, mode: str, closed: Any, tmp_path: Path) -> None:
    shard = last_shard(closed)
    data = shard.read_bytes()
    shard.unlink()
    if kind == "short":
        shard.write_bytes(data[:-4])
    elif kind == "empty":
        shard.write_bytes(b"")
    elif kind == "huge header":
        shard.write_bytes(struct.pack("<Q", 2**62) + data[8:])
    elif kind == "directory":
        shard.mkdir()
    elif kind == "link":
        (tmp_path / "target").write_bytes(data)
        shard.symlink_to(tmp_path / "target")
    with pytest.raises(hybridmem.CorruptStoreError, match=shard.name):
        opened_and_used(Path(closed.path), mode)


def test_dead_records_may_name_shards_that_are_gone(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=600)  # one entry in each shard
    fill(store, rng, 10)
    store.flush()
    gone = Path(store.path) / shard_of(store, 3)
    store.delete(3)
    store.flush()
    store.close()
    if gone.exists():
        gone.unlink()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode=mode) as again:
            assert len(contents(again)) == 9
    with hybridmem.open(store.path) as again:
        again.compact()
        assert list(again) == [1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_a_refused_open_repairs_nothing(closed: Any) -> None:
    """A damaged store is evidence: neither mode may change what is left of it."""
    path = Path(closed.path)
    change(path / "entries.bin", 50)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    for mode in ("r", "r+"):
        with pytest.raises(hybridmem.CorruptStoreError):
            hybridmem.open(path, mode=mode)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


# --- failures of the system ----------------------------------------------------------------------


def failing_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Every write through the one I/O module fails from now on."""

    def fail(*arguments: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(hybridmem._fileio.calls, "writev", fail)


def test_a_full_disk(store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 2)
    failing_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(hybridmem.StoreFullError):
        store.flush()
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1, 2]
    assert len(contents(store)) == 4, "what is buffered stays in memory"
    monkeypatch.undo()
    store.flush()
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 2, 3, 4]


def test_a_failing_disk(
    store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 2)
    failing_writes(monkeypatch, errno.EIO)
    with pytest.raises(hybridmem.StoreIOError) as caught:
        store.flush()
    assert not isinstance(caught.value, hybridmem.StoreFullError)
    store.close()  # after a failed write close only releases
    monkeypatch.undo()
    with hybridmem.open(store.path) as again:
        assert list(again)[:2] == [1, 2]
        fill(again, rng, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_after_a_failed_write_close_only_releases(
    number: int, store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk would take it by now."""
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 2)
    failing_writes(monkeypatch, number)
    with pytest.raises(hybridmem.StoreIOError if number == errno.EIO else hybridmem.StoreFullError):
        store.flush()
    monkeypatch.undo()
    before = photograph(Path(store.path))
    store.close()
    assert photograph(Path(store.path)) == before
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 2]


def test_an_error_of_a_background_flush_comes_with_the_next_call_that_writes(
    store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, rng, 2)
    failing_writes(monkeypatch, errno.ENOSPC)
    store.flush(wait=False)
    with pytest.raises(hybridmem.StoreFullError):
        store.flush()
    monkeypatch.undo()
    assert len(contents(store)) == 2
    store.flush()
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 2]


def test_a_failed_sync_is_never_tried_again(
    store: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(hybridmem._fileio.calls, name, fail)
    with pytest.raises(hybridmem.StoreIOError):
        store.flush()
    monkeypatch.undo()
    for call in (store.flush, lambda: fill(store, rng, 1), store.compact):
        with pytest.raises(hybridmem.StoreIOError, match="open"):
            call()
    assert len(store.query(pair(rng, 1)[0], 0)) == 3
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again)[:2] == [1, 2]
        fill(again, rng, 1)

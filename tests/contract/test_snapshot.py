"""Snapshots: a store of what was committed, by hard links; nothing done to the other changes it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader

import hybridmem
from hybridmem import _fileio
from hybridmem.verify import verify

from .helpers import contents, fill, pair, photograph, run_python, same_hits, shards

KINDS = [
    {},
    {"kv_dtype": "bfloat16"},
    {"quantize_stored": True},
    {"signature_tokens": 1, "signature_bits": 64},
]


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("copy", [False, True])
def test_a_snapshot_answers_as_the_store_did(
    fields: dict[str, Any],
    copy: bool,
    new_store: Callable[..., Any],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    store = new_store(shard_max_bytes=4000, **fields)
    fill(store, rng, 20)
    fill(store, rng, 5, layer_idx=1)
    store.calibrate(0)
    store.delete(3)
    store.query(pair(rng, 1)[0], 0)
    store.flush()
    asked = pair(rng, 2)[0]
    snapshot = tmp_path / "a" / "snap"
    store.snapshot(snapshot, copy=copy)
    with hybridmem.open(snapshot, mode="r") as other:
        assert contents(other) == contents(store)
        assert other.store_id == store.store_id
        assert other.config == store.config
        names = [name for name in store.entries.dtype.names if name != "shard_idx"]
        assert other.entries[names].tolist() == store.entries[names].tolist()
        assert same_hits(other.query(asked, 0, 9), store.query(asked, 0, 9))
    assert verify(snapshot).ok
    reader = ForeignReader(snapshot)
    assert reader.ids() == sorted(store)


def test_shards_are_linked_and_nothing_else_is(
    store: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    fill(store, rng, 4)
    store.flush()
    store.snapshot(tmp_path / "snap")
    store.snapshot(tmp_path / "copy", copy=True)
    assert sorted(os.listdir(tmp_path / "snap")) == [
        "entries.bin", "index.json", "shard_0000.safetensors",
    ]  # fmt: skip
    for name in os.listdir(tmp_path / "snap"):
        here = store.path / name
        assert os.path.samefile(here, tmp_path / "snap" / name) == name.startswith("shard")
        assert not os.path.samefile(here, tmp_path / "copy" / name)
        assert here.read_bytes() == (tmp_path / "copy" / name).read_bytes()


def test_what_is_not_committed_is_not_in_it(
    store: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    fill(store, rng, 3)
    store.flush()
    committed = contents(store)
    store.put(*pair(rng, 2), 0)
    store.delete(2)
    store.snapshot(tmp_path / "snap")
    with hybridmem.open(tmp_path / "snap", mode="r") as other:
        assert contents(other) == committed


def test_neither_store_changes_the_other(
    new_store: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    store = new_store(shard_max_bytes=4000)
    fill(store, rng, 20)
    store.flush()
    wanted = contents(store)
    store.snapshot(tmp_path / "snap")
    before = photograph(tmp_path / "snap")
    for entry_id in list(store)[:15]:
        store.query(store.get(entry_id).keys, 0, 2)
        store.delete(entry_id)
    store.compact()
    store.put(*pair(rng, 3), 0)
    store.close()
    assert photograph(tmp_path / "snap") == before
    kept = photograph(store.path)
    with hybridmem.open(tmp_path / "snap") as other:
        assert contents(other) == wanted
        assert other.put(*pair(rng, 3), 0) == 21
        other.query(pair(rng, 1)[0], 0, 9)
        other.evict(2)
        other.compact()
    assert photograph(store.path) == kept


def test_a_reader_snapshots_what_it_reads(
    new_store: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    # Not what another process has appended, replaced or counted since.
    store = new_store()
    fill(store, rng, 5)
    store.flush()
    with hybridmem.open(store.path, mode="r") as reader:
        wanted = contents(reader)
        records = reader.entries
        store.query(pair(rng, 1)[0], 0)
        fill(store, rng, 3)
        store.flush()
        reader.snapshot(tmp_path / "old")
        assert store.stats().generation > reader.stats().generation
        with hybridmem.open(tmp_path / "old", mode="r") as other:
            assert contents(other) == wanted
            assert other.entries.tolist() == records.tolist()
        # A compaction takes the records' file and the shards away from under the reader.
        store.delete(1)
        store.compact()
        with pytest.raises(hybridmem.SnapshotGoneError, match=r"refresh"):
            reader.snapshot(tmp_path / "gone")
        assert not (tmp_path / "gone").exists()
        reader.refresh()
        reader.snapshot(tmp_path / "new")
    with hybridmem.open(tmp_path / "new", mode="r") as other:
        assert contents(other) == contents(store)


def test_a_snapshot_of_nothing(store: Any, tmp_path: Path) -> None:
    store.snapshot(tmp_path / "snap")
    with hybridmem.open(tmp_path / "snap") as other:
        assert len(other) == 0


def test_where_it_cannot_be(store: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    (tmp_path / "link").symlink_to(store.path)
    for inside in (store.path / "snap", store.path / "a" / "b", tmp_path / "link" / "snap"):
        with pytest.raises(ValueError, match="inside the store"):
            store.snapshot(inside)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    for taken in (store.path, tmp_path / "file", tmp_path / "full", tmp_path / "link"):
        with pytest.raises(hybridmem.StoreExistsError, match="exists"):
            store.snapshot(taken)
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(hybridmem.StoreIOError):
        store.snapshot(tmp_path / "file" / "snap")
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "link", "mem"]
    store.close()
    with pytest.raises(hybridmem.StoreClosedError):
        store.snapshot(tmp_path / "late")


def test_another_file_system_asks_for_a_copy(
    store: Any, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, rng, 2)
    store.flush()

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(_fileio.calls, "link", refuse)
    with pytest.raises(hybridmem.StoreIOError, match=r"EXDEV.*copy=True"):
        store.snapshot(tmp_path / "snap")
    assert os.listdir(tmp_path) == ["mem"]
    store.snapshot(tmp_path / "snap", copy=True)
    assert verify(tmp_path / "snap").ok


def test_snapshots_while_a_thread_writes(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=3000)
    fill(store, rng, 5)
    store.flush()
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        mine = np.random.default_rng(5)
        try:
            while not stop.is_set():
                ids = fill(store, mine, 6)
                store.query(pair(mine, 1)[0], 0)
                store.flush()
                for entry_id in ids[:5]:
                    store.delete(entry_id)
                store.compact()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    sizes: list[int] = []
    ends = time.monotonic() + 120
    try:
        while len(sizes) < 20 or (len(set(sizes)) == 1 and time.monotonic() < ends):
            path = tmp_path / f"{len(sizes)}"
            store.snapshot(path)
            assert verify(path).ok
            with hybridmem.open(path, mode="r") as other:
                sizes.append(len(contents(other)))
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert len(set(sizes)) > 1


def test_the_snapshot_outlives_its_store(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 6)
    store.flush()
    store.snapshot(tmp_path / "snap")
    wanted = contents(store)
    store.close()
    for path in [*shards(store.path).values(), store.path / "index.json"]:
        path.unlink()
    code = "import hybridmem, sys; print(list(hybridmem.open(sys.argv[1], mode='r')))"
    assert run_python(code, tmp_path / "snap") == str(sorted(wanted))
    with hybridmem.open(tmp_path / "snap", mode="r") as other:
        assert contents(other) == wanted

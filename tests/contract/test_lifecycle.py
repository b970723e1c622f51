"""FORMAT-AND-API section 3: create, open, close."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

from .helpers import (
    contents,
    copy_committed,
    fill,
    mapped_files,
    open_descriptors,
    pair,
    photograph,
)

ROW = np.ones((2, 24), np.float32)


def test_create_then_open(tmp_path: Path, rng: np.random.Generator) -> None:
    with hybridmem.create(tmp_path / "mem", embed_dim=24, max_entries=100_000) as store:
        assert store.mode == "r+"
        assert len(store) == 0
        fill(store, rng, 3)
        wanted = contents(store)
    with hybridmem.open(tmp_path / "mem") as store:
        assert store.mode == "r+"
        assert contents(store) == wanted
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        assert store.mode == "r"
        assert contents(store) == wanted


@pytest.mark.parametrize("kind", [str, Path])
def test_path_kinds(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    with hybridmem.create(kind(tmp_path / "mem"), embed_dim=24) as store:
        assert os.path.samefile(store.path, tmp_path / "mem")
    with hybridmem.open(kind(tmp_path / "mem")) as store:
        assert os.path.samefile(store.path, tmp_path / "mem")


def test_a_relative_path_survives_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.chdir(tmp_path)
    store = hybridmem.create("mem", embed_dim=24)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    fill(store, rng, 1)
    store.close()
    assert not list((tmp_path / "other").iterdir())
    with hybridmem.open(tmp_path / "mem") as again:
        assert len(again) == 1


def test_create_refuses_an_existing_store(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 2)
    store.close()
    before = photograph(Path(store.path))
    with pytest.raises(hybridmem.StoreExistsError, match="mem"):
        hybridmem.create(store.path, embed_dim=24)
    assert photograph(Path(store.path)) == before


def test_create_into_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "mem").mkdir()
    with hybridmem.create(tmp_path / "mem", embed_dim=24) as store:
        assert len(store) == 0
    with hybridmem.open(tmp_path / "mem") as store:
        assert len(store) == 0


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("kind", ["missing", "empty", "foreign"])
def test_no_store_there(kind: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "mem"
    if kind != "missing":
        path.mkdir()
    if kind == "foreign":
        (path / "notes.txt").write_text("not a store")
    names = sorted(os.listdir(path)) if path.exists() else None
    with pytest.raises(hybridmem.StoreNotFoundError, match="mem") as caught:
        hybridmem.open(path, mode=mode)
    assert isinstance(caught.value, FileNotFoundError)
    assert (sorted(os.listdir(path)) if path.exists() else None) == names


@pytest.mark.parametrize("mode", ["w", "a", "rw", "", None, 3])
def test_unknown_mode(mode: object, store: Any) -> None:
    store.close()
    with pytest.raises((ValueError, TypeError), match="mode"):
        hybridmem.open(store.path, mode=mode)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_is_neither_copied_nor_pickled(
    mode: str, copied: Callable[[Any], Any], store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 2)
    store.close()
    with hybridmem.open(store.path, mode) as again:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled; .*open it"):
            copied(again)
        gc.collect()
        assert len(again.query(ROW, 0)) == 2
        if mode == "r+":
            fill(again, rng, 1)


@pytest.mark.parametrize("name", ["x" * 300, "file/below", "loop"])
def test_a_path_where_no_directory_can_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(hybridmem.StoreIOError, match=name[-20:]):
        hybridmem.create(tmp_path / name, embed_dim=24)
    with pytest.raises((hybridmem.StoreIOError, hybridmem.StoreNotFoundError), match=name[-20:]):
        hybridmem.open(tmp_path / name)


def test_an_empty_path_is_refused() -> None:
    for call in (hybridmem.open, functools.partial(hybridmem.create, embed_dim=24)):
        with pytest.raises(ValueError, match="store_dir must not be empty"):
            call("")


def test_a_parent_of_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    hybridmem.create(f"{tmp_path}/link/../mem", embed_dim=24).close()
    assert (tmp_path / "a" / "mem" / "index.json").exists()


def test_another_store_in_the_place_of_one_that_is_open(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 2)
    wanted = contents(store)
    store.close()
    path = Path(store.path)
    for mode in ("r", "r+"):
        with hybridmem.open(path, mode) as moved:
            path.rename(path.with_name("old"))
            with hybridmem.create(path, embed_dim=24, hdc_dim=512) as other:
                fill(other, rng, 3)
                other.flush()
                assert contents(moved) == wanted
                assert len(contents(other)) == 3
        shutil.rmtree(path)
        path.with_name("old").rename(path)


def test_a_new_store_is_at_once_on_disk(tmp_path: Path) -> None:
    with (
        hybridmem.create(tmp_path / "mem", embed_dim=24),
        hybridmem.open(tmp_path / "mem", mode="r") as reader,
    ):
        assert len(reader) == 0
        assert reader.query(ROW, layer_idx=0) == []


CALLS: dict[str, Callable[[Any], object]] = {
    "put": lambda s: s.put(ROW, ROW, layer_idx=0),
    "put_many": lambda s: s.put_many([(ROW, ROW)], layer_idx=0),
    "get": lambda s: s.get(1),
    "source": lambda s: s.source(1),
    "prefetch": lambda s: s.prefetch([1]),
    "timestamps": lambda s: s.timestamps([1]),
    "delete": lambda s: s.delete(1),
    "query": lambda s: s.query(ROW, layer_idx=0),
    "query_many": lambda s: s.query_many([ROW], layer_idx=0),
    "query_stored": lambda s: s.query_stored(ROW, layer_idx=0),
    "take_back": lambda s: s.take_back([]),
    "attend": lambda s: hybridmem.attend(ROW, s, layer_idx=0),
    "audit": lambda s: s.audit([ROW], layer_idx=0),
    "augmented_kv": lambda s: hybridmem.augmented_kv(ROW, ROW, ROW, s, layer_idx=0),
    "evict": lambda s: s.evict(0),
    "compact": lambda s: s.compact(),
    "calibrate": lambda s: s.calibrate(0, keys=ROW),
    "flush": lambda s: s.flush(),
    "refresh": lambda s: s.refresh(),
    "snapshot": lambda s: s.snapshot(f"{s.path}-copy"),
    "stats": lambda s: s.stats(),
    "entries": lambda s: s.entries,
    "len": len,
    "iter": list,
    "in": lambda s: 1 in s,
    "with": lambda s: s.__enter__(),
}


def test_no_call_is_forgotten() -> None:
    public = {name for name in dir(hybridmem.Store) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(hybridmem.Store, name))}
    assert methods - {"close"} <= CALLS.keys()


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_after_close_raises(call: str, mode: str, store: Any) -> None:
    store.put(ROW, ROW, layer_idx=0)
    store.close()
    with hybridmem.open(store.path, mode=mode) as again:
        pass
    with pytest.raises(hybridmem.StoreClosedError):
        CALLS[call](again)
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.evict("x"),
        lambda s: s.calibrate("x"),
        lambda s: s.put(None, None, "x"),
        lambda s: s.put_many(None, "x"),
        lambda s: s.delete("x"),
    ],
)
def test_a_writing_call_looks_at_the_store_before_its_arguments(
    call: Callable[[Any], object], store: Any
) -> None:
    store.close()
    with hybridmem.open(store.path, "r") as reader, pytest.raises(hybridmem.ReadOnlyError):
        call(reader)
    with pytest.raises(hybridmem.StoreClosedError):
        call(store)


def test_closing_twice_does_nothing(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 1)
    store.close()
    before = photograph(Path(store.path))
    store.close()
    assert photograph(Path(store.path)) == before


def test_a_second_close_closes_nobody_else(store: Any, rng: np.random.Generator) -> None:
    """Descriptor numbers are reused: closing again must not hit a later store's."""
    path = store.path
    store.close()
    with hybridmem.open(path) as again:
        store.close()
        fill(again, rng, 1)
        again.flush()
    with hybridmem.open(path, mode="r") as reader:
        assert len(reader) == 1


def test_close_flushes(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    wanted = contents(store)
    store.close()
    with hybridmem.open(store.path) as again:
        assert contents(again) == wanted


def test_leaving_with_flushes_even_after_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    def use() -> None:
        with hybridmem.create(tmp_path / "mem", embed_dim=24) as store:
            fill(store, rng, 2)
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        use()
    with hybridmem.open(tmp_path / "mem") as again:
        assert len(again) == 2


def test_flush_makes_everything_before_it_durable(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 5)
    store.delete(2)
    store.flush()
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode="r") as reader:
        assert contents(reader) == contents(store)


def test_a_flush_in_the_background_is_waited_for(store: Any, rng: np.random.Generator) -> None:
    for _ in range(5):
        fill(store, rng, 3)
        store.flush(wait=False)
    wanted = contents(store)
    store.flush()
    with hybridmem.open(store.path, mode="r") as reader:
        assert contents(reader) == wanted
    fill(store, rng, 3)
    store.flush(wait=False)
    store.close()
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == list(range(1, 19))


def test_flush_with_nothing_to_do_writes_nothing(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    before = photograph(Path(store.path))
    store.flush()
    assert photograph(Path(store.path)) == before


def test_model_id(new_store: Callable[..., Any]) -> None:
    store = new_store(model_id="weights A")
    store.close()
    for mode in ("r", "r+"):
        with pytest.raises(hybridmem.ModelMismatchError, match="weights A") as caught:
            hybridmem.open(store.path, mode=mode, model_id="weights B")
        assert "weights B" in str(caught.value)
        with hybridmem.open(store.path, mode=mode, model_id="weights A") as again:
            assert again.config.model_id == "weights A"
        with hybridmem.open(store.path, mode=mode) as again:
            assert again.config.model_id == "weights A"


def test_other_fields_cannot_be_given_to_open(store: Any) -> None:
    store.close()
    for field in ("embed_dim", "hdc_dim", "seed", "kv_dtype", "quantize_stored"):
        with pytest.raises(TypeError, match=field):
            hybridmem.open(store.path, **{field: getattr(store.config, field)})


def test_a_refused_open_leaves_no_lock_and_no_descriptor(store: Any) -> None:
    store.close()
    gc.collect()  # what other tests left may hold some
    before = open_descriptors()
    for wrong in ({"max_entries": -1}, {"max_open_shards": 0}):
        with pytest.raises((ValueError, TypeError)):
            hybridmem.open(store.path, **wrong)
    assert open_descriptors() == before
    with hybridmem.open(store.path) as again:
        again.put(ROW, ROW, layer_idx=0)


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_both_ways_of_reading_give_the_same(
    io: str, mode: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 30)
    wanted = contents(store)
    store.close()
    with hybridmem.open(store.path, mode=mode, io=io) as again:
        assert contents(again) == wanted
        hit = again.query(pair(rng, 1)[0], layer_idx=0)[0]
        assert not hit.keys.flags.writeable
        mapped = [name for _, _, name in mapped_files(Path(store.path)) if "shard" in name]
        assert bool(mapped) == (io == "mmap")


def test_cycles_of_opening_leak_no_descriptor(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 30)
    store.close()
    again = hybridmem.open(store.path)
    again.close()
    gc.collect()
    before = open_descriptors(), len(mapped_files(Path(store.path)))
    for turn in range(100):
        with hybridmem.open(store.path, mode="r" if turn % 2 else "r+") as again:
            again.get(1 + turn % 30)
    assert (open_descriptors(), len(mapped_files(Path(store.path)))) == before


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_close_lets_go_of_every_file(mode: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    store.close()
    gc.collect()
    before = open_descriptors()
    again = hybridmem.open(store.path, mode=mode)
    contents(again)
    again.close()  # and the object is still there
    assert mapped_files(Path(store.path)) == []
    assert open_descriptors() == before

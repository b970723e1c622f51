"""verify names each fault; salvage and open(salvage=True) keep what verifies, and only that."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem.testing import Recorder, crash_states, installed
from hybridmem.verify import salvage, verify

from .book import read

CONFIG = {"embed_dim": 4, "hdc_dim": 64, "shard_max_bytes": 1200}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of nine entries in several shards; entry 3 is deleted."""
    rng = np.random.default_rng(1)
    with hybridmem.create(tmp_path / "mem", **CONFIG) as store:  # type: ignore[arg-type]
        for i in range(9):
            keys, values = rng.standard_normal((2, 3, 4)).astype(np.float32)
            store.put(keys, values, i % 2, 1 + i)
        store.flush()
        store.query(np.ones(4, np.float32), 0)
        store.delete(3)
    return tmp_path / "mem"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def first_shard(path: Path) -> Path:
    return sorted(path.glob("shard_*"))[0]


def last_byte_of_a_tensor(path: Path) -> None:
    flip(first_shard(path), -1)


def header_of_a_shard(path: Path) -> None:
    flip(first_shard(path), 20)


def shard_cut(path: Path) -> None:
    shard = first_shard(path)
    shard.write_bytes(shard.read_bytes()[:-5])


def shard_missing(path: Path) -> None:
    first_shard(path).unlink()


def shard_is_a_link(path: Path) -> None:
    shard = first_shard(path)
    shard.rename(path.parent / "elsewhere")
    shard.symlink_to(path.parent / "elsewhere")


def record(path: Path) -> None:
    flip(path / "entries.bin", 48 * 4 + 9)


def records_cut(path: Path) -> None:
    data = (path / "entries.bin").read_bytes()
    (path / "entries.bin").write_bytes(data[: 48 * 5 + 7])


def records_missing(path: Path) -> None:
    (path / "entries.bin").unlink()


def index_number(path: Path) -> None:
    index = path / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"max_entries":0', b'"max_entries":9'))


FAULTS: dict[Callable[[Path], None], tuple[str, bool]] = {
    last_byte_of_a_tensor: ("shard_", True),
    header_of_a_shard: ("shard_", True),
    shard_cut: ("shard_", True),
    shard_missing: ("shard_", True),
    shard_is_a_link: ("shard_", True),
    record: ("entries.bin", False),
    records_cut: ("entries.bin", False),
    records_missing: ("entries.bin", False),
    index_number: ("index.json", True),
}


def test_a_sound_store_verifies(path: Path) -> None:
    (path / "shard_0099.safetensors").write_bytes(b"left by a writer that died")
    seen: list[tuple[int, int]] = []
    report = verify(path, lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.entries, report.sound) == (8, 8)
    assert report.orphans == ("shard_0099.safetensors",)
    assert seen[-1] == (8, 8)


@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_each_fault_is_named_and_the_rest_kept(
    damage: Callable[[Path], None], path: Path, tmp_path: Path
) -> None:
    with hybridmem.open(path, mode="r") as store:
        whole, used = read(store), store.entries["timestamp"].tolist()
    damage(path)
    file, keeps_some = FAULTS[damage]
    report = verify(path)
    assert not report.ok
    assert report.faults[0].file.startswith(file)
    assert (report.sound > 0) == keeps_some
    before = {one.name: one.read_bytes() for one in path.iterdir()}

    kept = salvage(path, tmp_path / "saved")
    assert kept.sound == report.sound
    assert {one.name: one.read_bytes() for one in path.iterdir()} == before
    assert verify(tmp_path / "saved").ok
    with hybridmem.open(tmp_path / "saved") as store:
        saved = read(store)
        assert len(saved) == report.sound
        assert saved.items() <= whole.items()
        assert set(store.entries["timestamp"].tolist()) <= set(used)
        assert store.put(np.ones((1, 4)), np.ones((1, 4)), 0) > 9

    with hybridmem.open(path, mode="r", salvage=True) as store:
        assert read(store) == saved
    assert {one.name: one.read_bytes() for one in path.iterdir()} == before
    with hybridmem.open(path, salvage=True) as store:
        assert read(store) == saved
        assert store.put(np.ones((1, 4)), np.ones((1, 4)), 0) == 10
    assert verify(path).ok
    with hybridmem.open(path) as store:
        assert len(store) == len(saved) + 1


def test_what_was_salvaged_is_there_whole_or_not_at_all(path: Path, tmp_path: Path) -> None:
    """An empty store in its place would verify, and be taken for all that could be kept."""
    recorder = Recorder(tmp_path)
    with installed(recorder):
        sound = salvage(path, tmp_path / "saved").sound
    seen = set()
    for number, state in enumerate(crash_states(recorder)):
        after = tmp_path / f"state {number}"
        state.build(after)
        there = (after / "saved").exists()
        if there:
            assert verify(after / "saved").ok
            with hybridmem.open(after / "saved", mode="r") as store:
                assert len(store) == sound
        seen.add(there)
        shutil.rmtree(after)
    assert seen == {True, False}


def test_records_that_a_damaged_index_is_wrong_about_are_not_kept(
    path: Path, tmp_path: Path
) -> None:
    """Of twice the width the first record would read well, and have another's bytes for its own."""
    with hybridmem.open(path, mode="r") as store:
        whole, config = read(store), store.config
    index = path / "index.json"
    wider = f'"hdc_dim":{2 * config.hdc_dim}'.encode()
    index.write_bytes(re.sub(rb'"hdc_dim": ?%d' % config.hdc_dim, wider, index.read_bytes()))
    assert wider in index.read_bytes()
    with hybridmem.open(path, mode="r", salvage=True) as store:
        assert len(store) == 0
    report = salvage(path, tmp_path / "saved", config=config)
    with hybridmem.open(tmp_path / "saved") as store:
        assert read(store) == whole
    assert report.sound == len(whole)


def test_an_index_that_is_gone_is_made_anew_from_the_config(path: Path, tmp_path: Path) -> None:
    with hybridmem.open(path, mode="r") as store:
        whole, config = read(store), store.config
    (path / "index.json").write_bytes(b"\0" * 700)
    with pytest.raises(hybridmem.CorruptStoreError, match="config"):
        salvage(path, tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    report = salvage(path, tmp_path / "saved", config=config)
    with hybridmem.open(tmp_path / "saved") as store:
        found = read(store)
    assert whole.items() <= found.items()
    assert found.keys() - whole.keys() <= {3}  # nothing says any more that it was deleted
    assert report.sound == len(found)

"""Golden stores of format version 1: written by tests/make_golden.py, not by the package."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_golden import CONFIG, DATA, build, digest, payload, plain_entry, sample, write_store
from reader import ForeignReader

import hybridmem

NAMES = ["float32", "float16", "bfloat16", "int8", "tokens", "history", "centred", "empty"]
FIELDS = ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "access_count", "padding")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture
def golden(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / name, tmp_path / "golden"))


def check_entries(store: Any, expected: Any) -> None:
    for wanted in expected["entries"]:
        entry = store.get(wanted["entry_id"])
        for field in FIELDS:
            assert getattr(entry, field) == wanted[field], field
        assert digest(entry.keys) == wanted["keys"]
        assert digest(entry.values) == wanted["values"]
    rows = {int(row["entry_id"]): row for row in store.entries}
    for wanted in expected["entries"]:
        assert bytes(rows[wanted["entry_id"]]["signature"]).hex() == wanted["signature"]


def ids_of(expected: Any) -> list[int]:
    return [wanted["entry_id"] for wanted in expected["entries"]]


def test_no_golden_store_is_forgotten() -> None:
    assert sorted(p.name for p in DATA.iterdir() if p.is_dir()) == sorted(NAMES)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_it_opens_and_is_whole(mode: str, io: str, golden: Path, expected: Any) -> None:
    with hybridmem.open(golden, mode=mode, io=io) as store:
        assert store.config == hybridmem.Config(**expected["config"])
        assert list(store) == ids_of(expected)
        check_entries(store, expected)
        assert store.stats().tokens == sum(e["n_tokens"] for e in expected["entries"])


def test_queries_are_answered_as_ever(golden: Path, expected: Any) -> None:
    with hybridmem.open(golden, mode="r") as store:
        for query in expected["queries"]:
            x = sample(query["number"], query["n"], store.config.embed_dim)
            found = store.query(x, query["layer_idx"], 4)
            assert [hit.entry_id for hit in found] == [i for i, _ in query["hits"]]
            assert [hit.score for hit in found] == pytest.approx([s for _, s in query["hits"]])


def test_eviction_goes_on_in_the_same_order(golden: Path, expected: Any) -> None:
    order = expected["eviction_order"]
    with hybridmem.open(golden, max_entries=0) as store:
        for gone in range(len(order) + 1):
            store.evict(len(order) - gone)
            assert list(store) == sorted(order[gone:])


def test_writing_goes_on(golden: Path, expected: Any) -> None:
    """New ids and shard numbers follow; what was there stays, through compaction too."""
    before = ForeignReader(golden)
    numbers = {shard[0] for shard in before.index["shards"]}
    width = expected["config"]["embed_dim"]
    keys, values = sample(900, 3, width), sample(901, 3, width)
    with hybridmem.open(golden, max_entries=0) as store:
        assert store.put(keys, values, layer_idx=1) == expected["next_entry_id"]
        store.flush()
        check_entries(store, expected)
        (new,) = {shard[0] for shard in ForeignReader(golden).index["shards"]} - numbers
        assert new >= before.index["next_shard"]
        store.compact()
        check_entries(store, expected)
    after = ForeignReader(golden)
    assert after.ids() == [*ids_of(expected), expected["next_entry_id"]]
    assert after.index["dead"] == []
    with hybridmem.open(golden, mode="r") as store:
        check_entries(store, expected)


def test_the_second_reader_reads_it(golden: Path, expected: Any) -> None:
    reader = ForeignReader(golden)
    assert reader.ids() == ids_of(expected)
    for wanted in expected["entries"]:
        record = reader.records[wanted["entry_id"]]
        for field in FIELDS:
            assert getattr(record, field) == wanted[field]
        assert record.signature.hex() == wanted["signature"]
        assert digest(reader.keys(record.entry_id)) == wanted["keys"]
        assert digest(reader.values(record.entry_id)) == wanted["values"]


def test_the_script_still_writes_them(tmp_path: Path) -> None:
    """The script explains the files only as long as it is the one that wrote them."""
    build(tmp_path / "again")
    files = sorted(p.relative_to(DATA) for p in DATA.rglob("*") if p.is_file())
    again = sorted(
        p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file()
    )
    assert files == again
    for file in files:
        assert (DATA / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "tokens"])
def test_the_package_writes_the_same(
    name: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same entries put at the same times give the same records and the same tensors."""
    golden = ForeignReader(DATA / name)
    with hybridmem.create(tmp_path / "mem", config=hybridmem.Config(**expected["config"])) as store:
        for e in expected["entries"]:
            monkeypatch.setattr(time, "time_ns", lambda e=e: e["timestamp"])
            keys, values = (
                payload(e["entry_id"] + i, e["n_tokens"], expected["config"]) for i in (0, 100)
            )
            store.put(keys, values, e["layer_idx"], e["importance"])
    mine = ForeignReader(tmp_path / "mem")
    assert mine.index.keys() == golden.index.keys()
    for field in ("format", "format_version", "config", "quantization", "n_entries", "dead"):
        assert mine.index[field] == golden.index[field]
    for entry_id, record in golden.records.items():
        other = mine.records[entry_id]
        assert (other.timestamp, other.importance) == (record.timestamp, record.importance)
        assert other.signature == record.signature
        for letter in "kv":
            tensor = f"{letter}_{entry_id}"
            assert mine.dtype(mine.shard(entry_id), tensor) == golden.dtype(
                golden.shard(entry_id), tensor
            )
            assert np.array_equal(mine.matrix(entry_id, letter), golden.matrix(entry_id, letter))


def test_shard_numbers_beyond_four_digits(tmp_path: Path) -> None:
    config = {**CONFIG, "hdc_dim": 64, "shard_max_bytes": 300}
    entries = [plain_entry(1, 2, config, shard_idx=9998)]
    write_store(tmp_path / "mem", config, entries, next_shard=9999)
    with hybridmem.open(tmp_path / "mem") as store:
        for number in (5, 6, 7):
            store.put(sample(number, 3), sample(number, 3), layer_idx=0)
            store.flush()
    names = {p.name for p in (tmp_path / "mem").glob("shard_*")}
    assert {f"shard_{n}.safetensors" for n in (9998, 9999, 10000, 10001)} <= names
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        assert [int(store.get(i).keys.shape[0]) for i in store] == [2, 3, 3, 3]
        assert digest(store.get(4).keys) == digest(sample(7, 3))
    assert ForeignReader(tmp_path / "mem").ids() == [1, 2, 3, 4]


def test_ids_beyond_32_bits(tmp_path: Path) -> None:
    """Ids are u64: a store that has seen very many puts goes on counting."""
    config = {**CONFIG, "hdc_dim": 64}
    entries = [plain_entry(1, 2, config)]
    write_store(tmp_path / "mem", config, entries, next_entry_id=2**53 + 1)
    with hybridmem.open(tmp_path / "mem") as store:
        for i in range(2):
            assert store.put(sample(5, 3), sample(6, 3), layer_idx=0) == 2**53 + 1 + i
        assert store.query(sample(5, 3), layer_idx=0)[0].entry_id == 2**53 + 1
        assert store.query(sample(5, 3), layer_idx=0, entry_ids=[2**53 + 2])[0].score == 1.0
    reader = ForeignReader(tmp_path / "mem")
    assert reader.ids() == [1, 2**53 + 1, 2**53 + 2]
    assert digest(reader.keys(2**53 + 2)) == digest(sample(5, 3))
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        assert list(store) == reader.ids()

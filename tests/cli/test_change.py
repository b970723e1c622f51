"""Commands that change or check a store: compact, evict, delete, verify, salvage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem.report.facts import eviction_order

from . import ENTRIES
from .helpers import contents, document, flip, run


def test_verify_of_a_sound_store(store: Path) -> None:
    before = contents(store)
    told = document("verify", store)
    assert told["ok"] is True
    assert told["entries"] == told["sound"] == ENTRIES - 2
    assert run("verify", store).stdout == "28 of 28 entries verify; 0 faults\n"
    assert contents(store) == before


def test_verify_names_faults_and_salvage_keeps_the_rest(store: Path, tmp_path: Path) -> None:
    shard = store / "shard_0000.safetensors"
    flip(shard, shard.stat().st_size - 5)
    told = document("verify", store, code=3)
    assert told["ok"] is False
    assert told["sound"] == told["entries"] - 1
    (fault,) = told["faults"]
    assert fault["file"] == shard.name
    assert fault["entry_id"] is not None
    text = run("verify", store, code=3).stdout
    assert f"entry {fault['entry_id']}" in text
    assert "1 fault" in text

    saved = document("salvage", store, tmp_path / "new")
    assert saved["saved"] == ENTRIES - 3
    assert document("verify", tmp_path / "new")["ok"] is True
    listed = {entry["entry_id"] for entry in document("ls", tmp_path / "new")["entries"]}
    assert fault["entry_id"] not in listed
    assert len(listed) == ENTRIES - 3
    assert "exists" in run("salvage", store, tmp_path / "new", code=1).stderr
    run("verify", tmp_path / "nowhere", code=4)


def test_compact_gives_back_what_the_dry_run_said(store: Path) -> None:
    said = document("compact", store, "--dry-run")
    size_before = document("info", store)["disk_bytes"]
    done = document("compact", store)
    assert done["disk_bytes"] == size_before - done["bytes_given_back"]
    assert done["bytes_given_back"] == pytest.approx(said["dead_bytes"], rel=0.2)
    assert document("compact", store)["bytes_given_back"] == 0
    assert "gave back 0 B" in run("compact", store).stdout


def test_evict_does_what_the_dry_run_said(store: Path) -> None:
    said = document("evict", store, "--to", 9, "--dry-run")
    assert said["evicted"] == ENTRIES - 2 - 9
    before = {entry["entry_id"] for entry in document("ls", store)["entries"]}
    assert document("evict", store, "--to", 9) == {"dry_run": False, "evicted": 19, "left": 9}
    after = {entry["entry_id"] for entry in document("ls", store)["entries"]}
    assert before - after == set(said["ids"])
    assert "evicted 0 entries; 9 entries left" in run("evict", store, "--to", 9).stdout


def test_eviction_order_counts_accesses_then_age_then_id() -> None:
    records = np.zeros(5, [("entry_id", "u8"), ("importance", "f4"), ("timestamp", "u8"),
                           ("access_count", "u4")])  # fmt: skip
    records["entry_id"] = [1, 2, 3, 4, 5]
    records["importance"] = [1.0, 1.0, 0.9, 1.0, 0.0]
    records["timestamp"] = [7, 6, 9, 6, 9]
    records["access_count"] = [0, 0, 3, 0, 1000]
    # 0.9 * (1 + log 4) = 2.15; the three of score 1 by age, then id.
    assert records["entry_id"][eviction_order(records)].tolist() == [5, 2, 4, 1, 3]


def test_delete_then_compact_leaves_no_byte(store: Path) -> None:
    with hybridmem.open(store, mode="r") as opened:
        secret = np.array(opened.get(8).keys)[2].tobytes()
    assert any(secret in file for file, _ in contents(store).values())
    assert document("delete", store, 8, 8, 9) == {"dry_run": False, "deleted": [8, 9], "left": 26}
    run("show", store, 8, code=1)
    run("compact", store)
    assert not any(secret in file for file, _ in contents(store).values())

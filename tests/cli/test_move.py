"""Commands that make another thing of a store: snapshot, export, import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hybridmem
from hybridmem._commands import move

from . import ENTRIES
from .helpers import document, run


def test_snapshot_makes_a_store_of_what_is_committed(store: Path, tmp_path: Path) -> None:
    with hybridmem.open(store) as writer:
        writer.delete(1)
        told = document("snapshot", store, tmp_path / "snap")
    listed = document("ls", tmp_path / "snap")
    assert (told["entries"], told["copied"]) == (ENTRIES - 2, False)
    assert listed["total"] == ENTRIES - 2
    assert os.path.samefile(
        store / "shard_0000.safetensors", tmp_path / "snap" / "shard_0000.safetensors"
    )
    assert "exists" in run("snapshot", store, tmp_path / "snap", code=1).stderr
    said = run("snapshot", store, tmp_path / "copy", "--copy").stdout
    assert said == f"{tmp_path / 'copy'} has 27 entries of generation 4\n"
    assert not os.path.samefile(
        store / "shard_0000.safetensors", tmp_path / "copy" / "shard_0000.safetensors"
    )


def test_snapshot_follows_a_writer_that_compacts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def opened(path: str, io: str = "mmap") -> hybridmem.Store:
        reader = hybridmem.open(path, mode="r", io=io)
        with hybridmem.open(path) as writer:  # the reader's shards go away
            writer.compact()
        seen.append(reader.stats().generation)
        return reader

    monkeypatch.setattr(move, "read_store", opened)
    told = document("snapshot", store, tmp_path / "snap")
    assert told["generation"] > seen[0]
    assert document("verify", tmp_path / "snap")["ok"]


def test_export_and_import_are_a_round_trip(store: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "out.safetensors", tmp_path / "back"
    told = document("export", store, file)
    assert told == {"path": str(file), "entries": ENTRIES - 2, "bytes": file.stat().st_size}
    assert "exists" in run("export", store, file, code=1).stderr
    assert document("import", file, back) == {"path": str(back), "entries": ENTRIES - 2}
    assert document("ls", back)["entries"] == [
        {**entry, "shard_idx": 0} for entry in document("ls", store)["entries"]
    ]
    assert document("info", back)["store_id"] == document("info", store)["store_id"]
    said = run("export", store, tmp_path / "one", "--layer", 1).stdout
    assert said.startswith(f"wrote 8 entries to {tmp_path / 'one'}, ")
    assert (
        run("import", tmp_path / "one", tmp_path / "b1").stdout
        == f"{tmp_path / 'b1'} has 8 entries\n"
    )
    run("import", tmp_path / "nothing", tmp_path / "b2", code=4)
    file.write_bytes(file.read_bytes()[:-1])
    run("import", file, tmp_path / "b2", code=3)


@pytest.mark.parametrize("command", ["snapshot", "export", "pack"])
def test_nothing_is_made_inside_the_store(command: str, store: Path) -> None:
    before = sorted(store.iterdir())
    assert "is inside the store" in run(command, store, store / "new", code=1).stderr
    assert sorted(store.iterdir()) == before

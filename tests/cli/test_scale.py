"""The commands for more than one store: pack, query of several, sessions, drop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

from .helpers import document, run

WIDTH = 16


def make(path: Path, seed: int, **config: Any) -> Path:
    rng = np.random.default_rng(seed)
    with hybridmem.create(path, **{"embed_dim": WIDTH, **config}) as store:
        for number in range(4):
            rows = rng.standard_normal((2, 2, store.config.embed_dim)).astype(np.float32)
            store.put(*rows, layer_idx=number % 2, source=f"{path.name} {number}")
    return path


def test_pack(tmp_path: Path) -> None:
    store = make(tmp_path / "mem", 1)
    told = document("pack", store, tmp_path / "pack")
    with hybridmem.open(tmp_path / "pack", mode="r") as pack:
        assert told == {
            "path": str(tmp_path / "pack"),
            "store_id": pack.store_id,
            "entries": 4,
            "bytes": sum(path.stat().st_size for path in (tmp_path / "pack").iterdir()),
        }
    assert document("info", tmp_path / "pack")["pack"] is True
    assert "does not change" in run("info", tmp_path / "pack").stdout
    assert document("info", store)["pack"] is False
    assert document("verify", tmp_path / "pack")["ok"]
    assert "exists" in run("pack", store, tmp_path / "pack", code=1).stderr
    assert "memory pack" in run("delete", tmp_path / "pack", 1, code=1).stderr
    assert "has 4 entries" in run("pack", store, tmp_path / "other").stdout


def test_pack_like_another_store(tmp_path: Path) -> None:
    store, like = make(tmp_path / "mem", 1), make(tmp_path / "like", 2)
    with hybridmem.open(like) as opened:
        opened.calibrate(0)
        means = opened.calibration[0][0]
    run("pack", store, tmp_path / "pack", "--like", like)
    with hybridmem.open(tmp_path / "pack", mode="r") as pack:
        np.testing.assert_array_equal(pack.calibration[0][0], means)
    other = make(tmp_path / "wide", 1, embed_dim=24)
    assert "embed_dim" in run("pack", other, tmp_path / "no", "--like", like, code=1).stderr


def test_query_of_several_stores(tmp_path: Path) -> None:
    paths = [make(tmp_path / name, seed) for seed, name in enumerate("abc")]
    told = document("query", *paths, "--entry", 3, "-k", 6)
    assert (told["layer_idx"], len(told["hits"])) == (0, 6)
    assert told["hits"][0]["score"] == 1.0
    assert (told["hits"][0]["store"], told["hits"][0]["entry_id"]) == (str(paths[0]), 3)
    places = {(hit["store"], hit["entry_id"]) for hit in told["hits"]}
    assert places == {(str(path), entry_id) for path in paths for entry_id in (1, 3)}
    for hit in told["hits"]:
        shown = document("show", hit["store"], hit["entry_id"])
        assert shown["source"] == hit["source"]
    lines = run("query", *paths, "--entry", 3).stdout.splitlines()
    assert lines[0].split() == [
        "rank",
        "score",
        "store",
        "id",
        "tokens",
        "importance",
        "age",
        "source",
    ]
    assert str(paths[0]) in lines[1]
    alone = run("query", paths[0], "--entry", 3).stdout
    assert "store" not in alone.splitlines()[0]
    other = make(tmp_path / "wide", 1, embed_dim=24)
    said = run("query", paths[0], other, "--entry", 1, code=2).stderr
    assert "cannot be layered: their embed_dim are 16 and 24" in said
    assert "Missing argument" in run("query", "--entry", 1, code=2).stderr


def test_the_directory_of_a_cluster_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be done is said, not that a store is to be made there."""
    monkeypatch.setitem(sys.modules, "ray", None)
    make(tmp_path / "mem" / "partition-0000", 1)
    (tmp_path / "mem" / "cluster.json").write_text("{}")
    said = run("info", tmp_path / "mem", code=1).stderr
    assert "needs Ray: pip install" in said
    assert f"or name the partitions that this machine has, as in {tmp_path}/mem/partition-*" in said
    said = run("ls", tmp_path / "mem", code=4).stderr
    assert f"name them, as in {tmp_path}/mem/partition-*" in said


def test_sessions(tmp_path: Path) -> None:
    root = tmp_path / "agents"
    assert run("sessions", root).stdout == f"no sessions in {root}\n"
    for seed, name in enumerate(("alice", "bob", "carol")):
        make(root / name, seed)
    told = document("sessions", root)["sessions"]
    assert [(one["name"], one["entries"], one["tokens"]) for one in told] == [
        ("alice", 4, 8),
        ("bob", 4, 8),
        ("carol", 4, 8),
    ]
    assert told[0]["path"] == str(root / "alice")
    (root / "bob" / "index.json").write_text("{")
    lines = run("sessions", root).stdout.splitlines()
    assert lines[0].split() == ["name", "entries", "tokens", "size", "last", "used"]
    assert ["damaged" in line for line in lines if "bob" in line] == [True]
    assert document("sessions", root)["sessions"][1]["error"]


def test_drop(tmp_path: Path) -> None:
    root = tmp_path / "agents"
    for seed, name in enumerate(("alice", "bob", "carol")):
        make(root / name, seed)
    n_bytes = document("sessions", root)["sessions"][0]["disk_bytes"]
    told = document("drop", root, "alice", "alice", "--dry-run")
    assert told == {"dry_run": True, "dropped": ["alice"], "bytes": n_bytes}
    assert "nothing dropped" in run("drop", root, "alice", "eve", code=1).stderr
    assert sorted(path.name for path in root.iterdir()) == ["alice", "bob", "carol"]
    with hybridmem.open(root / "bob"):
        assert "open for writing elsewhere" in run("drop", root, "bob", code=5).stderr
    assert run("drop", root, "alice", "bob").stdout.startswith("dropped 2 sessions, ")
    assert [path.name for path in root.iterdir()] == ["carol"]
    assert "no session '../carol'" in run("drop", root, "../carol", code=1).stderr


def test_info_of_several_stores(tmp_path: Path) -> None:
    paths = [make(tmp_path / name, seed) for seed, name in enumerate("ab")]
    told = document("info", *paths)
    each = [document("info", path) for path in paths]
    assert told == {
        "stores": each,
        "entries": 8,
        "entries_by_layer": {"0": 4, "1": 4},
        "tokens": 16,
        "disk_bytes": sum(one["disk_bytes"] for one in each),
    }
    lines = run("info", *paths).stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("path")] == [
        str(path) for path in paths
    ]
    assert any(
        line.split(maxsplit=1) == ["together", "2 stores that answer as one"] for line in lines
    )
    other = make(tmp_path / "wide", 1, embed_dim=24)
    assert "cannot be layered" in run("info", paths[0], other, code=2).stderr

"""Commands that look at a cluster."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from cli.helpers import document, run

from .helpers import CONFIG, matrix, put
from .nodes import ray


def test_info_and_query(nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridmem.integrations import ray as hm

    for call in (hm.create, hm.open):
        monkeypatch.setattr(hm, call.__name__, functools.partial(call, deadline_s=60))
    root = tmp_path / "mem"
    with hm.create(str(root), partitions=2, route="hash", **CONFIG) as memory:
        put(memory, range(12))
        memory.flush()
        wanted = [(hit.entry_id, hit.score) for hit in memory.query(matrix(4), 1, 3)]
        told = document("info", root)
        assert (told["store_id"], told["entries"]) == (memory.store_id, 12)
        assert [[one.split(" at ")[0] for one in each] for each in told["partitions"]] == [
            ["partition-0000"],
            ["partition-0001"],
        ]
        hits = document("query", root, "--entry", 5, "-k", 3)
        assert [(hit["entry_id"], hit["score"]) for hit in hits["hits"]] == wanted
        assert {hit["store"] for hit in hits["hits"]} == {str(root)}
        assert (hits["layer_idx"], wanted[0]) == (1, (5, 1.0))
        assert "has no entry 99" in run("query", root, "--entry", 99, code=1).stderr
    assert ray.is_initialized()


def test_where_ray_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nowhere)
    (tmp_path / "cluster.json").write_text("{}")
    said = run("info", tmp_path, code=1).stderr
    assert f"`ray start`, or name the partitions that this machine has, as in {tmp_path}" in said

"""Commands that only look: info, ls, show, query, report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem

from . import ENTRIES, TOKENS, WIDTH
from .helpers import contents, document, run


def test_info_says_what_stats_and_config_say(store: Path) -> None:
    shown = document("info", store)
    with hybridmem.open(store, mode="r") as opened:
        stats = opened.stats()
        assert shown["config"] == opened.config.to_dict()
        assert shown["store_id"] == opened.store_id
    assert shown["entries"] == stats.entries == ENTRIES - 2
    assert shown["entries_by_layer"] == {"0": 10, "1": 8, "2": 10}
    assert shown["disk_bytes"] == sum(p.stat().st_size for p in store.iterdir())
    text = run("info", store).stdout
    assert "28 of 168 tokens" in text
    assert "0: 10, 1: 8, 2: 10" in text
    assert "4,096 bits an entry" in text
    assert "toy" in text


def test_info_of_sub_signatures_limits_and_int8(tmp_path: Path) -> None:
    path = tmp_path / "mem"
    hybridmem.create(
        path,
        embed_dim=WIDTH,
        hdc_dim=16384,
        signature_tokens=1,
        signature_bits=256,
        quantize_stored=True,
        max_entries=1000,
        max_disk_bytes=3 << 30,
    ).close()
    text = run("info", path).stdout
    assert "256 bits for each token, 64 at most" in text
    assert "kept as INT8" in text
    assert "1,000 entries, 3.00 GiB on disk, 256 MiB a shard, 4 open shards" in text
    assert run("ls", path).stdout.split() == [
        "id", "layer", "tokens", "importance", "accesses", "age",
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["id", "layer", "tokens", "importance", "age", "access"])
@pytest.mark.parametrize("reverse", [False, True])
def test_ls_sorts_with_ties_by_id(store: Path, order: str, reverse: bool) -> None:
    entries = document("ls", store, "--sort", order, *(["--reverse"] if reverse else []))["entries"]
    fields = {
        "id": "entry_id", "layer": "layer_idx", "tokens": "n_tokens",
        "importance": "importance", "age": "timestamp", "access": "access_count",
    }  # fmt: skip
    sign = -1 if reverse != (order == "age") else 1
    expected = sorted(entries, key=lambda e: (sign * e[fields[order]], e["entry_id"]))
    assert entries == expected
    assert len(entries) == ENTRIES - 2


def test_ls_selects_a_layer_and_a_number(store: Path) -> None:
    shown = document("ls", store, "--layer", 1, "-n", 3)
    assert shown["total"] == 8
    assert [entry["entry_id"] for entry in shown["entries"]] == [8, 11, 14]
    lines = run("ls", store, "--layer", 1, "-n", 3).stdout.splitlines()
    assert lines[0].split() == ["id", "layer", "tokens", "importance", "accesses", "age"]
    assert lines[1].split()[:3] == ["8", "1", str(TOKENS)]
    assert lines[-1] == "3 of 8 entries"


def test_show_describes_keys_and_values(store: Path) -> None:
    shown = document("show", store, 4)
    with hybridmem.open(store, mode="r") as opened:
        entry = opened.get(4)
    assert shown["timestamp"] == entry.timestamp
    assert shown["importance"] == entry.importance
    assert shown["keys"]["shape"] == [TOKENS, WIDTH]
    assert shown["keys"]["max"] == entry.keys.max()
    assert shown["values"]["min"] == entry.values.min()
    assert shown["values"]["mean_norm"] == pytest.approx(
        np.linalg.norm(entry.values, axis=1).mean(), rel=1e-6
    )
    assert f"{TOKENS} x {WIDTH}" in run("show", store, 4).stdout


def test_query_by_entry_npy_and_safetensors(store: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    with hybridmem.open(store, mode="r") as opened:
        keys = np.array(opened.get(7).keys)
        wanted = [(hit.entry_id, hit.score) for hit in opened.query(keys, 0, 4)]
    np.save(tmp_path / "q.npy", keys)
    save_file({"a": keys[:1], "q": keys}, tmp_path / "q.safetensors")
    for how in (
        ["--entry", 7],
        ["--file", tmp_path / "q.npy", "--layer", 0],
        ["--file", f"{tmp_path / 'q.safetensors'}:q", "--layer", 0],
    ):
        hits = document("query", store, "-k", 4, *how)["hits"]
        assert [(hit["entry_id"], hit["score"]) for hit in hits] == wanted
    first = run("query", store, "--entry", 7).stdout.splitlines()[1].split()
    assert first[:3] == ["1", "+1.0000", "7"]


def test_query_lets_the_keys_decide(store: Path) -> None:
    with hybridmem.open(store, mode="r") as opened:
        asked = opened.get(7).keys
        wanted = [hit.entry_id for hit in opened.query(asked, 0, 3, rerank="late", candidates=9)]
        plain = [hit.entry_id for hit in opened.query(asked, 0, 3)]
    assert wanted != plain
    hits = document("query", store, "-k", 3, "--entry", 7, "--rerank", "late", "--candidates", 9)[
        "hits"
    ]
    assert [hit["entry_id"] for hit in hits] == wanted
    run("query", store, "--entry", 7, "--candidates", 9, code=2)


def test_show_query_and_report_say_where_an_entry_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "mem"
    rng = np.random.default_rng(3)
    said = {"session": "s1", "text": "<b>bold</b>\x9b31m"}
    with hybridmem.create(path, embed_dim=WIDTH) as opened:
        for source in (said, None, {"text": "long " * 400}):
            opened.put(*rng.normal(size=(2, TOKENS, WIDTH)).astype(np.float32), 0, source=source)
    assert document("show", path, 1)["source"] == said
    assert document("show", path, 2)["source"] is None
    assert "source" not in run("show", path, 2).stdout
    shown = run("show", path, 1).stdout
    assert '{"session":"s1","text":"<b>bold</b>\ufffd31m"}' in shown
    hits = document("query", path, "--entry", 1)["hits"]
    assert {hit["entry_id"]: hit["source"] for hit in hits}[1] == said
    lines = run("query", path, "--entry", 1).stdout.splitlines()
    assert lines[0].split()[-1] == "source"
    assert any(line.endswith("...") for line in lines)
    assert all(len(line) < 120 and "\x9b" not in line for line in lines)
    run("report", path, "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;bold&lt;/b&gt;\ufffd31m" in page
    assert "<b>bold" not in page
    assert page.count('class="said"') == 2


def test_query_of_an_empty_layer_says_so(store: Path) -> None:
    result = run("query", store, "--entry", 1, "--layer", 99)
    assert result.stdout == "layer 99 has no entries\n"
    assert document("query", store, "--entry", 1, "--layer", 99)["hits"] == []


def test_looking_changes_no_byte_of_the_store(store: Path) -> None:
    before = contents(store)
    for arguments in (
        ["info", store],
        ["ls", store],
        ["show", store, 1],
        ["query", store, "--entry", 1],
        ["evict", store, "--to", 3, "--dry-run"],
        ["compact", store, "--dry-run"],
        ["delete", store, 1, "--dry-run"],
    ):
        run(*arguments)
        document(*arguments)
    assert contents(store) == before


def test_report_is_written_where_it_is_asked_for(store: Path, tmp_path: Path) -> None:
    before = contents(store)
    page = tmp_path / "out.html"
    told = document("report", store, "-o", page)
    assert told == {"path": str(page), "bytes": page.stat().st_size, "entries": ENTRIES - 2}
    assert page.read_text().startswith("<!doctype html>")
    assert "wrote" in run("report", store, "-o", page).stdout
    assert "cannot write" in run("report", store, "-o", tmp_path / "no" / "x", code=1).stderr
    assert contents(store) == before

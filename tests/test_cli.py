"""The command line: what each command prints, returns and leaves alone."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

pytest.importorskip("click", reason="needs click: pip install 'hybridmem[cli]'")

import click
from click.testing import CliRunner, Result

from hybridmem._commands import commands, group, move
from hybridmem._text import age, plural, seconds, size
from hybridmem.report.facts import eviction_order
from hybridmem.testing import Faults, installed

WIDTH, TOKENS, ENTRIES = 24, 6, 30


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of three layers; entries 2 and 5 are deleted but not compacted away."""
    rng = np.random.default_rng(11)
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=WIDTH, model_id="toy") as opened:
        for number in range(ENTRIES):
            keys, values = rng.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
            opened.put(keys, values, layer_idx=number % 3, importance=float(rng.random()))
        opened.flush()
        for number in (2, 5):
            opened.delete(number)
        # Equal importance: age and id decide.
        opened.query(opened.get(1).keys, layer_idx=0, top_k=4)
    return path


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return parsed


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}


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
    assert "256 bits for each 1 token, 64 at most" in text
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


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["query", "STORE"], 2, "either --entry or --file"),
        (["query", "STORE", "--entry", "1", "--file", "x.npy"], 2, "either --entry or --file"),
        (["query", "STORE", "--file", "THIN"], 2, "needs --layer"),
        (["query", "STORE", "--file", "THIN", "--layer", "0"], 2, str(WIDTH)),
        (["query", "STORE", "--file", "nowhere.npy", "--layer", "0"], 1, "nowhere.npy"),
        (["query", "STORE", "--file", "TENSORS", "--layer", "0"], 2, "a, b"),
        (["query", "STORE", "--file", "TENSORS:c", "--layer", "0"], 2, "a, b"),
        (["query", "STORE", "--entry", "5"], 1, "no entry 5"),
        (["show", "STORE", "5"], 1, "no entry 5"),
        (["show", "STORE", "0"], 2, "0"),
        (["delete", "STORE", "1", "5", "77"], 1, "no entry 5, 77; nothing deleted"),
        (["delete", "STORE"], 2, "ENTRY_IDS"),
        (["evict", "STORE"], 2, "--to"),
        (["ls", "STORE", "--sort", "luck"], 2, "luck"),
        (["info", "NOWHERE"], 4, "no store in"),
        (["compact", "NOWHERE"], 4, "no store in"),
    ],
)
def test_mistakes_have_a_message_and_a_code(
    store: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    from safetensors.numpy import save_file

    np.save(tmp_path / "thin.npy", np.ones((2, WIDTH - 1), np.float32))
    ones = np.ones((1, WIDTH), np.float32)
    save_file({"a": ones, "b": ones}, tmp_path / "t.safetensors")
    names = {
        "STORE": store,
        "NOWHERE": tmp_path / "nowhere",
        "THIN": tmp_path / "thin.npy",
        "TENSORS": tmp_path / "t.safetensors",
    }
    filled = []
    for argument in arguments:
        for name, path in names.items():
            argument = argument.replace(name, str(path))
        filled.append(argument)
    before = {name: data for name, (data, _) in contents(store).items()}
    result = run(*filled, code=code)
    assert words in result.stderr
    assert result.stdout == ""
    assert {name: data for name, (data, _) in contents(store).items()} == before
    if code != 2:
        assert words in document(*filled, code=code)["error"]["message"]


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


def test_looking_works_beside_a_writer_and_writing_does_not(store: Path) -> None:
    with hybridmem.open(store):
        assert document("info", store)["entries"] == ENTRIES - 2
        for arguments in (["compact", store], ["evict", store, "--to", 1], ["delete", store, 1]):
            assert "writ" in run(*arguments, code=5).stderr
            assert document(*arguments, code=5)["error"]["type"] == "StoreLockedError"
    assert document("info", store)["entries"] == ENTRIES - 2


def test_a_damaged_store_is_exit_code_3(store: Path) -> None:
    index = store / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"generation"', b'"generatiom"'))
    assert document("info", store, code=3)["error"]["type"] == "CorruptStoreError"


def test_a_full_disk_is_exit_code_6(store: Path, tmp_path: Path) -> None:
    with installed(Faults(0, "full")):
        told = document("snapshot", store, tmp_path / "snap", code=6)
        assert told["error"]["type"] == "StoreFullError"
        assert "no space left" in run("export", store, tmp_path / "f", code=6).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mem"]


def test_a_newer_format_is_exit_code_1(store: Path) -> None:
    index = store / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"format_version":1', b'"format_version":7'))
    assert document("info", store, code=1)["error"]["type"] == "VersionError"


def test_exit_codes_are_those_of_the_page() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
    if not page.exists():
        pytest.skip("needs a copy of the source with its docs")
    rows = {int(row[1]) for row in re.finditer(r"^\| (\d+) \|", page.read_text(), re.M)}
    coded = {group.FAILED, group.DAMAGED, group.NO_STORE, group.LOCKED, group.NO_SPACE}
    assert rows == coded | {0, click.UsageError.exit_code}
    said = run("--help").stdout.split("Exit codes:")[1]
    assert {int(number) for number in re.findall(r"\d+", said)} == rows


def test_report_is_written_where_it_is_asked_for(store: Path, tmp_path: Path) -> None:
    before = contents(store)
    page = tmp_path / "out.html"
    told = document("report", store, "-o", page)
    assert told == {"path": str(page), "bytes": page.stat().st_size, "entries": ENTRIES - 2}
    assert page.read_text().startswith("<!doctype html>")
    assert "wrote" in run("report", store, "-o", page).stdout
    assert "cannot write" in run("report", store, "-o", tmp_path / "no" / "x", code=1).stderr
    assert contents(store) == before


def test_bench_measures_in_a_store_that_it_takes_away(tmp_path: Path) -> None:
    sizes = ["--width", 16, "--tokens", 4, "--entries", 20, "--layers", 2, "--dir", tmp_path]
    told = document("bench", *sizes, "--kept", "float16")
    assert told["put_bytes"] == 20 * 2 * 4 * 16 * 4
    assert told["entry_bytes"] >= 2 * 4 * 16 * 2 + 552
    assert all(value > 0 for name, value in told.items() if name.endswith("_seconds"))
    assert list(tmp_path.iterdir()) == []
    lines = run("bench", *sizes).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines][:3] == ["entry", "put", "all puts and flush"]


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


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


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
    assert "holds a store" in run("salvage", store, tmp_path / "new", code=1).stderr
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


def test_numbers_as_people_read_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 10 * 1024, 1023 * 1024, 1 << 20)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "1.00 MiB", "1.00 MiB",
    ]  # fmt: skip
    assert [seconds(s) for s in (3e-9, 1.5e-6, 0.02, 61)] == ["3 ns", "1.5 us", "20 ms", "61 s"]
    assert size(3.2 * 2**40) == "3.20 TiB"
    assert size(2.0**80) == "1048576 EiB"
    assert [plural(n, "entry") for n in (0, 1, 1234)] == ["0 entries", "1 entry", "1,234 entries"]
    assert [age(s) for s in (-4, 59, 60, 3600, 86400, 4e8)] == [
        "0 s", "59 s", "1 min", "1 h", "1 d", "12 y",
    ]  # fmt: skip


# -- the program as it is installed ---------------------------------------------------------------


def program(
    *arguments: object, cwd: Path, module: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, away from the source tree."""
    start = [sys.executable, "-m", "hybridmem"]
    if not module:
        start = [str(Path(sys.executable).with_name("hybridmem"))]
    return subprocess.run(
        [*start, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_python_m_hybridmem(store: Path, tmp_path: Path) -> None:
    done = program("info", store, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["entries"] == ENTRIES - 2
    failed = program("info", "nowhere", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (4, "")
    assert "no store in" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert program("--version", cwd=tmp_path).stdout == f"hybridmem {hybridmem.__version__}\n"


def test_the_installed_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("hybridmem")
    if not script.exists():
        pytest.skip("the package is not installed here, only on the path")
    done = program("--help", cwd=tmp_path, module=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: hybridmem ")


def test_without_click_the_command_says_what_to_install(tmp_path: Path) -> None:
    # A module that cannot be imported stands before the real one.
    (tmp_path / "click.py").write_text("raise ImportError('not here')\n")
    done = program("info", "x", cwd=tmp_path, PYTHONPATH=_path_with(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "The hybridmem command needs click: pip install 'hybridmem[cli]'\n"


def _path_with(first: Path) -> str:
    rest = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(first), *([rest] if rest else [])])


def test_a_closed_pipe_is_no_traceback(store: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridmem", "ls", str(store)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said
    assert process.returncode in (0, 1)


def test_shell_completion_knows_the_commands(tmp_path: Path) -> None:
    done = program(
        cwd=tmp_path,
        _HYBRIDMEM_COMPLETE="bash_complete",
        COMP_WORDS="hybridmem co",
        COMP_CWORD="1",
    )
    assert "compact" in done.stdout


def test_the_documentation_has_the_help_of_every_command() -> None:
    tool = Path(__file__).resolve().parent.parent / "tools" / "write_cli_docs.py"
    if not tool.exists():
        pytest.skip("needs a copy of the source with its docs")
    space = runpy.run_path(str(tool))
    page = space["PAGE"].read_text()
    assert sorted(space["sections"](page)) == sorted(commands.commands)
    # Versions of click break lines at other places.
    assert space["renewed"](page).split() == page.split(), (
        "python tools/write_cli_docs.py brings it up to date"
    )


def test_the_demo_finds_the_answer_and_prints_its_table(tmp_path: Path) -> None:
    from hybridmem import demo

    if not demo.DATA.exists():
        pytest.skip("this copy of the source came without the sample")
    # One thread: beside other work the threads of numpy would wait for each other.
    done = program("demo", "stores", "--json", cwd=tmp_path, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {store["index"] for store in result["stores"]} == {"pooled", "tokens"}
    tokens = next(store for store in result["stores"] if store["index"] == "tokens")
    assert sum(tokens["answer_found"]) >= 1
    assert tokens["error_question"] < result["baselines"]["cache only"]["error_question"]
    assert demo.table(result).splitlines()[0].startswith("Model")
    # The stores are kept where they were asked for, and are stores.
    kept = sorted(path.name for path in (tmp_path / "stores").iterdir())
    assert document("info", tmp_path / "stores" / kept[0])["entries"] == tokens["entries"]
    again = program("demo", "stores", cwd=tmp_path)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_shows_the_time_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with group.working("compact"):
        pass
    assert shown.getvalue() == ""
    threads = threading.active_count()
    with group.working("compact"):
        time.sleep(1.8)
    assert "compact 00:01" in shown.getvalue()
    with pytest.raises(KeyError), group.working("compact"):
        raise KeyError
    assert threading.active_count() == threads
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with group.working("compact"):
        time.sleep(1.3)
    assert sys.stderr.getvalue() == ""

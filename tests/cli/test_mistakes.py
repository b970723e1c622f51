"""What goes wrong: a message that helps, and an exit code."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import click
import numpy as np
import pytest

import hybridmem
from hybridmem._commands import group
from hybridmem.testing import Faults, Syscalls, installed

from . import ENTRIES, WIDTH
from .helpers import contents, document, flip, run

#: What helps a program and not who types a command.
PYTHON = re.compile(r"mode=|hybridmem\.|open\(|refresh|salvage=|pickle|Traceback")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["query", "STORE"], 2, "either --entry or --file"),
        (["query", "STORE", "--entry", "1", "--file", "x.npy"], 2, "either --entry or --file"),
        (["query", "STORE", "--file", "THIN"], 2, "needs --layer"),
        (["query", "STORE", "--file", "THIN", "--layer", "0"], 2, str(WIDTH)),
        (["query", "STORE", "--file", "nowhere.npy", "--layer", "0"], 1, "npy: No such file"),
        (["query", "STORE", "--file", "nowhere.safetensors:a", "--layer", "0"], 1, "no such file"),
        (["query", "STORE", "--file", "TEXT", "--layer", "0"], 1, "is neither a .npy nor"),
        (["query", "STORE", "--file", "OBJECTS", "--layer", "0"], 1, "holds Python objects"),
        (["query", "STORE", "--file", "SEVERAL", "--layer", "0"], 1, "it has several arrays"),
        (["audit", "STORE", "--queries", "THIN"], 1, "its array has no name"),
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
        (["verify", "THIN"], 4, "it is a file and no directory"),
        (["import", "STORE", "NOWHERE"], 4, "is a directory, not an export file"),
        (["import", "TEXT", "NOWHERE"], 3, "or no safetensors file"),
        (["demo", "STORE"], 1, "holds a store"),
        (["demo", "THIN"], 2, "is a file"),
    ],
)
def test_mistakes_have_a_message_and_a_code(
    store: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    from safetensors.numpy import save_file

    np.save(tmp_path / "thin.npy", np.ones((2, WIDTH - 1), np.float32))
    ones = np.ones((1, WIDTH), np.float32)
    save_file({"a": ones, "b": ones}, tmp_path / "t.safetensors")
    (tmp_path / "text").write_text("no arrays are in here")
    np.save(tmp_path / "objects.npy", np.array([{}, []], object))
    np.savez(tmp_path / "several.npz", a=ones, b=ones)
    names = {
        "STORE": store,
        "NOWHERE": tmp_path / "nowhere",
        "THIN": tmp_path / "thin.npy",
        "TENSORS": tmp_path / "t.safetensors",
        "TEXT": tmp_path / "text",
        "OBJECTS": tmp_path / "objects.npy",
        "SEVERAL": tmp_path / "several.npz",
    }
    filled = []
    for argument in arguments:
        for name, path in names.items():
            argument = argument.replace(name, str(path))
        filled.append(argument)
    before = {name: data for name, (data, _) in contents(store).items()}
    result = run(*filled, code=code)
    assert words in result.stderr
    assert not PYTHON.search(result.stderr)
    assert result.stdout == ""
    assert {name: data for name, (data, _) in contents(store).items()} == before
    if code != 2:
        assert words in document(*filled, code=code)["error"]["message"]


def test_looking_works_beside_a_writer_and_writing_does_not(store: Path) -> None:
    with hybridmem.open(store):
        assert document("info", store)["entries"] == ENTRIES - 2
        for arguments in (["compact", store], ["evict", store, "--to", 1], ["delete", store, 1]):
            told = run(*arguments, code=5).stderr
            assert "another program has" in told
            assert "commands that only look need not wait" in told
            assert not PYTHON.search(told)
            assert document(*arguments, code=5)["error"]["type"] == "StoreLockedError"
    assert document("info", store)["entries"] == ENTRIES - 2


def test_a_store_that_may_only_be_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Syscalls, path: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(self, path, flags, *rest)

    opened = Syscalls.open
    monkeypatch.setattr(Syscalls, "open", refuse)
    told = run("compact", store, code=1).stderr
    assert told == (
        f"Error: {store} cannot be written to: Read-only file system; commands that only look can "
        "read it\n"
    )
    assert document("info", store)["entries"] == ENTRIES - 2


def test_a_pack_is_not_written_to(store: Path, tmp_path: Path) -> None:
    pack, copy = tmp_path / "pack", tmp_path / "copy"
    run("pack", store, pack)
    for arguments in (["compact", pack], ["evict", pack, "--to", 1], ["delete", pack, 1]):
        told = run(*arguments, code=1).stderr
        assert "make a store of it with `hybridmem snapshot`" in told
        assert not PYTHON.search(told)
    run("snapshot", pack, copy)
    run("delete", copy, 1)


def test_a_store_that_is_compacted_meanwhile(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise hybridmem.SnapshotGoneError("refresh() and ask again")

    monkeypatch.setattr(hybridmem.Store, "get", gone)
    told = run("show", store, 1, code=1).stderr
    assert told == (
        "Error: a program that writes to the store compacted it meanwhile: run this again\n"
    )
    assert document("show", store, 1, code=1)["error"]["type"] == "SnapshotGoneError"


def test_damaged_records(store: Path) -> None:
    flip(store / "entries.bin", 100)
    for command in ("info", "compact"):
        told = run(command, store, code=3).stderr
        assert "`hybridmem salvage` keeps what verifies" in told
        assert not PYTHON.search(told)


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
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    if not page.exists():
        pytest.skip("needs a copy of the source with its docs")
    rows = {int(row[1]) for row in re.finditer(r"^\| (\d+) \|", page.read_text(), re.M)}
    coded = {group.FAILED, group.DAMAGED, group.NO_STORE, group.LOCKED, group.NO_SPACE}
    assert rows == coded | {0, click.UsageError.exit_code}
    said = run("--help").stdout.split("Exit codes:")[1]
    assert {int(number) for number in re.findall(r"\d+", said)} == rows

"""A store directory made to do harm, its checksums right: refused, in bounded memory and time."""

from __future__ import annotations

import base64
import math
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _fileio
from hybridmem.verify import verify

from . import forged
from .apart import apart
from .book import read

MB = 1 << 20
WAYS = ("r", "r+", "pread", "verify")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out syncs: nothing crashes here."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(_fileio.calls, name, lambda descriptor: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of six entries in one shard."""
    rng = np.random.default_rng(1)
    with hybridmem.create(tmp_path / "mem", embed_dim=4, hdc_dim=64) as store:
        for i in range(6):
            keys, values = rng.standard_normal((2, 3, 4)).astype(np.float32)
            store.put(keys, values, i % 2, 1 + i)
    return tmp_path / "mem"


def use(path: Path, way: str) -> str:
    """Do all that reads a store; return the name of the error that it ends in."""
    try:
        if way == "verify":
            return "" if verify(path).ok else "CorruptStoreError"
        mode, io = ("r", "pread") if way == "pread" else (way, "mmap")
        with hybridmem.open(path, mode, io=io) as store:
            read(store)
            store.query(np.ones(store.config.embed_dim, np.float32), 0, 9)
            if mode == "r+":
                store.put(np.ones((1, 4)), np.ones((1, 4)), 0)
                store.compact()
    except hybridmem.HybridMemError as error:
        return type(error).__name__
    return ""


def used(path: Path, way: str) -> str:
    """As `use`, in a process of its own that may take so much memory and time and no more."""
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    outcome = apart(use, path, way)
    assert outcome.grown <= 2 * size + 64 * MB, f"took {outcome.grown >> 20} MB for {size} bytes"
    return str(outcome.check())


@pytest.mark.parametrize("way", WAYS)
def test_a_store_as_it_should_be(path: Path, way: str) -> None:
    assert used(path, way) == ""


# --- index.json ----------------------------------------------------------------------------------

BODIES = {
    "huge list": b'{"n_entries":[' + b"[]," * 5_000_000 + b"0]",
    "huge list of numbers": b'{"n_entries":[' + b"999," * 5_000_000 + b"0]",
    "list as long as it may be": b'{"n_entries":[' + b"[]," * 690_000 + b"0]",
    "lists in lists": b'{"n_entries":[' + (b"[" * 50 + b"]" * 50 + b",") * 20_000 + b"0]",
    "deep list": b'{"n_entries":' + b"[" * 100_000 + b"]" * 100_000,
    "deep, but not too deep to parse": b'{"n_entries":' + b"[" * 900 + b"]" * 900,
    "huge number": b'{"n_entries":' + b"9" * 100_000,
    "1e999": b'{"n_entries":1e999',
    "NaN": b'{"n_entries":NaN',
    "a member twice": b'{"n_entries":1,"n_entries":2',
    "many members": b'{"a":1' + b"".join(b',"b%d":1' % i for i in range(100_000)),
    "lone surrogate": b'{"\\ud800":1',
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BODIES)
def test_index_json(name: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(forged.signed(BODIES[name]))
    (tmp_path / "entries.bin").write_bytes(b"")
    assert used(tmp_path, way) == "CorruptStoreError"


MEAN = base64.b64encode(np.ones(4, "<f4").tobytes()).decode()
NAN = base64.b64encode(np.full(4, np.nan, "<f4").tobytes()).decode()
MEMBERS: list[dict[str, Any]] = [
    {"format": "other"},
    {"format_version": 0},
    {"format_version": 1.0},
    {"format_version": True},
    {"store_id": "../../etc/passwd0000000000000000"},
    {"store_id": 7},
    {"generation": 0},
    {"generation": 1 << 64},
    {"generation": 1.5},
    {"quantization": "affine-i8"},
    {"quantization": "zip"},
    {"next_entry_id": 0},
    {"next_entry_id": 6},
    {"next_entry_id": 1 << 65},
    {"next_shard": -1},
    {"next_shard": 0},
    {"next_shard": 1 << 33},
    {"n_entries": 10**9},
    {"n_entries": 10**9, "entries_crc32c": [0] * 976_563},
    {"n_entries": 1 << 63},
    {"n_entries": -1},
    {"n_entries": 7},
    {"n_entries": 6.0},
    {"n_entries": "6"},
    {"n_entries": None},
    {"n_entries": True},
    {"entries_crc32c": []},
    {"entries_crc32c": [1 << 32]},
    {"entries_crc32c": [-1]},
    {"entries_crc32c": {}},
    {"shards": {}},
    {"shards": []},
    {"shards": [["../shard_0000", 1, 1, 1]]},
    {"shards": [["/etc/passwd", 100, 1, 1]]},
    {"shards": [[-1, 100, 1, 6]]},
    {"shards": [[0, 1 << 63, 1, 6]]},
    {"shards": [[0, 8, 1, 6]]},
    {"shards": [[0, 100, 1, 0]]},
    {"shards": [[0, 100, 1]]},
    {"shards": [[0, 100, 1, 6], [0, 100, 1, 6]]},
    {"shards": [[n, 100, 1, 6] for n in range(20_000)], "next_shard": 1 << 32},
    {"dead": [[0, 6]]},
    {"dead": [[3, 2]]},
    {"dead": [[0, 3], [3, 5]]},
    {"dead": [[-1, 2]]},
    {"dead": [[0]]},
    {"dead": [[0, 1 << 64]]},
    {"calibration": [[0, MEAN[:-4], ""]]},
    {"calibration": [[0, NAN, ""]]},
    {"calibration": [[0, "*" * 24, ""]]},
    {"calibration": [[0, "A" * 1_900_000, ""]]},
    {"calibration": [[0, MEAN, 1]]},
    {"calibration": [[-1, MEAN, ""]]},
    {"calibration": [[0, MEAN, ""], [0, MEAN, ""]]},
    {"calibration": [[0, "", ""]]},
    {"config": {}},
    {"config": []},
    {"embed_dim": 0},
    {"embed_dim": 5},
    {"embed_dim": 1 << 24},
    {"embed_dim": 1 << 62},
    {"embed_dim": 4.0},
    {"hdc_dim": 0},
    {"hdc_dim": 65},
    {"hdc_dim": 128},
    {"hdc_dim": 1 << 24},
    {"hdc_dim": 1 << 40},
    {"seed": -1},
    {"seed": 1 << 64},
    {"max_entries": -1},
    {"max_disk_bytes": 1 << 63},
    {"shard_max_bytes": 0},
    {"max_open_shards": 0},
    {"quantize_stored": 1},
    {"kv_dtype": "float16"},
    {"kv_dtype": "object"},
    {"signature_tokens": -1},
    {"signature_bits": 3},
    {"model_id": 5},
    {"model_id": "\ud800"},
    {"a member of no version": 1},
]


@pytest.mark.parametrize("way", ["r", "verify"])
@pytest.mark.parametrize("members", MEMBERS, ids=lambda members: f"{members!r:.60}")
def test_a_member_of_index_json(members: dict[str, Any], way: str, path: Path) -> None:
    forged.change_index(path, **members)
    assert used(path, way) == "CorruptStoreError"


def test_a_member_that_is_not_there(path: Path) -> None:
    whole = forged.index(path)
    for name in whole:
        forged.write_index(path, {key: value for key, value in whole.items() if key != name})
        assert used(path, "r") == "CorruptStoreError", name


@pytest.mark.parametrize("way", ["r", "r+"])
def test_very_long_signatures_of_narrow_keys(way: str, tmp_path: Path) -> None:
    """Their projection takes more random signs than a small store may make anyone keep."""
    path = tmp_path / "mem"
    keys = np.ones((1, 4), np.float32)

    def make() -> None:
        with hybridmem.create(path, embed_dim=4, hdc_dim=1 << 24) as store:
            store.put(keys, keys, 0)

    def search() -> None:
        with hybridmem.open(path, way) as store:
            assert [hit.score for hit in store.query(keys, 0)] == [1.0]

    apart(make, seconds=30).check()
    outcome = apart(search, seconds=30)
    outcome.check()
    assert outcome.grown <= 64 * MB
    # 64 sub-signatures lie interleaved in memory, however few there are.
    forged.change_index(path, signature_tokens=1)
    assert used(path, way) == "CorruptStoreError"


# --- entries.bin ---------------------------------------------------------------------------------

FIELDS: dict[str, tuple[int, str, Any]] = {
    "id 0": (0, "<Q", 0),
    "an id twice": (0, "<Q", 2),
    "an id not given yet": (0, "<Q", 7),
    "the last id of all": (0, "<Q", (1 << 64) - 1),
    "no tokens": (12, "<I", 0),
    "more tokens than there are": (12, "<I", 4),
    "2**32 - 1 tokens": (12, "<I", (1 << 32) - 1),
    "NaN": (16, "<f", math.nan),
    "infinity": (16, "<f", math.inf),
    "less than 0": (16, "<f", -1.0),
    "a shard that is not there": (32, "<I", 1),
    "the last shard of all": (32, "<I", (1 << 32) - 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_record(name: str, way: str, path: Path) -> None:
    offset, form, value = FIELDS[name]
    forged.change_record(path, 2, offset, form, value)
    assert used(path, way) == "CorruptStoreError"


# --- names that are no files ---------------------------------------------------------------------

NAMES = ("index.json", "entries.bin", "shard_0000.safetensors", "lock", "reserve")
NAMES += (".hybridmem-0.tmp", "entries.bin.g1", "shard_0001.safetensors")
#: What an open store needs; without the others it answers as ever.
NEEDED = NAMES[:3]


def link(name: Path) -> None:
    name.symlink_to(name.parent.parent / "outside")


def link_to_itself(name: Path) -> None:
    name.symlink_to(name)


def device(kind: int, number: int) -> Callable[[Path], None]:
    def make(name: Path) -> None:
        try:
            os.mknod(name, kind | 0o666, number)
        except PermissionError:
            pytest.skip("making a device needs privileges that this process lacks")

    return make


def listening(name: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.fspath(name))


KINDS: dict[str, Callable[[Path], None]] = {
    "link": link,
    "link to itself": link_to_itself,
    "link to nothing": lambda name: name.symlink_to("nothing"),
    "pipe": lambda name: os.mkfifo(name),
    "directory": lambda name: name.mkdir(),
    "socket": listening,
    "/dev/zero": device(stat.S_IFCHR, os.makedev(1, 5)),
    "/dev/null": device(stat.S_IFCHR, os.makedev(1, 3)),
    "a terminal": device(stat.S_IFCHR, os.makedev(5, 0)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_file(name: str, kind: str, path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((path / name).read_bytes() if (path / name).exists() else b"precious")
    before = outside.read_bytes()
    (path / name).unlink(missing_ok=True)
    KINDS[kind](path / name)
    for way in WAYS:
        error = used(path, way)
        if name in NEEDED:
            assert error == "CorruptStoreError", way
        elif name == "lock" and way == "r+":
            assert error in ("CorruptStoreError", "StoreIOError")
        elif (name, kind, way) == ("shard_0001.safetensors", "directory", "r+"):
            assert error == "StoreIOError"  # in its way: the next flush takes another number
        else:
            assert not error, way
        assert outside.read_bytes() == before, "what a link points to was changed"
    if name in NAMES[5:] and kind != "directory":
        assert all(stat.S_ISREG(os.lstat(path / one).st_mode) for one in os.listdir(path))


def test_create_where_a_name_is_taken_by_no_file(tmp_path: Path) -> None:
    for number, (kind, make) in enumerate(KINDS.items()):
        for name in ("entries.bin", "index.json", "lock"):
            path = tmp_path / f"{number}-{name}"
            path.mkdir()
            make(path / name)

            def create(path: Path = path) -> None:
                with pytest.raises(hybridmem.HybridMemError):
                    hybridmem.create(path, embed_dim=4)

            assert not apart(create).failure, f"{kind} {name}"

"""Shards made to do harm, their checksums right: refused, in bounded memory and time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _fileio

from . import forged
from .test_hostile import WAYS, used

Members = dict[str, Any]


@pytest.fixture(params=["float32", "int8"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three entries of three tokens in one shard."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(_fileio.calls, name, lambda descriptor: None)
    rng = np.random.default_rng(1)
    quantize = request.param == "int8"
    with hybridmem.create(
        tmp_path / "mem", embed_dim=4, hdc_dim=64, quantize_stored=quantize
    ) as store:
        for _ in range(3):
            keys, values = rng.standard_normal((2, 3, 4)).astype(np.float32)
            store.put(keys, values, 0)
    return tmp_path / "mem"


# --- names ---------------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        items = [(new if name == old else name, value) for name, value in members.items()]
        members.clear()
        members.update(items)

    return change


NAMES = ["k_02", "k_+2", "k_-2", "k_ 2", "k_2 ", "K_2", "k2", "k_", "k_\u0662", "k_2\u0000", ""]
NAMES += ["k_2_", "k_2_Scale", "x_2", "k_18446744073709551616", "k_" + "9" * 4000, "../k_2"]
#: Names that are right, of entries that this shard should not hold, or twins that lack each other.
NAMES += ["k_9", "v_18446744073709551615", "k_0"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name!r:.30}")
def test_a_name_of_a_tensor(name: str, path: Path) -> None:
    forged.change_header(path, renamed("k_2", name))
    for way in ("r", "verify"):
        assert used(path, way) == "CorruptStoreError", way


# --- shapes, ranges and types --------------------------------------------------------------------

SHAPES = [[2, 4], [4, 3], [1, 12], [12], [3, 4, 1], [], [3, -4], [0, 4], [3, 0], [3.0, 4]]
SHAPES += [[True, 12], ["3", 4], [None, 4], [1 << 62, 4], [1 << 31, 1 << 31], [1 << 32, 1 << 32]]
SHAPES += [[3, 4 + (1 << 60)], "34", None, {}, [[3], [4]], [10**400, 1]]
RANGES = [[0, 1 << 62], [1 << 62, 0], [-48, 0], [0.0, 48], [48], [0, 48, 96], None, "048", [10, 5]]
RANGES += [[0, 0], [1, 49], [0, 47], [(1 << 64) - 48, 1 << 64], [True, 49]]
DTYPES = ["F64", "I64", "f32", "F8_E4M3", "BOOL", "", "x" * 10_000, 5, None, [], {}]


@pytest.mark.parametrize(
    ("field", "value"),
    [("shape", value) for value in SHAPES]
    + [("data_offsets", value) for value in RANGES]
    + [("dtype", value) for value in DTYPES],
    ids=lambda value: f"{value!r:.30}",
)
def test_a_field_of_a_tensor(field: str, value: object, path: Path) -> None:
    forged.change_header(path, lambda members: members["k_2"].update({field: value}))
    for way in ("r", "verify"):
        assert used(path, way) == "CorruptStoreError", way


@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype"])
def test_a_field_that_is_not_there(field: str, path: Path) -> None:
    forged.change_header(path, lambda members: members["k_2"].pop(field))
    assert used(path, "r") == "CorruptStoreError"


# --- the header as a whole -----------------------------------------------------------------------


def without(name: str) -> Callable[[Members], object]:
    return lambda members: members.pop(name)


def metadata(**changes: Any) -> Callable[[Members], object]:
    return lambda members: members["__metadata__"].update(changes)


HEADERS: dict[str, Callable[[Members], object]] = {
    "no keys": without("k_2"),
    "no values": without("v_2"),
    "no metadata": without("__metadata__"),
    "metadata is a list": lambda members: members.update(__metadata__=[]),
    "no checksums": lambda members: members["__metadata__"].pop("crc32c"),
    "checksums of fewer": metadata(crc32c="00000000"),
    "checksums of more": lambda members: metadata(
        crc32c=members["__metadata__"]["crc32c"] + "00000000"
    )(members),
    "checksums that are no hexadecimal": lambda members: metadata(
        crc32c="x" * len(members["__metadata__"]["crc32c"])
    )(members),
    "checksums that are a number": metadata(crc32c=5),
    "checksums that are wrong": lambda members: metadata(
        crc32c="0" * len(members["__metadata__"]["crc32c"])
    )(members),
    "a tensor is a list": lambda members: members.update(k_2=[]),
    "a tensor is a number": lambda members: members.update(k_2=1),
    "a tensor has one member more": lambda members: members["k_2"].update(more=1),
    "nothing": lambda members: members.clear(),
    "a source of an entry that is not there": metadata(source_9='"a"'),
    "a source of no id": metadata(source_02='"a"'),
    "a source that is no string": metadata(source_2={"text": "a"}),
    "a source beside what is no string": metadata(source_2='"a"', more=5),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header(name: str, path: Path) -> None:
    forged.change_header(path, HEADERS[name])
    for way in WAYS:
        assert used(path, way) == "CorruptStoreError", way


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "not JSON": lambda text: b"x" * len(text),
    "cut": lambda text: text.rstrip()[:-1],
    "a list": lambda text: b"[" + text + b"]",
    "a tensor twice": lambda text: text.replace(b'"k_2":', b'"k_1":'),
    "a member of a tensor twice": lambda text: text.replace(b'"dtype":', b'"dtype":"F32","dtype":'),
    "a source by another name": lambda text: text.replace(
        b'"__metadata__": {', b'"__metadata__": {"\\u0073ource_2": "1", '
    ),
    "NaN": lambda text: text.replace(b"[3, 4]", b"[NaN, 4]"),
    "deep": lambda text: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep, but not too deep to parse": lambda text: b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    "not UTF-8": lambda text: text.replace(b"k_2", b"k_\xff"),
    "bytes after it": lambda text: text.rstrip() + b"\0" * 8,
    "4 MiB of lists": lambda text: b'{"a":[' + b"[]," * 1_390_000 + b"0]}",
    "4 MiB of members": lambda text: (
        b"{" + b",".join(b'"%05x":1' % i for i in range(400_000)) + b"}"
    ),
    "4 MiB of objects": lambda text: (
        b"{" + b",".join(b'"%04x":{"b":1}' % i for i in range(270_000)) + b"}"
    ),
    "more than 4 MiB": lambda text: text + b" " * (1 << 22),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_header(name: str, path: Path) -> None:
    members, tensors = forged.header(forged.first_shard(path))
    text = json.dumps(members).encode()
    forged.write_shard(path, TEXTS[name](text), tensors)
    for way in WAYS:
        assert used(path, way) == "CorruptStoreError", way


@pytest.mark.parametrize(
    "length", [0, 1, 10**6, 10**8, 10**8 + 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
)
def test_the_length_of_a_header(length: int, path: Path) -> None:
    members, tensors = forged.header(forged.first_shard(path))
    forged.write_shard(path, json.dumps(members).encode(), tensors, length=length)
    for way in WAYS:
        assert used(path, way) == "CorruptStoreError", way


@pytest.mark.parametrize("entries", [1, 2, 4, (1 << 32) - 1])
def test_the_number_of_entries_in_a_shard(entries: int, path: Path) -> None:
    members, tensors = forged.header(forged.first_shard(path))
    forged.write_shard(path, json.dumps(members).encode(), tensors, entries=entries)
    for way in WAYS:
        assert used(path, way) == "CorruptStoreError", way


def test_a_header_that_takes_long_is_parsed_once(tmp_path: Path) -> None:
    """However many entries are said to be in the shard."""
    with hybridmem.create(tmp_path / "mem", embed_dim=1, hdc_dim=64) as store:
        store.put_many([([[1.0]], [[1.0]])] * 500, 0)
    path = tmp_path / "mem"
    members, tensors = forged.header(forged.first_shard(path))
    text = json.dumps(members | {"a": [0] * 1_300_000}, separators=(",", ":")).encode()
    forged.write_shard(path, text, tensors)
    assert used(path, "verify") == "CorruptStoreError"
    assert used(path, "r") == "CorruptStoreError"


@pytest.mark.parametrize("source", ["", "{", "[" * 50_000, "a", '{"a":1}}'])
def test_a_source_that_is_not_json(source: str, path: Path) -> None:
    forged.change_header(path, metadata(source_2=source))
    assert used(path, "verify") == "CorruptStoreError"
    with hybridmem.open(path, mode="r") as store:
        assert store.get(1).source is None
        with pytest.raises(hybridmem.CorruptStoreError, match="entry 2"):
            _ = store.get(2).source
        with pytest.raises(hybridmem.CorruptStoreError, match="entry 2"):
            store.source(2)


def test_a_source_may_look_like_anything(path: Path) -> None:
    source = json.dumps('"source_1":"x"' * 100 + "[{" * 8_000 + '":' * 8_000)
    forged.change_header(path, metadata(source_2=source))
    for way in WAYS:
        assert used(path, way) == "", way
    with hybridmem.open(path, mode="r") as store:
        assert store.source(2) == json.loads(source)
        assert store.source(1) is None


def test_a_header_as_it_should_be(path: Path) -> None:
    forged.change_header(path, lambda members: None)
    for way in WAYS:
        assert used(path, way) == "", way

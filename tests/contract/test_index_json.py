"""FORMAT-AND-API section 2, index.json, and the directory as a whole."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader import ForeignReader, find_key

import hybridmem

from .helpers import contents, copy_committed, fill, photograph, shards

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def index_of(store: Any) -> dict[str, Any]:
    return dict(json.loads((Path(store.path) / "index.json").read_text()))


def test_configuration_and_counters_are_there(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(max_entries=99, model_id="tiny")
    fill(store, rng, 4)
    store.flush()
    index = index_of(store)
    assert index["format_version"] == 1
    for field, value in (("embed_dim", 24), ("hdc_dim", 512), ("max_entries", 99)):
        assert find_key(index, field) == value
    assert find_key(index, "seed") == store.config.seed
    assert find_key(index, "model_id") == "tiny"
    assert find_key(index, "kv_dtype") == "float32"
    assert index["n_entries"] == 4
    assert 5 in index.values(), "no counter for the next entry id"
    assert store.stats().generation in index.values()


def test_the_int8_scheme_is_named(new_store: Callable[..., Any]) -> None:
    plain, quantised = index_of(new_store("a")), index_of(new_store("b", quantize_stored=True))
    for index in (plain, quantised):
        index.pop("config")
    assert plain["quantization"] is None
    assert quantised["quantization"] == "affine-i8"
    assert '`"affine-i8"`' in PAGE.read_text()


def first_column(heading: str) -> set[str]:
    """Names in the first column of the table under a heading of the format's page."""
    section = PAGE.read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_the_page_of_the_format_names_every_member(store: Any) -> None:
    assert first_column("## index.json") == set(index_of(store))
    assert first_column("### config") == set(index_of(store)["config"])


def test_dead_rows_are_named_until_compacted(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 10)
    store.flush()
    for entry_id in (3, 4, 9):
        store.delete(entry_id)
    store.flush()
    assert ForeignReader(store.path).ids() == [1, 2, 5, 6, 7, 8, 10]
    store.compact()
    assert index_of(store)["dead"] == []
    assert ForeignReader(store.path).ids() == [1, 2, 5, 6, 7, 8, 10]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("version", [2, 999, 2**70])
def test_newer_version_is_refused_before_any_checksum(
    version: int, mode: str, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 1)
    store.close()
    index = Path(store.path) / "index.json"
    fields = json.loads(index.read_text())
    fields["format_version"] = version
    fields["a field of the future"] = 1.5  # whatever it holds, the version is what is wrong
    index.write_text(json.dumps(fields))
    before = photograph(Path(store.path))
    with pytest.raises(hybridmem.VersionError, match=str(version)) as caught:
        hybridmem.open(store.path, mode=mode)
    message = str(caught.value).lower()
    assert any(word in message for word in ("upgrade", "newer", "install", "update")), message
    after = photograph(Path(store.path))
    for name in ("index.json", "entries.bin"):
        assert after[name] == before[name]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"format_version": 1}',
        b'{"format_version": "1"}',
        b'{"format_version": 1.0}',
        b'{"format_version": NaN}',
        b"[" * 100_000,
        b'{"format_version": 1, "format_version": 1}',
    ],
    ids=lambda damage: damage[:24].decode("latin-1") or "empty",
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_damaged_index_is_corruption(damage: bytes, mode: str, store: Any) -> None:
    store.close()
    (Path(store.path) / "index.json").write_bytes(damage)
    with pytest.raises(hybridmem.CorruptStoreError, match=r"index\.json"):
        hybridmem.open(store.path, mode=mode)


def test_one_changed_digit_in_index_json_is_noticed(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 3)
    store.close()
    index = Path(store.path) / "index.json"
    whole = index.read_bytes()
    version = whole.index(b"format_version")
    places = [i for i, c in enumerate(whole) if chr(c).isdigit() and not 0 < i - version < 24]
    assert len(places) > 20
    for place in places[:: max(1, len(places) // 40)]:
        digit = b"7" if whole[place : place + 1] != b"7" else b"3"
        index.write_bytes(whole[:place] + digit + whole[place + 1 :])
        with pytest.raises(hybridmem.CorruptStoreError, match=r"index\.json"):
            hybridmem.open(store.path, mode="r")
    index.write_bytes(whole)
    with hybridmem.open(store.path, mode="r") as reader:
        assert len(reader) == 3


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_copied_without_lock_and_temporary_files_is_whole(
    mode: str, new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 20)
    store.evict(15)
    store.delete(next(iter(store)))
    fill(store, rng, 3)
    store.flush()
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode=mode) as again:
        assert contents(again) == contents(store)
        if mode == "r+":
            assert fill(again, rng, 1) == [24]


def test_a_writer_removes_what_no_commit_names_and_a_reader_does_not(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    """As a writer that died leaves it: full shards without a commit, and a temporary file."""
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 40)
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    (copy / ".hybridmem-0123456789abcdef.tmp").write_bytes(b"half a file")
    before = photograph(copy)
    assert len(shards(copy)) > 3
    with hybridmem.open(copy, mode="r") as reader:
        assert list(reader) == [1, 2]
    assert photograph(copy) == before
    with hybridmem.open(copy) as writer:
        assert len(shards(copy)) == 1
        assert not list(copy.glob("*.tmp"))
        assert contents(writer) == {i: contents(store)[i] for i in (1, 2)}


def test_a_moved_store_opens(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 3)
    wanted = contents(store)
    store.close()
    shutil.move(store.path, tmp_path / "elsewhere")
    with hybridmem.open(tmp_path / "elsewhere") as again:
        assert contents(again) == wanted


def test_what_was_not_committed_is_not_in_a_copy(
    new_store: Callable[..., Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    """put spills full shards by itself, without making that a commit."""
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 40)
    store.delete(1)
    copy = copy_committed(Path(store.path), tmp_path / "copy")
    with hybridmem.open(copy, mode="r") as reader:
        assert list(reader) == [1, 2]
    with hybridmem.open(copy) as writer:
        assert list(writer) == [1, 2]
    store.flush()
    with hybridmem.open(store.path, mode="r") as reader:
        assert list(reader) == list(range(2, 43))

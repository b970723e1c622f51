"""A store as one file: what other programs read of it, and what comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from safetensors import safe_open

import hybridmem
from hybridmem import archive
from hybridmem.archive import export_store, import_store
from hybridmem.verify import verify

from .helpers import contents, pair, photograph, same_hits

KINDS = [
    {},
    {"kv_dtype": "float16"},
    {"kv_dtype": "bfloat16", "model_id": "m", "max_entries": 50},
    {"quantize_stored": True},
    {"signature_tokens": 1, "signature_bits": 64},
]


@pytest.fixture
def filled(new_store: Callable[..., Any], rng: np.random.Generator) -> Callable[..., Any]:
    """A store of two layers with accesses, sources, a calibrated layer and a dead entry."""

    def make(**fields: Any) -> Any:
        store = new_store(shard_max_bytes=4000, **fields)
        for n in range(12):
            keys, values = pair(rng, 1 + n * 3)  # INT8: short and long ones have other layouts
            source = {"n": n, "text": 'say "\u00e9"'} if n % 3 else None
            store.put(keys, values, n % 2 * 7, importance=n / 4, source=source)
        store.calibrate(0)
        store.query(pair(rng, 1)[0], 0)
        store.delete(4)
        store.flush()
        return store

    return make


@pytest.mark.parametrize("fields", KINDS)
def test_a_round_trip(
    fields: dict[str, Any], filled: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    store = filled(**fields)
    file, back = tmp_path / "out.safetensors", tmp_path / "there" / "back"
    assert export_store(store.path, file) == 11
    assert import_store(file, back) == 11
    assert verify(back).ok
    with hybridmem.open(back) as again:
        assert contents(again) == contents(store)
        assert again.config == store.config
        assert again.store_id == store.store_id
        assert [again.source(one) for one in again] == [store.source(one) for one in store]
        names = [name for name in store.entries.dtype.names if name != "shard_idx"]
        assert again.entries[names].tolist() == store.entries[names].tolist()
        for layer in (0, 7):
            asked = pair(rng, 2)[0]
            assert same_hits(again.query(asked, layer, 9), store.query(asked, layer, 9))
        keys, values = pair(rng, 1)
        assert again.put(keys, values, 0) == store.put(keys, values, 0) == 13
        with pytest.raises(ValueError, match="calibrated already"):
            again.calibrate(0)


def test_what_another_program_reads(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled()
    file = tmp_path / "out.safetensors"
    export_store(store.path, file)
    records = store.entries
    with safe_open(file, framework="numpy") as opened:
        for name in ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "padding"):
            assert opened.get_tensor(name).tolist() == records[name].tolist()
        packed = opened.get_tensor("signature")
        assert [row.tobytes() for row in packed] == list(records["signature"])
        for entry_id in store:
            entry = store.get(entry_id)
            assert np.array_equal(opened.get_tensor(f"k_{entry_id}"), entry.keys)
            assert np.array_equal(opened.get_tensor(f"v_{entry_id}"), entry.values)
        metadata = opened.metadata()
        assert len(opened.keys()) == 8 + 2 * len(store)
    assert json.loads(metadata["source_2"]) == store.source(2)
    index = json.loads(metadata["index"])
    assert index["config"] == store.config.to_dict()
    assert index["n_entries"] == 0
    # The checksum of the header, as docs/format.md has it.
    data = file.read_bytes()
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    said = metadata["header_crc32c"]
    assert crc32c(head.replace(f'"{said}"'.encode(), b'"00000000"')) == int(said, 16)
    assert len(head) % 64 == 0


def test_one_layer(filled: Callable[..., Any], rng: np.random.Generator, tmp_path: Path) -> None:
    store = filled()
    assert export_store(store.path, tmp_path / "f", layer_idx=7) == 5
    import_store(tmp_path / "f", tmp_path / "back")
    with hybridmem.open(tmp_path / "back", mode="r") as again:
        assert contents(again) == {i: c for i, c in contents(store).items() if c[0] == 7}
    assert export_store(store.path, tmp_path / "none", layer_idx=3) == 0
    assert import_store(tmp_path / "none", tmp_path / "empty") == 0


def test_only_what_is_committed_and_nothing_changes(
    filled: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    store = filled()
    committed = contents(store)
    store.put(*pair(rng, 2), 0)
    store.delete(1)
    before = photograph(store.path)
    export_store(store.path, tmp_path / "f")  # beside the writer
    assert photograph(store.path) == before
    file = (tmp_path / "f").read_bytes()
    import_store(tmp_path / "f", tmp_path / "back")
    assert (tmp_path / "f").read_bytes() == file
    with hybridmem.open(tmp_path / "back", mode="r") as again:
        assert contents(again) == committed


def test_progress_is_told(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled()
    told: list[tuple[int, int]] = []
    export_store(store.path, tmp_path / "f", progress=lambda *at: told.append(at))
    assert told[-1] == (11, 11)
    assert told == sorted(told)
    told.clear()
    import_store(tmp_path / "f", tmp_path / "back", progress=lambda *at: told.append(at))
    assert told == [(n, 11) for n in range(1, 12)]


def test_a_writer_that_compacts_meanwhile(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled(max_open_shards=1)

    def compact(done: int, total: int) -> None:
        if len(store) == 11:
            for entry_id in list(store)[::2]:
                store.delete(entry_id)
            store.compact()

    with pytest.raises(hybridmem.SnapshotGoneError, match="export that"):
        export_store(store.path, tmp_path / "f", progress=compact)
    assert os.listdir(tmp_path) == ["mem"]


def test_where_nothing_is_written(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled()
    export_store(store.path, tmp_path / "f")
    kept = (tmp_path / "f").read_bytes()
    for taken in (tmp_path / "f", store.path):
        with pytest.raises(hybridmem.StoreExistsError, match="exists"):
            export_store(store.path, taken)
        with pytest.raises(hybridmem.StoreExistsError, match="exists"):
            import_store(tmp_path / "f", taken)
    assert (tmp_path / "f").read_bytes() == kept
    with pytest.raises(hybridmem.StoreNotFoundError):
        export_store(tmp_path / "nowhere", tmp_path / "g")
    for missing in (tmp_path / "nothing", tmp_path / "no" / "thing", tmp_path / "f" / "thing"):
        with pytest.raises(hybridmem.StoreNotFoundError, match=missing.name):
            import_store(missing, tmp_path / "g")
    with pytest.raises(hybridmem.StoreNotFoundError, match="is a directory, not an export file"):
        import_store(store.path, tmp_path / "g")
    assert sorted(os.listdir(tmp_path)) == ["f", "mem"]


@pytest.mark.parametrize("name", ["shard_0099.safetensors", "SHA256SUMS", "deep/file"])
def test_not_inside_the_store(name: str, filled: Callable[..., Any], tmp_path: Path) -> None:
    """Its next writer would remove the file, or take the store for a pack."""
    store = filled()
    before = sorted(store.path.iterdir())
    with pytest.raises(ValueError, match="inside the store"):
        export_store(store.path, store.path / name)
    assert sorted(store.path.iterdir()) == before


def test_arguments_are_checked(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled()
    with pytest.raises(ValueError, match="layer_idx"):
        export_store(store.path, tmp_path / "f", layer_idx=-1)
    with pytest.raises(TypeError, match="file must be a path"):
        export_store(store.path, 5)
    with pytest.raises(ValueError, match="file must not be empty"):
        import_store("", tmp_path / "back")
    with pytest.raises(TypeError, match="path must be a path"):
        store.snapshot(None)
    assert os.listdir(tmp_path) == ["mem"]


def test_too_many_tensors_for_one_file(
    filled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled()
    monkeypatch.setattr(archive, "_MAX_HEADER_BYTES", 3000)
    with pytest.raises(ValueError, match="some layers at a time"):
        export_store(store.path, tmp_path / "f")
    assert os.listdir(tmp_path) == ["mem"]


@pytest.mark.parametrize("fields", [{}, {"quantize_stored": True}])
def test_each_damaged_byte_is_seen(
    fields: dict[str, Any], filled: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    export_store(filled(**fields).path, tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    places = {*range(0, head, head // 40), *range(head, len(data), len(data) // 30), len(data) - 1}
    mutants = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
    mutants += [data[:at] for at in (0, 7, 8, head - 1, head, head + 1, len(data) - 1)]
    mutants += [data + b"\0", b"", b"{}", os.urandom(400)]
    for number, mutant in enumerate(mutants):
        (tmp_path / "m").write_bytes(mutant)
        with pytest.raises((hybridmem.CorruptStoreError, hybridmem.VersionError)):
            import_store(tmp_path / "m", tmp_path / f"back{number}")
    assert sorted(os.listdir(tmp_path)) == ["f", "m", "mem"]


def forged(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change the header of an export file and make its checksum anew."""
    end = 8 + int.from_bytes(data[:8], "little")
    members = json.loads(data[8:end])
    change(members)
    members["__metadata__"]["header_crc32c"] = "00000000"
    text = json.dumps(members, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    digits = b"%08x" % crc32c(head)
    return (
        head.replace(b'"header_crc32c":"00000000"', b'"header_crc32c":"' + digits + b'"')
        + data[end:]
    )


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda m: m["__metadata__"].update(format="hybridmem"),
    "no index": lambda m: m["__metadata__"].pop("index"),
    "index of something": lambda m: m["__metadata__"].update(index="{}"),
    "a source of nobody": lambda m: m["__metadata__"].update(source_99="1"),
    "a source that is not JSON": lambda m: m["__metadata__"].update(source_2="{"),
    "a source that is too large": lambda m: m["__metadata__"].update(
        source_2=json.dumps("x" * 70_000)
    ),
    "half of a pair of surrogates": lambda m: m["__metadata__"].update(source_2='"\ud800"'),
    "a list in the metadata": lambda m: m["__metadata__"].update(more=[]),
    "a name changed": lambda m: m.update(k_99=m.pop("k_2")),
    "a column gone": lambda m: m.update(k_99=m.pop("layer_idx")),
    "a column of another type": lambda m: m["layer_idx"].update(dtype="F32"),
    "a column of another shape": lambda m: m["layer_idx"].update(shape=[1, 11]),
    "keys in one dimension": lambda m: m["k_2"].update(shape=[4 * 24]),
    "keys of fewer tokens": lambda m: m["k_2"].update(shape=[2, 48]),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_file_made_to_do_harm(name: str, filled: Callable[..., Any], tmp_path: Path) -> None:
    export_store(filled().path, tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "g").write_bytes(forged(data, lambda members: None))
    import_store(tmp_path / "g", tmp_path / "good")
    (tmp_path / "g").write_bytes(forged(data, FORGED[name]))
    with pytest.raises(hybridmem.CorruptStoreError):
        import_store(tmp_path / "g", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_newer_version_says_what_to_do(filled: Callable[..., Any], tmp_path: Path) -> None:
    export_store(filled().path, tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    newer = forged(data, lambda members: members["__metadata__"].update(format_version="2"))
    (tmp_path / "g").write_bytes(newer)
    with pytest.raises(hybridmem.VersionError, match="newer"):
        import_store(tmp_path / "g", tmp_path / "back")

    def of_newer_store(members: dict[str, Any]) -> None:
        index = members["__metadata__"]["index"].replace('"format_version":1', '"format_version":9')
        members["__metadata__"]["index"] = index

    (tmp_path / "h").write_bytes(forged(data, of_newer_store))
    with pytest.raises(hybridmem.VersionError, match="format_version 9"):
        import_store(tmp_path / "h", tmp_path / "back")


def test_a_damaged_store_is_not_exported(filled: Callable[..., Any], tmp_path: Path) -> None:
    store = filled()
    store.close()
    shard = min(store.path.glob("shard_*"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    with pytest.raises(hybridmem.CorruptStoreError, match="checksum"):
        export_store(store.path, tmp_path / "f")
    assert os.listdir(tmp_path) == ["mem"]

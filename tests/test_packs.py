"""Memory packs: what is in them, that they do not change, and that damage is named."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import archive, verify

WIDTH = 16
CONFIG: dict[str, Any] = {"embed_dim": WIDTH, "hdc_dim": 256}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def fill(store: hybridmem.Store, rng: np.random.Generator, count: int, layers: int = 2) -> None:
    for number in range(count):
        rows = rng.standard_normal((2, 3, WIDTH)).astype(np.float32)
        store.put(*rows, layer_idx=number % layers, importance=number, source={"at": number})


def told(store: hybridmem.Store) -> dict[int, Any]:
    """Return all that is known of each entry, but where its bytes are."""
    return {
        entry.entry_id: (
            entry.layer_idx,
            entry.importance,
            entry.timestamp,
            entry.access_count,
            entry.padding,
            entry.signature,
            entry.source,
            entry.keys.tobytes(),
            entry.values.tobytes(),
        )
        for entry in map(store.get, store)
    }


@pytest.fixture
def packed(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A pack of a store with dead entries and several shards."""
    with hybridmem.create(tmp_path / "mem", shard_max_bytes=4096, **CONFIG) as store:
        fill(store, rng, 30)
        store.flush()
        store.delete(7)
    assert hybridmem.pack(tmp_path / "mem", tmp_path / "pack") == 29
    return tmp_path / "pack"


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_a_pack_holds_what_is_committed(form: str, tmp_path: Path, rng: Any) -> None:
    kept = {"quantize_stored": True} if form == "int8" else {"kv_dtype": form}
    limits = {"max_entries": 20, "max_disk_bytes": 1 << 16}
    calls = []
    with hybridmem.create(tmp_path / "mem", **CONFIG, **kept, **limits) as store:
        store.calibrate(1, keys=np.ones(WIDTH, np.float32))
        fill(store, rng, 20)
        store.delete(3)
        store.query(np.ones(WIDTH, np.float32), 0)
        store.flush()
        wanted = told(store)
        fill(store, rng, 1)  # not flushed
        count = hybridmem.pack(
            store.path, tmp_path / "deep" / "pack", progress=lambda *at: calls.append(at)
        )
        assert count == 19
        assert calls[-1] == (19, 19)
        with hybridmem.open(tmp_path / "deep" / "pack", mode="r") as pack:
            assert told(pack) == wanted
            assert pack.store_id != store.store_id
            assert pack.calibration.keys() == {1}
            assert pack.config == store.config.replace(max_entries=0, max_disk_bytes=0)
            assert pack.stats().dead_bytes == 0


def test_a_pack_has_the_sums_of_all_its_files(packed: Path) -> None:
    lines = (packed / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    files = {path.name: path.read_bytes() for path in packed.iterdir()}
    del files["SHA256SUMS"]
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert {name.split("_")[0] for name in files} == {"entries.bin", "index.json", "shard"}
    assert verify.verify(packed).ok


def damaged(path: Path, name: str, how: str) -> None:
    file = path / name
    data = bytearray(file.read_bytes())
    if how == "bit":
        data[len(data) // 2] ^= 1
    elif how == "longer":
        data += b"\0"
    file.write_bytes(data)
    if how == "missing":
        file.unlink()


@pytest.mark.parametrize("how", ["bit", "longer", "missing"])
@pytest.mark.parametrize("name", ["entries.bin", "shard_0000.safetensors"])
def test_damage_is_named(name: str, how: str, packed: Path) -> None:
    damaged(packed, name, how)
    faults = verify.verify(packed).faults
    assert any(fault.file == name and "SHA256SUMS" in fault.message for fault in faults)


def test_what_other_checksums_do_not_cover_is_covered(packed: Path) -> None:
    """Access counts lie outside the checksums of a store."""
    with (packed / "entries.bin").open("r+b") as file:
        file.seek(28)
        file.write(b"\x07")
    (fault,) = verify.verify(packed).faults
    assert (fault.file, fault.message) == (
        "entries.bin",
        "does not match its checksum in SHA256SUMS",
    )


def test_a_damaged_list_is_named(packed: Path) -> None:
    with (packed / "SHA256SUMS").open("a") as file:
        file.write("nonsense\n")
    (fault,) = verify.verify(packed).faults
    assert fault.file == "SHA256SUMS"
    assert "nonsense" in fault.message


@pytest.mark.parametrize("name", ["index.json", "entries.bin", "shard_0000.safetensors"])
def test_a_list_that_was_cut_short_is_named(name: str, packed: Path) -> None:
    sums = packed / "SHA256SUMS"
    lines = [line for line in sums.read_text().splitlines(True) if not line.endswith(f"{name}\n")]
    sums.write_text("".join(lines))
    (fault,) = verify.verify(packed).faults
    assert (fault.file, fault.message) == (name, "has no checksum in SHA256SUMS")


@pytest.mark.parametrize("name", ["..", ".", "a\0b", "x" * 5000, "/etc/passwd", "lock/x"])
def test_a_list_of_other_names_is_named(name: str, packed: Path) -> None:
    with (packed / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    (fault,) = verify.verify(packed).faults
    assert fault.file in ("SHA256SUMS", name)


def test_a_pack_is_not_made_inside_its_store(packed: Path, tmp_path: Path) -> None:
    """The store takes names of its files for its own, and removes what no commit names."""
    before = sorted((tmp_path / "mem").iterdir())
    for name in ("pack", "deep/pack"):
        with pytest.raises(ValueError, match="inside the store"):
            hybridmem.pack(tmp_path / "mem", tmp_path / "mem" / name)
    assert sorted((tmp_path / "mem").iterdir()) == before


def test_a_pack_is_not_written_to(packed: Path, tmp_path: Path, rng: Any) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    for options in ({}, {"salvage": True}, {"max_entries": 1}):
        with pytest.raises(hybridmem.ReadOnlyError, match=r"memory pack.* hybridmem\.layered"):
            hybridmem.open(packed, **options)
    row = np.ones((1, WIDTH), np.float32)
    with hybridmem.open(packed, mode="r") as pack:
        pack.query(row, 0)
        with pytest.raises(hybridmem.ReadOnlyError):
            pack.put(row, row, 0)
        pack.snapshot(tmp_path / "copy")
    with pytest.raises(hybridmem.StoreExistsError):
        hybridmem.create(packed, **CONFIG)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    with hybridmem.open(tmp_path / "copy") as copy:
        assert copy.put(row, row, 0) == 31
    assert verify.verify(packed).ok


def test_a_pack_without_its_sums_is_a_store(packed: Path) -> None:
    (packed / "SHA256SUMS").unlink()
    with hybridmem.open(packed) as store:
        store.delete(1)


def test_nothing_is_left_where_it_fails(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(hybridmem.StoreExistsError):
        hybridmem.pack(tmp_path / "mem", packed)
    with pytest.raises(hybridmem.StoreNotFoundError):
        hybridmem.pack(tmp_path / "none", tmp_path / "other")
    damaged(tmp_path / "mem", "shard_0000.safetensors", "bit")
    with pytest.raises(hybridmem.CorruptStoreError):
        hybridmem.pack(tmp_path / "mem", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mem", "pack"]


def test_the_same_pack_may_be_packed_again(packed: Path, tmp_path: Path) -> None:
    hybridmem.pack(packed, tmp_path / "again")
    with (
        hybridmem.open(packed, mode="r") as one,
        hybridmem.open(tmp_path / "again", mode="r") as other,
    ):
        assert told(one) == told(other)
        assert one.store_id != other.store_id


def test_a_pack_that_another_is_copied_over_is_named(packed: Path, tmp_path: Path) -> None:
    """A reader would take its configuration and its ids for those of the other."""
    other = {**CONFIG, "seed": 5}
    with hybridmem.create(tmp_path / "new", **other) as store:
        fill(store, np.random.default_rng(6), 4)
    hybridmem.pack(tmp_path / "new", tmp_path / "new pack")
    with hybridmem.open(packed, mode="r") as reader, hybridmem.layered([packed]) as memory:
        shutil.copytree(tmp_path / "new pack", packed, dirs_exist_ok=True)
        for refresh in (reader.refresh, memory.refresh):
            with pytest.raises(hybridmem.CorruptStoreError, match="holds another store"):
                refresh()
        assert len(reader) == len(memory) == 29


# -- packed like another store --------------------------------------------------------------------


@pytest.fixture
def calibrated(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, seed: int, count: int, layers: int = 2, **put: Any) -> Path:
        rng = np.random.default_rng(seed)
        with hybridmem.create(tmp_path / name, **CONFIG) as store:
            store.calibrate(0, keys=rng.standard_normal(WIDTH).astype(np.float32))
            for number in range(count):
                rows = rng.standard_normal((2, 3, WIDTH)).astype(np.float32)
                store.put(*rows, number % layers, **put)
        return tmp_path / name

    return make


def test_a_pack_like_another_store_can_be_layered_with_it(
    calibrated: Callable[..., Path], tmp_path: Path, rng: Any
) -> None:
    ours, theirs = calibrated("ours", 1, 10), calibrated("theirs", 2, 10, layers=3)
    with hybridmem.open(ours) as store, hybridmem.open(theirs, mode="r") as other:
        with pytest.raises(ValueError, match="like="):
            hybridmem.layered([other, store])
        hybridmem.pack(theirs, tmp_path / "pack", like=store)
        hybridmem.pack(theirs, tmp_path / "plain")
        memory = hybridmem.layered([tmp_path / "pack", store])
        # As if they had been put into one store.
        shutil.copytree(ours, tmp_path / "union")
        with hybridmem.open(tmp_path / "union") as union:
            for entry in map(other.get, other):
                union.put(entry.keys, entry.values, entry.layer_idx)
            query = rng.standard_normal((2, WIDTH)).astype(np.float32)
            for layer in range(3):
                got = [(hit.score, bytes(hit.keys)) for hit in memory.query(query, layer, 9)]
                wanted = [(hit.score, bytes(hit.keys)) for hit in union.query(query, layer, 9)]
                assert sorted(got) == sorted(wanted)
                assert [score for score, _ in got] == [score for score, _ in wanted]
        memory.close()
        with hybridmem.open(tmp_path / "pack", mode="r") as pack:
            np.testing.assert_array_equal(pack.calibration[0][0], store.calibration[0][0])
            signatures = pack.get(1).signature, other.get(1).signature
            assert signatures[0] != signatures[1]
            assert pack.get(2).signature == other.get(2).signature  # a layer that neither centres
    assert verify.verify(tmp_path / "pack").ok


def test_index_keys_cannot_be_signed_anew(
    calibrated: Callable[..., Path], tmp_path: Path, rng: Any
) -> None:
    ours = calibrated("ours", 1, 4)
    index_keys = rng.standard_normal((3, WIDTH)).astype(np.float32)
    theirs = calibrated("theirs", 2, 4, index_keys=index_keys)
    with hybridmem.open(ours, mode="r") as store, pytest.raises(ValueError, match="index_keys"):
        hybridmem.pack(theirs, tmp_path / "pack", like=store)
    assert not (tmp_path / "pack").exists()


def test_a_pack_like_a_store_of_another_kind_is_refused(packed: Path, tmp_path: Path) -> None:
    with (
        hybridmem.create(tmp_path / "other", embed_dim=24) as other,
        pytest.raises(ValueError, match="cannot be layered: their embed_dim are 24 and 16"),
    ):
        hybridmem.pack(tmp_path / "mem", tmp_path / "new", like=other)


# -- shared ---------------------------------------------------------------------------------------

READER = """
import sys, hybridmem
with hybridmem.open(sys.argv[1], mode="r") as pack:
    for _ in sys.stdin:
        total = sum(float(entry.keys.sum() + entry.values.sum()) for entry in map(pack.get, pack))
        kib = dict.fromkeys(("Rss:", "Private_Clean:", "Private_Dirty:"), 0)
        for line in open("/proc/self/smaps"):
            words = line.split()
            if "-" in words[0]:
                of_shard = line.rstrip().endswith(".safetensors")
            elif of_shard and words[0] in kib:
                kib[words[0]] += int(words[1])
        print(*kib.values(), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux: /proc/self/smaps")
def test_processes_share_the_pages_of_a_pack(tmp_path: Path, rng: Any) -> None:
    """What two processes read of keys and values is in memory once."""
    with hybridmem.create(tmp_path / "mem", **CONFIG | {"embed_dim": 1024}) as store:
        rows = rng.standard_normal((2, 64, 1024)).astype(np.float32)
        for _ in range(8):
            store.put(*rows, 0)
    hybridmem.pack(tmp_path / "mem", tmp_path / "pack")
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path / "pack")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]

    def read(reader: Any) -> list[int]:
        """Let it read everything; KiB of it that it has in memory, and that it has for itself."""
        reader.stdin.write("\n")
        reader.stdin.flush()
        return [int(kib) for kib in reader.stdout.readline().split()]

    wanted = 8 * rows.nbytes // 1024
    try:
        for _ in range(20):  # the system may take pages from one of them and not yet the other
            read(readers[0])
            resident, clean, dirty = read(readers[1])
            if resident >= wanted and clean + dirty == 0:
                break
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert resident >= wanted
    assert (clean, dirty) == (0, 0)


@pytest.mark.parametrize(
    ("make", "copy"), [(hybridmem.pack, "pack"), (archive.export_store, "export")]
)
def test_a_writer_that_compacts_meanwhile_is_named(make: Any, copy: str, tmp_path: Path) -> None:
    row = np.ones((1, 8), np.float32)
    with hybridmem.create(tmp_path / "mem", embed_dim=8, shard_max_bytes=1) as store:
        for _ in range(6):
            store.put(row, row, 0)
        store.flush()

        def compact(*_: int) -> None:
            if len(store) == 6:
                store.delete(6)
                store.compact()

        words = rf"compacted .*mem meanwhile \(.*\): try again, or make a snapshot and {copy} that"
        with pytest.raises(hybridmem.SnapshotGoneError, match=words):
            make(tmp_path / "mem", tmp_path / "made", progress=compact)
        assert [path.name for path in tmp_path.iterdir()] == ["mem"]
        make(tmp_path / "mem", tmp_path / "made")

"""Looking at every byte of a store: what is damaged, and what of it can still be trusted."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hybridmem import _source
from hybridmem._codec import Codec
from hybridmem._entries import ENTRIES_NAME, EntryTable
from hybridmem._fileio import Directory, is_temporary
from hybridmem._format import (
    BLOCK_RECORDS,
    PARTS,
    SOURCE,
    extend_checksums,
    record_dtype,
    shard_name,
    shard_number,
)
from hybridmem._manifest import INDEX_NAME, Manifest, read_manifest, unchecked_manifest
from hybridmem._shards import ShardPool, scanned_shard
from hybridmem._snapshot import Loaded
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, HybridMemError
from hybridmem.results import Fault

__all__ = ["Examined", "examine"]

Progress = Callable[[int, int], None]
Records = npt.NDArray[np.void]


@dataclasses.dataclass(slots=True)
class Examined:
    """What was found in a store.

    Attributes
    ----------
    manifest : Manifest
        As committed, or made anew from the other files where index.json cannot be read.
    records : structured array
        Committed records that were read, dead and damaged ones included.
    sound : bool array
        Live records that verify, with all of their tensors.
    n_live : int
        Live records that there should be.
    faults : list of Fault
    orphans : list of str
        Files that no commit names; the next writer removes them. No fault.
    pool : ShardPool
        To read the tensors of sound entries from.
    """

    manifest: Manifest
    records: Records
    sound: npt.NDArray[np.bool_]
    n_live: int
    faults: list[Fault]
    orphans: list[str]
    pool: ShardPool

    def loaded(self, directory: Directory) -> Loaded:
        """Return what verifies as a snapshot in memory."""
        table = EntryTable.empty(directory, self.manifest.config)
        for record in self.records[self.sound]:
            fields = {name: record[name].item() for name in record.dtype.names[:-1]}
            signature = np.frombuffer(record["signature"].tobytes(), np.uint8)
            table.append(signature, **fields)
        table.n_committed = table.n_rows
        used = set(self.records["shard_idx"][self.sound].tolist())
        manifest = self.manifest.replace(
            n_records=table.n_rows,
            entries_crc=tuple(extend_checksums((), 0, table.records(np.arange(table.n_rows)))),
            shards=tuple(shard for shard in self.manifest.shards if shard.number in used),
            dead=(),
        )
        return Loaded(manifest, table, ENTRIES_NAME)


def examine(
    directory: Directory, *, config: Config | None = None, progress: Progress | None = None
) -> Examined:
    """Read and check everything: index.json, records, shard headers, every tensor.

    Parameters
    ----------
    config : Config, optional
        Of the store, for where index.json is damaged.
    progress : callable, optional
        Called with the number of entries that were checked and that there are.

    Raises
    ------
    StoreNotFoundError, VersionError, StoreIOError
    CorruptStoreError
        If index.json cannot be read at all and no `config` was given.
    """
    faults: list[Fault] = []
    manifest = _manifest(directory, config, faults)
    records, bad = _records(directory, manifest, faults)
    live = np.ones(len(records), np.bool_)
    for first, last in manifest.dead:
        live[first : last + 1] = False
    dead = sum(last - first + 1 for first, last in manifest.dead)
    sound = live & ~bad
    _check_fields(directory, manifest, records, sound, faults)
    pool = ShardPool(directory, max(1, manifest.config.max_open_shards), "pread", reader=False)
    pool.retarget(manifest.shards)
    bad_shards = _check_shards(manifest, pool, faults)
    _check_tensors(manifest, records, sound, pool, bad_shards, faults, progress)
    names = {shard_name(shard.number) for shard in manifest.shards}
    orphans = [
        name
        for name in sorted(directory.names())
        if (shard_number(name) is not None and name not in names)
        or is_temporary(name)
        or name.startswith(f"{ENTRIES_NAME}.g")
    ]
    return Examined(manifest, records, sound, manifest.n_records - dead, faults, orphans, pool)


def _fault(error: HybridMemError, file: str, entry_id: int | None = None) -> Fault:
    return Fault(
        file=file,
        message=str(error),
        offset=getattr(error, "offset", None),
        records=getattr(error, "records", None),
        entry_id=entry_id,
    )


def _manifest(directory: Directory, config: Config | None, faults: list[Fault]) -> Manifest:
    try:
        return read_manifest(directory)
    except CorruptStoreError as error:
        faults.append(_fault(error, INDEX_NAME))
        manifest = unchecked_manifest(directory)
        if manifest is not None:
            # Its checksums of records still tell: records that match them are those it belongs to,
            # and have the width that it says.
            return manifest if config is None else manifest.replace(config=config)
        if config is None:
            raise CorruptStoreError(
                f"{error}; nothing in it can be used: give the config that the store was made with "
                "to hybridmem.verify.salvage",
                path=error.path,
            ) from None
    numbers = sorted(
        number for name in directory.names() if (number := shard_number(name)) is not None
    )
    shards = tuple(
        info for number in numbers if (info := scanned_shard(directory, number)) is not None
    )
    width = record_dtype(config.hdc_dim).itemsize
    try:
        n_records = directory.size(ENTRIES_NAME) // width
    except FileNotFoundError:
        n_records = 0
    return Manifest(
        config=config,
        store_id=secrets.token_hex(16),
        next_entry_id=1 << 64,
        next_shard=numbers[-1] + 1 if numbers else 0,
        n_records=n_records,
        shards=shards,
    )


def _records(
    directory: Directory, manifest: Manifest, faults: list[Fault]
) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Return the records there are, and which of them lie in blocks that do not verify."""
    best: tuple[Records, npt.NDArray[np.bool_], list[Fault]] | None = None
    for name in (ENTRIES_NAME, manifest.entries_name):
        try:
            fd, size = directory.open_file(name)
        except FileNotFoundError:
            continue
        except CorruptStoreError as error:
            faults.append(_fault(error, name))
            continue
        try:
            found = _read_records(directory, fd, size, name, manifest)
        finally:
            directory.close_file(fd)
        if best is None or int((~found[1]).sum()) > int((~best[1]).sum()):
            best = found
    if best is None:
        if manifest.n_records:
            message = f"{directory.path / ENTRIES_NAME} is missing"
            records = (0, manifest.n_records - 1)
            faults.append(Fault(file=ENTRIES_NAME, message=message, records=records))
        return np.empty(0, record_dtype(manifest.config.hdc_dim)), np.empty(0, np.bool_)
    faults.extend(best[2])
    return best[:2]


def _read_records(
    directory: Directory, fd: int, size: int, name: str, manifest: Manifest
) -> tuple[Records, npt.NDArray[np.bool_], list[Fault]]:
    dtype = record_dtype(manifest.config.hdc_dim)
    width = dtype.itemsize
    count = min(manifest.n_records, size // width)
    raw = np.empty((count, width), np.uint8)
    if count:
        directory.read_into(fd, memoryview(raw).cast("B"), 0, name)
    faults = []
    if count < manifest.n_records:
        lost = (count, manifest.n_records - 1)
        message = f"{name} ends after {count} of {manifest.n_records} records"
        faults.append(Fault(file=name, message=message, offset=size, records=lost))
    bad = np.zeros(count, np.bool_)
    for block, crc in enumerate(manifest.entries_crc):
        first, end = block * BLOCK_RECORDS, min((block + 1) * BLOCK_RECORDS, manifest.n_records)
        if first >= count:
            break
        if end > count or extend_checksums((), 0, raw[first:end]) != [crc]:
            bad[first:end] = True
            message = f"records {first} to {end - 1} do not match their checksum"
            records = (first, end - 1)
            faults.append(Fault(file=name, message=message, offset=first * width, records=records))
    return raw.view(dtype)[:, 0] if count else np.empty(0, dtype), bad, faults


def _check_fields(
    directory: Directory,
    manifest: Manifest,
    records: Records,
    sound: npt.NDArray[np.bool_],
    faults: list[Fault],
) -> None:
    """Hold the rules on fields that a checksum made anew would hide."""
    ids = records["entry_id"]
    largest = np.maximum.accumulate(ids) if len(ids) else ids
    falls = np.zeros(len(ids), np.bool_)
    falls[1:] = ids[1:] <= largest[:-1]
    numbers = np.array([shard.number for shard in manifest.shards], np.uint32)
    rules = (
        ("entry_id is 0 or not below next_entry_id",
         (ids == 0) | (ids > np.uint64(manifest.next_entry_id - 1))),
        ("entry_id does not ascend", falls),
        ("n_tokens is 0", records["n_tokens"] == 0),
        ("importance is not finite and >= 0",
         ~(np.isfinite(records["importance"]) & (records["importance"] >= 0))),
        ("shard_idx names no shard", ~np.isin(records["shard_idx"], numbers)),
    )  # fmt: skip
    for rule, broken in rules:
        for row in np.flatnonzero(broken & sound).tolist():
            sound[row] = False
            offset = row * records.dtype.itemsize
            message = f"{rule} in record {row}"
            faults.append(
                Fault(file=ENTRIES_NAME, message=message, offset=offset, records=(row, row))
            )


def _check_shards(
    manifest: Manifest, pool: ShardPool, faults: list[Fault]
) -> dict[int, CorruptStoreError]:
    """Return what is wrong with the shards that cannot be opened."""
    bad = {}
    for shard in manifest.shards:
        try:
            pool.header(shard.number)
        except CorruptStoreError as error:
            # A fresh one: that which was raised keeps all that was on its way.
            bad[shard.number] = CorruptStoreError(str(error), path=error.path, offset=error.offset)
            faults.append(_fault(error, shard_name(shard.number)))
    return bad


def _check_tensors(
    manifest: Manifest,
    records: Records,
    sound: npt.NDArray[np.bool_],
    pool: ShardPool,
    bad_shards: dict[int, CorruptStoreError],
    faults: list[Fault],
    progress: Progress | None,
) -> None:
    config = manifest.config
    codec = Codec(config.kv_dtype, quantize_stored=config.quantize_stored)
    rows = np.flatnonzero(sound)
    rows = rows[np.argsort(records["shard_idx"][rows], kind="stable")]
    for done, row in enumerate(rows.tolist()):
        entry_id, number = int(records["entry_id"][row]), int(records["shard_idx"][row])
        try:
            if number in bad_shards:
                raise bad_shards[number]
            parts = pool.load(number, entry_id, PARTS)
            tensors = [part for part in parts if part.suffix != SOURCE]
            wrong = codec.mismatch(tensors, int(records["n_tokens"][row]), config.embed_dim)
            wrong = wrong or _source.fault(parts)
            if wrong is not None:
                raise pool.corrupt(number, f"entry {entry_id}: {wrong}")
        except CorruptStoreError as error:
            sound[row] = False
            faults.append(_fault(error, shard_name(number), entry_id))
        if progress is not None:
            progress(done + 1, len(rows))

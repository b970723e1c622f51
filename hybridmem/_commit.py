"""The commit protocol: how puts, evictions and compactions become durable (docs/durability.md).

The rename of index.json is the only commit point. Whatever fails before it is undone and leaves the
last commit; whatever fails at it or after it leaves a writer that refuses to go on, since what
reached the disk is not known. Nothing is removed that a committed index.json may name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isqrt

import numpy as np

from hybridmem._codec import Tensor
from hybridmem._entries import ENTRIES_NAME, Bytes, EntryTable, Rows, dead_ranges
from hybridmem._fileio import Buffer, Directory, UnknownOutcomeError
from hybridmem._format import (
    HEAD_BYTES,
    HEADER_FIXED_BYTES,
    HEADER_TENSOR_BYTES,
    extend_checksums,
    shard_name,
)
from hybridmem._manifest import INDEX_NAME, Manifest, ShardInfo
from hybridmem._shards import MAX_SHARD_ENTRIES, ShardPool, write_shard
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, StoreFullError, StoreIOError

__all__ = ["RESERVE_NAME", "Writer"]

RESERVE_NAME = "reserve"
_PAGE = 4096
#: Records written per buffer of a compaction.
_PIECE_RECORDS = 8192


class Writer:
    """Holds what is not committed yet and commits it. The store's lock guards it.

    Attributes
    ----------
    manifest : Manifest
        The last commit.
    pending : dict of int to list of Tensor
        Keys and values of entries that are in no shard yet.
    """

    def __init__(
        self, directory: Directory, manifest: Manifest, table: EntryTable, pool: ShardPool, io: str
    ) -> None:
        self.manifest = manifest
        self.table = table
        self.pending: dict[int, list[Tensor]] = {}
        self._pending_size = 0
        self.next_entry_id = manifest.next_entry_id
        self.calibration = manifest.calibration
        self.accessed: set[int] = set()
        self.failure: BaseException | None = None
        self._directory = directory
        self._pool = pool
        self._io = io
        self._next_shard = manifest.next_shard
        self._spilled: dict[int, ShardInfo] = {}
        self._marked = False
        self._committing = False
        self._reserve = 0
        self.index_bytes = len(manifest.encode())
        shards, counts = np.unique(
            table.column("shard_idx")[table.alive_rows()], return_counts=True
        )
        self._live: dict[int, int] = dict(zip(shards.tolist(), counts.tolist(), strict=True))
        self._renew_reserve()

    def check(self) -> None:
        """Refuse to go on after a failure whose outcome is not known."""
        if self.failure is not None:
            raise StoreIOError(
                f"an earlier write failed and what reached the disk is not known ({self.failure}); "
                "close this store and open it again"
            )

    # -- changes, in memory until the next commit --------------------------------------------------

    def add(self, entry_id: int, tensors: list[Tensor]) -> None:
        """Keep the tensors of an entry that was put."""
        self.pending[entry_id] = tensors
        self._pending_size += _shard_bytes(tensors)
        self.next_entry_id = entry_id + 1

    def room_for(self, tensors: list[Tensor], config: Config) -> bool:
        """Whether an entry fits the shard that is being filled."""
        size = HEADER_FIXED_BYTES + self._pending_size + _shard_bytes(tensors)
        full = size > config.shard_max_bytes or len(self.pending) >= MAX_SHARD_ENTRIES
        return not (full and self.pending)

    def kill(self, row: int) -> None:
        """Mark a live entry dead; if it was never written, it never will be."""
        entry_id = int(self.table.columns["entry_id"][row])
        self.table.kill(row)
        tensors = self.pending.pop(entry_id, None)
        if tensors is not None:
            self._pending_size -= _shard_bytes(tensors)
        else:
            self._live[int(self.table.columns["shard_idx"][row])] -= 1
        if row < self.table.n_committed:
            self._marked = True

    def spill(self, config: Config) -> None:
        """Move the pending tensors to shards on disk, which no commit names yet."""
        self.check()
        written: list[ShardInfo] = []
        try:
            self._write_pending(config, written)
        except BaseException as error:
            self._failed(error, written)
            raise
        self._spilled.update({info.number: info for info in written})
        self.pending.clear()
        self._pending_size = 0

    # -- commits ----------------------------------------------------------------------------------

    def flush(self, config: Config) -> bool:
        """Commit everything; return whether a new generation was made."""
        self.check()
        table = self.table
        n_before = table.n_committed
        new_rows = n_before + np.flatnonzero(table.alive[n_before : table.n_rows])
        is_commit = (
            len(new_rows) > 0
            or self._marked
            or config != self.manifest.config
            or self.calibration != self.manifest.calibration
        )
        if not is_commit and self.next_entry_id == self.manifest.next_entry_id:
            self._write_access_counts()
            return False
        written: list[ShardInfo] = []
        try:
            self._write_pending(config, written)
            records = table.records(new_rows)
            pieces = self._access_pieces()
            if len(new_rows):
                pieces.append((n_before * table.dtype.itemsize, [memoryview(records).cast("B")]))
            if pieces:
                self._directory.update_file(ENTRIES_NAME, pieces)
            self._directory.sync()
            known = {
                shard.number: shard
                for shard in (*self.manifest.shards, *self._spilled.values(), *written)
            }
            shards = tuple(
                shard for number, shard in sorted(known.items()) if self._live.get(number, 0)
            )
            manifest = self._next(
                config=config,
                n_records=n_before + len(new_rows),
                entries_crc=tuple(extend_checksums(self.manifest.entries_crc, n_before, records)),
                shards=shards,
                dead=dead_ranges(table.alive[:n_before]),
            )
            self._commit(manifest)
        except BaseException as error:
            self._failed(error, written)
            raise
        self.pending.clear()
        self._pending_size = 0
        self._spilled.clear()
        self.accessed.clear()
        self._settle(manifest, {number for number in known if not self._live.get(number, 0)})
        table.drop_dead_new()
        if len(new_rows):
            table.committed(manifest.n_records, self._io)
        return True

    def commit_marks(self) -> None:
        """Commit evictions and deletions alone, which needs no disk space; free what they held."""
        self.check()
        if not self._marked:
            return
        dead = {
            shard.number for shard in self.manifest.shards if not self._live.get(shard.number, 0)
        }
        try:
            manifest = self._next(
                shards=tuple(shard for shard in self.manifest.shards if shard.number not in dead),
                dead=dead_ranges(self.table.alive[: self.table.n_committed]),
            )
            self._commit(manifest)
        except BaseException as error:
            self._failed(error, [])
            raise
        self._settle(manifest, dead)

    def compact(
        self, victims: Collection[int], signed: dict[int, tuple[Bytes, int]] | None = None
    ) -> None:
        """Commit a generation without dead records. Everything must have been flushed.

        Parameters
        ----------
        victims : collection of int
            Shards whose live entries are moved to new ones.
        signed : dict of int to (signature, padding), optional
            New signatures of some entries, by id.
        """
        self.check()
        rows = self.table.alive_rows()
        table = self.table.compacted(rows)
        for entry_id, (_, padding) in (signed or {}).items():
            table.columns["padding"][table.find(entry_id)] = padding
        written: list[ShardInfo] = []
        name = ""
        try:
            moved = np.isin(table.column("shard_idx"), np.array(sorted(victims), np.uint32))
            for info, at in self._rewritten(table, np.flatnonzero(moved)):
                written.append(info)
                table.columns["shard_idx"][at] = info.number
            live = {int(number) for number in np.unique(table.column("shard_idx"))}
            known = {shard.number: shard for shard in (*self.manifest.shards, *written)}
            manifest = self._next(
                n_records=len(rows),
                shards=tuple(known[number] for number in sorted(live)),
                dead=(),
            )
            name = manifest.entries_name
            crcs: list[int] = []
            self._directory.write_file(name, self._all_records(table, rows, signed or {}, crcs))
            self._directory.sync()
            manifest = manifest.replace(entries_crc=tuple(crcs))
            self._commit(manifest)
            self._directory.rename(name, ENTRIES_NAME)
            # Else a later commit could survive a crash that this rename does not.
            self._directory.sync()
        except BaseException as error:
            self._failed(error, written, name)
            raise
        self.table = table
        table.committed(len(rows), self._io)
        numbers, counts = np.unique(table.column("shard_idx"), return_counts=True)
        self._live = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self.accessed.clear()
        self._settle(manifest, known.keys() - live)

    def worn_shards(self) -> set[int]:
        """Return the committed shards that hold dead entries."""
        return {
            shard.number
            for shard in self.manifest.shards
            if self._live.get(shard.number, 0) < shard.entries
        }

    def small_shards(self, config: Config, more_than: int = 1) -> set[int]:
        """Return small shards of like size to merge, none unless more than `more_than` are small.

        Like sizes together, so that a byte is moved a logarithmic number of times before it rests.
        """
        small = sorted(
            (s.size, s.number) for s in self.manifest.shards if s.size < config.shard_max_bytes // 4
        )
        if len(small) <= more_than:
            return set()
        total, chosen = 0, set()
        for size, number in small:
            if total and size > 2 * total:
                break
            total += size
            chosen.add(number)
        return chosen if len(chosen) > 1 else set()

    def due(self, config: Config) -> set[int] | None:
        """Return the shards that are worth rewriting now, None while a compaction is not worth it.

        A compaction rewrites all records, so it waits until enough has gathered to pay for it: dead
        records or dead bytes of half of what is alive, or so many ranges or small shards that
        index.json, written at each commit, would grow with the number of entries and not with its
        square root.
        """
        many = max(256, 4 * isqrt(self.table.n_committed))
        small = (
            self.small_shards(config, more_than=many) if len(self.manifest.shards) > many else set()
        )
        worn = {
            s.number: s
            for s in self.manifest.shards
            if 4 * self._live.get(s.number, 0) <= 3 * s.entries
        }
        dead_bytes = sum(
            s.size * (s.entries - self._live.get(s.number, 0)) // s.entries for s in worn.values()
        )
        live_bytes = sum(s.size for s in self.manifest.shards) - dead_bytes
        is_due = (
            self.dead_records > max(1024, self.table.n_alive // 2)
            or len(self.manifest.dead) > 4 * many
            or dead_bytes > max(1 << 20, live_bytes // 2)
        )
        return worn.keys() | small if is_due or small else None

    @property
    def dead_records(self) -> int:
        """Number of committed records of dead entries."""
        n = self.table.n_committed
        return n - int(np.count_nonzero(self.table.alive[:n]))

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of tensors that no commit names."""
        return sum(map(_nbytes, self.pending.values())) + sum(
            shard.size for shard in self._spilled.values()
        )

    # -- pieces -----------------------------------------------------------------------------------

    def _next(self, **changes: object) -> Manifest:
        return self.manifest.replace(
            generation=self.manifest.generation + 1,
            next_entry_id=self.next_entry_id,
            next_shard=self._next_shard,
            calibration=self.calibration,
            **changes,
        )

    def _commit(self, manifest: Manifest) -> None:
        data = manifest.encode()
        self.index_bytes = len(data)
        try:
            name = self._directory.write_temporary([data], INDEX_NAME)
        except StoreFullError:
            if self._reserve < len(data):
                raise
            name, self._reserve = RESERVE_NAME, 0
            self._directory.overwrite_temporary(name, data)
        self._committing = True
        self._directory.rename(name, INDEX_NAME)
        self._directory.sync()

    def _settle(self, manifest: Manifest, dead: Collection[int]) -> None:
        """Take over a manifest that is committed and remove the shards that it no longer names."""
        self.manifest = manifest
        self._marked = self._committing = False
        for number in dead:
            self._pool.forget(number)
            self._live.pop(number, None)
            self._directory.remove(shard_name(number))
        self._renew_reserve()

    def _renew_reserve(self) -> None:
        """Keep room for one more index.json, so that evictions can be committed on a full disk."""
        wanted = -(-2 * self.index_bytes // _PAGE) * _PAGE
        if wanted <= self._reserve:
            return
        try:
            self._directory.preallocate(RESERVE_NAME, wanted)
            self._reserve = wanted
        except StoreIOError:
            self._reserve = 0  # no space now: the next commit tries again

    def _write_pending(self, config: Config, written: list[ShardInfo]) -> None:
        """Write the pending tensors to new shards, adding each to `written`."""
        for entries in _batches(self.pending.items(), config.shard_max_bytes):
            info = self._write_shard(entries)
            written.append(info)
            self._live[info.number] = len(entries)
            for entry_id, _ in entries:
                row = self.table.find(entry_id)
                assert row is not None
                self.table.columns["shard_idx"][row] = info.number

    def _write_shard(self, entries: Sequence[tuple[int, Sequence[Tensor]]]) -> ShardInfo:
        number = self._next_shard
        if number >= 1 << 32:
            raise StoreIOError("all shard numbers are used: export the entries to a new store")
        info, header = write_shard(self._directory, number, entries)
        self._next_shard = number + 1
        self._pool.add(info, header)
        return info

    def _rewritten(self, table: EntryTable, rows: Rows) -> Iterator[tuple[ShardInfo, Rows]]:
        """Copy the tensors of some rows to new shards; yield each with its rows."""
        at = 0
        for batch in _batches(self._stored(table, rows), self.manifest.config.shard_max_bytes):
            yield self._write_shard(batch), rows[at : at + len(batch)]
            at += len(batch)

    def _stored(self, table: EntryTable, rows: Rows) -> Iterator[tuple[int, list[Tensor]]]:
        for row in rows.tolist():
            entry_id = int(table.columns["entry_id"][row])
            yield entry_id, self._pool.load(int(table.columns["shard_idx"][row]), entry_id)

    def _all_records(
        self, table: EntryTable, rows: Rows, signed: dict[int, tuple[Bytes, int]], crcs: list[int]
    ) -> Iterator[Buffer]:
        """Yield the records of a compacted table, made of `rows` of this one."""
        for start in range(0, len(rows), _PIECE_RECORDS):
            part = rows[start : start + _PIECE_RECORDS]
            records = self.table.records(part)
            fields = records.view(self.table.dtype)[:, 0]
            for name in ("shard_idx", "padding"):
                fields[name] = table.columns[name][start : start + len(part)]
            if signed:
                for at, entry_id in enumerate(fields["entry_id"].tolist()):
                    if entry_id in signed:
                        records[at, HEAD_BYTES:] = signed[entry_id][0]
            crcs[:] = extend_checksums(crcs, start, records)
            yield memoryview(records).cast("B")

    def _access_pieces(self) -> list[tuple[int, Sequence[Buffer]]]:
        pieces: list[tuple[int, Sequence[Buffer]]] = []
        rows = sorted(
            row
            for entry_id in self.accessed
            if (row := self.table.find(entry_id)) is not None and row < self.table.n_committed
        )
        for row in rows:
            count = int(self.table.columns["access_count"][row])
            pieces.append((row * self.table.dtype.itemsize + 28, [count.to_bytes(4, "little")]))
        return pieces

    def _write_access_counts(self) -> None:
        pieces = self._access_pieces()
        if pieces:
            try:
                self._directory.update_file(ENTRIES_NAME, pieces)
            except BaseException as error:
                self._failed(error, [])
                raise
        self.accessed.clear()

    def _failed(
        self, error: BaseException, written: Sequence[ShardInfo], records: str = ""
    ) -> None:
        """Undo an attempt that reached no commit; refuse to go on after one that may have."""
        if self._committing or isinstance(error, UnknownOutcomeError):
            self.failure = error
            return
        for info in written:
            self._pool.forget(info.number)
            self._live.pop(info.number, None)
            self._directory.remove(shard_name(info.number))
        if records:
            self._directory.remove(records)
        try:
            committed = self.manifest.n_records * self.table.dtype.itemsize
            if self._directory.size(ENTRIES_NAME) > committed:
                self._directory.truncate_file(ENTRIES_NAME, committed)
        except (OSError, StoreIOError, CorruptStoreError):
            pass  # a tail that no commit names: ignored by readers, cut at the next open


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(memoryview(tensor.data).nbytes for tensor in tensors)


def _shard_bytes(tensors: Sequence[Tensor]) -> int:
    """Return what an entry takes in a shard, its part of the header included, at most."""
    return _nbytes(tensors) + len(tensors) * HEADER_TENSOR_BYTES


def _batches(
    entries: Iterable[tuple[int, list[Tensor]]], max_bytes: int
) -> Iterator[list[tuple[int, list[Tensor]]]]:
    """Divide entries among shards."""
    batch: list[tuple[int, list[Tensor]]] = []
    size = HEADER_FIXED_BYTES
    for entry_id, tensors in entries:
        nbytes = _shard_bytes(tensors)
        if batch and (size + nbytes > max_bytes or len(batch) >= MAX_SHARD_ENTRIES):
            yield batch
            batch, size = [], HEADER_FIXED_BYTES
        batch.append((entry_id, tensors))
        size += nbytes
    if batch:
        yield batch

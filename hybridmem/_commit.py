"""The commit protocol: how puts, evictions and compactions become durable (docs/durability.md).

The rename of index.json is the only commit point. Whatever fails before it is undone and leaves the
last commit; whatever fails at it or after it leaves a writer that refuses to go on, since what
reached the disk is not known. Nothing is removed that a committed index.json may name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hybridmem import _slabs
from hybridmem._codec import Tensor
from hybridmem._entries import ENTRIES_NAME, Bytes, EntryTable, Rows, dead_ranges
from hybridmem._fileio import Buffer, Directory, Piece, UnknownOutcomeError
from hybridmem._format import HEAD_BYTES, HEADER_FIXED_BYTES, PARTS, extend_checksums, shard_name
from hybridmem._manifest import INDEX_NAME, Manifest, ShardInfo
from hybridmem._shards import (
    MAX_SHARD_ENTRIES,
    ShardPool,
    batches,
    shard_bytes,
    tensor_bytes,
    write_shard,
)
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, StoreFullError, StoreIOError

__all__ = ["RESERVE_NAME", "Flush", "Writer"]

RESERVE_NAME = "reserve"
_PAGE = 4096
_PIECE_RECORDS = 8192  # written per buffer of a compaction


@dataclasses.dataclass(slots=True)
class Flush:
    """What one flush commits, taken at one moment.

    Attributes
    ----------
    manifest : Manifest or None
        The next one; None if only access counts are written, which are in no commit.
    batches : list of (shard number, entries)
    pieces : list of (offset, buffers)
        What is written into entries.bin.
    dead_shards : list of int
        Shards to remove afterwards.
    spilled, accessed, marked : what the writer takes back if the flush fails
    written : list of ShardInfo
        Shards written so far.
    """

    manifest: Manifest | None
    batches: list[tuple[int, list[tuple[int, list[Tensor]]]]]
    pieces: list[Piece]
    dead_shards: list[int]
    spilled: dict[int, ShardInfo]
    accessed: set[int]
    marked: bool
    written: list[ShardInfo] = dataclasses.field(default_factory=list)


class Writer:
    """Holds what is not committed yet and commits it. The store's lock guards it.

    Attributes
    ----------
    manifest : Manifest
        The last commit.
    live : dict of int to int
        Live entries of each shard that was written.
    pending, flushing : dict of int to list of Tensor
        Keys and values of entries that are in no shard yet, and of those that a flush under way is
        writing.
    """

    def __init__(
        self, directory: Directory, manifest: Manifest, table: EntryTable, pool: ShardPool, io: str
    ) -> None:
        self.manifest = manifest
        self.table = table
        self.pending: dict[int, list[Tensor]] = {}
        self.flushing: dict[int, list[Tensor]] = {}
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
        self._changing = self._in_commit = self._committing = False
        self._reserve = 0
        self.index_bytes = len(manifest.encode())
        shards, counts = np.unique(
            table.column("shard_idx")[table.alive_rows()], return_counts=True
        )
        self.live: dict[int, int] = dict(zip(shards.tolist(), counts.tolist(), strict=True))
        self._renew_reserve()

    def check(self) -> None:
        """Refuse to go on after a failure whose outcome is not known."""
        if self.failure is not None:
            raise StoreIOError(
                f"an earlier write failed and what reached the disk is not known ({self.failure}); "
                "close this store and open it again"
            )

    @property
    def is_broken(self) -> bool:
        """Whether a write failed, or a change or commit was cut short; asked with both locks."""
        return self.failure is not None or self._changing or self._in_commit

    def check_whole(self) -> None:
        """Refuse to go on if the writer is broken."""
        if self.is_broken and self.failure is None:
            self.failure = StoreIOError("a change was interrupted half-way")
        self.check()

    # -- changes, in memory until the next commit --------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Guard a change of several tables, which must not be committed if it is cut short."""
        if self._changing:
            self.check_whole()
        self._changing = True
        yield
        self._changing = False

    def add(self, entry_id: int, tensors: list[Tensor]) -> None:
        """Keep the tensors of an entry that was put."""
        self.pending[entry_id] = tensors
        self._pending_size += shard_bytes(tensors)
        self.next_entry_id = entry_id + 1

    def room_for(self, tensors: list[Tensor], config: Config) -> bool:
        """Whether an entry fits the shard that is being filled."""
        size = HEADER_FIXED_BYTES + self._pending_size + shard_bytes(tensors)
        full = size > config.shard_max_bytes or len(self.pending) >= MAX_SHARD_ENTRIES
        return not (full and self.pending)

    def kill(self, row: int) -> None:
        """Mark a live entry dead; if it was never written, it never will be."""
        entry_id = int(self.table.columns["entry_id"][row])
        self.table.kill(row)
        tensors = self.pending.pop(entry_id, None)
        if tensors is not None:
            self._pending_size -= shard_bytes(tensors)
            return
        self.live[int(self.table.columns["shard_idx"][row])] -= 1
        if row < self.table.n_committed:
            self._marked = True

    def spill(self, config: Config) -> None:
        """Move the pending tensors to shards on disk, which no commit names yet."""
        self._begin()
        written: list[ShardInfo] = []
        try:
            for number, entries in self._assigned(config):
                written.append(self._write_shard(number, entries))
        except BaseException as error:
            self._undo(error, written)
            raise
        self._spilled.update({info.number: info for info in written})
        _slabs.keep(max(_slabs.KEPT_BYTES, self._pending_size))
        self.pending = {}
        self._pending_size = 0
        self._in_commit = False

    # -- commits ----------------------------------------------------------------------------------

    def flush(self, config: Config) -> None:
        """Commit everything, holding the lock throughout."""
        flush = self.begin(config)
        if flush is not None:
            try:
                self.write(flush)
            except BaseException as error:
                self.fail(flush, error)
                raise
            self.finish(flush)

    def begin(self, config: Config) -> Flush | None:
        """Take everything that is not committed for one commit; None if there is nothing.

        What is put, evicted or deleted from now on belongs to the next one.
        """
        self.check_whole()
        table = self.table
        table.drop_dead_new()
        n_before, n_after = table.n_committed, table.n_rows
        pieces = self._access_pieces()
        is_commit = (
            n_after > n_before
            or self._marked
            or config != self.manifest.config
            or self.calibration != self.manifest.calibration
            or self.next_entry_id != self.manifest.next_entry_id
        )
        if not is_commit and not pieces:
            return None
        self._begin()
        assigned = list(self._assigned(config))
        records = table.records(np.arange(n_before, n_after))
        if len(records):
            pieces.append((n_before * table.dtype.itemsize, [memoryview(records).cast("B")]))
        manifest = None
        shards = (*self.manifest.shards, *self._spilled.values())
        if is_commit:
            manifest = self._next(
                config=config,
                n_records=n_after,
                entries_crc=tuple(extend_checksums(self.manifest.entries_crc, n_before, records)),
                shards=tuple(shard for shard in shards if self.live.get(shard.number, 0)),
                dead=dead_ranges(table.alive[:n_before]),
            )
        flush = Flush(
            manifest=manifest,
            batches=assigned,
            pieces=pieces,
            dead_shards=[shard.number for shard in shards if not self.live.get(shard.number, 0)],
            spilled=self._spilled,
            accessed=self.accessed,
            marked=self._marked,
        )
        self.flushing, self.pending, self._pending_size = self.pending, {}, 0
        self._spilled, self.accessed, self._marked = {}, set(), False
        return flush

    def write(self, flush: Flush) -> None:
        """Write and commit; needs no lock but the one that keeps other commits out."""
        for number, entries in flush.batches:
            flush.written.append(self._write_shard(number, entries))
        if flush.pieces:
            self._directory.update_file(ENTRIES_NAME, flush.pieces)
        if flush.manifest is not None:
            self._directory.sync()
            shards = sorted((*flush.manifest.shards, *flush.written), key=lambda one: one.number)
            flush.manifest = flush.manifest.replace(shards=tuple(shards))
            self._commit(flush.manifest)

    def finish(self, flush: Flush) -> None:
        """Take note that a flush is committed."""
        self.flushing = {}
        if flush.batches and not flush.spilled:  # less than a shard is put at a time
            _slabs.keep(_slabs.KEPT_BYTES)
        if flush.manifest is not None:
            n_before, n_after = self.table.n_committed, flush.manifest.n_records
            self.table.committed(n_after, self._io)
            # What was evicted or deleted meanwhile is in this commit, and goes with the next.
            self._marked |= not self.table.alive[n_before:n_after].all()
            self._settle(flush.manifest, flush.dead_shards)
        self._in_commit = False

    def fail(self, flush: Flush, error: BaseException) -> None:
        """Take back what a failed flush did not commit; it stays to be flushed again."""
        if not self._undo(error, flush.written):
            return  # what is being flushed stays readable from memory
        for number, _ in flush.batches:
            self.live.pop(number, None)
        taken = [one for one in self.flushing if self.table.find(one) is not None]
        self.pending = {one: self.flushing[one] for one in taken} | self.pending
        self.flushing = {}
        self._pending_size = sum(map(shard_bytes, self.pending.values()))
        self._spilled = {**flush.spilled, **self._spilled}
        self.accessed |= flush.accessed
        self._marked |= flush.marked

    def commit_marks(self) -> None:
        """Commit evictions and deletions alone, which needs no disk space; free what they held."""
        if not self._marked:
            return
        self._begin()
        dead = {
            shard.number for shard in self.manifest.shards if not self.live.get(shard.number, 0)
        }
        try:
            manifest = self._next(
                shards=tuple(shard for shard in self.manifest.shards if shard.number not in dead),
                dead=dead_ranges(self.table.alive[: self.table.n_committed]),
            )
            self._commit(manifest)
        except BaseException as error:
            self._undo(error, [])
            raise
        self._marked = False
        self._settle(manifest, dead)
        self._in_commit = False

    def compact(
        self, victims: Collection[int], signed: dict[int, tuple[Bytes, int]] | None = None
    ) -> None:
        """Commit a generation without dead records; what was not flushed stays so.

        Parameters
        ----------
        victims : collection of int
            Shards whose live entries are moved to new ones.
        signed : dict of int to (signature, padding), optional
            New signatures of some entries, by id.
        """
        self._begin()
        rows = np.flatnonzero(self.table.alive[: self.table.n_committed])
        table = self.table.compacted(rows)
        for entry_id, (signature, padding) in (signed or {}).items():
            table.sign(entry_id, signature, padding)
        written: list[ShardInfo] = []
        name = ""
        try:
            column = table.columns["shard_idx"][: len(rows)]
            moved = np.flatnonzero(np.isin(column, np.array(sorted(victims), np.uint32)))
            for info, at in self._rewritten(table, moved):
                written.append(info)
                column[at] = info.number
            numbers, counts = np.unique(column, return_counts=True)
            live: dict[int, int] = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
            known = {shard.number: shard for shard in (*self.manifest.shards, *written)}
            shards = tuple(known[number] for number in live)
            manifest = self._next(n_records=len(rows), shards=shards, dead=())
            name = manifest.entries_name
            crcs: list[int] = []
            records = self._all_records(table, rows, signed or {}, crcs)
            self._directory.write_file(name, [(0, records)])
            self._directory.sync()
            manifest = manifest.replace(entries_crc=tuple(crcs))
            self._commit(manifest)
            self._directory.rename(name, ENTRIES_NAME)
            # Else a later commit could survive a crash that this rename does not.
            self._directory.sync()
        except BaseException as error:
            self._undo(error, written, name)
            raise
        self.table = table
        self.live = live | {number: self.live[number] for number in self._spilled}
        self._marked = False
        self._settle(manifest, known.keys() - live.keys())
        self._in_commit = False

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of tensors that no commit names."""
        unwritten = (*self.pending.values(), *self.flushing.values())
        return sum(map(tensor_bytes, unwritten)) + sum(one.size for one in self._spilled.values())

    # -- pieces -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.check_whole()
        self._directory.check_lock()
        self._in_commit = True

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
            name = self._directory.write_temporary([(0, [data])], INDEX_NAME)
        except StoreFullError:
            if self._reserve < len(data):
                raise
            name, self._reserve = RESERVE_NAME, 0
            self._directory.overwrite_temporary(name, data)
        try:
            self._directory.check_lock()
        except BaseException:
            self._directory.remove(name)
            raise
        self._committing = True
        self._directory.rename(name, INDEX_NAME)
        self._directory.sync()

    def _settle(self, manifest: Manifest, dead: Collection[int]) -> None:
        """Take over a manifest that is committed and remove the shards that it no longer names."""
        self.manifest = manifest
        self._committing = False
        self._directory.remove_leaving()
        for number in dead:
            self._pool.forget(number)
            self.live.pop(number, None)
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

    def _assigned(self, config: Config) -> Iterator[tuple[int, list[tuple[int, list[Tensor]]]]]:
        """Divide the pending entries among shards whose numbers were never used."""
        for entries in batches(self.pending.items(), config.shard_max_bytes):
            number = self._new_number()
            for entry_id, _ in entries:
                row = self.table.find(entry_id)
                assert row is not None
                self.table.columns["shard_idx"][row] = number
            self.live[number] = len(entries)
            yield number, entries

    def _new_number(self) -> int:
        number = self._next_shard
        if number >= 1 << 32:
            raise StoreIOError("all shard numbers are used: export the entries to a new store")
        self._next_shard = number + 1
        return number

    def _write_shard(
        self, number: int, entries: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> ShardInfo:
        info, header = write_shard(self._directory, number, entries)
        self._pool.add(info, header)
        return info

    def _rewritten(self, table: EntryTable, rows: Rows) -> Iterator[tuple[ShardInfo, Rows]]:
        """Copy the tensors of some rows to new shards; yield each with its rows."""
        at = 0
        for batch in batches(self._stored(table, rows), self.manifest.config.shard_max_bytes):
            yield self._write_shard(self._new_number(), batch), rows[at : at + len(batch)]
            at += len(batch)

    def _stored(self, table: EntryTable, rows: Rows) -> Iterator[tuple[int, list[Tensor]]]:
        for row in rows.tolist():
            entry_id = int(table.columns["entry_id"][row])
            yield entry_id, self._pool.load(int(table.columns["shard_idx"][row]), entry_id, PARTS)

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

    def _access_pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        rows = sorted(
            row
            for entry_id in self.accessed
            if (row := self.table.find(entry_id)) is not None and row < self.table.n_committed
        )
        for row in rows:
            count = int(self.table.columns["access_count"][row])
            pieces.append((row * self.table.dtype.itemsize + 28, [count.to_bytes(4, "little")]))
        return pieces

    def _undo(self, error: BaseException, written: Sequence[ShardInfo], records: str = "") -> bool:
        """Remove what an attempt wrote that reached no commit.

        One that may have reached it leaves everything, and a writer that refuses to go on: False.
        """
        if self._committing or isinstance(error, UnknownOutcomeError):
            self.failure = error
            return False
        for info in written:
            self._pool.forget(info.number)
            self.live.pop(info.number, None)
            self._directory.remove(shard_name(info.number))
        if records:
            self._directory.remove(records)
        try:
            committed = self.manifest.n_records * self.table.dtype.itemsize
            if self._directory.size(ENTRIES_NAME) > committed:
                self._directory.truncate_file(ENTRIES_NAME, committed)
        except (OSError, StoreIOError, CorruptStoreError):
            pass  # a tail that no commit names: ignored by readers, cut at the next open
        self._in_commit = False
        return True

"""The records of a store in memory: fields as columns, signatures in the mapped entries.bin."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem._checksums import crc32c
from hybridmem._fileio import Directory
from hybridmem._format import BLOCK_RECORDS, HEAD_BYTES, record_dtype
from hybridmem._manifest import Manifest
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError

__all__ = ["ENTRIES_NAME", "EntryTable", "dead_ranges"]

ENTRIES_NAME = "entries.bin"

_HEAD = np.dtype(record_dtype(64).descr[:-1])
_NAMES = _HEAD.names or ()

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


class EntryTable:
    """All entries of a snapshot and those put since, one row each, in the order of their ids.

    The first `n_committed` rows are the records of entries.bin; later rows are not written yet and
    keep their signature here. Not thread-safe: the store's lock guards it.

    Attributes
    ----------
    n_rows, n_committed, n_alive : int
    columns : dict of str to array
        Fields of the records by name, longer than `n_rows`.
    alive : bool array
        Rows that are neither evicted nor deleted.
    """

    def __init__(self, config: Config) -> None:
        self.dtype = record_dtype(config.hdc_dim)
        self.n_rows = 0
        self.n_committed = 0
        self.n_alive = 0
        self.n_tokens_alive = 0
        self._by_layer: dict[int, int] = {}
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.empty(0, _HEAD[name]) for name in _NAMES
        }
        self.alive = np.empty(0, np.bool_)
        self._directory: Directory | None = None
        self._records: npt.NDArray[np.void] | None = None  # entries.bin, mapped when it is needed
        self._first_new = 0
        self._new: list[
            Bytes
        ] = []  # signatures of rows from _first_new on; those before are in the file

    @classmethod
    def empty(cls, directory: Directory, config: Config) -> EntryTable:
        """Return the table of a store without records."""
        table = cls(config)
        table._directory = directory
        return table

    # -- reading entries.bin ----------------------------------------------------------------------

    @classmethod
    def load(cls, directory: Directory, name: str, manifest: Manifest, io: str) -> EntryTable:
        """Read and verify the committed records from the file `name`.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        CorruptStoreError
            If it is too short, a checksum differs or a record breaks a rule of the format.
        """
        table = cls(manifest.config)
        table._directory = directory
        count = manifest.n_records
        fd, size = directory.open_file(name)
        try:
            path = str(directory.path / name)
            width = table.dtype.itemsize
            if size < count * width:
                raise CorruptStoreError(
                    f"{path} has {size} bytes, too few for the {count} records of {width} bytes "
                    "that index.json names",
                    path=path,
                    offset=size,
                    records=(size // width, count - 1),
                )
            table._reserve(count)
            signatures = np.empty((count, width - HEAD_BYTES), np.uint8) if io == "pread" else None
            crcs = table._read_verified(directory, fd, name, manifest, signatures)
            if crcs:
                first, last = (
                    crcs[0] * BLOCK_RECORDS,
                    min(count, (crcs[-1] + 1) * BLOCK_RECORDS) - 1,
                )
                raise CorruptStoreError(
                    f"{path} does not match its checksums in records {first} to {last}; "
                    "`hybridmem verify` lists every fault, "
                    "`hybridmem salvage` keeps what verifies",
                    path=path,
                    offset=first * width,
                    records=(first, last),
                )
            table.n_rows = table.n_committed = count
            for first, last in manifest.dead:
                table.alive[first : last + 1] = False
            table._recount()
            table._check(manifest, path)
            if signatures is not None:
                table._new = list(signatures)
            else:
                # Mapped at once: a reader must keep this file when a compaction replaces it.
                table._first_new = count
                table._map(fd, count)
            return table
        finally:
            directory.close_file(fd)

    def _read_verified(
        self,
        directory: Directory,
        fd: int,
        name: str,
        manifest: Manifest,
        signatures: Bytes | None,
    ) -> list[int]:
        """Read all records once; return the numbers of the blocks whose checksum differs."""
        count, width = manifest.n_records, self.dtype.itemsize
        buffer = np.empty((min(BLOCK_RECORDS, count), width), np.uint8)  # stays in the caches
        wrong = []
        for number, start in enumerate(range(0, count, BLOCK_RECORDS)):
            rows = buffer[: min(BLOCK_RECORDS, count - start)]
            place = slice(start, start + len(rows))
            done = directory.read_into(fd, memoryview(rows).cast("B"), start * width, name)
            records = rows.view(self.dtype)[:, 0]
            for field in _NAMES:
                self.columns[field][place] = records[field]
            if signatures is not None:
                signatures[place] = rows[:, HEAD_BYTES:]
            records["access_count"] = 0  # as which checksums take it
            if done < rows.nbytes or crc32c(rows) != manifest.entries_crc[number]:
                wrong.append(number)
        self.alive[:count] = True
        return wrong

    def _check(self, manifest: Manifest, path: str) -> None:
        """Hold every rule on fields, in one vectorised pass, before anything is computed."""
        n = self.n_rows
        column = {name: values[:n] for name, values in self.columns.items()}
        ids = column["entry_id"]
        shards = np.array([shard.number for shard in manifest.shards], np.uint32)
        rules = (
            ("entry_id is 0", ids == 0),
            ("entry_id is not below next_entry_id", ids > np.uint64(manifest.next_entry_id - 1)),
            (
                "entry_id does not ascend",
                np.concatenate(([False], ids[1:] <= ids[:-1])) if n else ids == 0,
            ),
            ("n_tokens is 0", column["n_tokens"] == 0),
            (
                "importance is not finite and >= 0",
                ~(np.isfinite(column["importance"]) & (column["importance"] >= 0)),
            ),
            ("shard_idx names no shard", self.alive[:n] & ~np.isin(column["shard_idx"], shards)),
        )
        for rule, broken in rules:
            if broken.any():
                row = int(np.flatnonzero(broken)[0])
                raise CorruptStoreError(
                    f"{path} is damaged: {rule} in record {row}",
                    path=path,
                    offset=row * self.dtype.itemsize,
                    records=(row, row),
                )

    # -- rows -------------------------------------------------------------------------------------

    def append(self, signature: Bytes, **fields: int | float) -> int:
        """Add a row; return its number."""
        row = self.n_rows
        self._reserve(row + 1)
        for name in _NAMES:
            self.columns[name][row] = fields.get(name, 0)
        self.alive[row] = True
        self._new.append(signature)
        self.n_rows += 1
        self.n_alive += 1
        self.n_tokens_alive += int(fields["n_tokens"])
        layer = int(fields["layer_idx"])
        self._by_layer[layer] = self._by_layer.get(layer, 0) + 1
        return row

    def find(self, entry_id: int) -> int | None:
        """Return the row of a live entry."""
        if not 0 < entry_id < 1 << 64:
            return None
        ids = self.columns["entry_id"]
        row = entry_id - ids.item(0) if self.n_rows else 0  # right where none before it is gone
        if not (0 <= row < self.n_rows and ids.item(row) == entry_id):
            row = int(ids[: self.n_rows].searchsorted(np.uint64(entry_id)))
        found = row < self.n_rows and ids.item(row) == entry_id and self.alive.item(row)
        return row if found else None

    def rows(self, entry_ids: npt.NDArray[np.uint64]) -> Rows:
        """Return the rows of entries that there are."""
        return self.columns["entry_id"][: self.n_rows].searchsorted(entry_ids)

    def kill(self, row: int) -> None:
        """Mark a live row dead."""
        self.alive[row] = False
        self.n_alive -= 1
        self.n_tokens_alive -= int(self.columns["n_tokens"][row])
        layer = int(self.columns["layer_idx"][row])
        self._by_layer[layer] -= 1
        if not self._by_layer[layer]:
            del self._by_layer[layer]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one field of all rows."""
        return self.columns[name][: self.n_rows]

    def alive_rows(self, layer_idx: int | None = None) -> Rows:
        """Return the live rows, of one layer if given."""
        mask = self.alive[: self.n_rows]
        if layer_idx is not None:
            mask = mask & (self.column("layer_idx") == layer_idx)
        return np.flatnonzero(mask)

    def first_alive(self) -> int:
        """Return the first live row; there must be one."""
        return int(np.argmax(self.alive[: self.n_rows]))

    def layers(self) -> dict[int, int]:
        """Return the number of live entries of each layer that has any."""
        return self._by_layer

    def signatures(self, rows: Rows) -> Iterator[tuple[Rows, Bytes]]:
        """Yield signatures of ascending rows in pieces of a MB: rows, uint8 [n, hdc_dim/8]."""
        step = max(1, (1 << 20) // self.dtype["signature"].itemsize)
        in_file = int(np.searchsorted(rows, self._first_new))
        for start in range(0, in_file, step):
            part = rows[start : min(start + step, in_file)]
            yield part, np.ascontiguousarray(self._mapped()[part, HEAD_BYTES:])
        for start in range(in_file, len(rows), step):
            part = rows[start : start + step]
            yield part, np.stack([self._new[row - self._first_new] for row in part.tolist()])
        self._drop_pages()

    def records(self, rows: Rows) -> Bytes:
        """Return packed records of ascending rows: uint8 [n, record bytes]."""
        packed = np.zeros(len(rows), self.dtype)
        for name in _NAMES:
            packed[name] = self.columns[name][rows]
        raw = packed.view(np.uint8).reshape(len(rows), self.dtype.itemsize)
        at = 0
        for part, signatures in self.signatures(rows):
            raw[at : at + len(part), HEAD_BYTES:] = signatures
            at += len(part)
        return raw

    def structured(self) -> npt.NDArray[np.void]:
        """Return the records of the live rows as a read-only array that fits a data frame."""
        rows = self.alive_rows()
        array = np.empty(len(rows), [*_HEAD.descr, ("signature", object)])
        for name in _NAMES:
            array[name] = self.columns[name][rows]
        at = 0
        for part, signatures in self.signatures(rows):
            array["signature"][at : at + len(part)] = [
                signature.tobytes() for signature in signatures
            ]
            at += len(part)
        array.flags.writeable = False
        return array

    def committed(self, n_committed: int, io: str) -> None:
        """Take note that the first rows now are the records of entries.bin."""
        self.n_committed = n_committed
        if io == "mmap":
            self._records = None
            self._new = self._new[n_committed - self._first_new :]
            self._first_new = n_committed

    def _mapped(self) -> Bytes:
        """Return the bytes of the committed records, uint8 [n, record bytes]."""
        if self._records is None:
            assert self._directory is not None
            try:
                fd, _ = self._directory.open_file(ENTRIES_NAME)
            except FileNotFoundError:
                path = str(self._directory.path / ENTRIES_NAME)
                raise CorruptStoreError(
                    f"{path} was removed while the store was open", path=path
                ) from None
            try:
                self._map(fd, self._first_new)
            finally:
                self._directory.close_file(fd)
        assert self._records is not None
        return self._records.view(np.uint8).reshape(-1, self.dtype.itemsize)

    def _map(self, fd: int, count: int) -> None:
        if count:
            assert self._directory is not None
            self._records = self._directory.map_records(fd, self.dtype, count, ENTRIES_NAME)

    def close(self) -> None:
        """Let go of the mapped file."""
        self._records = None

    def drop_dead_new(self) -> None:
        """Forget the dead rows that were never written, so that row numbers are record numbers."""
        new = self.alive[self.n_committed : self.n_rows]
        if new.all():
            return
        kept = self.n_committed + np.flatnonzero(new)
        start = self.n_committed - self._first_new
        self._new[start:] = [self._new[row - self._first_new] for row in kept.tolist()]
        end = self.n_committed + len(kept)
        for values in self.columns.values():
            values[self.n_committed : end] = values[kept]
        self.alive[self.n_committed : end] = True
        self.n_rows = end

    def compacted(self, rows: Rows) -> EntryTable:
        """Return a table of some committed rows, as the records of a new file, and the new rows."""
        self.drop_dead_new()
        kept = np.concatenate((rows, np.arange(self.n_committed, self.n_rows)))
        table = EntryTable.__new__(EntryTable)
        table.dtype = self.dtype
        table.columns = {name: self.columns[name][kept] for name in _NAMES}
        table.alive = self.alive[kept]
        table.n_rows = len(kept)
        table.n_committed = len(rows)
        table._directory = self._directory
        table._records = None
        # Either all signatures are in memory or those of committed rows are in the file.
        in_file = self._first_new > 0
        table._first_new = len(rows) if in_file else 0
        in_memory = kept[len(rows) :] - self._first_new if in_file else kept
        table._new = [self._new[row] for row in in_memory.tolist()]
        table._recount()
        return table

    def sign(self, entry_id: int, signature: Bytes, padding: int) -> None:
        """Give a live entry another signature; one that is in the file must be written there."""
        row = self.find(entry_id)
        assert row is not None
        self.columns["padding"][row] = padding
        if row >= self._first_new:
            self._new[row - self._first_new] = signature

    def _recount(self) -> None:
        mask = self.alive[: self.n_rows]
        self.n_alive = int(mask.sum())
        self.n_tokens_alive = int(self.column("n_tokens")[mask].sum(dtype=np.uint64))
        layers, counts = np.unique(self.column("layer_idx")[mask], return_counts=True)
        self._by_layer = dict(zip(layers.tolist(), counts.tolist(), strict=True))

    def _reserve(self, n: int) -> None:
        have = len(self.alive)
        if n <= have:
            return
        # A committed store that is only read needs no slack; one that grows doubles.
        more = n if have == 0 else max(n, 2 * have, 1024)
        for name in _NAMES:
            grown = np.empty(more, _HEAD[name])
            grown[:have] = self.columns[name]
            self.columns[name] = grown
        alive = np.zeros(more, np.bool_)
        alive[:have] = self.alive
        self.alive = alive

    def _drop_pages(self) -> None:
        """Give the mapped pages back: the layer indexes hold what is searched."""
        mapped = getattr(self._records, "_mmap", None)
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_DONTNEED)


def dead_ranges(alive: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return first and last row of each run of dead rows."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], alive, [True])).astype(np.int8)))
    return tuple(zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True))

"""What must go so that max_entries and max_disk_bytes hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hybridmem._chunks import Chunk
from hybridmem._codec import Codec
from hybridmem._entries import EntryTable
from hybridmem._eviction import EvictionQueue
from hybridmem._format import HEAD_BYTES, HEADER_FIXED_BYTES, HEADER_TENSOR_BYTES
from hybridmem.config import Config

__all__ = ["Limits"]

#: Most bytes of a shard in index.json.
_SHARD_INFO_BYTES = 64
_PAGE = 4096


class Limits:
    """Knows how large the directory will be, and which entry goes first.

    The size is an upper bound for a directory without dead entries, known before anything is
    written: what `put` can be held to. After a flush the real one is looked at.
    """

    def __init__(self, config: Config, codec: Codec, table: EntryTable) -> None:
        self.config = config
        self._codec = codec
        self._queue = EvictionQueue()
        #: What entries that were put take beyond their tensors' usual size: sources, above all.
        self._more: dict[int, int] = {}
        tokens, counts = np.unique(table.column("n_tokens")[table.alive_rows()], return_counts=True)
        self._payload = sum(
            count * self.entry_bytes(n)
            for n, count in zip(tokens.tolist(), counts.tolist(), strict=True)
        )

    def entry_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the tensors of an entry."""
        return self._codec.nbytes(n_tokens, self.config.embed_dim)

    def added(self, table: EntryTable, row: int, nbytes: int) -> None:
        """Take note of an entry that was put, and of what it takes."""
        more = nbytes - self.entry_bytes(int(table.columns["n_tokens"][row]))
        if more:
            self._more[int(table.columns["entry_id"][row])] = more
        self._payload += nbytes
        self._queue.added(table, row)

    def removed(self, entry_id: int, n_tokens: int) -> None:
        """Take note of an entry that is gone."""
        self._payload -= self.entry_bytes(n_tokens) + self._more.pop(entry_id, 0)

    def check_fit(self, chunks: Iterable[Chunk], index_bytes: int) -> None:
        """Refuse a chunk that would exceed max_disk_bytes all alone."""
        limit = self.config.max_disk_bytes
        for chunk in chunks if limit else ():
            smallest = self._directory_bytes(1, chunk.nbytes, index_bytes)
            if smallest > limit:
                raise ValueError(
                    f"keys and values of {chunk.n_tokens} tokens take a store of {smallest} bytes, "
                    f"more than max_disk_bytes={limit}; put fewer tokens at a time or raise it"
                )

    def victim(self, table: EntryTable, index_bytes: int, spare: int) -> int | None:
        """Return the row that goes next.

        None if the limits hold, or if only ids from `spare` on are left.
        """
        limit = self.config.max_disk_bytes
        is_over = 0 < self.config.max_entries < table.n_alive or (
            0 < limit < self._directory_bytes(table.n_alive, self._payload, index_bytes)
        )
        return self.first(table, spare) if is_over else None

    def first(self, table: EntryTable, spare: int) -> int | None:
        """Return the row that goes first, None if only ids from `spare` on are left."""
        return self._queue.pop(table, spare)

    def _directory_bytes(self, n_entries: int, payload: int, index_bytes: int) -> int:
        tensors = 6 if self.config.quantize_stored else 2
        record = HEAD_BYTES + self.config.hdc_dim // 8
        # In the worst case each entry has a shard of its own.
        shard = tensors * HEADER_TENSOR_BYTES + HEADER_FIXED_BYTES + _SHARD_INFO_BYTES
        reserve = -(-2 * (index_bytes + 512) // _PAGE) * _PAGE
        return payload + n_entries * (record + shard) + index_bytes + 512 + reserve

"""The signatures of one layer in memory, while entries come and go.

Signatures lie in append-only blocks, so that growing never copies and a view taken earlier stays
valid while entries are added. A block that lost a quarter of its entries is replaced by a smaller
one; views keep the old. Nothing here locks: the store lets one thread at a time call extend, remove
and view; views may be searched by any thread at any time.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike

from hybridmem import _clusters, _kernels
from hybridmem._blocks import LANES, U8, U32, U64, Block, Layout, unsigned
from hybridmem._clusters import Clusters
from hybridmem._view import IndexView
from hybridmem.hdc import SignatureSpec

__all__ = ["LayerIndex"]

# The first block is small, for an index of a few entries. Later ones lie in huge pages and are as
# large as all before them together: scans of blocks in 4 KB pages took up to 1.5 times as long.
FIRST_BLOCK_BYTES = 1 << 18
BLOCK_BYTES = 1 << 24
HUGE_PAGE = 1 << 21


class LayerIndex:
    """Signatures of the entries of one layer.

    Parameters
    ----------
    spec : SignatureSpec
        What a record's signature holds.
    """

    def __init__(self, spec: SignatureSpec) -> None:
        self.spec = spec
        self._layout = Layout(spec)
        self._blocks: tuple[Block, ...] = ()
        self._live = 0
        self._last_id = -1
        self._view: IndexView | None = None
        self._clusters: Clusters | None = None

    def __len__(self) -> int:
        """Number of live entries."""
        return self._live

    def extend(self, ids: ArrayLike, n_tokens: ArrayLike, signatures: ArrayLike) -> None:
        """Append entries.

        Parameters
        ----------
        ids : array_like of uint64, [n]
            Ascending, and above every id added before.
        n_tokens : array_like of uint32, [n]
            At least 1.
        signatures : array_like of uint8, [n, hdc_dim // 8]
            The records' signature fields.
        """
        new_ids = unsigned(ids, np.uint64, "ids")
        tokens = unsigned(n_tokens, np.uint32, "n_tokens")
        records = unsigned(signatures, np.uint8, "signatures")
        n = len(new_ids) if new_ids.ndim == 1 else -1
        if tokens.shape != (n,) or records.shape != (n, self.spec.record_bytes):
            raise ValueError(
                f"ids [n], n_tokens [n] and signatures [n, {self.spec.record_bytes}] expected, got "
                f"{new_ids.shape}, {tokens.shape} and {records.shape}"
            )
        if n == 0:
            return
        if int(new_ids[0]) <= self._last_id or bool((new_ids[1:] <= new_ids[:-1]).any()):
            raise ValueError("ids must ascend and lie above those added before")
        if not tokens.all():
            raise ValueError("n_tokens must be at least 1")
        used = self._layout.used(tokens)
        self._view = None
        done = 0
        while done < n:
            if not self._blocks or self._blocks[-1].filled == self._blocks[-1].capacity:
                self._blocks = (*self._blocks, Block(self._layout, self._next_capacity()))
            block = self._blocks[-1]
            part = slice(done, done + min(n - done, block.capacity - block.filled))
            self._fill(block, new_ids[part], used[part], records[part])
            done = part.stop
        self._last_id = int(new_ids[-1])

    def _next_capacity(self) -> int:
        held = sum(block.capacity for block in self._blocks) * self._layout.entry_bytes
        whole = max(held // HUGE_PAGE, 1) * HUGE_PAGE  # what is touched of a page is there whole
        wanted = whole if held else FIRST_BLOCK_BYTES
        return self._layout.capacity(min(wanted, BLOCK_BYTES))

    def _fill(self, block: Block, ids: U64, used: U32, records: U8) -> None:
        place = slice(block.filled, block.filled + len(ids))
        if self.spec.pooled:
            block.data[place] = records
        else:
            _kernels.late_pack(records, used, place.start, self._layout.lanes, block.data)
            block.used[place] = used
        block.ids[place] = ids
        block.alive[place] = 1
        block.filled = place.stop
        self._live += len(ids)

    def remove(self, entry_id: int) -> None:
        """Take an entry out of later views' results; KeyError where there is none."""
        number = bisect_right(self._blocks, entry_id, key=lambda block: int(block.ids[0])) - 1
        if number < 0 or entry_id > self._last_id:
            raise KeyError(entry_id)
        block = self._blocks[number]
        row = int(np.searchsorted(block.ids[: block.filled], np.uint64(entry_id)))
        if row == block.filled or int(block.ids[row]) != entry_id or not block.alive[row]:
            raise KeyError(entry_id)
        block.alive[row] = 0
        block.dead += 1
        self._live -= 1
        if 4 * block.dead > block.filled:
            self._compact(number)

    def _compact(self, number: int) -> None:
        """Replace a block by one without its dead entries, joined with neighbours that fit in."""
        most = self._layout.capacity(BLOCK_BYTES)
        first, stop = number, number + 1
        live = self._blocks[number].filled - self._blocks[number].dead
        if first > 0 and live + self._blocks[first - 1].filled <= most:
            first -= 1
            live += self._blocks[first].filled - self._blocks[first].dead
        if stop < len(self._blocks) and live + self._blocks[stop].filled <= most:
            live += self._blocks[stop].filled - self._blocks[stop].dead
            stop += 1
        places = sum(block.filled for block in self._blocks[:first])
        kept = np.concatenate([block.alive[: block.filled] for block in self._blocks[first:stop]])
        joined: tuple[Block, ...] = ()
        if live:
            capacity = -(-live // LANES) * LANES
            if stop == len(self._blocks):  # the one that grows
                capacity = max(capacity, self._blocks[-1].capacity)
            new = Block(self._layout, capacity)
            for block in self._blocks[first:stop]:
                new.take(self._layout, block)
            joined = (new,)
        # Who is interrupted from here on has no clusters: all is dealt anew.
        self._view, clusters, self._clusters = None, self._clusters, None
        self._blocks = (*self._blocks[:first], *joined, *self._blocks[stop:])
        if clusters is not None:
            clusters.renumber(places, kept)
            self._clusters = clusters

    def view(self, approximate: bool = False) -> IndexView:
        """The entries there are now; stays searchable while entries are added and removed.

        A removal may or may not show in a view taken before it. Before an approximate search some
        entries are dealt into clusters, where they are many.
        """
        if self._view is None:
            dealt = None if self._clusters is None else self._clusters.dealt()
            self._view = IndexView(self._layout, self._blocks, dealt)
        if approximate and self.spec.pooled and len(self._view) >= _clusters.LARGE:
            end = _clusters.BATCH + (0 if self._clusters is None else self._clusters.end)
            if end <= len(self._view):
                clusters, self._clusters = self._clusters, None  # as above
                clusters = clusters or Clusters(self.spec.record_bytes)
                clusters.deal(self._view, end)
                self._clusters = clusters
                self._view = IndexView(self._layout, self._blocks, clusters.dealt())
        return self._view

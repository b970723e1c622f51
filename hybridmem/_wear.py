"""How much of a store's directory is dead or scattered, and when rewriting it pays.

A compaction rewrites all records, so it waits until enough has gathered to pay for it: dead
records or dead bytes of half of what is alive, or so many ranges or small shards that index.json,
written at each commit, would grow with the number of entries and not with its square root.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

import numpy as np

from hybridmem._entries import EntryTable
from hybridmem._manifest import Manifest
from hybridmem._shards import MAX_SHARD_ENTRIES
from hybridmem.config import Config

__all__ = ["dead_records", "disk_shares", "due", "scattered", "worn"]

#: Less than this is not worth a compaction.
_FEW_RECORDS = 1024
_FEW_BYTES = 1 << 20

Live = Mapping[int, int]


def worn(manifest: Manifest, live: Live, least: float = 0.0) -> set[int]:
    """Return the shards of whose entries more than the share `least` is dead."""
    return {
        shard.number
        for shard in manifest.shards
        if shard.entries - live.get(shard.number, 0) > least * shard.entries
    }


def scattered(manifest: Manifest, config: Config, more_than: int = 1) -> set[int]:
    """Return small shards to merge, none unless there are more than `more_than`.

    Those of like size together, so that a byte is moved a logarithmic number of times before it
    rests.
    """
    small = sorted(
        (shard.size, shard.number)
        for shard in manifest.shards
        if shard.size < config.shard_max_bytes // 4 and shard.entries < MAX_SHARD_ENTRIES // 4
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


def due(manifest: Manifest, live: Live, table: EntryTable, config: Config) -> set[int] | None:
    """Return the shards that are worth rewriting now; None while no compaction is worth it."""
    many = max(256, 4 * isqrt(table.n_committed))
    small = scattered(manifest, config, many) if len(manifest.shards) > many else set()
    dead_bytes = sum(_dead_bytes(manifest, live).values())
    live_bytes = sum(shard.size for shard in manifest.shards) - dead_bytes
    is_due = (
        bool(small)
        or dead_records(table) > max(_FEW_RECORDS, table.n_alive // 2)
        or len(manifest.dead) > 4 * many
        or dead_bytes > max(_FEW_BYTES, live_bytes // 2)
    )
    return worn(manifest, live, 0.25) | small if is_due else None


def dead_records(table: EntryTable) -> int:
    """Return the number of committed records of dead entries."""
    return table.n_committed - int(np.count_nonzero(table.alive[: table.n_committed]))


def disk_shares(manifest: Manifest, table: EntryTable) -> tuple[int, int]:
    """Return the bytes of shards and records on disk that dead and live entries hold.

    The entries of a shard are taken to be of equal size where some of them are dead.
    """
    n = min(manifest.n_records, table.n_rows)
    numbers, counts = np.unique(table.column("shard_idx")[:n][table.alive[:n]], return_counts=True)
    live = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    width = table.dtype.itemsize
    total = sum(shard.size for shard in manifest.shards) + n * width
    dead = sum(_dead_bytes(manifest, live).values())
    dead += (n - int(np.count_nonzero(table.alive[:n]))) * width
    return dead, total - dead


def _dead_bytes(manifest: Manifest, live: Live) -> dict[int, int]:
    return {
        shard.number: shard.size * (shard.entries - live.get(shard.number, 0)) // shard.entries
        for shard in manifest.shards
    }

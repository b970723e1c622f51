"""Which shards a compaction merges, and that a byte comes to rest."""

from __future__ import annotations

from hybridmem._manifest import Manifest, ShardInfo
from hybridmem._shards import MAX_SHARD_ENTRIES
from hybridmem._wear import scattered
from hybridmem.config import Config

CONFIG = Config(embed_dim=64)


def manifest(*shards: tuple[int, int]) -> Manifest:
    """Shards of such sizes and numbers of entries, numbered from 0."""
    infos = tuple(ShardInfo(i, size, 0, entries) for i, (size, entries) in enumerate(shards))
    return Manifest(config=CONFIG, store_id="0" * 32, generation=1, shards=infos)


def test_shards_that_hold_as_many_entries_as_one_may_are_not_merged_again() -> None:
    """However few bytes they have: nothing would come of it, at every compaction."""
    full = [(1_600_000, MAX_SHARD_ENTRIES)] * 25
    single = [(1_100, 1)] * 900
    assert scattered(manifest(*full, *single), CONFIG) == set(range(25, 925))
    assert scattered(manifest(*full), CONFIG) == set()


def test_small_shards_of_like_size_are_merged() -> None:
    assert scattered(manifest((900, 1), (1000, 1), (5000, 4), (90_000, 60)), CONFIG) == {0, 1}
    assert scattered(manifest((900, 1), (1000, 1), (2000, 2), (3000, 3)), CONFIG) == {0, 1, 2, 3}
    large = CONFIG.shard_max_bytes // 2
    assert scattered(manifest((large, 9), (large, 9)), CONFIG) == set()
    assert scattered(manifest((900, 1), (1000, 1)), CONFIG, more_than=2) == set()

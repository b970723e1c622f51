"""Entries taken over as they are, with their ids, times, counts and stored bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridmem._chunks import Chunk
from hybridmem._codec import Tensor
from hybridmem._manifest import Manifest
from hybridmem._shards import tensor_bytes
from hybridmem.store import Store

__all__ = ["Row", "adopt", "insert"]


class Row(NamedTuple):
    """An entry whose id and time someone else has chosen."""

    entry_id: int
    importance: float
    timestamp: int
    chunk: Chunk


def insert(store: Store, layer: int, rows: Sequence[Row]) -> None:
    """Put entries of a layer under ids of their own; those whose ids are used are there already.

    Parameters
    ----------
    rows : sequence of Row
        By ascending id.
    """
    with store._lock:
        used = store._writing().next_entry_id
    new = [row for row in rows if row.entry_id >= used]
    store._make_room([row.chunk for row in new])
    with store._lock:
        writer = store._writing()
        for row in new:
            writer.next_entry_id = row.entry_id
            store._insert(row.chunk, layer, row.importance, row.timestamp)
        if new:
            store._keep_limits(spare=new[0].entry_id)
            store._keep_limits(spare=new[-1].entry_id)  # where the chunks alone exceed them


def adopt(store: Store, entries: Iterable[tuple[Any, list[Tensor]]], like: Manifest) -> None:
    """Put entries into an empty store; its next flush commits them.

    Parameters
    ----------
    entries : iterable of (record, parts)
        Records of entries.bin, by ascending id.
    like : Manifest
        Of the store that they come from: its calibration and its ids are gone on with.
    """
    writer, table = store._writer, store._table
    assert writer is not None
    writer.calibration = like.calibration
    for record, parts in entries:
        fields = {name: record[name].item() for name in record.dtype.names[:-1]}
        if not writer.room_for(parts, store.config):
            writer.spill(store.config)
        writer.add(fields["entry_id"], parts)
        signature = np.frombuffer(record["signature"].tobytes(), np.uint8)
        row = table.append(signature, **fields)
        store._limits.added(table, row, tensor_bytes(parts))
    if like.next_entry_id < 1 << 64:
        writer.next_entry_id = like.next_entry_id

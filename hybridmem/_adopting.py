"""Entries taken over as they are, with their ids, times, counts and stored bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hybridmem._codec import Tensor
from hybridmem._manifest import Manifest
from hybridmem._shards import tensor_bytes
from hybridmem.store import Store

__all__ = ["adopt"]


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

"""Memory packs: stores that do not change any more, to be shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hybridmem import _snapshot, opening
from hybridmem._adopting import adopt
from hybridmem._alike import check_alike
from hybridmem._codec import Tensor
from hybridmem._commit import RESERVE_NAME
from hybridmem._copies import check_outside, new_directory, unless_compacted
from hybridmem._entries import Bytes
from hybridmem._fileio import LOCK_NAME, path_of
from hybridmem._format import PARTS
from hybridmem._manifest import Calibration
from hybridmem._sums import write_sums
from hybridmem.store import Store

__all__ = ["pack"]

StrPath = str | os.PathLike[str]
Signed = dict[int, tuple[Bytes, int]]


def pack(
    store_dir: StrPath,
    pack_dir: StrPath,
    *,
    like: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Make a memory pack of what is committed in a store.

    A pack is a directory that any number of processes read and none writes: a store without bytes
    of dead entries, every byte of which was verified, with the checksums of its files in
    SHA256SUMS. Ids, times and access counts are those of the store; its `store_id` is its own.

    Parameters
    ----------
    store_dir : path
        A writer may have it open.
    pack_dir : path
        There must be nothing yet. After a crash it is complete or not there.
    like : Store, optional
        Centre the layers that this store has entries of, or is calibrated for, as it does, so that
        the two can be layered. Signatures are made anew from the stored keys.
    progress : callable, optional
        Called with the number of entries that were written and that there are.

    Returns
    -------
    int
        The number of entries.

    Raises
    ------
    StoreExistsError
        If there is something at `pack_dir`.
    CorruptStoreError
        If the store is damaged: `hybridmem.verify.salvage` keeps what is whole.
    SnapshotGoneError
        If the writer compacted the store meanwhile: try again, or pack a snapshot.
    ValueError
        If signatures are to be made anew and entries were put with `index_keys`. If `pack_dir` is
        inside the store.
    """
    path = path_of(pack_dir, "pack_dir")
    with opening.open(store_dir, mode="r") as store:
        check_outside(store.path, path)
        manifest = store._manifest
        if like is not None:
            check_alike(like, store)
            manifest = manifest.replace(calibration=_calibration(store, like))
        config = manifest.config.replace(max_entries=0, max_disk_bytes=0)
        with unless_compacted(store.path, "pack"), new_directory(path) as target:
            _snapshot.initialise(target, config)
            with opening.open(target.path) as made:
                adopt(made, _entries(store, manifest.calibration, progress), manifest)
            for name in (LOCK_NAME, RESERVE_NAME):  # of no use to readers
                target.remove(name)
            write_sums(target)
        return len(store)


def _calibration(store: Store, like: Store) -> tuple[Calibration, ...]:
    """Return how a store is to be centred: as another one, in the layers which that has."""
    theirs = {one.layer_idx: one for one in like._manifest.calibration}
    ours = {one.layer_idx: one for one in store._manifest.calibration}
    for layer in like._table.layers():
        ours.pop(layer, None)
    both = ours | theirs
    return tuple(both[layer] for layer in sorted(both))


def _entries(
    store: Store,
    calibration: tuple[Calibration, ...],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield record and parts of each entry, signed anew where its layer is centred otherwise."""
    rows = store._table.alive_rows()
    before, after = (
        {one.layer_idx: one for one in layers}
        for layers in (store._manifest.calibration, calibration)
    )
    signed: Signed = {}
    for layer in store._table.layers():
        if before.get(layer) != after.get(layer):
            entries = store._signed_entries(store._table.alive_rows(layer), store._keys)
            signed |= store._signatures.made_anew(calibration, layer, entries)
    for done, row in enumerate(rows, 1):
        record = store._table.records(np.array([row])).view(store._table.dtype)[0, 0].copy()
        number, entry_id = record["shard_idx"].item(), record["entry_id"].item()
        if entry_id in signed:
            signature, record["padding"] = signed[entry_id]
            record["signature"] = signature.tobytes()
        yield record, store._pool.load(number, entry_id, PARTS)
        if progress is not None:
            progress(done, len(rows))

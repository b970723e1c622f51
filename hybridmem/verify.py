"""Checking every byte of a store, and keeping what verifies of one that is damaged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hybridmem import _snapshot, opening
from hybridmem._adopting import adopt
from hybridmem._codec import Tensor
from hybridmem._copies import new_directory
from hybridmem._examine import Examined, examine
from hybridmem._fileio import Directory, path_of
from hybridmem._format import PARTS
from hybridmem._sums import check_sums
from hybridmem.config import Config
from hybridmem.results import Fault, Report

__all__ = ["Fault", "Report", "salvage", "verify"]

StrPath = str | os.PathLike[str]
Progress = Callable[[int, int], None]


def verify(store_dir: StrPath, progress: Progress | None = None) -> Report:
    """Check everything in a store, reading all of it; nothing is changed.

    Of a memory pack also the checksums in SHA256SUMS.

    Parameters
    ----------
    store_dir : path
    progress : callable, optional
        Called with the number of entries that were checked and that there are.

    Raises
    ------
    StoreNotFoundError, VersionError
    CorruptStoreError
        If index.json is damaged so far that nothing in it can be used.
    """
    directory = opening.directory_of(store_dir)
    try:
        examined = examine(directory, progress=progress)
        examined.pool.close()
        report = _report(directory, examined)
        return dataclasses.replace(report, faults=(*report.faults, *check_sums(directory)))
    finally:
        directory.close()


def salvage(
    src: StrPath,
    dst: StrPath,
    *,
    config: Config | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write what verifies of a damaged store into a new one; the damaged one is not changed.

    Ids, timestamps and access counts are kept. Where index.json is damaged, entries that were
    evicted or deleted may come back, as far as their tensors are there.

    Parameters
    ----------
    src : path
    dst : path
        There must be nothing yet. After a crash it is complete or not there.
    config : Config, optional
        The configuration that the store was made with, for where index.json is damaged. Records
        that do not match its checksums are left out; without an index.json nothing checks them.
    progress : callable, optional
        As for `verify`.

    Returns
    -------
    Report
        On the damaged store; `sound` is the number of entries of the new one.

    Raises
    ------
    StoreNotFoundError, StoreExistsError, VersionError
    CorruptStoreError
        If index.json cannot be read at all and no `config` was given.
    """
    directory = opening.directory_of(src)
    try:
        examined = examine(directory, config=config, progress=progress)
        try:
            with new_directory(path_of(dst, "dst")) as target:
                _snapshot.initialise(target, examined.manifest.config)
                with opening.open(target.path) as store:
                    adopt(store, _sound(examined), examined.manifest)
        finally:
            examined.pool.close()
        return _report(directory, examined)
    finally:
        directory.close()


def _report(directory: Directory, examined: Examined) -> Report:
    return Report(
        path=str(directory.path),
        entries=examined.n_live,
        sound=int(np.count_nonzero(examined.sound)),
        faults=tuple(examined.faults),
        orphans=tuple(examined.orphans),
    )


def _sound(examined: Examined) -> Iterator[tuple[Any, list[Tensor]]]:
    for record in examined.records[examined.sound]:
        number, entry_id = record["shard_idx"].item(), record["entry_id"].item()
        yield record, examined.pool.load(number, entry_id, PARTS)

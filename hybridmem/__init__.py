"""HybridMem: a memory on disk for the keys and values that leave a language model's cache."""

import importlib
from typing import Any

try:
    importlib.import_module("hybridmem._kernels")
except ModuleNotFoundError as error:
    if error.name != "hybridmem._kernels":
        raise
    raise ImportError(
        f"hybridmem in {__path__[0]} is a copy of the source whose compiled part was not built: "
        "start Python in another directory, or build it here with `pip install -e .`"
    ) from error

from hybridmem import hdc
from hybridmem._kernels import simd_level
from hybridmem._layered import Layered, layered
from hybridmem._packs import pack
from hybridmem._sessions import Session, Sessions, sessions
from hybridmem.attention import attend, augmented_kv, merge_attention
from hybridmem.config import Config
from hybridmem.errors import (
    CorruptStoreError,
    EntryNotFoundError,
    HybridMemError,
    ModelMismatchError,
    PartitionError,
    PartitionFullError,
    ReadOnlyError,
    SnapshotGoneError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    StoreNotFoundError,
    VersionError,
)
from hybridmem.memory import Memory
from hybridmem.opening import create, open
from hybridmem.results import Audit, Entry, Hit, Stats
from hybridmem.store import Store

__all__ = [
    "Audit",
    "Config",
    "CorruptStoreError",
    "Entry",
    "EntryNotFoundError",
    "Hit",
    "HybridMemError",
    "Layered",
    "Memory",
    "ModelMismatchError",
    "PartitionError",
    "PartitionFullError",
    "ReadOnlyError",
    "Session",
    "Sessions",
    "SnapshotGoneError",
    "Stats",
    "Store",
    "StoreClosedError",
    "StoreExistsError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreNotFoundError",
    "VersionError",
    "attend",
    "augmented_kv",
    "create",
    "hdc",
    "layered",
    "merge_attention",
    "open",
    "pack",
    "sessions",
    "simd_level",
]

__version__ = "0.1.0"

#: Imported when first asked for: most programs need none of them.
_LATER = ("archive", "plot", "report", "testing", "verify")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"hybridmem.{name}")
    raise AttributeError(f"module 'hybridmem' has no attribute {name!r}")

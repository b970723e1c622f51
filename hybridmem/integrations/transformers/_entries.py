"""What the client knows of each entry beyond what the store keeps: where it stood, and in which
text.

A log of fixed little-endian records, `transformers.meta`, in the store directory. The store does
not need it. Without it, entries still serve the conversation that made them (its saved state names
them), but no other one, because nobody knows how far their keys are rotated.

A record is bound to its entry by id and timestamp, and is written before the store is flushed: a
crash leaves records without an entry, which are ignored (the id may be given out again, to an entry
of another timestamp, whose record then comes later), and never an entry without its record.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from hybridmem._fileio import Directory
from hybridmem.errors import CorruptStoreError, VersionError

__all__ = ["META_NAME", "EntryLog", "Placement", "entry_log"]

META_NAME = "transformers.meta"
_MAGIC = b"HMTFMETA"
_VERSION = 1
_HEADER_BYTES = 64
_RECORD = np.dtype(
    [
        ("entry_id", "<u8"),
        ("timestamp", "<u8"),
        ("session", "<u8"),
        ("rope", "<u8"),
        ("layer_idx", "<u4"),
        ("n_tokens", "<u4"),
        ("position", "<u4"),
        ("token", "<u4"),
        ("checksum", "<u4"),
        ("zero", "<u4"),
    ]
)
_CHECKED = 48  # the bytes before the checksum

Ids = npt.NDArray[np.uint64]


class Placement(NamedTuple):
    """Where an entry stood in the text that it comes from.

    Attributes
    ----------
    entry_id, timestamp : int
        The entry in the store.
    session : int
        The conversation (one row of one batch) that it belongs to.
    rope : int
        Fingerprint of the RoPE parameters with which its keys are rotated.
    layer_idx, n_tokens : int
        As in the store.
    position : int
        RoPE position of its first token; the others follow one by one.
    token : int
        Index of its first token in the conversation; its tokens are [token, token + n_tokens).
    """

    entry_id: int
    timestamp: int
    session: int
    rope: int
    layer_idx: int
    n_tokens: int
    position: int
    token: int


class EntryLog:
    """The placements of a store's entries, in memory and in `transformers.meta`.

    Parameters
    ----------
    path : path
        The store directory.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        self._path = Path(path)
        self._placements: dict[int, Placement] = {}
        self._layers: dict[int, list[int]] = {}
        self._arrays: dict[int, Ids] = {}
        self._pending: list[Placement] = []
        self._lock = threading.Lock()
        self.weights = 0  # fingerprint of the model's weights; 0 is not known
        self._end = 0
        self._load()

    def __len__(self) -> int:
        return len(self._placements)

    def get(self, entry_id: int, timestamp: int) -> Placement | None:
        """Return where the entry with this id and timestamp stood, or None if that is not known."""
        placement = self._placements.get(entry_id)
        return placement if placement and placement.timestamp == timestamp else None

    def add(self, placement: Placement) -> None:
        """Note an entry; `sync` makes the note durable."""
        with self._lock:
            self._note(placement)
            self._pending.append(placement)

    def ids(self, layer_idx: int) -> Ids:
        """Return the ids of all entries of a layer whose place is known, ascending.

        Some of them may have left the store.
        """
        with self._lock:
            if layer_idx not in self._arrays:
                ids = self._layers.get(layer_idx, [])
                self._arrays[layer_idx] = np.unique(np.array(ids, np.uint64))
            return self._arrays[layer_idx]

    def ropes(self) -> set[int]:
        """Return the fingerprints that occur."""
        return {placement.rope for placement in self._placements.values()}

    def sync(self) -> None:
        """Append what is new, durably. Call it before the store's flush."""
        with self._lock:
            if not self._pending and self._end:
                return
            records = _packed(self._pending)
            directory = Directory(self._path)
            try:
                if self._end == 0:
                    temporary = directory.write_temporary([self._header(), records], META_NAME)
                    directory.rename(temporary, META_NAME)
                    directory.sync()
                    self._end = _HEADER_BYTES
                else:
                    directory.update_file(META_NAME, [(self._end, [records])])
            finally:
                directory.close()
            self._end += len(records)
            self._pending.clear()

    def set_weights(self, weights: int) -> None:
        """Say from which weights the entries come, if nobody has; durable with the next `sync`."""
        with self._lock:
            if self.weights == 0:
                self.weights = weights
                if self._end:  # the header changes: the file is written anew
                    self._pending = list(self._placements.values())
                    self._end = 0

    def _note(self, placement: Placement) -> None:
        self._placements[placement.entry_id] = placement
        self._layers.setdefault(placement.layer_idx, []).append(placement.entry_id)
        self._arrays.pop(placement.layer_idx, None)

    def _header(self) -> bytes:
        head = _MAGIC + _VERSION.to_bytes(8, "little") + self.weights.to_bytes(8, "little")
        head = head.ljust(_HEADER_BYTES - 4, b"\0")
        return head + int(crc32c(head)).to_bytes(4, "little")

    def _load(self) -> None:
        directory = Directory(self._path)
        try:
            data = directory.read_file(META_NAME, 1 << 40)
        except FileNotFoundError:
            return
        finally:
            directory.close()
        head = data[: _HEADER_BYTES - 4]
        if data[:8] != _MAGIC or crc32c(head).to_bytes(4, "little") != data[60:64]:
            raise CorruptStoreError(
                f"{META_NAME} has a damaged header; move the file away to go on without it: "
                "entries "
                "then serve only the conversations whose saved state names them",
                path=str(self._path / META_NAME),
                offset=0,
            )
        version = int.from_bytes(data[8:16], "little")
        if version != _VERSION:
            raise VersionError(
                f"{META_NAME} has version {version}; this hybridmem reads {_VERSION}"
            )
        self.weights = int.from_bytes(data[16:24], "little")
        count = (len(data) - _HEADER_BYTES) // _RECORD.itemsize
        records = np.frombuffer(data, _RECORD, count, _HEADER_BYTES).tolist()
        good = 0
        for number, record in enumerate(records):
            at = _HEADER_BYTES + number * _RECORD.itemsize
            if crc32c(data[at : at + _CHECKED]) != record[8]:
                continue  # an append that a crash cut short: the next one goes over it
            good = number + 1
            self._note(Placement(*record[:8]))
        self._end = _HEADER_BYTES + good * _RECORD.itemsize


def _packed(placements: list[Placement]) -> bytes:
    records = np.zeros(len(placements), _RECORD)
    for record, placement in zip(records, placements, strict=True):
        for name, value in zip(Placement._fields, placement, strict=True):
            record[name] = value
        record["checksum"] = crc32c(record.tobytes()[:_CHECKED])
    return records.tobytes()


_logs: weakref.WeakKeyDictionary[Any, EntryLog] = weakref.WeakKeyDictionary()
_logs_lock = threading.Lock()


def entry_log(store: Any) -> EntryLog:
    """Return the one log of an open store."""
    with _logs_lock:
        if store not in _logs:
            _logs[store] = EntryLog(store.path)
        return _logs[store]

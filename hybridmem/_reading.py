"""What every store can do, whatever its mode: get, count, refresh, close."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _copies, _html, _slabs, _snapshot, _source, _wear
from hybridmem import _text as text
from hybridmem._codec import Codec, Decoded, Tensor
from hybridmem._entries import EntryTable
from hybridmem._fileio import Directory, path_of
from hybridmem._format import KEY_SUFFIXES, SOURCE, SUFFIXES
from hybridmem._manifest import Manifest
from hybridmem._shards import ShardPool
from hybridmem._signatures import Signatures
from hybridmem.errors import CorruptStoreError, StoreClosedError, no_entry
from hybridmem.results import Entry, Stats

__all__ = ["Reader"]

Floats = npt.NDArray[np.float32]
Self = TypeVar("Self", bound="Reader")
_ENTRY_FIELDS = ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "access_count")


class Reader:
    """One committed snapshot of a store, and what a writer has put since.

    Attributes
    ----------
    path : Path
    config : Config
        The configuration, with the limits that hold for this object.
    """

    mode = "r"

    #: The stores of this process that are open, for what must be done when it forks.
    open_stores: ClassVar[weakref.WeakSet[Reader]] = weakref.WeakSet()

    def __init__(
        self, directory: Directory, io: str, limits: dict[str, int], loaded: _snapshot.Loaded
    ) -> None:
        manifest, table, _ = loaded
        self.path = directory.path
        self._lock = threading.RLock()
        self._closed = False
        self._directory = directory
        self._io = io
        self._given_limits = limits
        self._queries = self._hits = self._evicted = 0
        config = manifest.config
        self._codec = Codec(config.kv_dtype, quantize_stored=config.quantize_stored)
        self._signatures = Signatures(config)
        self._pool = ShardPool(directory, config.max_open_shards, io, reader=self.mode == "r")
        self._take(manifest, table)
        Reader.open_stores.add(self)

    def _take(self, manifest: Manifest, table: EntryTable) -> None:
        """Make a snapshot the one that is read."""
        self.config = manifest.config.replace(**self._given_limits)
        self._manifest = manifest
        self._table = table
        self._signatures.clear()
        self._signatures.calibrate(manifest.calibration)
        self._pool.max_open = self.config.max_open_shards
        self._pool.retarget(manifest.shards)

    # -- reading ----------------------------------------------------------------------------------

    def get(self, entry_id: int) -> Entry:
        """Return an entry. This is no access.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer; it is a KeyError too.
        """
        return self._entry(entry_id)

    def _entry(self, entry_id: int, tag: int = 0) -> Entry:
        """Return an entry, its id with a tag where it is one of several stores."""
        with self._lock:
            self._check_open()
            row = self._row(_arrays.entry_id(entry_id))
            ((_, signature),) = self._table.signatures(np.array([row]))
            columns = self._table.columns
            return Entry(
                shard_idx=int(columns["shard_idx"][row]),
                padding=int(columns["padding"][row]),
                signature=signature.tobytes(),
                **self._fields(row, tag),
            )

    def source(self, entry_id: int) -> Any:
        """Return what `put` was given as the source of an entry, without a look at its tensors.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer; it is a KeyError too.
        """
        with self._lock:
            self._check_open()
            row = self._row(_arrays.entry_id(entry_id))
            parts = self._tensors(row, (SOURCE,))
            if (wrong := _source.fault(parts)) is not None:
                raise self._misfit(row, wrong)
        return _source.value_of(parts)

    def timestamps(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the time of the put of each entry, 0 for those that are not there, or no longer.

        So one call tells which entries are left, and whether they are those that were meant.
        """
        with self._lock:
            self._check_open()
            rows = [self._table.find(_arrays.entry_id(one)) for one in entry_ids]
            stamps = self._table.columns["timestamp"]
            return [0 if row is None else stamps.item(row) for row in rows]

    def _row(self, entry_id: int) -> int:
        row = self._table.find(entry_id)
        if row is None:
            raise no_entry(self.path, entry_id)
        return row

    def _rows_of(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the rows of those entries that there are."""
        return [row for row in map(self._table.find, entry_ids) if row is not None]

    def _fields(self, row: int, tag: int) -> dict[str, Any]:
        columns = self._table.columns
        fields = {name: columns[name].item(row) for name in _ENTRY_FIELDS}
        entry_id = fields["entry_id"]
        decode = partial(self._decoded, row)
        if (parts := self._unwritten(entry_id)) is not None:
            decoded = decode(parts)
        else:
            decoded = self._pool.decoded(columns["shard_idx"].item(row), entry_id, decode)
        fields["entry_id"] = entry_id + tag
        fields["keys"], fields["values"] = decoded.keys.view(), decoded.values.view()
        fields["escaped_source"] = decoded.escaped_source
        return fields

    def _decoded(self, row: int, parts: Sequence[Tensor]) -> Decoded:
        tensors = [part for part in parts if part.suffix != SOURCE]
        n_tokens = self._table.columns["n_tokens"].item(row)
        try:
            rows = self._codec.decode(tensors, n_tokens, self.config.embed_dim)
        except ValueError as error:
            raise self._misfit(row, str(error)) from None
        return Decoded(*rows, _source.escaped(parts))

    def _keys(self, row: int) -> Floats:
        """Return the stored keys of an entry without a look at its values."""
        tensors = self._tensors(row, KEY_SUFFIXES)
        n_tokens = int(self._table.columns["n_tokens"][row])
        try:
            return self._codec.decode_keys(tensors, n_tokens, self.config.embed_dim)
        except ValueError as error:
            raise self._misfit(row, str(error)) from None

    def _tensors(self, row: int, suffixes: Collection[str] = SUFFIXES) -> list[Tensor]:
        """Return stored parts of an entry."""
        columns = self._table.columns
        entry_id = columns["entry_id"].item(row)
        parts = self._unwritten(entry_id)
        if parts is None:
            return self._pool.load(columns["shard_idx"].item(row), entry_id, suffixes)
        return [part for part in parts if part.suffix in suffixes]

    def prefetch(self, entry_ids: Any) -> None:
        """Have the system read keys and values of entries that will be asked for soon.

        Returns at once; ids that there are not, or no longer, are passed over. Queries do so for
        what they return.

        Parameters
        ----------
        entry_ids : array_like of int
        """
        with self._lock:
            self._check_open()
            self._fetch(self._rows_of(_arrays.entry_ids(entry_ids).tolist()))

    def _fetch(self, rows: Sequence[int], suffixes: Collection[str] = SUFFIXES) -> None:
        columns = self._table.columns
        entries = [(columns["shard_idx"].item(x), columns["entry_id"].item(x)) for x in rows]
        written = [one for one in entries if self._unwritten(one[1]) is None]
        self._pool.prefetch(written, suffixes)

    def _misfit(self, row: int, why: str) -> CorruptStoreError:
        columns = self._table.columns
        return self._pool.corrupt(
            int(columns["shard_idx"][row]), f"entry {int(columns['entry_id'][row])}: {why}"
        )

    def _unwritten(self, entry_id: int) -> list[Tensor] | None:
        """Return the parts of an entry that is in no shard yet."""
        return None

    def _accessed(self, rows: Iterable[int], by: int = 1) -> None:
        """Count an access of each entry that was found, where accesses are counted."""

    # -- contents ---------------------------------------------------------------------------------

    def __contains__(self, entry_id: object) -> bool:
        with self._lock:
            self._check_open()
            try:
                return self._table.find(_arrays.entry_id(entry_id)) is not None
            except TypeError:
                return False

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids there are at this moment, ascending."""
        with self._lock:
            self._check_open()
            return iter(self._table.columns["entry_id"][self._table.alive_rows()].tolist())

    def __len__(self) -> int:
        with self._lock:
            self._check_open()
            return self._table.n_alive

    def __bool__(self) -> bool:
        return True  # a store without entries is a store

    @property
    def entries(self) -> npt.NDArray[np.void]:
        """The records of the live entries, by id: a read-only structured array.

        The fields are those of docs/format.md; `signature` holds the packed bits as bytes objects,
        so that the array goes into a data frame as it is. A copy of this moment.
        """
        with self._lock:
            self._check_open()
            return self._table.structured()

    @property
    def store_id(self) -> str:
        """32 hexadecimal digits that tell this store from all others."""
        return self._manifest.store_id

    @property
    def calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Mean key and mean query (or None) of the layers that are calibrated."""
        with self._lock:
            self._check_open()
            return dict(self._signatures.centres)

    def stats(self) -> Stats:
        """Return counts and sizes of this moment."""
        with self._lock:
            self._check_open()
            table = self._table
            dead, live = _wear.disk_shares(self._manifest, table)
            return Stats(
                entries=table.n_alive,
                entries_by_layer=dict(sorted(table.layers().items())),
                tokens=table.n_tokens_alive,
                shards=len(self._manifest.shards),
                disk_bytes=self._directory.total_bytes(),
                live_bytes=live,
                dead_bytes=dead,
                unflushed_bytes=self._unflushed_bytes(),
                generation=self._manifest.generation,
                queries=self._queries,
                hits=self._hits,
                evicted=self._evicted,
            )

    def _unflushed_bytes(self) -> int:
        return 0

    # -- life -------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Move a reader to the newest commit; a writer is always there.

        Returns
        -------
        bool
            Whether there was a newer one.

        Raises
        ------
        CorruptStoreError
            If the commit is damaged, or the files are now those of another store.
        """
        with self._lock:
            self._check_open()
            manifest, table, _ = _snapshot.load(self._directory, self._io)
            if manifest.store_id != self._manifest.store_id:
                raise CorruptStoreError(
                    f"{self.path} holds another store than the one that was opened: close this one "
                    "and open it again",
                    path=str(self.path),
                )
            changed = manifest != self._manifest
            if changed:
                self._take(manifest, table)
            return changed

    def snapshot(self, path: str | os.PathLike[str], *, copy: bool = False) -> None:
        """Make a store of its own, at `path`, of what is committed.

        What this object reads is what it holds: the last commit of a writer, the snapshot of a
        reader. Shards are hard links and take no space, whatever becomes of this store; records
        and index.json are copied. It has the ids, and the `store_id`, of this store. What is
        deleted here stays in it. After a crash it is complete or not there.

        Parameters
        ----------
        path : path
            There must be nothing yet.
        copy : bool, default False
            Copy the shards: for another file system, and for a copy that shares no file.

        Raises
        ------
        StoreExistsError
            If there is something at `path`.
        StoreIOError
            If a file could not be linked or written.
        SnapshotGoneError
            If the writer has removed a shard of this reader's snapshot: `refresh` and try again.
        """
        target = path_of(path, "path")
        with self._last_commit() as (manifest, table):
            _copies.snapshot(self._directory, manifest, table, target, copy=copy)

    @contextlib.contextmanager
    def _last_commit(self) -> Iterator[tuple[Manifest, EntryTable]]:
        """Yield what is committed, and keep it from changing."""
        with self._lock:
            self._check_open()
            yield self._manifest, self._table

    def close(self) -> None:
        """Close; a second close does nothing. Arrays that were handed out stay valid."""
        with self._lock:
            if not self._closed:
                self._release()

    def _release(self) -> None:
        self._closed = True
        self._pool.close()
        _slabs.keep(_slabs.KEPT_BYTES)
        self._table.close()
        self._signatures.clear()
        self._directory.close()
        Reader.open_stores.discard(self)

    def __enter__(self: Self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            lost = self._unflushed_bytes()
            warnings.warn(
                f"{self!r} was not closed"
                + (f": {lost} bytes that were put and not flushed are lost" if lost else ""),
                RuntimeWarning if lost else ResourceWarning,  # the latter is not shown by default
                stacklevel=2,
            )
            self._release()

    def __reduce__(self) -> NoReturn:
        # Also asked by `copy`: two objects on one set of descriptors would close each other's.
        raise TypeError(
            f"{self!r} cannot be copied or pickled; pass its path and open it there, "
            'with mode="r" if this one writes'
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._table.n_alive} entries"
        return f"<hybridmem.Store {str(self.path)!r} mode={self.mode!r} {state}>"

    def _repr_html_(self) -> str:
        if self._closed:
            return _html.pairs("Store", [("path", self.path), ("state", "closed")])
        stats, config = self.stats(), self.config
        kept = "INT8" if config.quantize_stored else config.kv_dtype
        return _html.pairs(
            "Store",
            [
                ("path", self.path),
                ("mode", self.mode),
                ("model", config.model_id or "not named"),
                ("entries", f"{stats.entries:,} of {text.plural(stats.tokens, 'token')}"),
                ("layers", f"{len(stats.entries_by_layer):,}"),
                ("width", f"{config.embed_dim:,}, kept as {kept}"),
                ("on disk", text.size(stats.disk_bytes)),
            ],
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(
                f"the store {self.path} is closed; open it again with hybridmem.open"
            )

    def _after_fork(self) -> None:
        """Make this copy usable in a forked child: another thread may have held the locks."""
        self._lock = threading.RLock()
        self._pool.after_fork()


def _after_fork_in_child() -> None:
    for store in list(Reader.open_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

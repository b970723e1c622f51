"""The store: the one place where records, shards, signatures and commits meet."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hybridmem import _arrays, _chunks, _commit, _snapshot, _wear
from hybridmem._background import Background
from hybridmem._chunks import Chunk, Given
from hybridmem._codec import Tensor
from hybridmem._entries import Bytes, EntryTable
from hybridmem._eviction import lowest_rows
from hybridmem._fileio import Directory
from hybridmem._finding import Finder
from hybridmem._limits import Limits
from hybridmem._manifest import Calibration, Manifest
from hybridmem._signatures import first_mean
from hybridmem.errors import ReadOnlyError, StoreFullError, StoreIOError
from hybridmem.hdc import mean_pool

__all__ = ["Store"]

_MAX_ACCESS = (1 << 32) - 1


class Store(Finder):
    """Keys and values of attention layers on disk, found by the similarity of their signatures.

    Made by `hybridmem.create` and `hybridmem.open`. One object may be used from many threads.

    Attributes
    ----------
    path : Path
    config : Config
        The configuration, with the limits that hold for this object.
    mode : {"r+", "r"}
    """

    def __init__(
        self,
        directory: Directory,
        mode: str,
        io: str,
        limits: dict[str, int],
        loaded: _snapshot.Loaded,
    ) -> None:
        self.mode = mode
        self._forked = self._unflushable = False
        self._writer: _commit.Writer | None = None
        #: Held by whoever commits, and taken before the store's lock.
        self._commit_lock = threading.RLock()
        self._background = Background(self._commit_lock)
        super().__init__(directory, io, limits, loaded)
        self._limits = Limits(self.config, self._codec, self._table)
        if mode == "r+":
            self._writer = _commit.Writer(directory, loaded.manifest, loaded.table, self._pool, io)

    # -- putting ----------------------------------------------------------------------------------

    def put(
        self,
        keys: Any,
        values: Any,
        layer_idx: int,
        importance: float = 1.0,
        *,
        index_keys: Any = None,
        source: Any = None,
    ) -> int:
        """Store a chunk of consecutive tokens of one layer; it can be queried at once.

        Parameters
        ----------
        keys, values : array_like of float, shape (n_tokens, embed_dim)
        layer_idx : int
        importance : float, default 1.0
            Finite and >= 0; what is least important is evicted first.
        index_keys : array_like of float, shape (n_tokens, embed_dim), optional
            The keys to find the entry by where they are not the keys to keep, as for a model with
            rotary positions: its keys before the rotation.
        source : object, optional
            Where the chunk comes from, such as ``{"session": "a", "tokens": [64, 128], "text":
            "..."}``: anything that JSON can hold, at most 64 KiB of it. It is kept and removed with
            the entry, and given with hits (`Hit.source`).

        Returns
        -------
        int
            The entry's id, unique for ever in this store.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid; nothing is stored.
        StoreFullError, StoreIOError
            If a full shard could not be written; nothing is stored.
        """
        self._writing()
        layer = _arrays.layer_index(layer_idx)
        weight = _arrays.importance(importance)
        return self._put(layer, [Given(keys, values, index_keys, source)], [weight])[0]

    def put_many(
        self,
        entries: Iterable[tuple[Any, Any]],
        layer_idx: int,
        importance: float | Sequence[float] = 1.0,
        *,
        index_keys: Sequence[Any] | None = None,
        sources: Sequence[Any] | None = None,
    ) -> list[int]:
        """Store several chunks of one layer, all of them or none.

        Parameters
        ----------
        entries : iterable of (keys, values)
        layer_idx : int
        importance : float or one float each
        index_keys : sequence of array_like, optional
            One for each entry, as in `put`.
        sources : sequence, optional
            One for each entry, as `source` in `put`.

        Returns
        -------
        list of int
            The ids, in order.
        """
        self._writing()
        layer = _arrays.layer_index(layer_idx)
        given = _chunks.many(entries, index_keys, sources)
        return self._put(layer, given, _chunks.weights(importance, len(given)))

    def _put(self, layer: int, given: Sequence[Given], weights: Sequence[float]) -> list[int]:
        width = self.config.embed_dim

        def prepared() -> list[Chunk]:
            return [
                _chunks.prepare(self._codec, self._signatures, layer, width, one) for one in given
            ]

        centres = self._signatures.centres
        chunks = prepared()
        self._make_room(chunks)  # what can fail comes before the first is inserted
        with self._lock:
            self._writing()
            if self._signatures.centres is not centres:  # calibrated meanwhile
                chunks = prepared()
            ids = [
                self._insert(chunk, layer, weight, time.time_ns())
                for chunk, weight in zip(chunks, weights, strict=True)
            ]
            if ids:
                self._keep_limits(spare=ids[0])
                self._keep_limits(spare=ids[-1])  # where the chunks alone exceed them
            return ids

    def _make_room(self, chunks: Sequence[Chunk]) -> None:
        """Refuse what no store could hold; write pending tensors that fill a shard."""
        with self._lock:
            writer = self._writing()
            self._limits.check_fit(chunks, writer.index_bytes)
            if not chunks or writer.room_for(chunks[0].tensors, self.config):
                return
        # Waits for a flush under way, which bounds what it holds.
        with self._commit_lock, self._lock:
            writer = self._writing()
            limit = self.config.max_disk_bytes
            # Where the directory must not grow they stay in memory, which the same limit bounds.
            if not limit or self._directory.total_bytes() + writer.unflushed_bytes <= limit:
                self._unflushable = True
                writer.spill(self.config)
                self._unflushable = False

    def _insert(self, chunk: Chunk, layer: int, importance: float, timestamp: int) -> int:
        entry_id = (writer := self._writing()).next_entry_id
        if entry_id >= 1 << 64:
            raise StoreIOError("all entry ids of this store are used; go on in a new one")
        # In this order whoever reads after an interrupt finds nothing that is incomplete.
        with writer.changing():
            writer.add(entry_id, chunk.tensors)
            row = self._table.append(
                chunk.signature,
                entry_id=entry_id,
                layer_idx=layer,
                n_tokens=chunk.n_tokens,
                importance=importance,
                timestamp=timestamp,
                padding=chunk.padding,
            )
            self._signatures.add(layer, entry_id, chunk.n_tokens, chunk.signature)
            self._limits.added(self._table, row, chunk.nbytes)
        return entry_id

    def calibrate(self, layer_idx: int, *, keys: Any = None, queries: Any = None) -> None:
        """Centre the keys and queries of a layer from now on; committed on return.

        Signatures of a layer's keys less their mean tell its entries apart better. The means are
        kept with the store and do not change any more. Signatures that were made before are made
        anew from the stored keys.

        Parameters
        ----------
        layer_idx : int
        keys : array_like of float, shape (n, embed_dim), optional
            Keys, in the space that is indexed, to take the mean of; by default the stored keys of
            the layer's first few thousand tokens.
        queries : array_like of float, shape (n, embed_dim), optional
            Queries of unrelated text to take the mean of; where there are none, queries are not
            centred.

        Raises
        ------
        ValueError
            If the layer is calibrated already; if neither keys are given nor stored; if entries
            were put with `index_keys`, which are not stored; if all means took more than 1.5 MB.
        """
        self._writing()
        layer = _arrays.layer_index(layer_idx)
        width = self.config.embed_dim
        given = [
            None
            if rows is None
            else mean_pool(_arrays.matrix(rows, name, width, vector_ok=True))[0]
            for name, rows in (("keys", keys), ("queries", queries))
        ]
        with self._commit_lock, self._lock:
            writer = self._writing()
            if layer in self._signatures.centres:
                raise ValueError(f"layer {layer} is calibrated already, and its means are frozen")
            self.flush()
            rows = self._table.alive_rows(layer)
            if given[0] is None:
                given[0] = first_mean(keys for _, keys, _ in self._signed_entries(rows, self._keys))
            calibration = Calibration(layer, *(Calibration.pack(mean) for mean in given))
            before = writer.calibration
            after = Calibration.joined(before, calibration)
            entries = self._signed_entries(rows, self._keys)
            signed = self._signatures.made_anew(after, layer, entries)
            writer.calibration = after
            try:
                if signed:
                    self._compact(writer, set(), signed)
                else:
                    self.flush()
            except BaseException:
                writer.calibration = before
                raise
            self._signatures.clear()
            self._signatures.calibrate(after)

    # -- removing ---------------------------------------------------------------------------------

    def delete(self, entry_id: int) -> None:
        """Remove an entry; the next flush commits it, `compact` removes its bytes.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer; it is a KeyError too.
        """
        with self._lock:
            writer = self._writing()
            self._kill(writer, self._row(_arrays.entry_id(entry_id)))

    def evict(self, target_entries: int) -> int:
        """Evict entries until no more than `target_entries` are left; committed on return.

        What goes first has the lowest `importance * (1 + log(1 + access_count))`, ties by older
        timestamp, then by smaller id.

        Returns
        -------
        int
            The number evicted.
        """
        self._writing()
        target = _arrays.count(target_entries, "target_entries", 0)
        with self._commit_lock, self._lock:
            writer = self._writing()
            is_full = False
            try:
                self.flush()
            except StoreFullError:
                is_full = True  # evicting may make the room that is missing
            rows = lowest_rows(self._table, max(0, self._table.n_alive - target))
            for row in rows.tolist():
                self._evict(writer, row)
            if is_full:
                writer.commit_marks()
            self.flush()
            return len(rows)

    def compact(self) -> int:
        """Rewrite the store without the bytes of evicted and deleted entries; committed on return.

        Small shards are merged on the way. Views that were handed out stay valid.

        Returns
        -------
        int
            The bytes given back.
        """
        with self._commit_lock, self._lock:
            writer = self._writing()
            before = self._directory.total_bytes()
            try:
                self._flush(writer)
            except StoreFullError:
                writer.commit_marks()
                self._flush(writer)
            manifest = writer.manifest
            victims = _wear.worn(manifest, writer.live) | _wear.scattered(manifest, self.config)
            if victims or _wear.dead_records(self._table):
                self._compact(writer, victims)
            return max(0, before - self._directory.total_bytes())

    def _compact(
        self,
        writer: _commit.Writer,
        victims: set[int],
        signed: dict[int, tuple[Bytes, int]] | None = None,
    ) -> None:
        writer.compact(victims, signed)
        self._table, self._manifest = writer.table, writer.manifest

    def _evict(self, writer: _commit.Writer, row: int) -> None:
        self._kill(writer, row)
        self._evicted += 1

    def _kill(self, writer: _commit.Writer, row: int) -> None:
        columns = self._table.columns
        layer, entry_id = int(columns["layer_idx"][row]), int(columns["entry_id"][row])
        n_tokens = int(columns["n_tokens"][row])
        with writer.changing():
            self._signatures.remove(layer, entry_id)
            self._limits.removed(entry_id, n_tokens)
            writer.kill(row)

    def _keep_limits(self, spare: int) -> None:
        """Evict what exceeds the limits, entries from id `spare` on excepted."""
        writer = self._writing()
        while (row := self._limits.victim(self._table, writer.index_bytes, spare)) is not None:
            self._evict(writer, row)

    # -- committing -------------------------------------------------------------------------------

    def flush(self, wait: bool = True) -> None:
        """Make what was put, deleted and evicted durable; queries and puts go on meanwhile.

        Parameters
        ----------
        wait : bool, default True
            Whether it is committed on return. Otherwise a thread commits it: a later `flush()`
            or `close` waits for that, and an error is raised by the next call that writes.

        Raises
        ------
        StoreFullError
            If there is no space. The last commit stands and what was put stays in memory: free
            space and flush again.
        StoreIOError
            If a write or a sync failed.
        """
        self._writing()
        if not wait:
            self._background.submit(self._flush_and_tidy)
            return
        with self._commit_lock:
            self._writing()  # which tells of a flush in the background that failed meanwhile
            self._flush_and_tidy()

    def _flush_and_tidy(self) -> None:
        with self._commit_lock:
            writer = self._writer
            assert writer is not None
            self._flush(writer)
            # Only tidying up: where space is short it is tried again when more gathered.
            with self._lock, contextlib.suppress(StoreFullError):
                victims = _wear.due(writer.manifest, writer.live, self._table, self.config)
                if victims is not None:
                    self._compact(writer, victims)

    def _flush(self, writer: _commit.Writer) -> None:
        with self._lock:
            self._keep_limits(spare=writer.next_entry_id)
            self._unflushable = True
            flush = writer.begin(self.config)
        if flush is not None:
            try:
                writer.write(flush)
            except BaseException as error:
                with self._lock:
                    writer.fail(flush, error)
                raise
        with self._lock:
            if flush is not None:
                writer.finish(flush)
                self._manifest = writer.manifest
            if self.config.max_disk_bytes:
                self._keep_disk_limit(writer)
            self._unflushable = False

    def _keep_disk_limit(self, writer: _commit.Writer) -> None:
        """Bring the directory below max_disk_bytes: first by compaction, then by eviction."""
        limit = self.config.max_disk_bytes
        while (size := self._directory.total_bytes(leaving=False)) > limit:
            victims = _wear.worn(writer.manifest, writer.live)
            if victims or _wear.dead_records(self._table):
                self._compact(writer, victims)
                continue
            if not self._table.n_alive:
                return  # what is left is the size of an empty store
            # A little more than is too much, so that the next flushes need no compaction.
            excess = size - limit + limit // 16
            sizes = {shard.number: shard.size // shard.entries for shard in writer.manifest.shards}
            while excess > 0 and self._table.n_alive:
                row = self._limits.first(self._table, spare=writer.next_entry_id)
                assert row is not None
                n_tokens = int(self._table.columns["n_tokens"][row])
                number = int(self._table.columns["shard_idx"][row])
                excess -= sizes.get(number, self._limits.entry_bytes(n_tokens))
                self._evict(writer, row)
            writer.flush(self.config)
            self._manifest = writer.manifest

    @contextlib.contextmanager
    def _last_commit(self) -> Iterator[tuple[Manifest, EntryTable]]:
        # Puts and queries go on: they change neither what is committed nor its records.
        with self._commit_lock:
            self._check_open()
            if self._writer is not None and not self._forked:
                self._writer.check()  # else what is committed is not known
            yield self._manifest, self._table

    def refresh(self) -> bool:
        if self.mode == "r":
            return super().refresh()
        self._check_open()
        return False

    def close(self) -> None:
        """Flush and close; a second close does nothing. Arrays that were handed out stay valid."""
        try:
            if not (self._closed or self._forked):
                self._background.close()
            with self._commit_lock, self._lock:
                writer = self._writer
                # After a write that failed no promise is left to keep.
                only_lets_go = self._closed or self._forked or self._unflushable
                if writer is not None and not (only_lets_go or writer.is_broken):
                    self.flush()
        finally:
            super().close()

    # -- what a reader lacks ----------------------------------------------------------------------

    def _unwritten(self, entry_id: int) -> list[Tensor] | None:
        if self._writer is None:
            return None
        return self._writer.pending.get(entry_id) or self._writer.flushing.get(entry_id)

    def _unflushed_bytes(self) -> int:
        return self._writer.unflushed_bytes if self._writer is not None else 0

    def _accessed(self, rows: Iterable[int], by: int = 1) -> None:
        if self._writer is None or self._forked:
            return
        counts, ids = (self._table.columns[name] for name in ("access_count", "entry_id"))
        for row in rows:
            counts[row] = min(max(counts.item(row) + by, 0), _MAX_ACCESS)
            self._writer.accessed.add(ids.item(row))

    def _writing(self) -> _commit.Writer:
        self._check_open()
        if self._writer is None:
            raise ReadOnlyError(
                f'{self.path} is open with mode="r"; open it with mode="r+" to write'
            )
        if self._forked:
            raise ReadOnlyError(
                f"{self.path} was opened for writing before this process was forked: "
                "only the parent may write"
            )
        self._background.check()
        self._writer.check()
        return self._writer

    def _after_fork(self) -> None:
        super()._after_fork()
        self._commit_lock = threading.RLock()
        self._forked = True
        self._directory.drop_lock()

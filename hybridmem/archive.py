"""A store, or a layer of it, as one safetensors file, and back (docs/format.md)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _snapshot, _source, opening
from hybridmem._adopting import adopt
from hybridmem._checksums import crc32c
from hybridmem._codec import Codec, Tensor
from hybridmem._copies import check_outside, check_vacant, new_directory, unless_compacted
from hybridmem._fileio import Buffer, Directory, path_of
from hybridmem._format import (
    COLUMN_BYTES,
    ITEM_BYTES,
    SOURCE,
    SUFFIXES,
    StoredTensor,
    newer_version,
    pack_header,
    parse_tensors,
    record_dtype,
)
from hybridmem._manifest import Manifest
from hybridmem.errors import CorruptStoreError, StoreNotFoundError, VersionError
from hybridmem.store import Store

__all__ = ["export_store", "import_store"]

StrPath = str | os.PathLike[str]
Progress = Callable[[int, int], None]

_KIND, _VERSION = "hybridmem-export", "1"
#: Room for some 150,000 entries of two tensors.
_MAX_HEADER_BYTES = 1 << 25
#: The columns of the records, by the names of their safetensors dtypes.
_COLUMNS = {
    "entry_id": "U64", "timestamp": "U64", "layer_idx": "U32", "n_tokens": "U32",
    "importance": "F32", "access_count": "U32", "padding": "U32", "signature": "U8",
}  # fmt: skip
_NUMPY = {
    "U64": "<u8", "U32": "<u4", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "I8": "i1",
}  # fmt: skip
_HEADER_CRC = re.compile(rb'"header_crc32c":"[0-9a-f]{8}"')
_SOURCE_NAME = re.compile(rf"{SOURCE}_([1-9]\d{{0,19}})", re.ASCII)


def export_store(
    store_dir: StrPath,
    file: StrPath,
    *,
    layer_idx: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write what is committed in a store into one file, which any safetensors reader opens.

    Parameters
    ----------
    store_dir : path
        A writer may have it open.
    file : path
        There must be nothing yet. After a crash it is complete or not there.
    layer_idx : int, optional
        Only this layer.
    progress : callable, optional
        Called with the number of entries that were written and that there are.

    Returns
    -------
    int
        The number of entries.

    Raises
    ------
    StoreExistsError
        If the file exists.
    ValueError
        If it would have too many tensors: export some layers at a time. If it would be inside the
        store.
    SnapshotGoneError
        If the writer compacted the store meanwhile: try again, or export a snapshot.
    """
    path = path_of(file, "file")
    check_vacant(path)
    with opening.open(store_dir, mode="r") as store:
        check_outside(store.path, path)
        layer = None if layer_idx is None else _arrays.layer_index(layer_idx)
        rows = store._table.alive_rows(layer)
        with (
            unless_compacted(store.path, "export"),
            contextlib.closing(Directory.make(path.parent)) as directory,
        ):
            directory.write_file(path.name, [(0, _written(store, rows, progress))])
            directory.sync()
        return len(rows)


def import_store(file: StrPath, store_dir: StrPath, *, progress: Progress | None = None) -> int:
    """Make a store of an export file: the same ids, records, signatures, keys and values.

    Parameters
    ----------
    file : path
    store_dir : path
        There must be nothing yet. After a crash it is complete or not there.
    progress : callable, optional
        Called with the number of entries that were read and that there are.

    Returns
    -------
    int
        The number of entries.

    Raises
    ------
    StoreNotFoundError
        If there is no such file.
    StoreExistsError
        If there is something at `store_dir`.
    VersionError
        If a newer version wrote the file.
    CorruptStoreError
        If it is damaged, or no export file.
    """
    path = path_of(file, "file")
    try:
        directory = Directory(path.parent)
    except OSError as error:
        raise StoreNotFoundError(f"cannot open {path}: {error}") from None
    try:
        try:
            source = _ExportFile(directory, path.name)
        except FileNotFoundError:
            raise StoreNotFoundError(f"there is no file {path}") from None
        except CorruptStoreError:
            if path.is_dir():
                raise StoreNotFoundError(f"{path} is a directory, not an export file") from None
            raise
        try:
            with new_directory(path_of(store_dir, "store_dir")) as target:
                manifest = source.manifest
                _snapshot.initialise(target, manifest.config, manifest.store_id)
                with opening.open(target.path) as store:
                    adopt(store, source.entries(progress), manifest)
        finally:
            source.close()
    finally:
        directory.close()
    return len(source.records)


# -- writing --------------------------------------------------------------------------------------


def _written(
    store: Store, rows: npt.NDArray[np.int64], progress: Progress | None
) -> Iterator[Buffer]:
    """Yield the bytes of an export file: header, records, then tensors, wide elements first."""
    records = store._table.records(rows).view(store._table.dtype)[:, 0]
    columns = [
        (name, dtype, np.ascontiguousarray(_column(records, name)))
        for name, dtype in (_COLUMNS if len(rows) else {}).items()
    ]
    at = list(zip(records["shard_idx"].tolist(), records["entry_id"].tolist(), strict=True))
    pieces: list[tuple[int, str, str, tuple[int, ...], int, Any]] = [
        (COLUMN_BYTES[dtype], name, dtype, data.shape, crc32c(data), memoryview(data).cast("B"))
        for name, dtype, data in columns
    ]
    sources = {}
    for number, entry_id in at:
        header = store._pool.header(number)
        row = header.find(entry_id)
        if row is None:
            raise store._pool.corrupt(number, f"it does not hold entry {entry_id}")
        for _, (suffix, dtype, shape, _, _, crc) in header.parts_of(row):
            if suffix != SOURCE:
                name = f"{suffix[0]}_{entry_id}{suffix[1:]}"
                pieces.append(
                    (ITEM_BYTES[dtype], name, dtype, shape, crc, (number, entry_id, suffix))
                )
        said = _source.text_of(store._pool.load(number, entry_id, (SOURCE,)))
        if said is not None:
            sources[f"{SOURCE}_{entry_id}"] = said
    pieces.sort(key=lambda piece: -piece[0])
    about = store._manifest.replace(n_records=0, entries_crc=(), shards=(), dead=())
    head = pack_header(
        [piece[1:5] for piece in pieces],
        {
            "format": _KIND,
            "format_version": _VERSION,
            "index": about.encode().decode(),
            "header_crc32c": "0" * 8,
            **sources,
        },
    )
    if len(head) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(rows)} entries need a header of {len(head)} bytes, more than the "
            f"{_MAX_HEADER_BYTES} of one file: export some layers at a time"
        )
    yield _HEADER_CRC.sub(b'"header_crc32c":"%08x"' % crc32c(head), head, count=1)
    done = 0
    for *_, data in pieces:
        if isinstance(data, tuple):
            number, entry_id, suffix = data
            (tensor,) = store._pool.load(number, entry_id, (suffix,))
            data = memoryview(np.ascontiguousarray(tensor.data)).cast("B")
            done += 1
            if progress is not None:
                progress(done * len(rows) // (len(pieces) - len(columns)), len(rows))
        yield data


def _column(records: npt.NDArray[np.void], name: str) -> npt.NDArray[Any]:
    if name != "signature":
        return records[name]
    width = records.dtype["signature"].itemsize
    return np.frombuffer(records["signature"].tobytes(), np.uint8).reshape(len(records), width)


# -- reading --------------------------------------------------------------------------------------


class _ExportFile:
    """An export file, read and not mapped; whatever is wrong with it is a CorruptStoreError.

    Attributes
    ----------
    manifest : Manifest
        Configuration, ids and calibration of the store that it comes from.
    records : structured array
        By ascending id.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory, self._name = directory, name
        self._path = str(directory.path / name)
        self._fd, self._size = directory.open_file(name)
        try:
            head = self._head()
            try:
                metadata, tensors = parse_tensors(
                    head[8:], self._size - len(head), ITEM_BYTES | COLUMN_BYTES
                )
                self._check_kind(metadata, head)
                self.manifest = self._index(metadata)
                self._sources = {
                    int(match[1]): text
                    for name, text in metadata.items()
                    if (match := _SOURCE_NAME.fullmatch(name))
                }
                self._tensors = {tensor.name: tensor for tensor in tensors}
                self.records = self._records()
            except ValueError as error:
                raise self._corrupt(str(error)) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._directory.close_file(self._fd)

    def entries(self, progress: Progress | None) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yield record and parts of each entry."""
        config = self.manifest.config
        codec = Codec(config.kv_dtype, quantize_stored=config.quantize_stored)
        for done, record in enumerate(self.records, 1):
            entry_id = record["entry_id"].item()
            tensors = list(self._tensors_of(entry_id))
            wrong = codec.mismatch(tensors, record["n_tokens"].item(), config.embed_dim)
            said = self._sources.get(entry_id)
            parts = tensors if said is None else [*tensors, _source.stored(said)]
            wrong = wrong or _source.fault(parts)
            if wrong is not None:
                raise self._corrupt(f"entry {entry_id}: {wrong}")
            yield record, parts
            if progress is not None:
                progress(done, len(self.records))

    def _tensors_of(self, entry_id: int) -> Iterator[Tensor]:
        for suffix in SUFFIXES:
            tensor = self._tensors.get(f"{suffix[0]}_{entry_id}{suffix[1:]}")
            if tensor is not None:
                rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
                yield Tensor(suffix, tensor.dtype, (rows, columns), self._array(tensor))

    def _head(self) -> bytes:
        length = self._bytes(0, 8).tobytes()
        n_head = int.from_bytes(length, "little")
        if n_head > min(_MAX_HEADER_BYTES, self._size - 8):
            raise self._corrupt(
                f"its header claims {n_head} bytes: it is damaged, or no safetensors file"
            )
        return length + self._bytes(8, n_head).tobytes()

    def _check_kind(self, metadata: dict[str, Any], head: bytes) -> None:
        if metadata.get("format") != _KIND:
            raise ValueError(f"its format is {metadata.get('format')!r:.40}, wanted {_KIND!r}")
        version = metadata.get("format_version")
        if version != _VERSION:
            raise VersionError(
                f"{self._path} has version {version!r:.40} of its format; this hybridmem reads "
                f"{_VERSION}: install a newer one"
            )
        zeroed = _HEADER_CRC.sub(b'"header_crc32c":"00000000"', head, count=1)
        if f"{crc32c(zeroed):08x}" != metadata.get("header_crc32c"):
            raise ValueError("its header does not match its checksum")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not of strings")
        "".join(metadata.values()).encode()  # no half of a pair, which no text in UTF-8 has

    def _index(self, metadata: dict[str, Any]) -> Manifest:
        data = metadata.get("index", "").encode()
        try:
            return Manifest.decode(data)
        except (ValueError, RecursionError) as error:
            if (version := newer_version(data)) is not None:
                raise VersionError(
                    f"{self._path} comes from a store of format_version {version}: install a newer "
                    "hybridmem"
                ) from None
            raise ValueError(f"its index is damaged: {error}") from None

    def _records(self) -> npt.NDArray[np.void]:
        """Return the records, each rule on fields held."""
        dtype = record_dtype(self.manifest.config.hdc_dim)
        if not self._tensors:
            return np.empty(0, dtype)
        given = {}
        for name, kind in _COLUMNS.items():
            tensor = self._tensors.get(name)
            if tensor is None or tensor.dtype != kind:
                raise ValueError(f"it has no tensor {name} of the type {kind}")
            given[name] = self._array(tensor)
        n = len(given["entry_id"])
        for name, column in given.items():
            shape = (n, dtype["signature"].itemsize) if name == "signature" else (n,)
            if column.shape != shape:
                raise ValueError(f"its tensor {name} is {list(column.shape)}, want {list(shape)}")
        ids, importance = given["entry_id"], given["importance"]
        if ids[0] == 0 or (ids[1:] <= ids[:-1]).any():
            raise ValueError("its entry_id do not ascend from 1")
        if ids[-1] > np.uint64(self.manifest.next_entry_id - 1):
            raise ValueError("an entry_id is not below next_entry_id")
        if not (np.isfinite(importance) & (importance >= 0)).all():
            raise ValueError("an importance is not finite and >= 0")
        if len(self._tensors) != len(_COLUMNS) + n * (
            6 if self.manifest.config.quantize_stored else 2
        ):
            raise ValueError(
                f"it has {len(self._tensors)} tensors, which is not right for {n} entries"
            )
        if not self._sources.keys() <= set(ids.tolist()):
            raise ValueError("it holds a source of an entry that it does not hold")
        records = np.zeros(n, dtype)
        for name, column in given.items():
            records[name] = column.view(dtype["signature"])[:, 0] if name == "signature" else column
        return records

    def _array(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        raw = self._bytes(tensor.start, tensor.length)
        if crc32c(raw) != tensor.crc:
            raise self._corrupt(
                f"its tensor {tensor.name} does not match its checksum", tensor.start
            )
        return raw.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)

    def _bytes(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        raw = np.empty(length, np.uint8)
        if self._directory.read_into(self._fd, memoryview(raw), start, self._name) < length:
            raise self._corrupt("it ends too early", start)
        return raw

    def _corrupt(self, why: str, offset: int | None = None) -> CorruptStoreError:
        return CorruptStoreError(f"{self._path}: {why}", path=self._path, offset=offset)

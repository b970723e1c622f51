"""Safetensors shards: written whole, read through a map, a few open at a time."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hybridmem import _source
from hybridmem._checksums import crc32c
from hybridmem._codec import Decoded, Tensor
from hybridmem._fileio import Buffer, Directory, Piece
from hybridmem._format import (
    HEADER_FIXED_BYTES,
    HEADER_TENSOR_BYTES,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    PARTS,
    SOURCE,
    SUFFIXES,
    ShardHeader,
    pack_header,
    parse_header,
    shard_name,
)
from hybridmem._manifest import ShardInfo
from hybridmem.errors import CorruptStoreError, SnapshotGoneError, StoreIOError

__all__ = [
    "MAX_SHARD_ENTRIES",
    "ShardPool",
    "batches",
    "check_files",
    "scanned_shard",
    "shard_bytes",
    "tensor_bytes",
    "write_shard",
]

#: Parsing a header costs about 1.5 us a tensor; this bounds the first touch of a shard.
MAX_SHARD_ENTRIES = 2048
#: What the sources of a shard may take of the 4 MiB of its header; tensors take 1.5 MiB at most.
_MAX_SOURCES_BYTES = 1 << 21

_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
}


class _Stored(NamedTuple):
    """A tensor of an entry as it goes into a shard."""

    name: str
    dtype: str
    shape: tuple[int, int]
    data: Buffer


def write_shard(
    directory: Directory, number: int, entries: Sequence[tuple[int, Sequence[Tensor]]]
) -> tuple[ShardInfo, ShardHeader]:
    """Write, sync and name a shard. It is part of the store once a commit names it.

    Parameters
    ----------
    entries : sequence of (entry_id, parts)
        By ascending id. A source goes into the header, so that it lives and dies with its entry.
    """
    tensors = [
        _Stored(
            f"{tensor.suffix[0]}_{entry_id}{tensor.suffix[1:]}",
            tensor.dtype,
            tensor.shape,
            tensor.data,
        )
        for entry_id, parts in entries
        for tensor in parts
        if tensor.suffix != SOURCE
    ]
    # Wide elements first: each tensor then lies at a multiple of its element size.
    tensors.sort(key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    sources = {
        f"source_{entry_id}": text
        for entry_id, parts in entries
        if (text := _source.text_of(parts)) is not None
    }
    checksums = [0] * len(tensors)

    def header() -> bytes:  # of the same length whatever the checksums are
        described = zip(tensors, checksums, strict=True)
        return pack_header([(t.name, t.dtype, t.shape, crc) for t, crc in described], sources)

    def data() -> Iterator[Buffer]:
        for at, tensor in enumerate(tensors):
            checksums[at] = crc32c(tensor.data)  # and written while the processor's caches have it
            yield tensor.data

    def pieces() -> Iterator[Piece]:
        yield len(header()), data()
        yield 0, [header()]

    directory.write_file(shard_name(number), pieces())
    head = header()
    size = len(head) + sum(memoryview(tensor.data).nbytes for tensor in tensors)
    info = ShardInfo(number, size, crc32c(head), len(entries))
    return info, parse_header(head[8:], size - len(head))


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of an entry's tensors."""
    return sum(memoryview(tensor.data).nbytes for tensor in tensors)


def shard_bytes(tensors: Sequence[Tensor]) -> int:
    """Return what an entry takes in a shard, its part of the header included, at most."""
    return tensor_bytes(tensors) + len(tensors) * HEADER_TENSOR_BYTES


def batches(
    entries: Iterable[tuple[int, list[Tensor]]], max_bytes: int
) -> Iterator[list[tuple[int, list[Tensor]]]]:
    """Divide entries among shards."""
    batch: list[tuple[int, list[Tensor]]] = []
    size, in_header = HEADER_FIXED_BYTES, 0
    for entry_id, parts in entries:
        nbytes = shard_bytes(parts)
        source = sum(part.shape[1] for part in parts if part.suffix == SOURCE)
        if batch and (
            size + nbytes > max_bytes
            or len(batch) >= MAX_SHARD_ENTRIES
            or in_header + source > _MAX_SOURCES_BYTES
        ):
            yield batch
            batch, size, in_header = [], HEADER_FIXED_BYTES, 0
        batch.append((entry_id, parts))
        size += nbytes
        in_header += source
    if batch:
        yield batch


def check_files(directory: Directory, infos: Iterable[ShardInfo]) -> None:
    """Check that each shard is there with the size that was committed."""
    for info in infos:
        name = shard_name(info.number)
        path = str(directory.path / name)
        try:
            size = directory.size(name)
        except FileNotFoundError:
            raise CorruptStoreError(f"{path} is missing", path=path) from None
        if size != info.size:
            raise CorruptStoreError(
                f"{path} has {size} bytes, index.json says {info.size}",
                path=path,
                offset=min(size, info.size),
            )


def scanned_shard(directory: Directory, number: int) -> ShardInfo | None:
    """Return what index.json should say of a shard, by the file alone; None if it is damaged."""
    name = shard_name(number)
    try:
        fd, size = directory.open_file(name)
    except CorruptStoreError:
        return None
    try:
        length = bytearray(8)
        directory.read_into(fd, memoryview(length), 0, name)
        n_head = 8 + int.from_bytes(length, "little")
        if n_head > min(size, MAX_HEADER_BYTES):
            return None
        head = bytearray(n_head)
        directory.read_into(fd, memoryview(head), 0, name)
        header = parse_header(bytes(head[8:]), size - n_head)
        return ShardInfo(number, size, crc32c(bytes(head)), len(header.ids))
    except ValueError:
        return None
    finally:
        directory.close_file(fd)


class _Open:
    """An open shard: its mapped bytes, or its descriptor where files are read and not mapped.

    Attributes
    ----------
    seen : dict of int to list of Tensor
        Entries whose parts were all verified, as views of the map: what is found again and again
        costs a look here.
    decoded : dict of int to Decoded
        Instead, where they were asked for decoded, and that are views of the map too.
    """

    __slots__ = ("data", "decoded", "fd", "seen")

    def __init__(self, data: npt.NDArray[np.uint8] | None, fd: int) -> None:
        self.data = data
        self.fd = fd
        self.seen: dict[int, list[Tensor]] = {}
        self.decoded: dict[int, Decoded] = {}


class ShardPool:
    """The shards of a snapshot; at most `max_open` are open, the least recently used closes first.

    What was read of a header, and which tensors were verified, is kept for shards that are closed,
    since a committed shard never changes. Arrays handed out keep their map alive by themselves.
    """

    def __init__(self, directory: Directory, max_open: int, io: str, *, reader: bool) -> None:
        self.max_open = max_open
        self._directory = directory
        self._io = io
        self._reader = reader
        self._infos: dict[int, ShardInfo] = {}
        self._headers: dict[int, ShardHeader] = {}
        self._verified: dict[int, npt.NDArray[np.bool_]] = {}
        self._open: OrderedDict[int, _Open] = OrderedDict()
        # Maps that a caller's arrays keep alive are used again: each one holds a descriptor.
        self._maps: weakref.WeakValueDictionary[int, npt.NDArray[np.uint8]] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    def add(self, info: ShardInfo, header: ShardHeader | None = None) -> None:
        """Make a shard known; give the header of one that was just written."""
        self._infos[info.number] = info
        if header is not None:
            self._headers[info.number] = header

    def forget(self, number: int) -> None:
        """Close a shard that no entry needs any more."""
        with self._lock:
            opened = self._open.pop(number, None)
            if opened is not None:
                self._release(opened)
            for table in (self._infos, self._headers, self._verified, self._maps):
                table.pop(number, None)

    def retarget(self, infos: Iterable[ShardInfo]) -> None:
        """Move to another snapshot, keeping what is known of shards that are in both."""
        wanted = {info.number: info for info in infos}
        for number in list(self._infos):
            if wanted.get(number) != self._infos[number]:
                self.forget(number)
        self._infos = wanted

    def after_fork(self) -> None:
        """Replace a lock that another thread of the parent may have held."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Close all shards; arrays that were handed out stay valid."""
        with self._lock:
            while self._open:
                self._release(self._open.popitem()[1])

    def load(
        self, number: int, entry_id: int, suffixes: Collection[str] = SUFFIXES
    ) -> list[Tensor]:
        """Return stored parts of an entry, verified on first touch, as views of the map.

        Raises
        ------
        SnapshotGoneError
            If the writer has removed the shard since this reader's snapshot.
        CorruptStoreError
            If the shard is not what was committed.
        """
        with self._lock:
            opened = self._opened(number)
            seen = opened.seen.get(entry_id)
            if seen is not None:
                return [part for part in seen if part.suffix in suffixes]
            header = self._headers[number]
            row = header.find(entry_id)
            if row is None:
                raise self.corrupt(number, f"it does not hold entry {entry_id}")
            verified = self._verified[number]
            if opened.data is not None and not verified[row].all():
                self._fetch(opened, number, row, suffixes)
            tensors = []
            complete = True
            for column, part in header.parts_of(row):
                if part.name not in suffixes:
                    complete = False
                    continue
                raw = self._bytes(opened, number, part.start, part.length)
                if opened.data is None or not verified[row, column]:
                    if crc32c(raw) != part.crc:
                        raise self.corrupt(
                            number,
                            f"{part.name} of entry {entry_id} does not match its checksum",
                            part.start,
                        )
                    verified[row, column] = True
                data: npt.NDArray[Any] = np.ndarray(part.shape, _NUMPY[part.dtype], raw)
                tensors.append(Tensor(part.name, part.dtype, data.shape, data))
            if complete and opened.data is not None:
                opened.seen[entry_id] = tensors
            return tensors

    def decoded(
        self, number: int, entry_id: int, decode: Callable[[Sequence[Tensor]], Decoded]
    ) -> Decoded:
        """Return what `decode` makes of the parts of an entry, which `load` verifies."""
        with self._lock:
            opened = self._opened(number)
            known = opened.decoded.get(entry_id)
            if known is None:
                known = decode(self.load(number, entry_id, PARTS))
                data, rows = opened.data, (known.keys, known.values)
                if data is not None and all(np.may_share_memory(one, data) for one in rows):
                    opened.decoded[entry_id] = known
                    opened.seen.pop(entry_id, None)
            return known

    def prefetch(
        self, entries: Iterable[tuple[int, int]], suffixes: Collection[str] = SUFFIXES
    ) -> None:
        """Have the system read stored parts of entries, by shard and id, that were never touched.

        Of no more shards than can be open; what is wrong with them `load` will say.
        """
        with self._lock:
            numbers: set[int] = set()
            for number, entry_id in entries:
                known = self._open.get(number)
                if known is not None and (entry_id in known.decoded or entry_id in known.seen):
                    numbers.add(number)
                    continue
                if len(numbers | {number}) > self.max_open:
                    continue
                numbers.add(number)
                opened = self._opened(number)
                if opened.data is None:
                    continue
                row = self._headers[number].find(entry_id)
                if row is not None and not self._verified[number][row].all():
                    self._fetch(opened, number, row, suffixes)

    def _fetch(self, opened: _Open, number: int, row: int, suffixes: Collection[str]) -> None:
        # Page by page, as they are touched, a cold disk takes three times as long.
        start = end = 0
        for _, part in self._headers[number].parts_of(row):
            if part.name not in suffixes:
                continue
            if part.start != end:
                self._advise(opened, start, end)
                start = part.start
            end = part.start + part.length
        self._advise(opened, start, end)

    def _advise(self, opened: _Open, start: int, end: int) -> None:
        holder: Any = None if opened.data is None else opened.data.base
        if end > start and holder is not None:
            self._directory.fetch(getattr(holder, "obj", holder), start, end - start)

    def header(self, number: int) -> ShardHeader:
        """Return the verified header of a shard."""
        with self._lock:
            self._opened(number)
            return self._headers[number]

    def _opened(self, number: int) -> _Open:
        opened = self._open.get(number)
        if opened is not None:
            self._open.move_to_end(number)
            return opened
        while len(self._open) >= self.max_open:
            self._release(self._open.popitem(last=False)[1])
        data = self._maps.get(number)
        opened = self._open_shard(number) if data is None else _Open(data, -1)
        self._open[number] = opened
        return opened

    def _open_shard(self, number: int) -> _Open:
        name, info = shard_name(number), self._infos[number]
        try:
            fd, size = self._directory.open_file(name)
        except FileNotFoundError:
            if self._reader:
                raise SnapshotGoneError(
                    f"{self._directory.path / name} was removed by the writer; "
                    "refresh() and ask again"
                ) from None
            raise self.corrupt(number, "it is missing") from None
        keep = False
        try:
            if size != info.size:
                raise self.corrupt(
                    number, f"it has {size} bytes, index.json says {info.size}", size
                )
            data = None
            if self._io == "mmap":
                mapped = self._directory.map_file(fd, size, name)
                data = np.frombuffer(mapped, np.uint8)
            opened = _Open(data, -1 if data is not None else fd)
            self._verify_header(opened, fd, number)
            keep = data is None
            if data is not None:
                self._maps[number] = data
            return opened
        finally:
            if not keep:
                self._directory.close_file(fd)

    def _verify_header(self, opened: _Open, fd: int, number: int) -> None:
        info = self._infos[number]
        head = _Open(opened.data, fd)
        length = int.from_bytes(self._bytes(head, number, 0, 8).tobytes(), "little")
        if length > min(info.size - 8, MAX_HEADER_BYTES):
            raise self.corrupt(number, f"its header claims {length} bytes", 0)
        text = self._bytes(head, number, 0, 8 + length)
        if crc32c(text) != info.header_crc:
            raise self.corrupt(number, "its header does not match its checksum", 0)
        if number not in self._headers:
            try:
                header = parse_header(text[8:].tobytes(), info.size - 8 - length)
            except ValueError as error:
                raise self.corrupt(number, str(error), 0) from None
            if len(header.ids) != info.entries:
                raise self.corrupt(
                    number, f"it holds {len(header.ids)} entries, index.json says {info.entries}"
                )
            if opened.data is not None:
                self._agree(number, header, fd)
            self._headers[number] = header
        if number not in self._verified:
            self._verified[number] = np.zeros(self._headers[number].shape, np.bool_)

    def _agree(self, number: int, header: ShardHeader, fd: int) -> None:
        """Let the reference reader parse the shard too: what it would read otherwise is refused."""
        path = self._directory.path / shard_name(number)
        try:
            with safe_open(self._directory.reopened(fd, path.name), framework="numpy") as file:
                count = len(file.keys())
        except FileNotFoundError:
            return  # removed since it was opened here; the map stays valid
        except SafetensorError as error:
            raise self.corrupt(number, f"safetensors refuses it: {error}") from None
        except OSError as error:
            raise StoreIOError(f"failed opening {path}: {error}") from error
        if count != header.n_tensors:
            raise self.corrupt(
                number, f"safetensors finds {count} tensors in it, its header names others"
            )

    def _bytes(self, opened: _Open, number: int, start: int, length: int) -> npt.NDArray[np.uint8]:
        if opened.data is not None:
            return opened.data[start : start + length]
        raw = np.empty(length, np.uint8)
        name = shard_name(number)
        if self._directory.read_into(opened.fd, memoryview(raw), start, name) < length:
            raise self.corrupt(number, "it was cut short", start)
        raw.flags.writeable = False
        return raw

    def _release(self, opened: _Open) -> None:
        if opened.fd >= 0:
            self._directory.close_file(opened.fd)

    def corrupt(self, number: int, why: str, offset: int | None = None) -> CorruptStoreError:
        """Return the error for a shard that is damaged."""
        path = str(self._directory.path / shard_name(number))
        return CorruptStoreError(f"{path} is damaged: {why}", path=path, offset=offset)

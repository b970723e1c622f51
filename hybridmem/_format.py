"""Bytes to values and back, without I/O: records, index.json and shard headers (docs/format.md).

Everything read here is untrusted: each parser either returns values that hold every rule of the
format or raises `ValueError` saying which rule is broken; callers add the file's name.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hybridmem._checksums import crc32c

__all__ = [
    "BLOCK_RECORDS",
    "FORMAT_VERSION",
    "HEAD_BYTES",
    "ShardHeader",
    "StoredTensor",
    "decode_json",
    "encode_json",
    "extend_checksums",
    "newer_version",
    "pack_header",
    "parse_header",
    "parse_tensors",
    "record_dtype",
    "shard_name",
    "shard_number",
]

FORMAT_VERSION = 1
#: Bytes of a record before its signature.
HEAD_BYTES = 40
#: Records covered by one checksum of entries.bin.
BLOCK_RECORDS = 1024
#: Largest header of a shard: more than 2,048 entries need, and cheap to parse if hostile.
MAX_HEADER_BYTES = 1 << 22

#: Upper bounds of what a shard's header takes: for each tensor, and besides.
HEADER_TENSOR_BYTES, HEADER_FIXED_BYTES = 128, 192

#: Members of index.json are fewer; a model_id may hold what looks like some.
INDEX_MEMBERS = 4096

_ACCESS_COUNT = slice(28, 32)
_TAIL = re.compile(rb',\n"crc32c":"([0-9a-f]{8})"\}\n\Z')
_SHARD = re.compile(r"shard_(\d{4,10})\.safetensors\Z", re.ASCII)
_TENSOR = re.compile(r"([kv])_(0|[1-9]\d{0,19})(|_scale|_zero)\Z", re.ASCII)
#: Bytes of one element by safetensors dtype.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}
DTYPES = tuple(ITEM_BYTES)
#: Likewise, of the columns of records in an export file.
COLUMN_BYTES = {"U64": 8, "U32": 4, "F32": 4, "U8": 1}
#: Tensors of one entry.
SUFFIXES = ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero")
KEY_SUFFIXES = ("k", "k_scale", "k_zero")
#: What the header itself holds of an entry: its source.
SOURCE = "source"
PARTS = (*SUFFIXES, SOURCE)
_SOURCE_MEMBER = re.compile(
    rb'"source_(0|[1-9]\d{0,19})" ?: ?"([^"\\]*(?:\\.[^"\\]*)*)"'  # its id; a whole string
)


# -- entries.bin ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def record_dtype(hdc_dim: int) -> np.dtype[np.void]:
    """Return the packed little-endian dtype of a record with a signature of `hdc_dim` bits."""
    return np.dtype(
        [
            ("entry_id", "<u8"),
            ("layer_idx", "<u4"),
            ("n_tokens", "<u4"),
            ("importance", "<f4"),
            ("timestamp", "<u8"),
            ("access_count", "<u4"),
            ("shard_idx", "<u4"),
            ("padding", "<u4"),
            ("signature", f"V{hdc_dim // 8}"),
        ]
    )


def extend_checksums(
    checksums: Sequence[int], n_before: int, records: npt.NDArray[np.uint8]
) -> list[int]:
    """Return the checksums of entries.bin after records were appended.

    Each is the CRC-32C of a block of 1,024 records (of fewer at the end), their access counts taken
    as 0.

    Parameters
    ----------
    checksums : sequence of int
        Of the `n_before` records that precede.
    records : uint8 array, shape (n, record bytes)
    """
    extended = list(checksums)
    at = 0
    while at < len(records):
        room = BLOCK_RECORDS - (n_before + at) % BLOCK_RECORDS
        block = records[at : at + room].copy()
        block[:, _ACCESS_COUNT] = 0
        if room < BLOCK_RECORDS:
            extended[-1] = crc32c(block, extended[-1])
        else:
            extended.append(crc32c(block))
        at += room
    return extended


# -- index.json -----------------------------------------------------------------------------------


def encode_json(fields: dict[str, Any]) -> bytes:
    """Return index.json: one member a line, the last one the CRC-32C of all bytes before it."""
    lines = [
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}"
        for key, value in fields.items()
    ]
    body = ("{" + ",\n".join(lines)).encode()
    return body + b',\n"crc32c":"%08x"}\n' % crc32c(body)


def decode_json(data: bytes, *, checked: bool = True) -> dict[str, Any]:
    """Parse index.json whose checksum holds, or is not asked for."""
    tail = _TAIL.search(data)
    if tail is None:
        raise ValueError('it does not end in its checksum, "crc32c"')
    if checked and crc32c(data[: tail.start()]) != int(tail[1], 16):
        raise ValueError("its checksum does not match its bytes")
    _check_density(data, INDEX_MEMBERS, 0, 5)
    fields = _strict_object(data)
    del fields["crc32c"]
    return fields


def newer_version(data: bytes) -> int | None:
    """Return the format version of an index.json that this version cannot read, if it is newer.

    Nothing else is asked of it: a newer format may have other members and another checksum.
    """
    try:
        _check_density(data, INDEX_MEMBERS, 0, 5)
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    is_newer = type(version) is int and version > FORMAT_VERSION
    return version if is_newer else None


def _check_density(data: bytes, free: int, member_bytes: int, list_bytes: int) -> None:
    """Refuse JSON whose parsed form would be many times larger than what it is read for needs.

    Parameters
    ----------
    free : int
        Members, and lists and objects, that it may have in any case.
    member_bytes, list_bytes : int
        It may have one more for so many bytes each; 0 for none.
    """
    members = data.count(b'":')
    if members > free + (len(data) // member_bytes if member_bytes else 0):
        raise ValueError(f"its JSON has {members} members, too many")
    lists = data.count(b"[") + data.count(b"{")
    if lists > free + len(data) // list_bytes:
        raise ValueError(f"its JSON has {lists} lists and objects, too many")


def _strict_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object of integers and strings that names no member twice."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_members,
            parse_float=_no_float,
            parse_constant=_no_float,
        )
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("its JSON is not an object")
    return value


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("its JSON names a member twice")
    return members


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"its JSON holds {text[:40]}, where only integers may stand")


# -- shards ---------------------------------------------------------------------------------------


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard_{number:04d}.safetensors"


def shard_number(name: str) -> int | None:
    """Return the number of a shard by its file name, or None for any other name."""
    match = _SHARD.fullmatch(name)
    if match is None or shard_name(int(match[1])) != name:
        return None
    return int(match[1])


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file: where in the file its bytes are, and their CRC-32C.

    As a part of an entry it is named by its suffix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int
    crc: int


_PLACE = np.dtype(
    [
        ("start", np.int64),
        ("rows", np.uint32),
        ("columns", np.uint32),
        ("crc", np.uint32),
        ("dtype", np.uint8),
    ]
)


class ShardHeader:
    """Where the tensors and the source of each entry of a shard lie.

    A store of a million entries keeps hundreds of them, so they are small.

    Parameters
    ----------
    ids : uint64 array, shape (n,)
        Entries of the shard, ascending.
    names : sequence of str
        Those of `PARTS` that any entry has.
    places : structured array, shape (n, len(names))
        Of each entry's parts: first byte in the file, rows (0 where it has no such part), columns,
        CRC-32C of the bytes, index into `DTYPES`. A source is one row of bytes.
    """

    __slots__ = ("_places", "ids", "names")

    def __init__(
        self, ids: npt.NDArray[np.uint64], names: Sequence[str], places: npt.NDArray[np.void]
    ) -> None:
        self.ids = ids
        self.names = tuple(names)
        self._places = [_narrow(places[name]) for name in _PLACE.names or ()]

    @property
    def shape(self) -> tuple[int, int]:
        """Entries, and names of parts."""
        return len(self.ids), len(self.names)

    @property
    def n_tensors(self) -> int:
        """Tensors of all entries; sources are none."""
        rows = self._places[1]
        return int(np.count_nonzero(rows[:, [name != SOURCE for name in self.names]]))

    def find(self, entry_id: int) -> int | None:
        """Return the row of an entry."""
        at = int(self.ids.searchsorted(np.uint64(entry_id)))
        return at if at < len(self.ids) and int(self.ids[at]) == entry_id else None

    def parts_of(self, row: int) -> Iterator[tuple[int, StoredTensor]]:
        """Yield the parts that an entry has, each with its column."""
        fields = (field[row].tolist() for field in self._places)
        for column, (name, start, rows, columns, crc, number) in enumerate(
            zip(self.names, *fields, strict=True)
        ):
            if rows:
                dtype = DTYPES[number]
                length = rows * columns * ITEM_BYTES[dtype]
                yield column, StoredTensor(name, dtype, (rows, columns), start, length, crc)


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a field of all entries, in 4 bytes where it fits; what is the same for all, once."""
    if (values == values[:1]).all():
        return np.broadcast_to(values[:1].copy(), values.shape)
    return values.astype(np.uint32 if values.max() < 1 << 32 else values.dtype)


def pack_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the first bytes of a safetensors file: header length and header.

    Parameters
    ----------
    tensors : sequence of (name, dtype, shape, crc)
        In the order of their bytes, which follow each other without a gap.
    metadata : mapping of str to str
        What `__metadata__` holds besides the checksums.

    Notes
    -----
    The header is padded with spaces to a multiple of 64 bytes, so that tensors are aligned for
    vector loads.
    """
    members: dict[str, Any] = {
        "__metadata__": {
            "format": "hybridmem",
            "crc32c": "".join(f"{crc:08x}" for *_, crc in tensors),
            **metadata,  # may say that the format is another
        }
    }
    at = 0
    for name, dtype, shape, _ in tensors:
        end = at + math.prod(shape) * (ITEM_BYTES | COLUMN_BYTES)[dtype]
        members[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, data_bytes: int) -> ShardHeader:
    """Parse the header of a shard whose tensors fill `data_bytes` bytes after it."""
    metadata, tensors = parse_tensors(text, data_bytes, ITEM_BYTES)
    found: list[tuple[int, str, StoredTensor]] = []
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or int(match[2]) >= 1 << 64:
            raise ValueError(f"it holds a tensor of the name {tensor.name[:60]!r}")
        if len(tensor.shape) != 2:
            raise ValueError(f"its tensor {tensor.name} has {len(tensor.shape)} dimensions")
        if max(tensor.shape) >= 1 << 32:
            raise ValueError(f"its tensor {tensor.name} has more than 2**32 - 1 rows or columns")
        found.append((int(match[2]), match[1] + match[3], tensor))
    ids = sorted({entry_id for entry_id, *_ in found})
    there = {suffix for _, suffix, _ in found}
    if any(name.startswith("source_") for name in metadata):
        there.add(SOURCE)
    names = [name for name in PARTS if name in there]
    row_of = {entry_id: row for row, entry_id in enumerate(ids)}
    places = np.zeros((len(ids), len(names)), _PLACE)
    for entry_id, suffix, tensor in found:
        _, dtype, shape, start, _, crc = tensor
        place = (start, *shape, crc, DTYPES.index(dtype))
        places[row_of[entry_id], names.index(suffix)] = place
    present = np.zeros((len(ids), len(PARTS)), np.bool_)
    present[:, [PARTS.index(name) for name in names]] = places["rows"] > 0
    scaled = present[:, 2 : len(SUFFIXES)]
    lone = ~present[:, :2].all(axis=1) | (scaled.any(axis=1) & ~scaled.all(axis=1))
    if lone.any():
        raise ValueError(f"entry {ids[int(np.argmax(lone))]} lacks some of its tensors")
    if SOURCE in there:
        _find_sources(places[:, -1], text, metadata, row_of)
    return ShardHeader(np.array(ids, np.uint64), names, places)


def parse_tensors(
    text: bytes, data_bytes: int, item_bytes: Mapping[str, int]
) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Parse the header of a safetensors file as this package writes it.

    Parameters
    ----------
    text : bytes
        From byte 8 on.
    data_bytes : int
        Bytes after it.
    item_bytes : mapping of str to int
        The dtypes that are allowed, and the bytes of an element.

    Returns
    -------
    metadata : dict
    tensors : list of StoredTensor
        In the order of their bytes, which fill the file.
    """
    # The shortest tensor takes 56 bytes, with four members and three lists and objects. Sources
    # are strings, whatever they look like inside.
    _check_density(_SOURCE_MEMBER.sub(b"", text) if b"source_" in text else text, 64, 12, 16)
    members = _strict_object(text)
    metadata = members.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise ValueError("it has no __metadata__")
    try:
        crcs = np.frombuffer(bytes.fromhex(metadata["crc32c"]), ">u4").tolist()
    except (KeyError, TypeError, ValueError):
        raise ValueError("its metadata has no valid crc32c") from None
    if len(crcs) != len(members):
        raise ValueError(f"its metadata has {len(crcs)} checksums for {len(members)} tensors")
    found = [(name, *_tensor_fields(name, one, item_bytes)) for name, one in members.items()]
    base, at = 8 + len(text), 0
    tensors = []
    for (name, dtype, shape, start, end), crc in zip(
        sorted(found, key=lambda tensor: tensor[3:]), crcs, strict=True
    ):
        if start != at:
            raise ValueError(f"its tensors overlap or leave a gap at byte {base + at}")
        at = end
        tensors.append(StoredTensor(name, dtype, shape, base + start, end - start, crc))
    if at != data_bytes:
        raise ValueError(f"its tensors fill {at} bytes where the file has {data_bytes}")
    return metadata, tensors


def _find_sources(
    places: npt.NDArray[np.void], text: bytes, metadata: dict[str, Any], row_of: dict[int, int]
) -> None:
    """Note where in the header the sources stand; they are read from there when asked for."""
    named = {name for name in metadata if name.startswith("source_")}
    for match in _SOURCE_MEMBER.finditer(text):
        entry_id, (start, end) = int(match[1]), match.span(2)
        if entry_id not in row_of:
            raise ValueError(f"it holds a source of entry {entry_id}, but not the entry")
        place = (8 + start, 1, end - start, crc32c(match[2]), DTYPES.index("I8"))
        places[row_of[entry_id]] = place
        named.discard(f"source_{entry_id}")
    if named or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not of plain names and strings")


def _tensor_fields(
    name: str, tensor: object, item_bytes: Mapping[str, int]
) -> tuple[str, tuple[int, ...], int, int]:
    try:
        if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
            raise TypeError
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        start, end = offsets
        if type(dtype) is not str or dtype not in item_bytes or type(shape) is not list:
            raise TypeError
        if len(shape) not in (1, 2) or not all(
            type(value) is int and 0 <= value < 1 << 62 for value in (*shape, start, end)
        ):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"its tensor {name} has no valid dtype, shape and data_offsets") from None
    size = math.prod(shape) * item_bytes[dtype]
    if size == 0 or end - start != size:
        raise ValueError(f"the byte range of its tensor {name} does not fit its shape")
    return dtype, tuple(shape), start, end

"""index.json: configuration, counters and commit record, as one frozen value."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem._fileio import Directory
from hybridmem._format import (
    BLOCK_RECORDS,
    FORMAT_VERSION,
    decode_json,
    encode_json,
    newer_version,
    record_dtype,
)
from hybridmem.config import Config
from hybridmem.errors import CorruptStoreError, StoreIOError, StoreNotFoundError, VersionError

__all__ = [
    "INDEX_NAME",
    "Calibration",
    "Manifest",
    "ShardInfo",
    "read_manifest",
    "unchecked_manifest",
]

INDEX_NAME = "index.json"
_U32, _U64 = 1 << 32, 1 << 64
#: 1e9 entries need about 11 MB of checksums; dead ranges are compacted away long before this.
_MAX_INDEX_BYTES = 1 << 25
#: What it may have in any store; more must be in proportion to the other files.
_FREE_INDEX_BYTES = 1 << 21
#: Of these, what the means of all layers may take: a store that shrinks must be read all the same.
_CALIBRATION_BYTES = 3 << 19

_STORE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)

#: Name in index.json of the INT8 scheme that docs/format.md defines.
INT8_SCHEME = "affine-i8"


class ShardInfo(NamedTuple):
    """A committed shard: size of the file, CRC-32C of its header, entries written into it."""

    number: int
    size: int
    header_crc: int
    entries: int


class Calibration(NamedTuple):
    """What the keys and queries of a layer are centred by, as it stands in index.json.

    Attributes
    ----------
    mean_key, mean_query : str
        Base64 of `embed_dim` little-endian float32; an empty `mean_query` centres no query.
    """

    layer_idx: int
    mean_key: str
    mean_query: str = ""

    @staticmethod
    def pack(mean: npt.NDArray[np.float32] | None) -> str:
        """Return the text of a mean, empty for none."""
        return (
            "" if mean is None else base64.b64encode(mean.astype("<f4").tobytes()).decode("ascii")
        )

    @staticmethod
    def joined(layers: Iterable[Calibration], one: Calibration) -> tuple[Calibration, ...]:
        """Return layers and one more, in order.

        Raises
        ------
        ValueError
            If they would take more than their part of index.json.
        """
        after = tuple(sorted((*layers, one), key=lambda layer: layer.layer_idx))
        size = sum(len(layer.mean_key) + len(layer.mean_query) for layer in after)
        if size > _CALIBRATION_BYTES:
            raise ValueError(
                f"the means of {len(after)} calibrated layers would take {size} bytes of "
                f"index.json, more than the {_CALIBRATION_BYTES} that there are for them: "
                "calibrate fewer layers, or give no queries"
            )
        return after

    @staticmethod
    def unpack(text: str) -> npt.NDArray[np.float32]:
        """Return the mean of a text."""
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one generation of a store consists of.

    Attributes
    ----------
    store_id : str
        32 random hexadecimal digits, made at `create`: entry ids are unique in one store only.
    generation : int
        Number of the commit, counting from 1.
    n_records : int
        Committed records of entries.bin, dead ones included.
    entries_crc : tuple of int
        CRC-32C of each block of 1,024 records.
    shards : tuple of ShardInfo
        By ascending number.
    dead : tuple of (int, int)
        First and last record of each run of dead records, ascending.
    calibration : tuple of Calibration
        By ascending layer; layers that are not named are not centred.
    """

    config: Config
    store_id: str
    generation: int = 0
    next_entry_id: int = 1
    next_shard: int = 0
    n_records: int = 0
    entries_crc: tuple[int, ...] = ()
    shards: tuple[ShardInfo, ...] = ()
    dead: tuple[tuple[int, int], ...] = ()
    calibration: tuple[Calibration, ...] = ()

    def replace(self, **changes: Any) -> Manifest:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def entries_name(self) -> str:
        """Name under which a compaction writes the records of this generation."""
        return f"entries.bin.g{self.generation}"

    def encode(self) -> bytes:
        """Return the bytes of index.json.

        Raises
        ------
        StoreIOError
            If they are more than what is read of a store of this size.
        """
        records = self.n_records * record_dtype(self.config.hdc_dim).itemsize
        limit = _limit(records + sum(shard.size for shard in self.shards))
        data = encode_json(
            {
                "format": "hybridmem",
                "format_version": FORMAT_VERSION,
                "store_id": self.store_id,
                "generation": self.generation,
                "config": self.config.to_dict(),
                "quantization": INT8_SCHEME if self.config.quantize_stored else None,
                "next_entry_id": self.next_entry_id,
                "next_shard": self.next_shard,
                "n_entries": self.n_records,
                "entries_crc32c": self.entries_crc,
                "shards": self.shards,
                "dead": self.dead,
                "calibration": self.calibration,
            }
        )
        if len(data) > limit:
            raise StoreIOError(
                f"{INDEX_NAME} would have {len(data)} bytes, more than the {limit} that are read "
                f"of a store of this size; it names {len(self.shards)} shards: open the store with "
                "a larger shard_max_bytes and compact it"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse index.json; raise ValueError saying which rule is broken."""
        return cls._of_fields(decode_json(data))

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Manifest:
        expected = {
            "format", "format_version", "store_id", "generation", "config", "quantization",
            "next_entry_id", "next_shard", "n_entries", "entries_crc32c", "shards", "dead",
            "calibration",
        }  # fmt: skip
        if fields.keys() != expected:
            names = str(sorted(fields))[:400]
            raise ValueError(f"its members are {names}, wanted {sorted(expected)}")
        if fields["format"] != "hybridmem":
            raise ValueError(f"its format is {str(fields['format'])[:40]!r}, wanted 'hybridmem'")
        _integer("format_version", fields["format_version"], FORMAT_VERSION, FORMAT_VERSION)
        config = _config(fields["config"])
        if fields["quantization"] != (INT8_SCHEME if config.quantize_stored else None):
            raise ValueError(f"its quantization {str(fields['quantization'])[:40]!r} is not known")
        n_records = _integer("n_entries", fields["n_entries"], 0, _U64 - 1)
        next_shard = _integer("next_shard", fields["next_shard"], 0, _U32)
        store_id = fields["store_id"]
        if not isinstance(store_id, str) or not _STORE_ID.fullmatch(store_id):
            raise ValueError("its store_id is not 32 hexadecimal digits")
        return cls(
            config=config,
            store_id=store_id,
            generation=_integer("generation", fields["generation"], 1, _U64 - 1),
            next_entry_id=_integer("next_entry_id", fields["next_entry_id"], 1, _U64),
            next_shard=next_shard,
            n_records=n_records,
            entries_crc=_checksums(fields["entries_crc32c"], n_records),
            shards=_shards(fields["shards"], next_shard),
            dead=_ranges(fields["dead"], n_records),
            calibration=_calibration(fields["calibration"], config.embed_dim),
        )


def read_manifest(directory: Directory) -> Manifest:
    """Read the committed manifest of a store.

    Raises
    ------
    StoreNotFoundError
        If there is no index.json.
    VersionError
        If it was written in a newer format.
    CorruptStoreError
        If it is damaged.
    """
    path = directory.path / INDEX_NAME
    try:
        data = directory.read_file(INDEX_NAME, _index_limit(directory))
    except FileNotFoundError:
        raise StoreNotFoundError(
            f"no store in {directory.path}: it has no index.json; make one with hybridmem.create"
        ) from None
    try:
        return Manifest.decode(data)
    except (ValueError, RecursionError) as error:
        why = str(error)
    # Here, where the first parse is given back already: hostile JSON takes many times its size.
    version = newer_version(data)
    if version is not None:
        raise VersionError(
            f"{path} has format_version {version}; this hybridmem reads up to "
            f"{FORMAT_VERSION}: install a newer hybridmem to open it"
        )
    raise CorruptStoreError(f"{path} is damaged: {why}", path=str(path))


def unchecked_manifest(directory: Directory) -> Manifest | None:
    """Return what a damaged index.json says if it holds every rule but that of its checksum."""
    try:
        data = directory.read_file(INDEX_NAME, _index_limit(directory))
        return Manifest._of_fields(decode_json(data, checked=False))
    except (CorruptStoreError, ValueError, RecursionError):
        return None


def _index_limit(directory: Directory) -> int:
    return _limit(directory.total_bytes())


def _limit(total_bytes: int) -> int:
    """Return how large index.json may be: parsed, JSON takes up to twenty times its size."""
    return min(_MAX_INDEX_BYTES, _FREE_INDEX_BYTES + total_bytes // 16)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"its {name} is {str(value)[:40]}, wanted an integer from {low} to {high}")
    return value


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"its {name} is not a list")
    return value


def _config(value: object) -> Config:
    names = {field.name for field in dataclasses.fields(Config)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"its config does not have the fields {sorted(names)}")
    try:
        return Config(**value)
    except TypeError as error:
        raise ValueError(f"its config is invalid: {error}") from None


def _checksums(value: object, n_records: int) -> tuple[int, ...]:
    checksums = _list("entries_crc32c", value)
    if len(checksums) != -(-n_records // BLOCK_RECORDS):
        raise ValueError(f"it has {len(checksums)} checksums for {n_records} records")
    return tuple(_integer("entries_crc32c", checksum, 0, _U32 - 1) for checksum in checksums)


def _shards(value: object, next_shard: int) -> tuple[ShardInfo, ...]:
    shards = []
    low = 0
    for item in _list("shards", value):
        if not isinstance(item, list) or len(item) != 4:
            raise ValueError("its shards are not lists of number, size, checksum and entries")
        shards.append(
            ShardInfo(
                _integer("shard number", item[0], low, next_shard - 1),
                _integer("shard size", item[1], 9, _U64 - 1),
                _integer("shard checksum", item[2], 0, _U32 - 1),
                _integer("entries of a shard", item[3], 1, _U32 - 1),
            )
        )
        low = shards[-1].number + 1
    return tuple(shards)


def _ranges(value: object, n_records: int) -> tuple[tuple[int, int], ...]:
    ranges = []
    low = 0
    for item in _list("dead", value):
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError("its dead ranges are not pairs")
        first = _integer("dead record", item[0], low, n_records - 1)
        last = _integer("dead record", item[1], first, n_records - 1)
        ranges.append((first, last))
        low = last + 1
    return tuple(ranges)


def _calibration(value: object, embed_dim: int) -> tuple[Calibration, ...]:
    layers = []
    low = 0
    for item in _list("calibration", value):
        if not isinstance(item, list) or len(item) != 3:
            raise ValueError("its calibration is not lists of layer, mean key and mean query")
        layer, *texts = item
        for text in texts:
            if not isinstance(text, str):
                raise ValueError("a mean of its calibration is no text")
            if text or text is texts[0]:
                mean = Calibration.unpack(text)
                if mean.shape != (embed_dim,) or not np.isfinite(mean).all():
                    raise ValueError(f"a mean of its calibration is not {embed_dim} finite numbers")
        layers.append(Calibration(_integer("calibrated layer", layer, low, _U32 - 1), *texts))
        low = layers[-1].layer_idx + 1
    return tuple(layers)

"""Writes the golden stores of format version 1 under tests/data, and stores for other tests.

``python tests/make_golden.py`` builds them from docs/format.md with struct and json alone
(signatures come from tests/model.py): nothing of ``hybridmem`` is imported, so they show what the
format is and not what the package happens to write. They are never built anew for the sake of a
test: a store of version 1 must open for ever.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model import DEFAULT_SEED, Floats, Model, Row, to_bfloat16_bits
from reader import HEAD, dequantise, shard_name

DATA = Path(__file__).resolve().parent / "data" / "format-1"
STORE_ID = "00112233445566778899aabbccddeeff"
START = 1_700_000_000_000_000_000  # ns since the epoch

CONFIG: dict[str, Any] = {
    "embed_dim": 12,
    "hdc_dim": 4096,
    "seed": DEFAULT_SEED,
    "max_entries": 0,
    "max_disk_bytes": 0,
    "shard_max_bytes": 256 * 2**20,
    "max_open_shards": 4,
    "quantize_stored": False,
    "kv_dtype": "float32",
    "signature_tokens": 0,
    "signature_bits": 0,
    "model_id": None,
}


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), reflected, as RFC 3720 has it; the slow way."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFF_FFFF


def crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F6_3B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = crc_table()
assert crc32c(b"123456789") == 0xE306_9283


@dataclass
class Tensor:
    """One tensor as it stands in a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Entry:
    """One record and its tensors; ``keys`` and ``values`` are what a reader must get."""

    entry_id: int
    layer_idx: int
    importance: float
    timestamp: int
    access_count: int
    shard_idx: int
    keys: Floats
    values: Floats
    tensors: list[Tensor] = field(default_factory=list)
    signature: bytes = b""
    padding: int = 0

    def record(self) -> bytes:
        head = HEAD.pack(
            self.entry_id,
            self.layer_idx,
            len(self.keys),
            self.importance,
            self.timestamp,
            self.access_count,
            self.shard_idx,
            self.padding,
        )
        return head + self.signature


# --- sample entries ------------------------------------------------------------------------------


def sample(number: int, n: int, width: int = 12) -> Floats:
    """A matrix by a formula, in numbers that float16 and bfloat16 hold exactly."""
    i, j = np.indices((n, width))
    x = (37 * number + 11 * i * i + 29 * j + 5 * i * j * number) % 251 - 125
    return (x / 16).astype(np.float32)


def payload(number: int, n: int, config: dict[str, Any]) -> Floats:
    """Keys or values of a store: with all 24 bits of a float32 where it keeps them."""
    x = sample(number, n, config["embed_dim"])
    return x / np.float32(3) if config["kv_dtype"] == "float32" else x


def encoded(name: str, x: Floats, kv_dtype: str) -> Tensor:
    if kv_dtype == "float16":
        return Tensor(name, "F16", x.shape, x.astype("<f2").tobytes())
    if kv_dtype == "bfloat16":
        return Tensor(name, "BF16", x.shape, to_bfloat16_bits(x).astype("<u2").tobytes())
    return Tensor(name, "F32", x.shape, x.astype("<f4").tobytes())


def plain_entry(
    entry_id: int, n: int, config: dict[str, Any], shard_idx: int = 0, **record: Any
) -> Entry:
    """An entry of a store that is not quantised, signed by the model."""
    keys, values = payload(entry_id, n, config), payload(entry_id + 100, n, config)
    entry = Entry(
        entry_id=entry_id,
        layer_idx=record.get("layer_idx", entry_id % 2),
        importance=record.get("importance", float(np.float32(0.1 * entry_id))),
        timestamp=START + 1000 * entry_id,
        access_count=record.get("access_count", 3 * entry_id),
        shard_idx=shard_idx,
        keys=keys,
        values=values,
    )
    entry.tensors = [
        encoded(f"k_{entry_id}", keys, config["kv_dtype"]),
        encoded(f"v_{entry_id}", values, config["kv_dtype"]),
    ]
    entry.signature = model_of(config).signature(keys).tobytes()
    return entry


def int8_entry(entry_id: int, n: int, config: dict[str, Any]) -> Entry:
    """An INT8 entry in the shapes that a writer uses, with scales that are powers of two.

    The signature is made of the keys that are read back.
    """
    width = config["embed_dim"]
    tensors, matrices = [], []
    for letter, shift in (("k", 0), ("v", 100)):
        q = (sample(entry_id + shift, n, width) * 16).astype(np.int8)
        if letter == "v":
            shapes = [(n, -(-width // 96))] * 2
        elif n < 16:
            shapes = [(n, -(-width // 32))] * 2
        else:
            shapes = [(1, -(-width // 2)), (1, width)]
        (i, j), (k, m) = (np.indices(shape) for shape in shapes)
        scale = np.ldexp(1.0, -3 - (i + j + entry_id) % 4).astype(np.float32)
        zero = (((k * 7 + m * 3) % 9 - 4) / 4).astype(np.float32)
        # One entry with float32 scales, the others with float16.
        tag, kind = ("F32", "<f4") if entry_id == 2 else ("F16", "<f2")
        name = f"{letter}_{entry_id}"
        tensors.append(Tensor(name, "I8", q.shape, q.tobytes()))
        for suffix, x in (("_scale", scale), ("_zero", zero)):
            tensors.append(Tensor(name + suffix, tag, x.shape, x.astype(kind).tobytes()))
        matrices.append(dequantise(q, scale, zero))
    entry = plain_entry(entry_id, n, config)
    entry.keys, entry.values = matrices
    entry.tensors = tensors
    entry.signature = model_of(config).signature(entry.keys).tobytes()
    return entry


def centre(entries: list[Entry], model: Model) -> None:
    """Sign entries anew as a store with these means has them."""
    for entry in entries:
        entry.signature = model.signature(entry.keys, entry.layer_idx).tobytes()
        norm = np.float32(model.padding(entry.keys, entry.layer_idx))
        entry.padding = int(norm.view(np.uint32))


def model_of(config: dict[str, Any]) -> Model:
    names = ("embed_dim", "hdc_dim", "seed", "signature_tokens", "signature_bits")
    return Model(**{name: config[name] for name in names})


# --- the files -----------------------------------------------------------------------------------


def shard_header(tensors: Iterable[Tensor]) -> bytes:
    """Header length and header of a shard whose tensors follow each other in this order."""
    tensors = list(tensors)
    checksums = "".join(f"{crc32c(tensor.data):08x}" for tensor in tensors)
    members: dict[str, Any] = {"__metadata__": {"format": "hybridmem", "crc32c": checksums}}
    at = 0
    for tensor in tensors:
        end = at + len(tensor.data)
        members[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text


def index_json(fields: dict[str, Any]) -> bytes:
    lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in fields.items()]
    body = ("{" + ",\n".join(lines)).encode()
    return body + f',\n"crc32c":"{crc32c(body):08x}"}}\n'.encode()


def write_store(
    path: Path,
    config: dict[str, Any],
    entries: list[Entry],
    *,
    dead: Iterable[int] = (),
    gone_shards: Iterable[int] = (),
    calibration: Iterable[tuple[int, Floats, Floats | None]] = (),
    generation: int = 2,
    next_entry_id: int | None = None,
    next_shard: int | None = None,
) -> None:
    """Write a store directory: records in the order given, ``dead`` by row.

    Tensors of dead entries stay in their shards, except for shards that are gone.
    """
    path.mkdir(parents=True)
    gone = set(gone_shards)
    shards = []
    for number in sorted({entry.shard_idx for entry in entries} - gone):
        inside = [entry for entry in entries if entry.shard_idx == number]
        tensors = [tensor for entry in inside for tensor in entry.tensors]
        tensors.sort(key=lambda tensor: ("F32", "BF16", "F16", "I8").index(tensor.dtype))
        header = shard_header(tensors)
        data = header + b"".join(tensor.data for tensor in tensors)
        (path / shard_name(number)).write_bytes(data)
        shards.append([number, len(data), crc32c(header), len(inside)])
    records = [entry.record() for entry in entries]
    (path / "entries.bin").write_bytes(b"".join(records))
    checksums = []
    for start in range(0, len(records), 1024):
        block = b"".join(r[:28] + bytes(4) + r[32:] for r in records[start : start + 1024])
        checksums.append(crc32c(block))
    fields = {
        "format": "hybridmem",
        "format_version": 1,
        "store_id": STORE_ID,
        "generation": generation,
        "config": config,
        "quantization": "affine-i8" if config["quantize_stored"] else None,
        "next_entry_id": next_entry_id or max((e.entry_id for e in entries), default=0) + 1,
        "next_shard": next_shard or max((e.shard_idx for e in entries), default=-1) + 1,
        "n_entries": len(records),
        "entries_crc32c": checksums,
        "shards": shards,
        "dead": ranges(dead),
        "calibration": [
            [layer, text_of(mean_key), text_of(mean_query)]
            for layer, mean_key, mean_query in calibration
        ],
    }
    (path / "index.json").write_bytes(index_json(fields))


def text_of(x: Floats | None) -> str:
    return "" if x is None else base64.b64encode(x.astype("<f4").tobytes()).decode()


def ranges(rows: Iterable[int]) -> list[list[int]]:
    """[first, last] of each run of consecutive rows."""
    out: list[list[int]] = []
    for row in sorted(rows):
        if out and out[-1][1] == row - 1:
            out[-1][1] = row
        else:
            out.append([row, row])
    return out


# --- what a reader must find ---------------------------------------------------------------------


def digest(x: Floats) -> str:
    return hashlib.sha256(x.astype("<f4").tobytes()).hexdigest()


def expectation(
    config: dict[str, Any], entries: list[Entry], next_entry_id: int, model: Model
) -> dict[str, Any]:
    """Records, array digests and answers to some queries, as plain JSON."""
    for e in entries:
        signature = np.frombuffer(e.signature, np.uint8)
        model.rows[e.entry_id] = Row(
            e.entry_id, e.layer_idx, e.keys, e.values, e.importance, signature, e.timestamp
        )
    queries = []
    for number, n in ((1, 1), (2, 3), (7, 2), (300, 1)):
        for layer_idx in (0, 1):
            found = model.query(sample(number, n, config["embed_dim"]), layer_idx, 4)
            queries.append({"number": number, "n": n, "layer_idx": layer_idx, "hits": found})
    return {
        "config": config,
        "next_entry_id": next_entry_id,
        "entries": [
            {
                "entry_id": e.entry_id,
                "layer_idx": e.layer_idx,
                "n_tokens": len(e.keys),
                "importance": e.importance,
                "timestamp": e.timestamp,
                "access_count": e.access_count,
                "padding": e.padding,
                "signature": e.signature.hex(),
                "keys": digest(e.keys),
                "values": digest(e.values),
            }
            for e in entries
        ],
        "eviction_order": model_with_counts(model, entries).eviction_order(),
        "queries": queries,
    }


def model_with_counts(model: Model, entries: list[Entry]) -> Model:
    for e in entries:
        model.rows[e.entry_id].access_count = e.access_count
    return model


def build(target: Path) -> None:
    """Write every golden store and, beside each, what must be found in it."""
    for kv_dtype in ("float32", "float16", "bfloat16"):
        config = {**CONFIG, "kv_dtype": kv_dtype}
        entries = [plain_entry(i, n, config) for i, n in ((1, 1), (2, 3), (3, 16), (4, 2))]
        save(target / kv_dtype, config, entries, {}, entries)

    config = {**CONFIG, "embed_dim": 100, "hdc_dim": 128, "quantize_stored": True}
    entries = [int8_entry(i, n, config) for i, n in ((1, 1), (2, 3), (3, 16), (4, 40))]
    save(target / "int8", config, entries, {}, entries)

    config = {**CONFIG, "hdc_dim": 512, "signature_tokens": 1, "signature_bits": 128}
    entries = [plain_entry(i, n, config) for i, n in ((1, 1), (2, 3), (3, 4), (4, 9))]
    save(target / "tokens", config, entries, {}, entries)

    # Evicted and compacted: ids and shard numbers with gaps, dead rows, a shard that is gone.
    config = {**CONFIG, "hdc_dim": 192, "max_entries": 9, "model_id": "a model \u00e9\u4e2d"}
    where = {3: 4, 4: 4, 8: 6, 9: 6, 10: 7, 11: 7, 12: 9}
    entries = [plain_entry(i, 1 + i % 4, config, shard) for i, shard in where.items()]
    dead = [1, 4, 5]
    entries[0].access_count = 2**32 - 1
    history = {"dead": dead, "gone_shards": [7], "generation": 17}
    history |= {"next_entry_id": 15, "next_shard": 11}
    live = [entry for row, entry in enumerate(entries) if row not in dead]
    save(target / "history", config, entries, history, live)

    # Layer 1 is centred, keys and queries; layer 0 is not.
    config = {**CONFIG, "hdc_dim": 256}
    model = model_of(config)
    entries = [plain_entry(i, n, config) for i, n in ((1, 1), (2, 3), (3, 4), (5, 2))]
    model.calibrate(1, sample(50, 9), sample(51, 4))
    centre(entries, model)
    history = {"calibration": [(1, *model.means[1])], "generation": 4}
    save(target / "centred", config, entries, history, entries, model)

    save(target / "empty", {**CONFIG, "hdc_dim": 64}, [], {"generation": 1}, [])


def save(
    path: Path,
    config: dict[str, Any],
    entries: list[Entry],
    history: dict[str, Any],
    live: list[Entry],
    model: Model | None = None,
) -> None:
    write_store(path, config, entries, **history)
    last = history.get("next_entry_id") or max((e.entry_id for e in entries), default=0) + 1
    expected = expectation(config, live, last, model or model_of(config))
    path.with_suffix(".json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    if DATA.exists():
        sys.exit(f"{DATA} exists: golden stores of a version that is out are never written again")
    build(DATA)

"""Stores with wrong contents and right checksums, as an attacker writes them.

Written from docs/format.md, with nothing of the package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crc32c import crc32c

BLOCK = 1024
HEAD = 40


def signed(body: bytes) -> bytes:
    """End an index.json in its checksum."""
    return body + b',\n"crc32c":"%08x"}\n' % crc32c(body)


def index(path: Path) -> dict[str, Any]:
    """The members of a store's index.json, less its checksum."""
    fields: dict[str, Any] = json.loads((path / "index.json").read_text())
    del fields["crc32c"]
    return fields


def write_index(path: Path, fields: dict[str, Any]) -> None:
    """Write an index.json with a checksum that fits."""
    (path / "index.json").write_bytes(signed(json.dumps(fields).encode()[:-1]))


def change_index(path: Path, **changes: Any) -> None:
    """Change members of index.json; those of its configuration by their own name."""
    fields = index(path)
    for name, value in changes.items():
        (fields["config"] if name in fields["config"] else fields)[name] = value
    write_index(path, fields)


def records_crc(data: bytes, width: int, count: int) -> list[int]:
    """The checksums of the first records of entries.bin."""
    rows = [bytearray(data[i * width : (i + 1) * width]) for i in range(count)]
    for row in rows:
        row[28:32] = bytes(4)
    return [crc32c(b"".join(rows[i : i + BLOCK])) for i in range(0, count, BLOCK)]


def change_record(path: Path, row: int, offset: int, form: str, value: Any) -> None:
    """Change a field of a record, and the checksum with it."""
    fields = index(path)
    width = HEAD + fields["config"]["hdc_dim"] // 8
    data = bytearray((path / "entries.bin").read_bytes())
    struct.pack_into(form, data, row * width + offset, value)
    (path / "entries.bin").write_bytes(data)
    fields["entries_crc32c"] = records_crc(bytes(data), width, fields["n_entries"])
    write_index(path, fields)


def first_shard(path: Path) -> Path:
    return min(path.glob("shard_*.safetensors"))


def header(shard: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a shard, and its tensors."""
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write_shard(
    path: Path, text: bytes, tensors: bytes, *, length: int | None = None, entries: int = 0
) -> None:
    """Write the first shard anew, and what index.json says of it.

    Parameters
    ----------
    length : int, optional
        What the file says of the length of its header; the truth by default.
    entries : int, optional
        What index.json says of its entries; as before by default.
    """
    shard = first_shard(path)
    head = (len(text) if length is None else length).to_bytes(8, "little") + text
    shard.write_bytes(head + tensors)
    fields = index(path)
    row = fields["shards"][0]
    row[1], row[2] = len(head) + len(tensors), crc32c(head)
    row[3] = entries or row[3]
    write_index(path, fields)


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the first shard, and its checksum with it."""
    members, tensors = header(first_shard(path))
    change(members)
    write_shard(path, json.dumps(members).encode(), tensors)

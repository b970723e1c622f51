"""A second reader of HybridMem stores that knows only struct, json and safetensors.

It follows docs/format.md and imports nothing of ``hybridmem``: what it reads is what any other
program can read. It trusts the store (no checksums); it is for tests.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Floats = NDArray[np.float32]

# entry_id, layer_idx, n_tokens, importance, timestamp, access_count, shard_idx, padding
HEAD = struct.Struct("<QIIfQIII")
assert HEAD.size == 40


@dataclass(frozen=True)
class Record:
    """One row of entries.bin."""

    entry_id: int
    layer_idx: int
    n_tokens: int
    importance: float
    timestamp: int
    access_count: int
    shard_idx: int
    padding: int
    signature: bytes


def record_size(hdc_dim: int) -> int:
    return HEAD.size + hdc_dim // 8


def shard_name(number: int) -> str:
    return f"shard_{number:04d}.safetensors"


def find_key(tree: Any, name: str) -> Any:
    """The value of ``name`` wherever it stands in a JSON object; KeyError where it does not."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        for branch in tree.values():
            try:
                return find_key(branch, name)
            except KeyError:
                continue
    raise KeyError(name)


class ForeignReader:
    """The committed entries of a store directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index: dict[str, Any] = json.loads((self.path / "index.json").read_text())
        self.hdc_dim = int(find_key(self.index, "hdc_dim"))
        self.embed_dim = int(find_key(self.index, "embed_dim"))
        self.rows = self._rows()
        dead = {i for first, last in self.index["dead"] for i in range(first, last + 1)}
        live = [row for i, row in enumerate(self.rows) if i not in dead]
        self.records = {row.entry_id: row for row in live}
        assert len(self.records) == len(live), "an id occurs twice"

    def _rows(self) -> list[Record]:
        size = record_size(self.hdc_dim)
        data = (self.path / "entries.bin").read_bytes()
        count = int(self.index["n_entries"])
        assert len(data) >= count * size, "entries.bin is shorter than index.json says"
        rows = []
        for start in range(0, count * size, size):
            head = HEAD.unpack_from(data, start)
            rows.append(Record(*head, signature=data[start + HEAD.size : start + size]))
        return rows

    def ids(self) -> list[int]:
        return sorted(self.records)

    def shard(self, entry_id: int) -> Path:
        return self.path / shard_name(self.records[entry_id].shard_idx)

    def tensor(self, shard: Path, name: str) -> NDArray[Any]:
        with safe_open(shard, framework="numpy") as file:
            if file.get_slice(name).get_dtype() != "BF16":
                return np.asarray(file.get_tensor(name))
        return bfloat16_tensor(shard, name)

    def dtype(self, shard: Path, name: str) -> str:
        with safe_open(shard, framework="numpy") as file:
            return str(file.get_slice(name).get_dtype())

    def names(self, shard: Path) -> set[str]:
        with safe_open(shard, framework="numpy") as file:
            return set(file.keys())

    def matrix(self, entry_id: int, letter: str) -> Floats:
        """Keys (letter k) or values (letter v) of an entry as float32."""
        shard, name = self.shard(entry_id), f"{letter}_{entry_id}"
        x = self.tensor(shard, name)
        if x.dtype != np.int8:
            return x.astype(np.float32)
        scale = self.tensor(shard, name + "_scale").astype(np.float32)
        zero = self.tensor(shard, name + "_zero").astype(np.float32)
        return dequantise(x, scale, zero)

    def keys(self, entry_id: int) -> Floats:
        return self.matrix(entry_id, "k")

    def values(self, entry_id: int) -> Floats:
        return self.matrix(entry_id, "v")


def dequantise(q: NDArray[np.int8], scale: Floats, zero: Floats) -> Floats:
    """x = zero + scale * q in float64, then float32; scale and zero are [1 or n_tokens, G]."""
    n, d = q.shape

    def spread(x: Floats) -> NDArray[np.float64]:
        groups = x.shape[1]
        if groups == d:
            width = 1
        elif groups == -(-d // 2):
            width = 2
        else:
            width = 32
            while width * groups < d:
                width += 32
        columns = np.arange(d) // width
        return np.broadcast_to(x.astype(np.float64)[:, columns], (n, d))

    return (spread(zero) + spread(scale) * q).astype(np.float32)


def safetensors_header(shard: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset of its data."""
    with open(shard, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def bfloat16_tensor(shard: Path, name: str) -> Floats:
    header, base = safetensors_header(shard)
    entry = header[name]
    assert entry["dtype"] == "BF16"
    start, end = entry["data_offsets"]
    with open(shard, "rb") as file:
        file.seek(base + start)
        bits = np.frombuffer(file.read(end - start), "<u2")
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])

"""What several contract tests need: sample entries, looks at the directory, other processes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from model import Model
from numpy.typing import NDArray

import hybridmem

Floats = NDArray[np.float32]
#: One signature an entry, and one a token.
FORMS: list[dict[str, Any]] = [{}, {"signature_tokens": 1, "signature_bits": 128}]
SHARD = re.compile(r"shard_(\d{4,})\.safetensors")
IMPORT_ROOT = str(Path(hybridmem.__file__).resolve().parents[1])

# The fixed names of RELIABILITY and FORMAT: everything else is the package's own affair.
COMMITTED = re.compile(r"index\.json|entries\.bin|shard_\d{4,}\.safetensors")


def pair(rng: np.random.Generator, n: int, width: int = 24) -> tuple[Floats, Floats]:
    """Keys and values that float16 and bfloat16 also hold exactly (multiples of 1/32 below 4)."""
    x = rng.integers(-127, 128, (2, n, width)).astype(np.float32) / 32
    return x[0].copy(), x[1].copy()


def fill(
    store: Any,
    rng: np.random.Generator,
    count: int,
    *,
    layer_idx: int = 0,
    n: int = 3,
    importance: float = 1.0,
) -> list[int]:
    """Put ``count`` entries of ``n`` tokens; their ids."""
    width = store.config.embed_dim
    return [
        store.put(*pair(rng, n, width), layer_idx=layer_idx, importance=importance)
        for _ in range(count)
    ]


def model_for(store: Any) -> Model:
    """An oracle of the same signatures."""
    config = store.config
    return Model(
        24,
        config.hdc_dim,
        signature_tokens=config.signature_tokens,
        signature_bits=config.signature_bits,
    )


def contents(store: Any) -> dict[int, tuple[int, bytes, bytes]]:
    """Everything a user can get: id -> (layer, key bytes, value bytes)."""
    out = {}
    for entry_id in store:
        entry = store.get(entry_id)
        out[entry_id] = (entry.layer_idx, entry.keys.tobytes(), entry.values.tobytes())
    return out


def record(store: Any, entry_id: int, name: str) -> Any:
    """One field of one record, from the table of entries."""
    (row,) = store.entries[store.entries["entry_id"] == entry_id]
    return row[name]


def shard_of(store: Any, entry_id: int) -> str:
    """The name of the shard that holds an entry."""
    return f"shard_{record(store, entry_id, 'shard_idx'):04d}.safetensors"


def same_hits(left: list[Any], right: list[Any]) -> bool:
    """Whether two results name the same entries, in order, with equal scores and bytes."""
    return [hit_bytes(hit) for hit in left] == [hit_bytes(hit) for hit in right]


def hit_bytes(hit: Any) -> tuple[Any, ...]:
    return (hit.entry_id, hit.layer_idx, hit.score, hit.keys.tobytes(), hit.values.tobytes())


# --- the directory -------------------------------------------------------------------------------


def directory_bytes(path: Path) -> int:
    """The sum of the sizes of all files, as max_disk_bytes counts."""
    return sum(entry.stat().st_size for entry in os.scandir(path))


def photograph(path: Path) -> dict[str, tuple[Any, ...]]:
    """Names, inodes, sizes, modes, times and contents: equal only where nothing was written."""
    out: dict[str, tuple[Any, ...]] = {}
    info = path.stat()
    out["."] = (info.st_mtime_ns, info.st_mode)
    for entry in sorted(os.scandir(path), key=lambda e: e.name):
        info = entry.stat(follow_symlinks=False)
        digest = hashlib.sha256(Path(entry.path).read_bytes()).hexdigest()
        out[entry.name] = (info.st_ino, info.st_size, info.st_mode, info.st_mtime_ns, digest)
    return out


def committed_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of the files that other programs read."""
    return {p.name: p.read_bytes() for p in path.iterdir() if COMMITTED.fullmatch(p.name)}


def copy_committed(source: Path, target: Path) -> Path:
    """Copy a store as another program would: the documented files only."""
    target.mkdir()
    for name in os.listdir(source):
        if COMMITTED.fullmatch(name):
            shutil.copy(source / name, target / name)
    return target


def shards(path: Path) -> dict[int, Path]:
    found = ((SHARD.fullmatch(p.name), p) for p in path.iterdir())
    return {int(match[1]): p for match, p in found if match}


def mapped_files(under: Path) -> list[tuple[int, int, str]]:
    """(start, end, name) of every mapping of a file below ``under`` in this process."""
    out = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(str(under)):
            start, end = (int(x, 16) for x in fields[0].split("-"))
            out.append((start, end, Path(fields[5].removesuffix(" (deleted)")).name))
    return out


def mapped_in(array: NDArray[Any], under: Path) -> str | None:
    """The name of the mapped file that the whole array lies in."""
    first = array.__array_interface__["data"][0]
    last = first + array.nbytes
    for start, end, name in mapped_files(under):
        if start <= first and last <= end:
            return name
    return None


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- other processes -----------------------------------------------------------------------------


def run_python(code: str, *args: object, timeout: float = 120) -> str:
    """Run code in a fresh interpreter that finds the same package; its standard output."""
    environment = dict(os.environ)
    parts = [IMPORT_ROOT, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()

"""What a user waits for: put, flush, open, query, get, augmented_kv, import."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import TOKENS, WIDTH, Sizes, chunk

import hybridmem

Note = Callable[[str, float], None]


def titled(benchmark: Any, title: str) -> None:
    benchmark.extra_info["title"] = title


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16", "int8"])
def test_put(
    benchmark: Any, floor: Note, tmp_path: Path, rng: np.random.Generator, form: str
) -> None:
    titled(benchmark, f"put {TOKENS} x {WIDTH} as {form}")
    keys, values = chunk(rng), chunk(rng)
    floor("copy", keys.nbytes + values.nbytes)
    kept: dict[str, Any] = {"quantize_stored": True} if form == "int8" else {"kv_dtype": form}
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH, **kept) as store:
        # Fewer than fill a shard: what is measured is memory, not the disk.
        benchmark.pedantic(store.put, (keys, values, 0), rounds=60, warmup_rounds=5, iterations=1)
        assert len(store) >= 1


def test_flush(benchmark: Any, tmp_path: Path, sizes: Sizes, rng: np.random.Generator) -> None:
    rows = [(chunk(rng), chunk(rng)) for _ in range(sizes.flush_entries)]
    n_bytes = sum(keys.nbytes + values.nbytes for keys, values in rows)
    titled(benchmark, f"flush {n_bytes / 1e6:.0f} MB")
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH) as store:

        def put_all() -> None:
            store.put_many(rows, 0)

        benchmark.pedantic(store.flush, setup=put_all, rounds=5)
        benchmark.extra_info["floor"] = "raw write and sync"
        benchmark.extra_info["floor_seconds"] = min(
            raw_write(tmp_path / "raw", rows) for _ in range(3)
        )
        assert store.stats().unflushed_bytes == 0


def raw_write(path: Path, rows: list[Any]) -> float:
    """Return the time of writing and syncing the same bytes to a plain file."""
    import time

    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for keys, values in rows:
            file.write(keys)
            file.write(values)
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    path.unlink()
    return took


def test_empty_flush(benchmark: Any, tmp_path: Path) -> None:
    titled(benchmark, "put a token + flush")
    row = np.ones((1, 64), np.float32)
    with hybridmem.create(tmp_path / "mem", embed_dim=64) as store:

        def put_and_flush() -> None:
            store.put(row, row, 0)
            store.flush()

        benchmark.pedantic(put_and_flush, rounds=40, warmup_rounds=2)
        assert store.stats().generation > 1


def test_open(benchmark: Any, floor: Note, many: Path, sizes: Sizes) -> None:
    titled(benchmark, f"open {sizes.entries:,} entries")
    floor("read", (many / "entries.bin").stat().st_size)

    def open_and_close() -> int:
        with hybridmem.open(many, mode="r") as store:
            return len(store)

    assert benchmark.pedantic(open_and_close, rounds=10, warmup_rounds=1) == sizes.entries


@pytest.mark.parametrize("top_k", [1, 5, 50])
def test_query(
    benchmark: Any, floor: Note, searched: hybridmem.Store, sizes: Sizes, top_k: int
) -> None:
    in_layer = sizes.entries // sizes.layers
    titled(benchmark, f"query {in_layer:,} of {sizes.entries:,} entries, top {top_k}")
    floor("read", in_layer * 512)
    asked = itertools.cycle(np.random.default_rng(1).standard_normal((64, 64), np.float32))
    hits = benchmark(lambda: searched.query(next(asked), 0, top_k))
    assert len(hits) == top_k


def test_query_many(benchmark: Any, floor: Note, searched: hybridmem.Store, sizes: Sizes) -> None:
    in_layer = sizes.entries // sizes.layers
    titled(benchmark, f"query_many, 32 queries, {in_layer:,} entries, top 5: each")
    floor("read", in_layer * 512 / 32)
    benchmark.extra_info["per_round"] = 32
    queries = np.random.default_rng(1).standard_normal((32, 64), np.float32)
    assert len(benchmark(searched.query_many, queries, 0, 5)) == 32


def test_late_interaction(benchmark: Any, floor: Note, late: Path, sizes: Sizes) -> None:
    titled(
        benchmark,
        f"late interaction, 8 query tokens, {sizes.late_entries:,} x {TOKENS} x 256 bits",
    )
    floor("read", sizes.late_entries * TOKENS * 32)
    query = np.random.default_rng(1).standard_normal((8, 64), np.float32)
    with hybridmem.open(late, mode="r") as store:
        store.query(query, 0)
        assert len(benchmark(store.query, query, 0, 5)) == 5


def test_query_and_read(benchmark: Any, floor: Note, large: Path, rng: np.random.Generator) -> None:
    titled(benchmark, f"query and read the top 5 of {TOKENS} x {WIDTH} float32")
    query = chunk(rng, 1)[0]
    with hybridmem.open(large, mode="r") as store:
        floor("read", 5 * 2 * TOKENS * WIDTH * 4)

        def query_and_read() -> float:
            hits = store.query(query, 0, 5)
            return float(sum(hit.keys.sum() + hit.values.sum() for hit in hits))

        assert np.isfinite(benchmark(query_and_read))


def test_get(benchmark: Any, large: Path, sizes: Sizes) -> None:
    titled(benchmark, "get an entry")
    ids = itertools.cycle(range(1, sizes.large_entries + 1))
    with hybridmem.open(large, mode="r") as store:
        assert benchmark(lambda: store.get(next(ids))).n_tokens == TOKENS


def test_augmented_kv(
    benchmark: Any, floor: Note, large: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    titled(benchmark, f"augmented_kv, top 5 and {sizes.cache_tokens:,} cached tokens")
    cache = chunk(rng, sizes.cache_tokens)
    query = chunk(rng, 1)[0]
    with hybridmem.open(large, mode="r") as store:
        keys, values = benchmark(hybridmem.augmented_kv, query, cache, cache, store, 0, 5)
    assert len(keys) == 5 * TOKENS + sizes.cache_tokens
    floor("copy", keys.nbytes + values.nbytes)


@pytest.mark.parametrize("module", ["numpy", "hybridmem"])
def test_import(benchmark: Any, tmp_path: Path, module: str) -> None:
    titled(benchmark, f"a process that imports {module}")
    command = [sys.executable, "-c", f"import {module}"]
    benchmark.pedantic(subprocess.check_call, (command,), {"cwd": tmp_path}, rounds=5)

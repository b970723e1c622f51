"""Headers of shards in memory: what is kept of each entry, and what is refused."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from hybridmem import _format

WIDTH = 8


def header(tokens: list[int], sources: dict[str, str] | None = None) -> tuple[bytes, int]:
    """Return the header of a shard of entries 1, 2, ... of so many tokens, and its data's bytes."""
    shapes = [(f"{letter}_{at}", (n, WIDTH)) for at, n in enumerate(tokens, 1) for letter in "kv"]
    tensors = [(name, "F32", shape, 7 * at) for at, (name, shape) in enumerate(shapes)]
    text = _format.pack_header(tensors, sources or {})
    return text[8:], sum(8 * n * WIDTH for n in tokens)


def test_parts_of_entries_of_many_sizes() -> None:
    text, size = header([1, 3, 2], {"source_2": "a"})
    parsed = _format.parse_header(text, size)
    assert parsed.ids.tolist() == [1, 2, 3]
    assert parsed.names == ("k", "v", "source")
    assert parsed.n_tensors == 6
    at = 8 + len(text)
    for row, n in enumerate([1, 3, 2]):
        parts = dict(parsed.parts_of(row))
        assert len(parts) == (3 if row == 1 else 2)
        for column, name in enumerate("kv"):
            length = 4 * n * WIDTH
            crc = 7 * (2 * row + column)
            assert parts[column] == (name, "F32", (n, WIDTH), at, length, crc)
            at += length
    name, dtype, shape, start, length, _ = dict(parsed.parts_of(1))[2]
    assert (name, dtype, shape, length) == ("source", "I8", (1, 1), 1)
    assert text[start - 8 : start - 7] == b"a"


def test_an_entry_takes_few_bytes() -> None:
    """A million entries are in hundreds of shards, whose headers are all kept."""
    n = 2048
    text, size = header([1] * n)
    _format.parse_header(text, size)
    tracemalloc.start()
    try:
        kept = _format.parse_header(text, size)
        gc.collect()  # and what the interpreter keeps of freed tuples
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.ids) == n
    assert taken <= 32 * n


def test_more_rows_than_a_record_can_name_are_refused() -> None:
    text, size = header([1 << 32])
    with pytest.raises(ValueError, match=r"k_1 has more than 2\*\*32 - 1 rows"):
        _format.parse_header(text, size)

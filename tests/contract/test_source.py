"""Sources: what `put` was told of where an entry comes from lives and dies with the entry."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import hybridmem
from hybridmem.verify import salvage, verify

from .helpers import committed_bytes, fill, pair, shards

#: Texts with everything that a parser of headers could trip over.
TEXTS = [
    "", "plain", '"source_1":"no"', '\\"source_2\\": \\"no\\"', "[[[[{{{{" * 9, "\\", "\\\\\"",
    "\0\x1f\n", "\u00e9\u4e2d\U0001f600", "k_1", '"}', "source_1",
]  # fmt: skip
SOURCES: list[Any] = [
    {"session": "a", "tokens": [64, 128], "text": "what was said"},
    {"token_ids": list(range(64))},
    *TEXTS, 0, -1.5, 1e300, True, [], {}, [[[1]]], 2**70,
]  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(
        st.characters(exclude_categories=["Cs"]), max_size=9), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"kv_dtype": "float16"}, {"quantize_stored": True}])
def test_a_source_comes_back_from_everywhere(
    fields: dict[str, Any],
    new_store: Callable[..., Any],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    store = new_store(shard_max_bytes=6000, **fields)
    wanted: dict[int, Any] = {}
    for source in SOURCES:
        wanted[store.put(*pair(rng, 3), 0, source=source)] = source
    wanted |= dict.fromkeys(fill(store, rng, 3))

    def check(opened: Any) -> None:
        assert {i: opened.get(i).source for i in opened} == wanted
        assert {i: opened.source(i) for i in opened} == wanted
        hits = opened.query(pair(rng, 2)[0], 0, len(wanted))
        assert {hit.entry_id: hit.source for hit in hits} == wanted

    check(store)
    assert len(shards(store.path)) > 1  # some are in shards that no commit names yet
    store.flush()
    check(store)
    store.delete(2)
    del wanted[2]
    store.compact()
    check(store)
    store.snapshot(tmp_path / "snap")
    salvage(store.path, tmp_path / "saved")
    store.close()
    assert verify(store.path).ok
    for path in (store.path, tmp_path / "snap", tmp_path / "saved"):
        for mode, io in (("r", "mmap"), ("r", "pread"), ("r+", "mmap")):
            with hybridmem.open(path, mode=mode, io=io) as again:
                check(again)


@given(source=values)
def test_any_json(source: Any) -> None:
    with tempfile.TemporaryDirectory() as path, hybridmem.create(path, embed_dim=2) as store:
        entry_id = store.put([[1.0, 2.0]], [[1.0, 2.0]], 0, source=source)
        before = store.get(entry_id).source
        store.flush()
        after = store.get(entry_id).source
    assert json.dumps(before) == json.dumps(after) == json.dumps(source)


def test_a_source_of_no_entry(store: Any) -> None:
    with pytest.raises(KeyError):
        store.source(1)
    store.close()
    with pytest.raises(hybridmem.StoreClosedError):
        store.source(1)


def test_other_programs_read_it(store: Any, rng: np.random.Generator) -> None:
    store.put(*pair(rng, 3), 0)
    store.put(*pair(rng, 3), 0, source={"text": 'he said "\u00e9"'})
    store.flush()
    (shard,) = shards(store.path).values()
    with safe_open(shard, framework="numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["source_2"]) == {"text": 'he said "\u00e9"'}
    assert "source_1" not in metadata


def test_a_shard_without_sources_has_the_bytes_it_always_had(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store, other = new_store("a"), new_store("b")
    for _ in range(3):
        keys, values = pair(rng, 2)
        store.put(keys, values, 0)
        other.put(keys, values, 0, source=None)
    store.flush()
    other.flush()
    name = "shard_0000.safetensors"
    assert committed_bytes(store.path)[name] == committed_bytes(other.path)[name]
    assert b"source" not in committed_bytes(store.path)[name]


def test_many_puts_have_one_each(store: Any, rng: np.random.Generator) -> None:
    pairs = [pair(rng, 2) for _ in range(3)]
    ids = store.put_many(pairs, 0, sources=[{"n": 0}, None, "c"])
    assert [store.get(one).source for one in ids] == [{"n": 0}, None, "c"]
    with pytest.raises(ValueError, match="sources: got 2 for 3"):
        store.put_many(pairs, 0, sources=["a", "b"])
    with pytest.raises(TypeError, match="entry 1: source"):
        store.put_many(pairs, 0, sources=["a", {1, 2}, "c"])
    assert len(store) == 3


def test_arrays_are_lists(store: Any, rng: np.random.Generator) -> None:
    ids = np.arange(4, dtype=np.int64)
    entry_id = store.put(*pair(rng, 4), 0, source={"token_ids": ids, "n": np.float32(0.5)})
    ids[:] = 9
    assert store.get(entry_id).source == {"token_ids": [0, 1, 2, 3], "n": 0.5}


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ({1, 2}, TypeError),
        (object(), TypeError),
        ({"a": b"bytes"}, TypeError),
        ({(1, 2): 3}, TypeError),
        (math.nan, ValueError),
        ([math.inf], ValueError),
        ("\ud800", ValueError),  # no other program would read the shard
        ("x" * 70_000, ValueError),
        ('"' * 20_000, ValueError),
    ],
)
def test_what_is_refused(
    source: Any, error: type[Exception], store: Any, rng: np.random.Generator
) -> None:
    with pytest.raises(error, match=r"^source "):
        store.put(*pair(rng, 2), 0, source=source)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"^source "):
        store.put(*pair(rng, 2), 0, source=loop)
    assert len(store) == 0
    store.flush()
    assert not shards(store.path)


def test_large_sources_are_divided_among_shards(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    texts = {
        store.put(*pair(rng, 1), 0, source=f"{n}" * 30_000): f"{n}" * 30_000 for n in range(80)
    }
    store.flush()
    assert len(shards(store.path)) >= 2
    for shard in shards(store.path).values():
        assert int.from_bytes(shard.read_bytes()[:8], "little") < 1 << 22
    store.close()
    with hybridmem.open(store.path, mode="r") as again:
        assert {i: again.get(i).source for i in again} == texts


def test_what_comes_back_is_the_callers(store: Any, rng: np.random.Generator) -> None:
    store.put(*pair(rng, 2), 0, source={"a": [1]})
    store.flush()
    hit = store.query(pair(rng, 1)[0], 0)[0]
    hit.source["a"].append(2)
    assert hit.source == {"a": [1]}
    store.delete(1)
    store.compact()
    store.close()
    assert hit.source == {"a": [1]}
    assert pickle.loads(pickle.dumps(hit)).source == {"a": [1]}
    assert hit.source_json == '{"a":[1]}'
    assert "source" not in repr(hit)


def test_an_entry_is_found_by_its_keys_whatever_it_says(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    plain, told = new_store("a"), new_store("b")
    for n in range(8):
        keys, values = pair(rng, 3)
        plain.put(keys, values, 0)
        told.put(keys, values, 0, source={"n": n})
    asked = pair(rng, 1)[0]
    for store in (plain, told):
        store.flush()
    assert [(h.entry_id, h.score) for h in plain.query(asked, 0)] == [
        (h.entry_id, h.score) for h in told.query(asked, 0)
    ]
    outputs = [hybridmem.attend(asked, s, 0)[0] for s in (plain, told)]
    assert np.array_equal(*outputs)


def test_its_size_counts_towards_the_limit_on_bytes(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    limit = 200_000
    store = new_store(max_disk_bytes=limit)
    for n in range(30):
        store.put(*pair(rng, 2), 0, source=f"{n % 10}" * 20_000)
        store.flush()
        assert sum(path.stat().st_size for path in store.path.iterdir()) <= limit
    assert 1 < len(store) < 10
    small = new_store("small", max_disk_bytes=30_000)
    with pytest.raises(ValueError, match="max_disk_bytes"):
        small.put(*pair(rng, 2), 0, source="x" * 40_000)

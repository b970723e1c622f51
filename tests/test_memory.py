"""What attention asks of a memory is `Memory`, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem.memory import Memory, Question
from hybridmem.results import Entry, Hit, Stats

WIDTH = 16


class Borrowed(Memory):
    """A memory that has every answer from a store, and is none itself."""

    mode = "r+"

    def __init__(self, store: hybridmem.Store) -> None:
        self._store = store
        self.config = store.config

    def _hits_of(self, question: Question) -> list[list[Hit]]:
        return self._store._hits_of(question)

    def take_back(self, hits: Sequence[Hit]) -> None:
        self._store.take_back(hits)

    def _check_open(self) -> None:
        self._store._check_open()

    @property
    def store_id(self) -> str:
        return self._store.store_id

    @property
    def calibration(self) -> dict[int, Any]:
        return self._store.calibration

    def get(self, entry_id: int) -> Entry:
        return self._store.get(entry_id)

    def timestamps(self, entry_ids: Iterable[int]) -> list[int]:
        return self._store.timestamps(entry_ids)

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[int]:
        return iter(self._store)

    def stats(self) -> Stats:
        return self._store.stats()

    def put(self, keys: Any, values: Any, layer_idx: int, *args: Any, **options: Any) -> int:
        return self._store.put(keys, values, layer_idx, *args, **options)

    def put_many(self, entries: Any, layer_idx: int, *args: Any, **options: Any) -> list[int]:
        return self._store.put_many(entries, layer_idx, *args, **options)

    def delete(self, entry_id: int) -> None:
        self._store.delete(entry_id)

    def calibrate(self, layer_idx: int, **means: Any) -> None:
        self._store.calibrate(layer_idx, **means)

    def flush(self, wait: bool = True) -> None:
        self._store.flush(wait)

    def compact(self) -> int:
        return self._store.compact()

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def store(tmp_path: Path, rng: np.random.Generator) -> Iterator[hybridmem.Store]:
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH, kv_dtype="bfloat16") as store:
        for n_tokens in (1, 3, 2, 5):
            rows = rng.standard_normal((2, n_tokens, WIDTH), np.float32)
            store.put(*rows, layer_idx=0)
        yield store


def test_a_store_is_a_memory(store: hybridmem.Store) -> None:
    assert isinstance(store, hybridmem.Memory)
    assert isinstance(Borrowed(store), hybridmem.Memory)
    assert bool(Borrowed(store))


def test_whatever_is_abstract_must_be_defined() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Memory,), {"_hits_of": lambda *_: []})()


def test_attention_runs_on_any_memory(store: hybridmem.Store, rng: np.random.Generator) -> None:
    query, cache = rng.standard_normal((2, 3, WIDTH), np.float32)
    borrowed = Borrowed(store)
    for got, wanted in zip(
        hybridmem.augmented_kv(query, cache, cache, borrowed, 0, 2),
        hybridmem.augmented_kv(query, cache, cache, store, 0, 2),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(
        hybridmem.attend(query, borrowed, 0, 3, n_heads=2),
        hybridmem.attend(query, store, 0, 3, n_heads=2),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)  # bfloat16 widens exactly


def test_a_query_whose_hits_did_not_fit_is_taken_back(
    store: hybridmem.Store, rng: np.random.Generator
) -> None:
    query = rng.standard_normal((1, WIDTH), np.float32)
    cache = np.full((1, WIDTH), np.nan, np.float32)
    with pytest.raises(ValueError, match="cache"):
        hybridmem.augmented_kv(query, cache, cache, Borrowed(store), 0)
    assert (store.stats().queries, store.stats().hits) == (0, 0)
    assert store.entries["access_count"].sum() == 0


@pytest.mark.parametrize("call", [hybridmem.attend, hybridmem.augmented_kv])
def test_what_is_no_memory_is_refused(call: Callable[..., Any]) -> None:
    row = np.ones((1, WIDTH), np.float32)
    between = (row, row) if call is hybridmem.augmented_kv else ()
    with pytest.raises(TypeError, match=r"store: got dict, want an open hybridmem\.Store"):
        call(row, *between, {}, 0)


def test_timestamps(store: hybridmem.Store) -> None:
    store.delete(2)
    wanted = [store.get(one).timestamp for one in (4, 1)]
    assert store.timestamps([4, 2, 1, 99, 0, 1 << 70]) == [wanted[0], 0, wanted[1], 0, 0, 0]
    assert store.timestamps([]) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_timestamps_of_ids_in_an_array(dtype: Any, store: hybridmem.Store) -> None:
    """Also of one below the first that is left, from which unsigned numbers count below zero."""
    store.delete(1)
    store.compact()
    wanted = [store.get(one).timestamp for one in (2, 4)]
    with np.errstate(over="raise"):
        assert store.timestamps(np.array([1, 2, 4, 99], dtype)) == [0, *wanted, 0]

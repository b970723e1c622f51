"""FORMAT-AND-API: what is refused, by which name, and that nothing is stored then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .helpers import contents, fill, pair, photograph

WIDTH = 24
GOOD = np.ones((3, WIDTH), np.float32)


def holding(value: float, dtype: Any = np.float32) -> Any:
    x = np.ones((3, WIDTH), dtype)
    x[1, 7] = value
    return x


def nested(depth: int) -> Any:
    out: Any = 1.0
    for _ in range(depth):
        out = [out]
    return out


# What is given as keys or values, and what the message must hold besides the name.
MATRICES: dict[str, tuple[Callable[[], Any], str]] = {
    "scalar": (lambda: np.float32(1), ""),
    "number": (lambda: 1.0, ""),
    "None": (lambda: None, ""),
    "string": (lambda: "abc", ""),
    "bytes": (lambda: b"\0" * 4 * WIDTH, ""),
    "dict": (lambda: {"a": GOOD}, ""),
    "two entries": (lambda: np.ones((2, 3, WIDTH), np.float32), r"2, 3, 24"),
    "trailing axis": (lambda: np.ones((3, WIDTH, 1), np.float32), r"3, 24, 1"),
    "one too narrow": (lambda: np.ones((3, WIDTH - 1), np.float32), r"3, 23.*24|24.*3, 23"),
    "one too wide": (lambda: np.ones((3, WIDTH + 1), np.float32), r"3, 25.*24|24.*3, 25"),
    "width 0": (lambda: np.ones((3, 0), np.float32), r"3, 0.*24|24.*3, 0"),
    "transposed": (lambda: np.ones((WIDTH, 3), np.float32), r"24, 3"),
    "no tokens": (lambda: np.ones((0, WIDTH), np.float32), r"0, 24"),
    "empty list": (list, ""),
    "ragged list": (lambda: [[1.0] * WIDTH, [1.0]], ""),
    "ragged strings": (lambda: [["a"] * WIDTH], ""),
    "very deep list": (lambda: nested(200), ""),
    "int64": (lambda: np.ones((3, WIDTH), np.int64), "int64"),
    "uint8": (lambda: np.ones((3, WIDTH), np.uint8), "uint8"),
    "bool": (lambda: np.ones((3, WIDTH), bool), "bool"),
    "complex64": (lambda: np.ones((3, WIDTH), np.complex64), "complex64"),
    "complex128": (lambda: np.ones((3, WIDTH), np.complex128), "complex128"),
    "object": (lambda: np.ones((3, WIDTH), object), "object"),
    "datetime": (lambda: np.zeros((3, WIDTH), "M8[s]"), "datetime"),
    "text": (lambda: np.full((3, WIDTH), "1.0"), ""),
    "structured": (lambda: np.zeros((3, WIDTH), [("a", "f4")]), ""),
    "NaN": (lambda: holding(np.nan), "finite|NaN|nan"),
    "infinity": (lambda: holding(np.inf), "finite|inf"),
    "minus infinity": (lambda: holding(-np.inf), "finite|inf"),
    "NaN in float64": (lambda: holding(np.nan, np.float64), "finite|NaN|nan"),
    "NaN in float16": (lambda: holding(np.nan, np.float16), "finite|NaN|nan"),
    "infinity in float16": (lambda: holding(np.inf, np.float16), "finite|inf"),
    "float64 beyond float32": (lambda: holding(1e39, np.float64), "float32|overflow"),
    "float64 just beyond": (lambda: holding(3.4028236e38, np.float64), "float32|overflow"),
    "NaN in a list": (lambda: [[1.0] * (WIDTH - 1) + [float("nan")]] * 3, "finite|NaN|nan"),
    "NaN in a column slice": (lambda: np.full((3, 2 * WIDTH), np.nan, "f4")[:, ::2], ""),
    "2**32 tokens": (lambda: np.broadcast_to(np.float32(1), (2**32, WIDTH)), str(2**32)),
    "2**40 tokens": (lambda: np.broadcast_to(np.float32(1), (2**40, WIDTH)), str(2**40)),
}


@pytest.fixture
def filled(store: Any, rng: np.random.Generator) -> Any:
    """A store with two committed entries and a pending one."""
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 1)
    return store


class Unchanged:
    """Length, ids, contents, statistics and the bytes on disk are what they were."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def state(self) -> Any:
        counts = self.store.entries["access_count"].tolist()
        photo = photograph(Path(self.store.path))
        return contents(self.store), len(self.store), self.store.stats(), counts, photo

    def __enter__(self) -> None:
        self.before = self.state()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert self.state() == self.before
            row = np.ones((1, WIDTH), np.float32)
            assert self.store.put(row, row, layer_idx=0) == 4, "an id was used up"


@pytest.mark.parametrize("case", MATRICES)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_put_refuses(name: str, case: str, filled: Any) -> None:
    make, wanted = MATRICES[case]
    arguments: dict[str, Any] = {"keys": GOOD, "values": GOOD, name: make()}
    with Unchanged(filled), pytest.raises((ValueError, TypeError), match=name) as caught:
        filled.put(**arguments, layer_idx=0)
    assert re.search(wanted, str(caught.value)), str(caught.value)


# A query may be as long as it likes.
@pytest.mark.parametrize("case", [c for c in MATRICES if "tokens" not in c or "no" in c])
def test_query_refuses(case: str, filled: Any) -> None:
    make, wanted = MATRICES[case]
    with Unchanged(filled), pytest.raises((ValueError, TypeError), match="quer") as caught:
        filled.query(make(), layer_idx=0)
    assert re.search(wanted, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("case", ["one too wide", "NaN", "int64", "no tokens", "None"])
def test_query_many_refuses_the_whole_batch(case: str, filled: Any) -> None:
    make, _ = MATRICES[case]
    with Unchanged(filled), pytest.raises((ValueError, TypeError), match="quer"):
        filled.query_many([GOOD, make()], layer_idx=0)
    if case != "no tokens":  # an array of no rows is no queries
        with pytest.raises((ValueError, TypeError), match="quer"):
            filled.query_many(make(), layer_idx=0)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, 1, 4096])
def test_a_query_vector_of_another_width(width: int, filled: Any) -> None:
    with (
        Unchanged(filled),
        pytest.raises((ValueError, TypeError), match=rf"query.*{width}.*24|query.*24.*{width}"),
    ):
        filled.query(np.ones(width, np.float32), layer_idx=0)


def test_unequal_keys_and_values(filled: Any, rng: np.random.Generator) -> None:
    keys, values = pair(rng, 3, WIDTH)[0], pair(rng, 2, WIDTH)[0]
    for k, v in ((keys, values), (values, keys), (keys[:1], keys), (keys, keys[:1])):
        with pytest.raises(ValueError, match=r"keys.*values|values.*keys") as caught:
            filled.put(k, v, layer_idx=0)
        assert str(len(k)) in str(caught.value)
        assert str(len(v)) in str(caught.value)
    with Unchanged(filled):
        pass


BAD_LAYERS = [-1, -(2**40), 2**32, 2**64, 10**30, 1.0, 1.5, "1", None, [1], float("nan")]


@pytest.mark.parametrize("layer_idx", BAD_LAYERS)
def test_bad_layer(layer_idx: Any, filled: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: filled.put(GOOD, GOOD, layer_idx=layer_idx),
        lambda: filled.put_many([(GOOD, GOOD)], layer_idx=layer_idx),
        lambda: filled.query(GOOD, layer_idx=layer_idx),
        lambda: filled.query_many([GOOD], layer_idx=layer_idx),
    ]
    with Unchanged(filled):
        for call in calls:
            with pytest.raises((ValueError, TypeError), match="layer_idx"):
                call()


BAD_IMPORTANCES = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -1e-9,
    -1,
    1e39,
    3.4028236e38,
    np.float64(1e300),
    np.float32("nan"),
    10**400,
    "high",
    None,
    1j,
    [1.0],
]


@pytest.mark.parametrize("importance", BAD_IMPORTANCES, ids=lambda x: repr(x)[:24])
def test_bad_importance(importance: Any, filled: Any) -> None:
    with Unchanged(filled):
        with pytest.raises((ValueError, TypeError), match="importance"):
            filled.put(GOOD, GOOD, layer_idx=0, importance=importance)
        each = [1.0, importance]
        with pytest.raises((ValueError, TypeError), match="importance"):
            filled.put_many([(GOOD, GOOD)] * 2, layer_idx=0, importance=each)


@pytest.mark.parametrize("top_k", [0, -1, -(2**70), 1.0, 2.5, "5", None, [5], float("inf")])
def test_bad_top_k(top_k: Any, filled: Any) -> None:
    with Unchanged(filled):
        for call in (
            lambda: filled.query(GOOD, layer_idx=0, top_k=top_k),
            lambda: filled.query_many([GOOD], layer_idx=0, top_k=top_k),
            lambda: filled.query(GOOD, layer_idx=99, top_k=top_k),
            lambda: filled.query_many([], layer_idx=0, top_k=top_k),
        ):
            with pytest.raises((ValueError, TypeError), match="top_k"):
                call()


class NoLength:
    """Iterable by its type, but not when it is tried, as a tensor of a number is."""

    def __iter__(self) -> Any:
        raise TypeError("iteration over a 0-d tensor")


@pytest.mark.parametrize(
    "ids",
    [3, 1.5, "12", [1.5], ["a"], [None], [[1, 2], [3, 4]], np.array(3), NoLength()],
    ids=lambda ids: type(ids).__name__ if isinstance(ids, NoLength) else repr(ids),
)
def test_bad_entry_ids(ids: Any, filled: Any) -> None:
    with Unchanged(filled), pytest.raises((ValueError, TypeError), match="entry_ids"):
        filled.query(GOOD, layer_idx=0, entry_ids=ids)


@pytest.mark.parametrize("value", [65520.0, -65520.0, 1e6, 3e38])
def test_what_overflows_a_float16_store(
    value: float, new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """65504 is the largest float16; from 65520 on nearest-even rounds to infinity."""
    store = new_store(kv_dtype="float16")
    fill(store, rng, 3)
    store.flush()
    for name in ("keys", "values"):
        arguments: dict[str, Any] = {"keys": GOOD, "values": GOOD, name: holding(value)}
        with pytest.raises(ValueError, match=name) as caught:
            store.put(**arguments, layer_idx=0)
        assert "float16" in str(caught.value)
        with pytest.raises(ValueError, match=name):
            store.put_many([(GOOD, GOOD), tuple(arguments.values())], layer_idx=0)
    with Unchanged(store):
        pass
    edge = holding(65519.0)
    entry_id = store.put(edge, -edge, layer_idx=0)
    assert store.get(entry_id).keys.max() == 65504
    assert store.get(entry_id).values.min() == -65504


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_what_overflows_a_bfloat16_store(value: float, new_store: Callable[..., Any]) -> None:
    """The largest bfloat16 is 3.3895e38; beyond, nearest-even rounds to infinity: never stored."""
    store = new_store(kv_dtype="bfloat16")
    with pytest.raises(ValueError, match="keys"):
        store.put(holding(value), GOOD, layer_idx=0)
    with pytest.raises(ValueError, match="values"):
        store.put(GOOD, holding(value), layer_idx=0)
    assert len(store) == 0


def test_missing_arguments(filled: Any) -> None:
    for call in (
        lambda: filled.put(GOOD, GOOD),
        lambda: filled.put(GOOD, layer_idx=0),
        lambda: filled.query(GOOD),
        lambda: filled.put(GOOD, GOOD, layer_idx=0, importence=2.0),
    ):
        with pytest.raises(TypeError):
            call()
    with Unchanged(filled):
        pass

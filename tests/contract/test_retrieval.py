"""FORMAT-AND-API "Named in the other pages": index_keys, calibrate."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import Model, mean_pool
from reader import ForeignReader

import hybridmem

from .helpers import (
    FORMS,
    contents,
    copy_committed,
    fill,
    model_for,
    pair,
    photograph,
    record,
    same_hits,
)

# --- index_keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_index_keys_are_what_is_found_and_keys_what_is_kept(
    fields: dict[str, Any], new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store(**fields)
    keys, values = pair(rng, 3)
    indexed = pair(rng, 3)[0]
    fill(store, rng, 5)
    ids = [store.put(keys, values, layer_idx=0, index_keys=indexed)]
    ids += store.put_many([(keys, values)] * 2, layer_idx=0, index_keys=[indexed, keys])
    wanted = [model_for(store).signature(x).tobytes() for x in (indexed, indexed, keys)]
    assert [bytes(record(store, i, "signature")) for i in ids] == wanted
    hits = store.query(indexed, layer_idx=0, top_k=2)
    assert [(hit.entry_id, hit.score) for hit in hits] == [(ids[0], 1.0), (ids[1], 1.0)]
    for entry_id in ids:
        assert store.get(entry_id).keys.tobytes() == keys.tobytes()
        assert store.get(entry_id).values.tobytes() == values.tobytes()


@pytest.mark.parametrize("case", ["tokens", "width", "nan", "integers", "too few", "too many"])
def test_bad_index_keys(case: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    keys, values = pair(rng, 3)
    before = contents(store)
    bad = {
        "tokens": keys[:2],
        "width": keys[:, :23],
        "nan": np.where(keys == keys[1, 1], np.nan, keys),
        "integers": keys.astype(int),
    }.get(case)
    many = {"too few": [keys], "too many": [keys] * 3}.get(case, [keys, bad])
    if bad is not None:
        with pytest.raises((ValueError, TypeError), match="index_keys"):
            store.put(keys, values, layer_idx=0, index_keys=bad)
    with pytest.raises((ValueError, TypeError), match="index_keys"):
        store.put_many([(keys, values)] * 2, layer_idx=0, index_keys=many)
    assert contents(store) == before
    assert fill(store, rng, 1) == [3]


# --- calibrate -----------------------------------------------------------------------------------


def same_records(store: Any, model: Model) -> bool:
    """Signatures are the model's, and the paddings its norms."""
    for row in model.rows.values():
        if bytes(record(store, row.entry_id, "signature")) != row.signature.tobytes():
            return False
        norm = record(store, row.entry_id, "padding").view(np.float32)
        if not math.isclose(norm, model.padding(row.keys, row.layer_idx), rel_tol=1e-6):
            return False
    return True


def named(hits: list[Any]) -> list[Any]:
    return [(hit.entry_id, pytest.approx(hit.score, abs=1e-12)) for hit in hits]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("centre_queries", [False, True])
def test_calibrate(
    centre_queries: bool,
    flushed: bool,
    fields: dict[str, Any],
    new_store: Callable[..., Any],
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """Signatures from before are made anew; the means stay with the store."""
    store = new_store(**fields)
    model = model_for(store)
    for i in range(20):
        keys, values = pair(rng, 1 + i % 4)
        store.put(keys + 2, values, layer_idx=i % 2)
        model.put(keys + 2, values, i % 2)
    if flushed:
        store.flush()
    sample, queries = pair(rng, 30)[0] + 2, pair(rng, 7)[0] - 1 if centre_queries else None
    store.calibrate(1, keys=sample, queries=queries)
    model.calibrate(1, sample, queries)
    assert same_records(store, model)
    copy = copy_committed(Path(store.path), tmp_path / "copy")  # committed on return
    keys, values = pair(rng, 3)
    store.put(keys, values, layer_idx=1)
    model.put(keys, values, 1)
    store.flush()
    assert ForeignReader(store.path).ids() == list(store)
    wanted = model.query(keys, 1, 9)
    assert named(store.query(keys, 1, 9)) == wanted
    store.close()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode=mode) as again:
            assert same_records(again, model)
            mean_key, mean_query = again.calibration[1]
            assert mean_key.tobytes() == model.means[1][0].tobytes()
            assert list(again.calibration) == [1]
            if centre_queries:
                assert mean_query.tobytes() == mean_pool(queries).tobytes()
            else:
                assert mean_query is None
            assert named(again.query(keys, 1, 9)) == wanted
            assert again.query(keys, 0, 99)[0].score <= 1.0
    with hybridmem.open(copy, mode="r") as reader:
        del model.rows[21]
        assert same_records(reader, model)


def test_the_mean_of_the_stored_keys_is_the_default(store: Any, rng: np.random.Generator) -> None:
    model = model_for(store)
    for _ in range(6):
        keys, values = pair(rng, 3)
        store.put(keys, values, layer_idx=4)
        model.put(keys, values, 4)
    store.calibrate(4)
    model.calibrate(4, np.concatenate([row.keys for row in model.rows.values()]))
    assert same_records(store, model)


def test_a_calibrated_layer_is_frozen(store: Any, rng: np.random.Generator) -> None:
    sample = pair(rng, 5)[0]
    store.calibrate(1, keys=sample)
    mean = store.calibration[1][0].tobytes()
    with pytest.raises(ValueError, match="calibrated"):
        store.calibrate(1, keys=sample + 1)
    assert store.calibration[1][0].tobytes() == mean
    store.calibrate(0, keys=sample)
    assert list(store.calibration) == [0, 1]


def test_calibrating_a_layer_changes_no_other(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 5, layer_idx=0)
    fill(store, rng, 5, layer_idx=1)
    before = store.entries[:5].tolist()
    wanted, query = contents(store), pair(rng, 1)[0]
    hits = store.query(query, 0, 5)
    store.calibrate(1)
    assert contents(store) == wanted
    assert same_hits(store.query(query, 0, 5), hits)
    unchanged = ["entry_id", "signature", "padding", "timestamp", "importance"]
    names = [store.entries.dtype.names.index(name) for name in unchanged]
    after = store.entries[:5].tolist()
    assert [[row[i] for i in names] for row in after] == [[row[i] for i in names] for row in before]


def test_calibration_is_refused_where_it_cannot_be_right(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 2)
    store.put(*pair(rng, 2), layer_idx=3, index_keys=pair(rng, 2)[0])
    store.flush()
    before = photograph(Path(store.path))
    nan = np.full((2, 24), np.nan, np.float32)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("keys", lambda: store.calibrate(9)),  # no keys given, none stored
        ("index_keys", lambda: store.calibrate(3)),  # its index keys are not stored
        ("keys", lambda: store.calibrate(0, keys=nan)),
        ("queries", lambda: store.calibrate(0, queries=nan)),
        ("keys", lambda: store.calibrate(0, keys=np.ones((2, 23), np.float32))),
        ("layer_idx", lambda: store.calibrate(-1, keys=np.ones((2, 24), np.float32))),
    ]
    for name, call in cases:
        with pytest.raises((ValueError, TypeError), match=name):
            call()
    assert store.calibration == {}
    assert photograph(Path(store.path)) == before


def test_short_entries_of_other_keys_are_not_signed_anew(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """One token of 128 bits in a record of 8,192: what differs is little of the record."""
    store = new_store(hdc_dim=8192, signature_tokens=1, signature_bits=128)
    store.put(*pair(rng, 1), layer_idx=0, index_keys=pair(rng, 1)[0])
    with pytest.raises(ValueError, match="index_keys"):
        store.calibrate(0)

"""A store on the real disk against the plain-Python model, step by step (hypothesis).

Ids, hits, scores, order, K/V bytes and counts must be the model's after every step: of the writer,
of a reader with its snapshot, of the store reopened with other limits, and of a copy of the
committed files.
``HYPOTHESIS_PROFILE=thorough pytest tests/test_state_machine.py`` runs it for a long time.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import Floats, Model, Row

import hybridmem

EMBED, HDC = 16, 256
COMMITTED = re.compile(r"index\.json|entries\.bin|shard_\d{4,}\.safetensors")

seeds = st.integers(0, 24)  # few, so that entries with equal keys and so ties are frequent
tokens = st.integers(1, 6)
layers = st.integers(0, 2)
importances = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 2.5])
top_ks = st.sampled_from([1, 2, 3, 5, 100])
picks = st.integers(0, 10**6)
configs = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from(["float32", "float32", "float16", "bfloat16"]),
        "quantize_stored": st.sampled_from([False, False, False, True]),
        "shard_max_bytes": st.sampled_from([500, 3000, 2**28]),
        "max_open_shards": st.sampled_from([1, 2, 4]),
        "max_entries": st.sampled_from([0, 0, 4, 12]),
        "max_disk_bytes": st.sampled_from([0, 0, 0, 30_000]),
    }
)
signatures = st.sampled_from([(0, 0), (0, 0), (1, 64), (2, 128)])
new_limits = st.fixed_dictionaries(
    {},
    optional={
        "max_entries": st.sampled_from([0, 1, 3, 8, 50]),
        "max_disk_bytes": st.sampled_from([0, 30_000, 60_000]),
        "shard_max_bytes": st.sampled_from([500, 3000, 2**28]),
        "max_open_shards": st.sampled_from([1, 3]),
    },
)


def matrix(seed: int, n: int) -> Floats:
    """A sample that float16 and bfloat16 hold exactly."""
    rng = np.random.default_rng([seed, n])
    return rng.integers(-24, 25, (n, EMBED)).astype(np.float32) / 8


class StoreMachine(RuleBasedStateMachine):
    """One writer, at most one reader."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hybridmem-machine-"))
        self.path = self.directory / "mem"
        self.reader: Any = None
        self.held: list[tuple[Any, bytes]] = []
        self.evicted = 0
        self.in_background = False  # whether a flush may be under way

    @initialize(config=configs, signature=signatures)
    def create(self, config: dict[str, Any], signature: tuple[int, int]) -> None:
        config["signature_tokens"], config["signature_bits"] = signature
        if config["quantize_stored"]:
            config["kv_dtype"] = "float32"
        self.config = config
        self.store = hybridmem.create(self.path, embed_dim=EMBED, hdc_dim=HDC, **config)
        self.model = Model(
            EMBED,
            HDC,
            signature_tokens=config["signature_tokens"],
            signature_bits=config["signature_bits"],
            kv_dtype=config["kv_dtype"],
        )
        self.committed: dict[int, Row] = {}
        self.foreign_index: set[int] = set()  # entries whose index keys are not their keys
        self.committed_means: dict[int, Any] = {}
        self.generation = self.store.stats().generation

    # --- keeping the model in step ---------------------------------------------------------------

    def learn(self, entry_id: int) -> None:
        """Take from the store what the model cannot know: the time, and what INT8 made of K/V."""
        row, entry = self.model.rows[entry_id], self.store.get(entry_id)
        row.timestamp = entry.timestamp
        if self.config["quantize_stored"]:
            for name in ("keys", "values"):
                mine, stored = getattr(row, name), getattr(entry, name)
                assert np.abs(mine - stored).max() <= 0.01 * np.abs(mine).max()
                setattr(row, name, stored.copy())

    def lose(self, victims: list[int]) -> None:
        for victim in victims:
            del self.model.rows[victim]
        self.evicted += len(victims)

    def keep_limits(self, spared: list[int] | None = None) -> None:
        """Evict in the model what put or flush had to evict to keep the limits."""
        order = self.model.eviction_order(exempt=spared or [])
        if self.config["max_entries"]:
            excess = len(self.model.rows) - self.config["max_entries"]
            self.lose(order[: max(0, excess)])
            order = order[max(0, excess) :]
        if self.config["max_disk_bytes"]:
            gone = self.model.rows.keys() - set(self.store)
            assert set(order[: len(gone)]) == gone, "evicted out of order"
            self.lose(order[: len(gone)])

    def settle(self) -> None:
        """Wait for a flush in the background, so that it is known what is committed."""
        if self.in_background:
            self.flush()

    def has_committed(self) -> None:
        self.in_background = False
        self.committed = self.model.clone_rows()
        self.committed_means = dict(self.model.means)
        self.generation = self.store.stats().generation
        limit = self.config["max_disk_bytes"]
        if limit:
            assert sum(e.stat().st_size for e in os.scandir(self.path)) <= limit

    def pick(self, number: int) -> int:
        return sorted(self.model.rows)[number % len(self.model.rows)]

    def check_hits(self, hits: list[Any], wanted: list[tuple[int, float]], rows: Any) -> None:
        assert [hit.entry_id for hit in hits] == [i for i, _ in wanted]
        for hit, (_, score) in zip(hits, wanted, strict=True):
            assert hit.score == pytest.approx(score, abs=1e-12)
            self.check_entry(hit, rows[hit.entry_id])

    def check_entry(self, entry: Any, row: Row) -> None:
        assert (entry.entry_id, entry.layer_idx) == (row.entry_id, row.layer_idx)
        for name in ("keys", "values"):
            array, wanted = getattr(entry, name), getattr(row, name)
            assert array.shape == wanted.shape
            assert array.tobytes() == wanted.tobytes()
            assert not array.flags.writeable
        if len(self.held) < 40:
            self.held.append((entry, entry.keys.tobytes() + entry.values.tobytes()))

    # --- writing ---------------------------------------------------------------------------------

    @rule(
        seed=seeds,
        n=tokens,
        layer=layers,
        importance=importances,
        index_seed=st.sampled_from([None, None, None, 300]),
    )
    def put(self, seed: int, n: int, layer: int, importance: float, index_seed: int | None) -> None:
        keys, values = matrix(seed, n), matrix(seed + 100, n)
        indexed = None if index_seed is None else matrix(index_seed, n)
        entry_id = self.store.put(keys, values, layer, importance, index_keys=indexed)
        assert entry_id == self.model.insert(keys, values, layer, importance, index_keys=indexed)
        if indexed is not None:
            self.foreign_index.add(entry_id)
        self.learn(entry_id)
        self.keep_limits([entry_id])

    @rule(
        what=st.lists(st.tuples(seeds, tokens, importances), max_size=4),
        layer=layers,
    )
    def put_many(self, what: list[tuple[int, int, float]], layer: int) -> None:
        if self.config["max_entries"]:
            what = what[: self.config["max_entries"]]
        pairs = [(matrix(seed, n), matrix(seed + 100, n)) for seed, n, _ in what]
        weights = [importance for *_, importance in what]
        ids = self.store.put_many(pairs, layer_idx=layer, importance=weights)
        for (keys, values), importance, entry_id in zip(pairs, weights, ids, strict=True):
            assert entry_id == self.model.insert(keys, values, layer, importance)
            self.learn(entry_id)
        if ids:
            self.keep_limits(ids)

    @rule(kind=st.integers(0, 5))
    def refused_put(self, kind: int) -> None:
        good, bad = matrix(1, 2), matrix(2, 2)
        layer, importance = 0, 1.0
        if kind == 0:
            bad[1, 3] = np.nan
        elif kind == 1:
            bad = bad[:, :-1]
        elif kind == 2:
            bad = bad[:1]
        elif kind == 3:
            layer = -1
        elif kind == 4:
            importance = float("nan")
        else:
            bad = bad[:0]
        with pytest.raises((ValueError, TypeError)):
            self.store.put(good, bad, layer_idx=layer, importance=importance)
        with pytest.raises((ValueError, TypeError)):
            self.store.put_many([(good, good), (good, bad)], layer, [1.0, importance])

    @precondition(lambda self: self.model.rows)
    @rule(number=picks)
    def delete(self, number: int) -> None:
        victim = self.pick(number)
        self.store.delete(victim)
        del self.model.rows[victim]

    @rule(keep=st.integers(0, 20))
    def evict(self, keep: int) -> None:
        self.keep_limits_of_flush()
        victims = self.model.eviction_order()[: max(0, len(self.model.rows) - keep)]
        count = self.store.evict(keep)
        self.lose(victims)
        self.keep_limits()
        assert count == len(victims) or self.config["max_disk_bytes"]
        self.has_committed()

    def keep_limits_of_flush(self) -> None:
        """A lowered max_entries takes effect at the next put or flush, evict's own included."""
        if self.config["max_entries"]:
            excess = len(self.model.rows) - self.config["max_entries"]
            self.lose(self.model.eviction_order()[: max(0, excess)])

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.keep_limits()
        self.has_committed()

    def may_flush_in_background(self) -> bool:
        # Where a flush evicts, the model could not tell when.
        limit = self.config["max_entries"] or len(self.model.rows)
        return not self.config["max_disk_bytes"] and len(self.model.rows) <= limit

    @precondition(may_flush_in_background)
    @rule()
    def flush_in_background(self) -> None:
        self.store.flush(wait=False)
        self.in_background = True

    @rule()
    def compact(self) -> None:
        assert self.store.compact() >= 0
        self.keep_limits()
        assert self.store.stats().dead_bytes == 0
        self.has_committed()

    @precondition(lambda self: not self.config["quantize_stored"])
    @rule(layer=layers, seed=st.sampled_from([None, 5, 6]), centre_queries=st.booleans())
    def calibrate(self, layer: int, seed: int | None, centre_queries: bool) -> None:
        keys = None if seed is None else matrix(seed, 6)
        queries = matrix(400, 3) if centre_queries else None
        if layer in self.model.means:
            with pytest.raises(ValueError, match="calibrated"):
                self.store.calibrate(layer, keys=keys, queries=queries)
            return
        self.keep_limits_of_flush()  # which a calibration begins with
        rows = [row for _, row in sorted(self.model.rows.items()) if row.layer_idx == layer]
        if any(row.entry_id in self.foreign_index for row in rows) or not (rows or seed):
            with pytest.raises(ValueError, match="keys"):
                self.store.calibrate(layer, keys=keys, queries=queries)
        else:
            self.store.calibrate(layer, keys=keys, queries=queries)
            if keys is None:
                keys = np.concatenate([row.keys for row in rows])
            self.model.calibrate(layer, keys, queries)
        self.keep_limits()
        self.has_committed()

    # --- reading ---------------------------------------------------------------------------------

    @rule(seed=seeds, n=st.integers(1, 3), layer=layers, top_k=top_ks)
    def query(self, seed: int, n: int, layer: int, top_k: int) -> None:
        hits = self.store.query(matrix(seed, n), layer, top_k)
        wanted = self.model.query(matrix(seed, n), layer, top_k)
        self.check_hits(hits, wanted, self.model.rows)

    @rule(seed=seeds, layer=layers, top_k=top_ks, ids=st.lists(st.integers(1, 40), max_size=12))
    def query_among(self, seed: int, layer: int, top_k: int, ids: list[int]) -> None:
        hits = self.store.query(matrix(seed, 1), layer, top_k, entry_ids=ids)
        wanted = self.model.query(matrix(seed, 1), layer, top_k, ids)
        self.check_hits(hits, wanted, self.model.rows)

    @rule(what=st.lists(st.tuples(seeds, st.integers(1, 3)), max_size=4), layer=layers, k=top_ks)
    def query_many(self, what: list[tuple[int, int]], layer: int, k: int) -> None:
        queries = [matrix(seed, n) for seed, n in what]
        found = self.store.query_many(queries, layer, k)
        for hits, wanted in zip(found, self.model.query_many(queries, layer, k), strict=True):
            self.check_hits(hits, wanted, self.model.rows)

    @rule(seed=seeds, layer=layers, top_k=top_ks)
    def augmented_kv(self, seed: int, layer: int, top_k: int) -> None:
        query, cache_k, cache_v = matrix(seed, 1), matrix(201, 3), matrix(202, 3)
        keys, values = hybridmem.augmented_kv(query, cache_k, cache_v, self.store, layer, top_k)
        wanted = self.model.augmented(query, cache_k, cache_v, layer, top_k)
        assert keys.tobytes() == wanted[0].tobytes()
        assert values.tobytes() == wanted[1].tobytes()

    @precondition(lambda self: self.model.rows)
    @rule(number=picks)
    def get(self, number: int) -> None:
        entry_id = self.pick(number)
        row, entry = self.model.rows[entry_id], self.store.get(entry_id)
        self.check_entry(entry, row)
        assert (entry.importance, entry.access_count) == (row.importance, row.access_count)
        assert (entry.timestamp, entry.n_tokens) == (row.timestamp, row.n_tokens)

    @rule(entry_id=st.integers(0, 60))
    def get_or_delete_what_may_be_missing(self, entry_id: int) -> None:
        assert (entry_id in self.store) == (entry_id in self.model.rows)
        if entry_id in self.model.rows:
            return
        for call in (self.store.get, self.store.delete):
            with pytest.raises(KeyError):
                call(entry_id)

    # --- the reader ------------------------------------------------------------------------------

    @precondition(lambda self: self.reader is None)
    @rule(limit=st.sampled_from([1, 4]))
    def open_reader(self, limit: int) -> None:
        self.settle()
        self.reader = hybridmem.open(self.path, mode="r", max_open_shards=limit)
        self.take_snapshot()

    @precondition(lambda self: self.reader is not None)
    @rule()
    def refresh(self) -> None:
        self.settle()
        self.reader.refresh()
        self.take_snapshot()
        for row in self.snapshot.values():
            self.check_entry(self.reader.get(row.entry_id), row)

    @precondition(lambda self: self.reader is not None)
    @rule()
    def close_reader(self) -> None:
        self.reader.close()
        self.reader = None

    def take_snapshot(self) -> None:
        self.snapshot = {i: copy.copy(row) for i, row in self.committed.items()}
        self.snapshot_generation = self.generation
        self.snapshot_means = dict(self.committed_means)
        assert self.reader.stats().generation == self.generation
        self.check_reader()

    def or_gone(self, call: Callable[[], None]) -> None:
        """A file of an old snapshot may be gone; one of the newest may not."""
        try:
            call()
        except hybridmem.SnapshotGoneError:
            assert self.generation > self.snapshot_generation or self.in_background

    @precondition(lambda self: self.reader is not None)
    @rule(seed=seeds, layer=layers, top_k=top_ks)
    def query_reader(self, seed: int, layer: int, top_k: int) -> None:
        view = copy.copy(self.model)
        view.rows, view.means = self.snapshot, self.snapshot_means
        wanted = view.query(matrix(seed, 1), layer, top_k, counts=False)

        def call() -> None:
            hits = self.reader.query(matrix(seed, 1), layer, top_k)
            self.check_hits(hits, wanted, self.snapshot)

        self.or_gone(call)

    @precondition(lambda self: self.reader is not None)
    @rule()
    def check_reader(self) -> None:
        assert list(self.reader) == sorted(self.snapshot)
        assert self.reader.entries["entry_id"].tolist() == sorted(self.snapshot)
        for row in self.snapshot.values():
            self.or_gone(lambda row=row: self.check_entry(self.reader.get(row.entry_id), row))

    # --- the directory ---------------------------------------------------------------------------

    @rule(limits=new_limits)
    def reopen(self, limits: dict[str, int]) -> None:
        self.store.close()
        self.keep_limits_of_flush()
        self.store = hybridmem.open(self.path, **limits)
        self.keep_limits()  # what closing evicted is seen only now
        self.has_committed()
        self.config.update(limits)
        for name, value in self.config.items():
            assert getattr(self.store.config, name) == value
        self.model.queries = self.model.hits = self.evicted = 0
        for row in self.model.rows.values():
            self.check_entry(self.store.get(row.entry_id), row)

    @rule(mode=st.sampled_from(["r", "r+"]))
    def copy_of_the_committed_files(self, mode: str) -> None:
        self.settle()
        target = self.directory / "copy"
        target.mkdir()
        for name in os.listdir(self.path):
            if COMMITTED.fullmatch(name):
                shutil.copy(self.path / name, target / name)
        with hybridmem.open(target, mode=mode, max_entries=0, max_disk_bytes=0) as store:
            assert list(store) == sorted(self.committed)
            for row in self.committed.values():
                entry = store.get(row.entry_id)
                self.check_entry(entry, row)
                # Counts are written at flush; later ones may be lost, and none may be invented.
                latest = self.model.rows.get(row.entry_id)
                assert row.access_count <= entry.access_count
                assert latest is None or entry.access_count <= latest.access_count
        shutil.rmtree(target)

    # --- always ----------------------------------------------------------------------------------

    @invariant()
    def same_entries_and_counts(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = [self.model.rows[i] for i in sorted(self.model.rows)]
        assert len(self.store) == len(rows)
        assert list(self.store) == [row.entry_id for row in rows]
        entries = self.store.entries
        for name in ("entry_id", "layer_idx", "n_tokens", "importance", "access_count"):
            assert entries[name].tolist() == [getattr(row, name) for row in rows], name
        assert [bytes(s) for s in entries["signature"]] == [r.signature.tobytes() for r in rows]
        norms = entries["padding"].view(np.float32) if rows else []
        assert [float(norm) for norm in norms] == pytest.approx([row.padding for row in rows])
        stats = self.store.stats()
        assert stats.entries == len(rows)
        assert stats.tokens == sum(row.n_tokens for row in rows)
        present = {row.layer_idx for row in rows}
        assert stats.entries_by_layer == {
            layer: sum(row.layer_idx == layer for row in rows) for layer in present
        }
        assert (stats.queries, stats.hits) == (self.model.queries, self.model.hits)
        assert stats.evicted == self.evicted

    @invariant()
    def held_arrays_never_change(self) -> None:
        for entry, wanted in self.held:
            assert entry.keys.tobytes() + entry.values.tobytes() == wanted

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.store.close()
            if self.reader is not None:
                self.reader.close()
            self.held_arrays_never_change()
        finally:
            shutil.rmtree(self.directory)


PROFILES = {
    "ci": settings(
        max_examples=40,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    ),
    "thorough": settings(
        max_examples=3000,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    ),
}

TestStore = StoreMachine.TestCase
TestStore.settings = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "ci")]

"""Stores and floors for the benchmarks, and the table that they end in.

``make bench`` runs them and writes latest.json (pytest-benchmark's own) and latest.md into
bench/results.
Without ``--benchmark-enable`` each case runs once, at a small size, as a test.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from cases import TOKENS, WIDTH, Sizes, fill

import hybridmem


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return Sizes(bool(request.config.getoption("benchmark_enable")))


@pytest.fixture(scope="session")
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory, sizes: Sizes, rng: np.random.Generator) -> Path:
    """A store of many small entries: what is measured on it is the search."""
    path = tmp_path_factory.mktemp("bench") / "many"
    with hybridmem.create(path, embed_dim=64) as store:
        fill(store, sizes.entries, sizes.layers, rng, tokens=2)
    return path


@pytest.fixture
def searched(many: Path) -> Iterator[hybridmem.Store]:
    """The store of many entries, its first layer's index built and every shard's header read."""
    with hybridmem.open(many, mode="r", max_open_shards=64) as store:
        for number in itertools.islice(store, 0, None, 512):
            store.get(number)
        store.query(np.ones(64, np.float32), 0)
        yield store


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory, sizes: Sizes, rng: np.random.Generator) -> Path:
    """A store of entries as large as a model's."""
    path = tmp_path_factory.mktemp("bench") / "large"
    with hybridmem.create(path, embed_dim=WIDTH) as store:
        fill(store, sizes.large_entries, 1, rng, TOKENS)
    return path


@pytest.fixture(scope="session")
def late(tmp_path_factory: pytest.TempPathFactory, sizes: Sizes, rng: np.random.Generator) -> Path:
    """A store with a signature of 256 bits for each token."""
    path = tmp_path_factory.mktemp("bench") / "late"
    with hybridmem.create(
        path, embed_dim=64, hdc_dim=16384, signature_tokens=1, signature_bits=256
    ) as store:
        fill(store, sizes.late_entries, 1, rng, TOKENS)
    return path


def best(call: Callable[[], object], rounds: int = 7) -> float:
    """Return the shortest time of a call, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture(scope="session")
def bandwidth(sizes: Sizes) -> dict[str, float]:
    """Bytes a second of this machine's memory, one thread: read by numpy, and copied."""
    words = np.ones((64 << 20 if sizes.cache_tokens > 64 else 1 << 20) // 8, np.uint64)
    other = np.empty_like(words)
    return {
        "read": words.nbytes / best(words.sum),
        "copy": words.nbytes / best(lambda: np.copyto(other, words)),
    }


@pytest.fixture
def versus(benchmark: Any) -> Callable[..., None]:
    """Time a call in turn with others, so that what else the machine does hits all alike.

    versus(title, ours, others, floor=(name, call), per={name: repeats}, rounds=n); `per` says how
    often a call repeats what is measured, "" stands for ours. What is timed is a call right after
    others of the same (`again`): each finds the processor's caches as it leaves them itself.
    `before` is called first in each round.
    """

    def run(
        title: str,
        ours: Callable[[], object],
        others: dict[str, Callable[[], object]],
        *,
        floor: tuple[str, Callable[[], object]] | None = None,
        per: dict[str, int] | None = None,
        rounds: int = 15,
        again: int = 1,
        before: Callable[[], object] | None = None,
    ) -> None:
        calls = dict(others) | ({floor[0]: floor[1]} if floor else {})
        taken: dict[str, list[float]] = {name: [] for name in calls}
        repeats = per or {}

        def in_turn() -> None:
            if before is not None:
                before()
            for name, call in calls.items():
                # A floor of the same memory as ours is as often asked before as we will be.
                for _ in range(again * (2 if floor is not None and name == floor[0] else 1)):
                    call()
                start = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - start) / repeats.get(name, 1))
            for _ in range(again):
                ours()

        benchmark.pedantic(ours, setup=in_turn, rounds=rounds, warmup_rounds=1)
        benchmark.extra_info["title"] = title
        if benchmark.disabled:
            return
        mine = np.array(benchmark.stats.stats.data) / repeats.get("", 1)
        benchmark.extra_info["per_round"] = repeats.get("", 1)
        benchmark.extra_info["others"] = {
            name: {
                "seconds": statistics.median(times[-rounds:]),
                # Of each round by itself: a slow moment of the machine then counts on both sides.
                "ratio": float(np.median(np.array(times[-rounds:]) / mine)),
                "is_floor": floor is not None and name == floor[0],
            }
            for name, times in taken.items()
        }

    return run


@pytest.fixture
def floor(benchmark: Any, bandwidth: dict[str, float]) -> Callable[[str, float], None]:
    """Note the time that the bytes of a case take by themselves: floor(kind, bytes)."""

    def note(kind: str, n_bytes: float) -> None:
        benchmark.extra_info["floor"] = kind
        benchmark.extra_info["floor_seconds"] = n_bytes / bandwidth[kind]
        benchmark.extra_info["bytes"] = int(n_bytes)

    return note


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Say what ran, and where."""
    machine_info["hybridmem"] = hybridmem.__version__
    machine_info["simd"] = hybridmem.simd_level()
    machine_info["numpy"] = np.__version__
    machine_info["cores"] = os.cpu_count()


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Write the same figures as a table for people, beside the JSON."""
    cases = sorted(output_json["benchmarks"], key=lambda case: str(case["fullname"]))
    results = output_json | {"benchmarks": cases}
    text = [
        tables.machine(results),
        "",
        *tables.alone(results),
        "",
        "One thread, in turn within each round; medians. Below 1.00 is slower than the floor, and "
        "above faster than a peer.",
        "",
        *tables.compared(results),
    ]
    target = Path(config.rootpath) / "bench" / "results" / "latest.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(text) + "\n")

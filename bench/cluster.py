"""Latency, bytes and memory of a cluster by its number of partitions, beside a model of them.

Run once for each number of partitions, on a machine that does nothing else, then for the page::

    for n in 1 2 4 8; do python -m bench.cluster measure $n; done
    python -m bench.cluster write

The model has constants that are measured apart: what a query costs that finds nothing to scan (a,
and d for each partition), what scanning one more entry costs in one process, how fast keys and
values come through the object store, and what an entry takes in memory. `write` puts the measured
figures beside the model's, and what it says of larger layers, into docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hybridmem

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "bench" / "results"
_PLACE = re.compile(r"(<!-- cluster -->\n)(.*?)(<!-- end -->)", re.S)

ENTRIES, WIDTH, TOP_K = 100_000, 64, 8
#: A large entry: 64 tokens of width 1024 in bfloat16.
LARGE_WIDTH, LARGE_TOKENS, LARGE = 1024, 64, 64


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Median time of a call, the first few left out."""
    times = []
    for _ in range(rounds + 5):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[5:])


def fill(memory: Any, entries: int, rng: np.random.Generator) -> None:
    """Put entries of one token."""
    for _ in range(entries // 1000):
        rows = rng.standard_normal((1000, 1, WIDTH), np.float32)
        memory.put_many([(row, row) for row in rows], 0)
    memory.flush()


def resident_mb(actor: Any) -> float:
    """Memory of the process of a partition that it shares with no other."""

    def own(_: Any) -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    import ray

    kilobytes: int = ray.get(actor.__ray_call__.remote(own))
    return kilobytes / 1024


def measure(partitions: int) -> dict[str, Any]:
    """Measure one number of partitions."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    from hybridmem.integrations import ray as clusters

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="hm", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        ray.init(
            address="local", include_dashboard=False, object_store_memory=256 << 20,
            log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        query = rng.standard_normal((400, WIDTH), np.float32)
        turn = iter(range(10**6))
        with clusters.create(
            f"{folder}/mem", partitions=partitions, route="hash", embed_dim=WIDTH
        ) as memory:
            actors = [owner.replicas[0].actor for owner in memory._owners.all]

            def ask() -> object:
                return memory.query(query[next(turn) % 400], 0, TOP_K)

            for _ in range(partitions):
                memory.put(query[:1], query[:1], 0)
            nearly_empty = median_ms(ask, 200)
            bare = sum(map(resident_mb, actors)) / partitions
            begun = time.perf_counter()
            fill(memory, ENTRIES, rng)
            put_us = 1e6 * (time.perf_counter() - begun) / ENTRIES
            full = median_ms(ask, 100)
            disk = memory.stats().disk_bytes
        with clusters.open(f"{folder}/mem") as memory:
            median_ms(ask, 10)
            actors = [owner.replicas[0].actor for owner in memory._owners.all]
            used = sum(map(resident_mb, actors)) / partitions
        with clusters.create(
            f"{folder}/large", partitions=partitions, route="hash", embed_dim=LARGE_WIDTH,
            kv_dtype="bfloat16",
        ) as memory:  # fmt: skip
            for _ in range(LARGE):
                rows = rng.standard_normal((LARGE_TOKENS, LARGE_WIDTH), np.float32)
                memory.put(rows, rows, 0)
            large = rng.standard_normal(LARGE_WIDTH, np.float32)
            stored = median_ms(lambda: memory.query_stored(large, 0, TOP_K), 50)
        ray.shutdown()
        with hybridmem.create(f"{folder}/one", embed_dim=WIDTH) as store:
            fill(store, ENTRIES, rng)
            in_process = median_ms(lambda: store.query(query[next(turn) % 400], 0, TOP_K), 100)
    return {
        "partitions": partitions,
        "nearly_empty_ms": nearly_empty,
        "full_ms": full,
        "large_ms": stored,
        "in_process_ms": in_process,
        "put_us": put_us,
        "bare_mb": bare,
        "used_mb": used,
        "disk_bytes": disk,
        "cores": os.cpu_count(),
        "simd": hybridmem.simd_level(),
    }


def model(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the constants: ms, ns an entry, GB/s, and MB and bytes an entry in memory."""
    several = [run for run in runs if run["partitions"] > 1]
    d, a = np.polyfit(
        [run["partitions"] for run in several], [run["nearly_empty_ms"] for run in several], 1
    )
    each, base = np.polyfit(
        [ENTRIES / run["partitions"] for run in runs], [run["used_mb"] for run in runs], 1
    )
    nbytes = TOP_K * 2 * LARGE_TOKENS * LARGE_WIDTH * 2
    extra = statistics.median(run["large_ms"] - run["nearly_empty_ms"] for run in runs)
    return {
        "a": a,
        "d": d,
        "one": runs[0]["nearly_empty_ms"],
        "scan": statistics.median(run["in_process_ms"] for run in runs) / ENTRIES * 1e6,
        "rate": nbytes / extra / 1e6,
        "base": base,
        "each": each * 2**20,
    }


def predicted_ms(c: dict[str, float], entries: float, partitions: int, at_once: int) -> float:
    """What a query takes of a layer that is spread over partitions, so many of them at once."""
    calls = c["one"] if partitions == 1 else c["a"] + c["d"] * partitions
    return calls + entries * c["scan"] / at_once / 1e6


def write() -> None:
    """Write the tables of docs/scale.md."""
    runs = sorted(
        (json.loads(path.read_text()) for path in RESULTS.glob("cluster-*.json")),
        key=lambda run: run["partitions"],
    )
    c = model(runs)
    lines = [
        "| partitions | nothing to scan | 100,000 entries | model "
        "| memory of a partition | model | put |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        n = run["partitions"]
        lines.append(
            f"| {n} | {run['nearly_empty_ms']:.1f} ms | {run['full_ms']:.1f} ms "
            f"| {predicted_ms(c, ENTRIES, n, 1):.1f} ms | {run['used_mb']:.0f} MB "
            f"| {c['base'] + c['each'] * ENTRIES / n / 2**20:.0f} MB | {run['put_us']:.0f} µs |"
        )
    lines += [
        "",
        f"Constants: {c['one']:.1f} ms for one partition, which is asked once; for more "
        f"a = {c['a']:.1f} ms and d = {c['d']:.1f} ms; s = {c['scan']:.0f} ns for 4,096 bits "
        f"({runs[0]['simd']}); {c['base']:.0f} MB a partition and {c['each']:.0f} bytes an entry "
        f"in memory; {runs[0]['disk_bytes'] / ENTRIES - 2 * WIDTH * 4:.0f} bytes an entry on disk "
        f"beside keys and values; these come at {c['rate']:.1f} GB/s through the object store. All "
        f"on {runs[0]['cores']} cores, which share one memory (c = 1) and run the partitions, the "
        f"asking process and Ray; entries of one token, width {WIDTH}, top {TOP_K}, medians.",
        "",
        "| entries of a layer | best number of partitions | a query then | with 8 |",
        "|---|---|---|---|",
    ]
    for entries in (10**6, 10**7, 31_250_000, 10**8, 10**9):
        best = max(1, round((entries * c["scan"] / 1e6 / c["d"]) ** 0.5))
        lines.append(
            f"| {entries:,} | {best} | {predicted_ms(c, entries, best, best):,.0f} ms "
            f"| {predicted_ms(c, entries, 8, 8):,.0f} ms |"
        )
    text, count = _PLACE.subn(
        lambda place: place[1] + "\n".join(lines) + "\n" + place[3],
        PAGE.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise SystemExit(f"{PAGE} must have one place between <!-- cluster --> and <!-- end -->")
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "write"])
    parser.add_argument("partitions", type=int, nargs="?", default=1)
    given = parser.parse_args()
    if given.what == "write":
        write()
        return
    RESULTS.mkdir(exist_ok=True)
    run = measure(given.partitions)
    (RESULTS / f"cluster-{given.partitions}.json").write_text(json.dumps(run, indent=1))
    print(json.dumps(run))


if __name__ == "__main__":
    main()

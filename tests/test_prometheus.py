"""What Prometheus is told of a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem.integrations import prometheus

client = pytest.importorskip(
    "prometheus_client", reason="needs prometheus_client: pip install 'hybridmem[metrics]'"
)


def test_metrics_are_the_stats_at_each_scrape(tmp_path: Path) -> None:
    registry = client.CollectorRegistry()
    rows = np.eye(4, 8, dtype=np.float32)
    with hybridmem.create(tmp_path / "mem", embed_dim=8) as store:
        prometheus.watch(store, registry=registry)
        store.put(rows, rows, 0)
        store.put(rows, rows, 3)
        store.query(rows[0], 0)
        stats = store.stats()

        def value(name: str, **labels: str) -> float | None:
            found: float | None = registry.get_sample_value(name, {"store": "mem", **labels})
            return found

        assert value("hybridmem_entries") == 2
        assert value("hybridmem_tokens") == 8
        assert value("hybridmem_layer_entries", layer="3") == 1
        assert value("hybridmem_queries_total") == 1
        assert value("hybridmem_hits_total") == 1
        assert value("hybridmem_unflushed_bytes") == stats.unflushed_bytes > 0
        assert value("hybridmem_disk_bytes") == stats.disk_bytes
        store.evict(1)
        assert value("hybridmem_entries") == 1
        assert value("hybridmem_evicted_total") == 1
        assert value("hybridmem_generation") == store.stats().generation
        with pytest.raises(ValueError, match="'mem'"):
            prometheus.watch(store, registry=registry)
        with hybridmem.create(tmp_path / "other" / "mem", embed_dim=8) as other:
            prometheus.watch(other, "other", registry)
            assert value("hybridmem_entries") == 1
            assert registry.get_sample_value("hybridmem_entries", {"store": "other"}) == 0
            assert client.generate_latest(registry).count(b"# TYPE hybridmem_entries ") == 1
        assert registry.get_sample_value("hybridmem_entries", {"store": "other"}) is None
    assert value("hybridmem_entries") is None
    with hybridmem.open(tmp_path / "mem", mode="r") as store:
        prometheus.watch(store, registry=registry)  # the name is free again
        assert value("hybridmem_entries") == 1
        with hybridmem.layered([tmp_path / "other" / "mem", store]) as memory:
            with pytest.raises(ValueError, match="name: got none"):
                prometheus.watch(memory, registry=registry)
            prometheus.watch(memory, "both", registry)
            assert registry.get_sample_value("hybridmem_entries", {"store": "both"}) == 1
        assert registry.get_sample_value("hybridmem_entries", {"store": "both"}) is None

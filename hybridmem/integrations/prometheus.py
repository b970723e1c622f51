"""Counters and sizes of a store for Prometheus (extra `metrics`).

from hybridmem.integrations import prometheus
prometheus.watch(store)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from hybridmem.errors import StoreClosedError
from hybridmem.memory import Memory
from hybridmem.results import Stats
from hybridmem.store import Store

__all__ = ["StoreCollector", "watch"]

_GAUGES = {
    "entries": "Live entries, flushed or not",
    "tokens": "Tokens of the live entries",
    "shards": "Committed shards",
    "disk_bytes": "Bytes of all files of the directory",
    "live_bytes": "Bytes on disk that belong to live entries",
    "dead_bytes": "Bytes on disk that a compaction would give back",
    "unflushed_bytes": "Bytes of keys and values that the next flush makes durable",
    "generation": "Number of the last commit",
}
_COUNTERS = {
    "queries": "Queries answered since the store was opened",
    "hits": "Entries returned by queries since the store was opened",
    "evicted": "Entries evicted since the store was opened",
}


class StoreCollector:
    """Reads `Store.stats` of the stores it watches when it is asked. Closed ones drop out."""

    def __init__(self) -> None:
        self._stores: dict[str, Memory] = {}
        self._lock = threading.Lock()

    def add(self, store: Memory, name: str) -> None:
        """Watch one more store, under a name of its own."""
        with self._lock:
            self._all_stats()
            if name in self._stores:
                raise ValueError(f"name: a store is watched as {name!r} already, give another")
            self._stores[name] = store

    def _all_stats(self) -> dict[str, Stats]:
        found = {}
        for name, store in list(self._stores.items()):
            try:
                found[name] = store.stats()
            except StoreClosedError:
                del self._stores[name]
        return found

    def describe(self) -> list[Any]:
        """Return nothing: what there is to tell is not known before it is asked."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield metric families, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            found = self._all_stats()
        for kind, fields in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, text in fields.items():
                family = kind(f"hybridmem_{field}", text, labels=["store"])
                for name, stats in found.items():
                    family.add_metric([name], getattr(stats, field))
                yield family
        layers = GaugeMetricFamily(
            "hybridmem_layer_entries", "Live entries of a layer", labels=["store", "layer"]
        )
        for name, stats in found.items():
            for layer, count in stats.entries_by_layer.items():
                layers.add_metric([name, str(layer)], count)
        yield layers


_collectors: weakref.WeakKeyDictionary[Any, StoreCollector] = weakref.WeakKeyDictionary()


def watch(store: Memory, name: str | None = None, registry: Any = None) -> None:
    """Tell Prometheus of a store for as long as it is open.

    Parameters
    ----------
    store : Memory
        A store, or several that are layered.
    name : str, optional
        Value of the label `store`; the last part of a store's path by default.
    registry : prometheus_client.CollectorRegistry, optional
        The process's own by default.

    Raises
    ------
    ValueError
        If an open store is watched under this name already.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ImportError(
            "hybridmem.integrations.prometheus needs prometheus_client: "
            "pip install 'hybridmem[metrics]'"
        ) from error
    registry = REGISTRY if registry is None else registry
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = StoreCollector()
        registry.register(collector)
    if name is None:
        if not isinstance(store, Store):
            raise ValueError("name: got none, want one: only a store has a path to name it by")
        name = store.path.name
    collector.add(store, name)

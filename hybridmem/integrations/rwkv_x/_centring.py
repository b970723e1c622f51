"""Learning the mean key and the mean query by which the store centres a layer's signatures."""

from __future__ import annotations

import threading
import warnings

import numpy as np
from torch import Tensor

from hybridmem.memory import Memory

#: A layer with more entries than this is not centred any more: all their signatures would change.
_MOST_ENTRIES = 64


class Centring:
    """Means of the first tokens of each layer, handed to `Memory.calibrate` once. Thread-safe."""

    def __init__(self, store: Memory, layers: int, tokens: int) -> None:
        self._store = store
        self._tokens = tokens
        entries = store.stats().entries_by_layer
        learnt = store.calibration
        self._learning = {
            layer: _Sums()
            for layer in range(layers if tokens else 0)
            if layer not in learnt and entries.get(layer, 0) <= _MOST_ENTRIES
        }
        self._lock = threading.Lock()

    def learns(self, layer: int) -> bool:
        """Whether a layer still needs tokens."""
        return layer in self._learning

    def learn(self, layer: int, keys: Tensor, queries: Tensor) -> None:
        """Take note of rows of a layer, `[n, width]`; calibrate it when there are enough."""
        if layer not in self._learning:
            return
        with self._lock:
            sums = self._learning.get(layer)
            if sums is None:
                return
            sums.add(keys, queries)
            if sums.count < self._tokens:
                return
            del self._learning[layer]
        try:
            self._store.calibrate(
                layer, keys=sums.keys / sums.count, queries=sums.queries / sums.count
            )
        except ValueError as error:
            if layer not in self._store.calibration:  # else it is only that another was first
                warnings.warn(
                    f"layer {layer} of {self._store!r} stays uncentred, and searches of it will "
                    f"find less: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class _Sums:
    def __init__(self) -> None:
        self.count = 0
        self.keys: np.ndarray = np.zeros(1)
        self.queries: np.ndarray = np.zeros(1)

    def add(self, keys: Tensor, queries: Tensor) -> None:
        self.count += len(keys)
        self.keys = self.keys + keys.double().sum(0).cpu().numpy()
        self.queries = self.queries + queries.double().sum(0).cpu().numpy()

"""Learning the mean key and the mean query by which the store centres a layer's signatures."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory import Memory

#: A layer with more entries than this is not centred any more: all their signatures would change.
_MOST_ENTRIES = 64
#: Rows that are added up together.
_TOGETHER = 64


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
        mean_key, mean_query = sums.means()
        try:
            self._store.calibrate(layer, keys=mean_key, queries=mean_query)
        except ValueError as error:
            if layer not in self._store.calibration:  # else it is only that another was first
                warnings.warn(
                    f"layer {layer} of {self._store!r} stays uncentred, and searches of it will "
                    f"find less: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class _Sums:
    """Sums of rows, of which some wait: to add them up one by one costs decode a percent."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = [np.zeros(1), np.zeros(1)]
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._summed = 0

    def add(self, keys: Tensor, queries: Tensor) -> None:
        self._waiting.append((keys, queries))
        self.count += len(keys)
        if self.count - self._summed >= _TOGETHER:
            self._add_up()

    def means(self) -> list[NDArray[np.float64]]:
        self._add_up()
        return [total / self.count for total in self._sums]

    def _add_up(self) -> None:
        for at, rows in enumerate(zip(*self._waiting, strict=True)):
            self._sums[at] = self._sums[at] + torch.cat(rows).double().sum(0).cpu().numpy()
        self._waiting.clear()
        self._summed = self.count

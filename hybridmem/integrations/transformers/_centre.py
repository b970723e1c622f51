"""Per-layer means that are taken from keys and queries before they are projected to signatures.

Keys and queries of a layer share a large common direction that says nothing about the text. Without
it, signs of projections compare what differs. A mean is learned once and kept for the life of the
store, in `transformers.means` in its directory, because signatures of different means do not
compare.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hybridmem._fileio import Directory
from hybridmem.errors import CorruptStoreError

__all__ = ["MEANS_NAME", "Centres", "centres"]

MEANS_NAME = "transformers.means"

Vector = npt.NDArray[np.float32]


class Centres:
    """Mean key and mean query of each layer, [embed_dim] float32, frozen once set."""

    def __init__(self, path: os.PathLike[str] | str, embed_dim: int) -> None:
        self._path = Path(path)
        self._means: dict[str, Vector] = {}
        self._changed = False
        self._lock = threading.Lock()
        directory = Directory(self._path)
        try:
            data = directory.read_file(MEANS_NAME, 1 << 32)
            self._means = load(data)
        except FileNotFoundError:
            return
        except SafetensorError as error:
            raise CorruptStoreError(
                f"{MEANS_NAME} is damaged ({error}); move the file away to learn means anew",
                path=str(self._path / MEANS_NAME),
            ) from error
        finally:
            directory.close()
        for name, mean in self._means.items():
            if (
                mean.shape != (embed_dim,)
                or mean.dtype != np.float32
                or not np.isfinite(mean).all()
            ):
                raise CorruptStoreError(
                    f"{MEANS_NAME}: {name} is no mean of {embed_dim} float32 values",
                    path=str(self._path / MEANS_NAME),
                )

    def get(self, layer_idx: int) -> tuple[Vector, Vector] | None:
        """Return the mean key and the mean query of a layer, or None before they are set."""
        key, query = self._means.get(f"key_{layer_idx}"), self._means.get(f"query_{layer_idx}")
        return None if key is None or query is None else (key, query)

    def set(self, layer_idx: int, key: Vector, query: Vector) -> tuple[Vector, Vector]:
        """Set the means of a layer unless another conversation has; return what now holds."""
        with self._lock:
            if f"key_{layer_idx}" not in self._means:
                self._means[f"key_{layer_idx}"] = np.ascontiguousarray(key, np.float32)
                self._means[f"query_{layer_idx}"] = np.ascontiguousarray(query, np.float32)
                self._changed = True
            return self._means[f"key_{layer_idx}"], self._means[f"query_{layer_idx}"]

    def sync(self) -> None:
        """Write the means, durably, if any is new."""
        with self._lock:
            if not self._changed:
                return
            directory = Directory(self._path)
            try:
                temporary = directory.write_temporary([save(self._means)], MEANS_NAME)
                directory.rename(temporary, MEANS_NAME)
                directory.sync()
            finally:
                directory.close()
            self._changed = False


_centres: weakref.WeakKeyDictionary[Any, Centres] = weakref.WeakKeyDictionary()
_centres_lock = threading.Lock()


def centres(store: Any) -> Centres:
    """Return the means of an open store."""
    with _centres_lock:
        if store not in _centres:
            _centres[store] = Centres(store.path, store.config.embed_dim)
        return _centres[store]

"""Signatures of entries and queries, and the indexes of a snapshot's layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridmem._entries import EntryTable
from hybridmem._index import IndexView, LayerIndex
from hybridmem.config import Config
from hybridmem.hdc import sign_entry, sign_query

__all__ = ["Signatures"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Signatures:
    """Makes signatures and finds them. The store's lock guards everything but views.

    The index of a layer is gathered from the records when it is first searched, and kept up from
    then on.

    Attributes
    ----------
    removals : int
        Counts removals: a search that began before one must be asked again.
    """

    def __init__(self, config: Config) -> None:
        self.spec = config.signature
        self.removals = 0
        self._projector = self.spec.projector(config.embed_dim, config.seed)
        self._layers: dict[int, LayerIndex] = {}

    def of_entry(self, keys: Floats) -> Bytes:
        """Return the signature of a record, uint8 [hdc_dim/8]."""
        return sign_entry(self._projector, self.spec, keys)

    def of_query(self, rows: Floats) -> Bytes:
        """Return the signatures of a query, uint8 [n, bits/8]."""
        return sign_query(self._projector, self.spec, rows)

    def view(self, layer: int, table: EntryTable) -> IndexView:
        """Return the live entries of a layer, to be searched without the store's lock."""
        index = self._layers.get(layer)
        if index is None:
            index = LayerIndex(self.spec)
            if layer in table.layers():
                for rows, signatures in table.signatures(table.alive_rows(layer)):
                    index.extend(
                        table.columns["entry_id"][rows], table.columns["n_tokens"][rows], signatures
                    )
                self._layers[layer] = index
        return index.view()

    def add(self, layer: int, entry_id: int, n_tokens: int, signature: Bytes) -> None:
        """Take note of an entry that was put."""
        index = self._layers.get(layer)
        if index is not None:
            index.extend([entry_id], [n_tokens], signature[None])

    def remove(self, layer: int, entry_id: int) -> None:
        """Take note of an entry that was evicted or deleted."""
        self.removals += 1
        index = self._layers.get(layer)
        if index is not None:
            index.remove(entry_id)
            if not len(index):
                del self._layers[layer]

    def clear(self) -> None:
        """Forget the indexes: the snapshot is another one."""
        self.removals += 1
        self._layers.clear()

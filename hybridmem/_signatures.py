"""Signatures of entries and queries, and the indexes of a snapshot's layers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hybridmem._entries import EntryTable
from hybridmem._index import LayerIndex
from hybridmem._manifest import Calibration
from hybridmem._view import IndexView
from hybridmem.config import Config
from hybridmem.hdc import centred, mean_pool, round_query, sign_entry, sign_query

__all__ = ["Signatures", "first_mean"]

#: Tokens whose mean a layer is centred by where none is given.
_CALIBRATION_TOKENS = 4096

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float64]


class Signatures:
    """Makes signatures and finds them. The store's lock guards everything but views.

    The index of a layer is gathered from the records when it is first searched, and kept up from
    then on.

    Attributes
    ----------
    centres : dict of int to (array, array or None)
        Mean key and mean query of the layers that are centred.
    removals : int
        Counts removals: a search that began before one must be asked again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.spec = config.signature
        self.removals = 0
        self.centres: dict[int, tuple[Floats, Floats | None]] = {}
        self._projector = self.spec.projector(config.embed_dim, config.seed)
        self._layers: dict[int, LayerIndex] = {}

    def calibrate(self, layers: Iterable[Calibration]) -> None:
        """Centre keys and queries of these layers from now on, and no others."""
        self.centres = {
            layer.layer_idx: (
                Calibration.unpack(layer.mean_key),
                Calibration.unpack(layer.mean_query) if layer.mean_query else None,
            )
            for layer in layers
        }

    def of_entry(self, layer: int, keys: Floats) -> tuple[Bytes, int]:
        """Return the signature of a record, uint8 [hdc_dim/8], and its padding.

        The padding holds the float32 bits of the norm of the centred mean key, where a layer is
        centred and its entries have one signature each.
        """
        centre, _ = self.centres.get(layer, (None, None))
        signature = sign_entry(self._projector, self.spec, keys, centre)
        if centre is None or not self.spec.pooled:
            return signature, 0
        norm = np.float32(
            np.linalg.norm(centred(mean_pool(keys), centre, "keys").astype(np.float64))
        )
        return signature, int(norm.view(np.uint32))

    def is_of(self, layer: int, keys: Floats, signature: Bytes) -> bool:
        """Whether a record's signature was made of these keys, but for their rounding.

        That turns a few bits near zero; the signature of other keys differs in half of them.
        """
        turned = int(np.unpackbits(self.of_entry(layer, keys)[0] ^ signature).sum())
        return turned <= self.spec.used_slots(len(keys)) * self.spec.bits // 8

    def made_anew(
        self,
        layers: Iterable[Calibration],
        layer: int,
        entries: Iterable[tuple[int, Floats, Bytes]],
    ) -> dict[int, tuple[Bytes, int]]:
        """Return the signatures and paddings that a layer's entries have with other centres.

        Parameters
        ----------
        layers : iterable of Calibration
            The other centres.
        entries : iterable of (entry_id, keys, signature)
            Keys as stored, and the present signature.
        """
        other = Signatures(self._config)
        other.calibrate(layers)
        made = {}
        for entry_id, keys, signature in entries:
            if not self.is_of(layer, keys, signature):
                raise ValueError(
                    f"entry {entry_id} of layer {layer} was put with index_keys, which are not "
                    "stored: calibrate a layer before its first entry"
                )
            made[entry_id] = other.of_entry(layer, keys)
        return made

    def of_query(self, layer: int, rows: Floats) -> Bytes:
        """Return the signatures of a query, uint8 [n, bits/8]."""
        _, centre = self.centres.get(layer, (None, None))
        return sign_query(self._projector, self.spec, rows, centre)

    def cosines(self, layer: int, view: IndexView, rows: Floats, entry_ids: Ids) -> Scores:
        """Return the largest cosines of a query's tokens with the signs of entries, [n, 1, m].

        Of the tokens as `hdc.round_query` rounds them, not of their signs. KeyError if one of the
        entries is not in the view of the layer.
        """
        _, centre = self.centres.get(layer, (None, None))
        query = round_query(self._projector, self.spec, rows, centre)
        squares = np.square(query, dtype=np.float64).sum(axis=1) * self.spec.bits  # all exact
        # A row of zeros is at the same distance from all.
        cosines: Scores = view.dots(query, entry_ids) / np.sqrt(np.maximum(squares, 1))
        return cosines[:, None]

    def centred_query(self, layer: int, rows: Floats) -> Floats:
        """Return a query less the layer's mean query."""
        _, centre = self.centres.get(layer, (None, None))
        return centred(rows, centre, "query")

    def check_order(self, layer: int, order: str) -> None:
        """Refuse an order that the records of a layer do not serve."""
        if order == "norm" and (layer not in self.centres or not self.spec.pooled):
            raise ValueError(
                f'order="norm" needs one signature an entry and norms, which layer {layer} has '
                "once it is calibrated; call calibrate first"
            )

    def by_norm(
        self,
        ids: npt.NDArray[np.uint64],
        distances: npt.NDArray[np.uint32],
        paddings: npt.NDArray[np.uint32],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], npt.NDArray[np.float64]]:
        """Order entries by the norm of their centred mean key times a cosine, returned with them.

        It is the cosine that the distance stands for: sign bits of a random projection differ with
        probability angle / pi (M. Charikar, STOC 2002). The paddings hold the norms.
        """
        norms = np.nan_to_num(paddings.view(np.float32).astype(np.float64))
        estimates = norms * np.cos(np.pi * distances / self.spec.bits)
        order = np.lexsort((ids, -estimates))
        return ids[order], distances[order], estimates[order]

    def view(self, layer: int, table: EntryTable, approximate: bool = False) -> IndexView:
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
        return index.view(approximate)

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


def first_mean(keys: Iterable[Floats]) -> Floats:
    """Return the mean of the first stored keys of a layer."""
    parts: list[Floats] = []
    n_tokens = 0
    for part in keys:
        parts.append(part)
        n_tokens += len(part)
        if n_tokens >= _CALIBRATION_TOKENS:
            break
    if not parts:
        raise ValueError("keys: the layer stores none to take the mean of; give some")
    mean: Floats = mean_pool(np.concatenate(parts))[0]
    return mean

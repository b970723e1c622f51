"""By which means the layers of a cluster are centred: on all partitions by the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridmem._signatures import Signatures, first_mean
from hybridmem.errors import PartitionError
from hybridmem.integrations.ray._calls import Owner
from hybridmem.integrations.ray._owners import Owners, failures
from hybridmem.memory import Floats
from hybridmem.results import Entry

__all__ = ["Centring"]

Means = tuple[Floats, Floats | None]


class Centring:
    """Calibrates layers on all partitions, and knows of which layers that did not succeed.

    Parameters
    ----------
    owners : Owners
    signatures : Signatures
        Of the cluster; its `centres` are kept to what the partitions say.
    of_layer : callable
        Gives the partitions that may hold entries of a layer.
    """

    def __init__(
        self,
        owners: Owners,
        signatures: Signatures,
        of_layer: Callable[[int], Sequence[Owner]],
    ) -> None:
        self._owners, self._signatures, self._of_layer = owners, signatures, of_layer
        #: Means of layers that some partitions are centred by and others may not be: what these
        #: answer cannot be compared.
        self.unsettled: Mapping[int, Means] = {}

    def check(self, layers: Iterable[int]) -> None:
        """Refuse layers that partitions may centre differently.

        Raises
        ------
        PartitionError
        """
        for layer in self.unsettled.keys() & set(layers):
            raise PartitionError(
                f"some partitions may centre layer {layer} and others not, as calibrate failed: "
                "call it again with the same means",
                [str(owner) for owner in self._of_layer(layer)],
            )

    def calibrate(
        self,
        layer: int,
        mean: Floats | None,
        mean_query: Floats | None,
        entry: Callable[[int], Entry],
    ) -> None:
        """Centre a layer; by the mean of what is stored, got by `entry`, where none is given.

        Raises
        ------
        ValueError
            If entries of a partition cannot be signed anew; none is centred then.
        PartitionError
            If a partition could not; until it is called again the layer is refused.
        """
        owners = self._of_layer(layer)
        self._owners.flush(owners)
        if mean is None and layer in self.unsettled:
            mean, mean_query = self.unsettled[layer]
        if mean is None:
            ids = self._read(owners, "ids", layer)
            stored = np.sort(np.concatenate(list(ids.values()))).tolist()
            mean = first_mean(entry(one).keys for one in stored)
        self._read(owners, "check_calibration", layer, mean, mean_query)
        self._everywhere(layer, owners, (mean, mean_query))
        means = self._read(owners[:1], "calibration")[owners[0].number][layer]
        self._signatures.centres = {**self._signatures.centres, layer: means}
        self._settled(layer)

    def settle(self, writing: bool) -> None:
        """Learn the means of calibrated layers; finish what a writer that died began."""
        owners = [one for one in self._owners.all if one.replicas]
        answers, _ = self._owners.read(
            {one.number: ("calibration",) for one in owners}, self._owners.write_deadline_s
        )
        known = {layer: means for centres in answers.values() for layer, means in centres.items()}
        lacking = {
            layer: [
                one for one in self._of_layer(layer) if layer not in answers.get(one.number, known)
            ]
            for layer in known
        }
        self._signatures.centres = known
        self.unsettled = {layer: known[layer] for layer, some in lacking.items() if some}
        for layer, means in self.unsettled.items() if writing else ():
            with contextlib.suppress(PartitionError):  # it stays unsettled, and says so when asked
                self._everywhere(layer, lacking[layer], means)
                self._settled(layer)

    def _everywhere(self, layer: int, owners: Sequence[Owner], means: Means) -> None:
        self.unsettled = {**self.unsettled, layer: means}
        self._owners.flush(owners, "calibrate", layer, *means)

    def _settled(self, layer: int) -> None:
        self.unsettled = {one: means for one, means in self.unsettled.items() if one != layer}

    def _read(self, owners: Sequence[Owner], method: str, *args: object) -> dict[int, Any]:
        answers, failed = self._owners.read(
            {one.number: (method, *args) for one in owners}, self._owners.write_deadline_s
        )
        if failed:
            raise failures("calibrate", {self._owners.all[one]: why for one, why in failed.items()})
        return answers

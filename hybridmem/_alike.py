"""Whether stores can answer as one: their scores must be comparable, and their ids distinct."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridmem.errors import ModelMismatchError
from hybridmem.store import Store

__all__ = ["ID_BITS", "check_alike", "same_means", "unlike"]

#: An id of a store takes the low bits; those above, of 63, name the store.
ID_BITS = 40
#: What has to be equal for scores to be comparable.
_COMPARED = ("embed_dim", "hdc_dim", "seed", "signature_tokens", "signature_bits")


def check_alike(first: Store, other: Store) -> None:
    """Refuse stores whose scores or whose keys and values cannot be compared."""
    for name in _COMPARED:
        one, two = getattr(first.config, name), getattr(other.config, name)
        if one != two:
            raise ValueError(
                f"{first.path} and {other.path} cannot be layered: their {name} are {one} and {two}"
            )
    one, two = first.config.model_id, other.config.model_id
    if one is not None and two is not None and one != two:
        raise ModelMismatchError(
            f"{first.path} and {other.path} cannot be layered: they hold keys and values of the "
            f"models {one!r} and {two!r}"
        )
    # The next id counts too: what is put then has to have an id below 2**ID_BITS.
    last = max(
        int(other._table.column("entry_id").max(initial=0)), other._manifest.next_entry_id - 1
    )
    if last >> ID_BITS - 1:
        raise ValueError(
            f"{other.path} cannot be layered: its ids have come to {last}, beyond "
            f"2**{ID_BITS - 1}; put its entries into a new store"
        )


def same_means(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    """Whether two layers are centred alike: by the same means, or both not at all."""
    if one is None or other is None:
        return one is other
    return all(
        mine is theirs if mine is None or theirs is None else np.array_equal(mine, theirs)
        for mine, theirs in zip(one, other, strict=True)
    )


def unlike(layer: int, first: Store, other: Store) -> str:
    """Say that two stores centre a layer differently, and what can be done."""
    message = (
        f"{first.path} and {other.path} cannot be layered: they centre layer {layer} differently, "
        "so that their scores cannot be compared"
    )
    if layer in other.calibration or layer not in first.calibration:
        return f"{message}; pack one like the other (like=, or --like)"
    return (
        f"{message}; calibrate {other.path} with the means of the other, which are "
        f"`calibration[{layer}]` there"
    )

"""What a put brings, on its way in: checked, encoded, signed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays
from hybridmem._codec import Codec, Tensor
from hybridmem._signatures import Signatures

__all__ = ["Chunk", "each", "pairs", "prepare"]


class Chunk(NamedTuple):
    """Keys and values as they will be stored, and the signature to find them by."""

    tensors: list[Tensor]
    nbytes: int
    n_tokens: int
    signature: npt.NDArray[np.uint8]
    padding: int


def prepare(
    codec: Codec,
    signatures: Signatures,
    layer: int,
    width: int,
    keys: Any,
    values: Any,
    index_keys: Any,
    where: str = "",
) -> Chunk:
    """Check, encode and sign what was put; it is copied, the caller may use its arrays again.

    Parameters
    ----------
    where : str
        Put before the names of the arguments in messages.
    """
    k = _arrays.matrix(keys, f"{where}keys", width, finite=False)
    v = _arrays.matrix(values, f"{where}values", width, finite=False)
    if len(k) != len(v):
        raise ValueError(
            f"{where}keys and values must have the same number of tokens, "
            f"got {list(k.shape)} and {list(v.shape)}"
        )
    tensors = codec.encode(k, v, where)
    indexed = k
    if index_keys is not None:
        indexed = _arrays.matrix(index_keys, f"{where}index_keys", width)
        if len(indexed) != len(k):
            raise ValueError(
                f"{where}index_keys must have a row for each of keys, "
                f"got {list(indexed.shape)} for {list(k.shape)}"
            )
    nbytes = sum(memoryview(tensor.data).nbytes for tensor in tensors)
    return Chunk(tensors, nbytes, len(k), *signatures.of_entry(layer, indexed))


def pairs(entries: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return what `put_many` was given as a list of (keys, values)."""
    try:
        listed = list(entries)
    except TypeError:
        raise TypeError(
            f"entries: got {type(entries).__name__}, want (keys, values) pairs"
        ) from None
    for at, pair in enumerate(listed):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"entries: entry {at} is no (keys, values) pair")
    return listed


def each(value: Any, n: int, name: str) -> list[Any]:
    """Return one value for each of `n` entries, from one for all or a sequence of one each."""
    if not isinstance(value, (list, tuple)) and np.ndim(value) == 0:
        return [value] * n
    values = list(value)
    if len(values) != n:
        raise ValueError(f"{name}: got {len(values)} for {n} entries, want one for all or one each")
    return values

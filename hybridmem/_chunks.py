"""What a put brings, on its way in: checked, encoded, signed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _source
from hybridmem._codec import Codec, Tensor
from hybridmem._signatures import Signatures

__all__ = ["Chunk", "Given", "each", "many", "prepare", "weights"]


class Given(NamedTuple):
    """A chunk as it was given; `where` stands before the names of arguments in messages."""

    keys: Any
    values: Any
    index_keys: Any = None
    source: Any = None
    where: str = ""


class Chunk(NamedTuple):
    """Keys and values as they will be stored, and the signature to find them by."""

    tensors: list[Tensor]
    nbytes: int
    n_tokens: int
    signature: npt.NDArray[np.uint8]
    padding: int


def prepare(codec: Codec, signatures: Signatures, layer: int, width: int, given: Given) -> Chunk:
    """Check, encode and sign what was put; it is copied, the caller may use its arrays again."""
    keys, values, index_keys, source, where = given
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
    spec = signatures.spec
    if not spec.pooled and len(k) > spec.slots * spec.signature_tokens:
        warnings.warn(
            f"only the first {spec.slots * spec.signature_tokens} tokens of an entry are found "
            f"by their own signatures: hdc_dim={spec.hdc_dim} has room for {spec.slots} of them; "
            "make the store with a larger hdc_dim, or put shorter chunks",
            stacklevel=2,
        )
    if source is not None:
        tensors.append(_source.encode(source, where))
    nbytes = sum(memoryview(tensor.data).nbytes for tensor in tensors)
    return Chunk(tensors, nbytes, len(k), *signatures.of_entry(layer, indexed))


def many(entries: Iterable[tuple[Any, Any]], index_keys: Any, sources: Any) -> list[Given]:
    """Return what `put_many` was given, entry by entry."""
    try:
        entries = iter(entries)
    except TypeError:
        raise TypeError(
            f"entries: got {type(entries).__name__}, want (keys, values) pairs"
        ) from None
    listed = list(entries)
    for at, pair in enumerate(listed):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"entries: entry {at} is no (keys, values) pair")
    nothing = [None] * len(listed)
    indexed = nothing if index_keys is None else each(index_keys, len(listed), "index_keys")
    named = nothing if sources is None else each(sources, len(listed), "sources")
    return [
        Given(*pair, index, source, f"entry {at}: ")
        for at, (pair, index, source) in enumerate(zip(listed, indexed, named, strict=True))
    ]


def weights(importance: Any, n: int) -> list[float]:
    """Return the importance of each of `n` entries."""
    return [_arrays.importance(one) for one in each(importance, n, "importance")]


def each(value: Any, n: int, name: str) -> list[Any]:
    """Return one value for each of `n` entries, from one for all or a sequence of one each."""
    if not isinstance(value, (list, tuple)) and np.ndim(value) == 0:
        return [value] * n
    values = list(value)
    if len(values) != n:
        raise ValueError(f"{name}: got {len(values)} for {n} entries, want one for all or one each")
    return values

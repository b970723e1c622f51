"""Where an entry comes from: JSON that the caller gives, kept in the header of its shard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridmem._codec import Tensor
from hybridmem._format import SOURCE

__all__ = ["MAX_SOURCE_BYTES", "encode", "escaped", "fault", "stored", "text_of", "value_of"]

#: What the source of one entry may take in a header, so that a shard has room for many.
MAX_SOURCE_BYTES = 1 << 16


def encode(source: Any, where: str = "") -> Tensor:
    """Return a source as it is stored.

    Parameters
    ----------
    source : object
        What JSON can hold; arrays and tensors are taken as lists.
    where : str
        Put before the name of the argument in messages.
    """
    try:
        text = json.dumps(
            source, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed
        )
        text.encode()
    except TypeError as error:
        raise TypeError(f"{where}source must be what JSON can hold: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}source must be what JSON can hold: {error}") from None
    part = stored(text)
    if part.shape[1] > MAX_SOURCE_BYTES:
        raise ValueError(
            f"{where}source takes {part.shape[1]} bytes as JSON, more than {MAX_SOURCE_BYTES}; "
            "keep large texts elsewhere and give what finds them"
        )
    return part


def stored(text: str) -> Tensor:
    """Return the JSON text of a source as it stands between two quotes."""
    escaped = json.dumps(text)[1:-1].encode()
    return Tensor(SOURCE, "I8", (1, len(escaped)), np.frombuffer(escaped, np.int8)[None])


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not")


def escaped(parts: Sequence[Tensor]) -> bytes | None:
    """Return the source among the parts of an entry as it stands between two quotes, or None."""
    return next((part.data.tobytes() for part in parts if part.suffix == SOURCE), None)


def text_of(parts: Sequence[Tensor]) -> str | None:
    """Return the JSON text of the source among the parts of an entry, None without one."""
    data = escaped(parts)
    if data is None:
        return None
    text: str = json.loads(b'"%s"' % data)
    return text


def value_of(parts: Sequence[Tensor]) -> Any:
    """Return the source among the parts of an entry, None without one."""
    text = text_of(parts)
    return None if text is None else json.loads(text)


def fault(parts: Sequence[Tensor]) -> str | None:
    """Return what is wrong with the source among the parts of an entry, or None."""
    try:
        if any(part.suffix == SOURCE and part.shape[1] > MAX_SOURCE_BYTES for part in parts):
            return f"its source takes more than {MAX_SOURCE_BYTES} bytes"
        value_of(parts)
    except (ValueError, RecursionError) as error:
        return f"its source is not JSON: {error}"
    return None

"""The bridge to attention: what was found, in front of what the cache holds or beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays
from hybridmem._codec import Attention, Codec
from hybridmem.memory import Memory

__all__ = ["attend", "augmented_kv", "merge_attention"]

Floats = npt.NDArray[np.float32]


def augmented_kv(
    query: Any,
    cache_k: Any,
    cache_v: Any,
    store: Memory,
    layer_idx: int,
    top_k: int = 5,
    *,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Return keys and values to attend to: the entries found, oldest first, then the cache.

    Parameters
    ----------
    query : array_like of float, shape (embed_dim,) or (n_tokens, embed_dim)
    cache_k, cache_v : array or torch tensor of float, shape (n_cache, embed_dim)
        Leading axes of length 1 are kept.
    store : Memory
        A store, or several that are layered.
    layer_idx : int
    top_k : int, default 5
    out : pair of arrays or tensors, optional
        Buffers for keys and values that end with the caches: ``cache_k`` is ``out[0][..., -n:, :]``
        in the same memory. What is found is written right before them, and the caches are neither
        moved nor read.

    Returns
    -------
    keys, values
        Shape (sum(n_tokens) + n_cache, embed_dim) after the cache's leading axes; type, dtype and
        device are the cache's. The cache itself where nothing was found. With `out`, views of the
        ends of the buffers.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid; no query is counted.
    """
    _check_store(store)
    width = store.config.embed_dim
    n_keys = _arrays.cache_tokens(cache_k, "cache_k", width)
    n_values = _arrays.cache_tokens(cache_v, "cache_v", width)
    if n_keys != n_values:
        raise ValueError(
            f"cache_k and cache_v must have the same number of tokens, got {n_keys} and {n_values}"
        )
    room = 0
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"out: got {type(out).__name__}, want a pair of buffers")
        room = min(_room(out[0], cache_k, "cache_k"), _room(out[1], cache_v, "cache_v"))
    hits = store.query(query, layer_idx, top_k)
    hits.sort(key=lambda hit: (hit.timestamp, hit.entry_id))
    try:
        if out is not None:
            n_found = sum(hit.n_tokens for hit in hits)
            if n_found > room:
                raise ValueError(
                    f"out: {n_found} tokens were found, there is room for {room} before the cache"
                )
            return (
                _in_front([hit.keys for hit in hits], cache_k, out[0], "cache_k"),
                _in_front([hit.values for hit in hits], cache_v, out[1], "cache_v"),
            )
        return (
            _arrays.concatenate_like([hit.keys for hit in hits], cache_k, name="cache_k"),
            _arrays.concatenate_like([hit.values for hit in hits], cache_v, name="cache_v"),
        )
    except ValueError:  # NaN in the cache, or too narrow a type: seen on the way
        store.take_back(hits)
        raise


def _room(buffer: Any, cache: Any, name: str) -> int:
    """Return how many rows fit between the beginning of a buffer and the cache at its end."""
    shape, wanted = tuple(getattr(buffer, "shape", ())), tuple(cache.shape)
    room = shape[-2] - wanted[-2] if len(shape) == len(wanted) else -1
    if (
        type(buffer) is not type(cache)
        or buffer.dtype != cache.dtype
        or room < 0
        or shape != (*wanted[:-2], shape[-2], wanted[-1])
        or (wanted[-2] and _place(buffer[..., room:, :]) != _place(cache))
    ):
        raise ValueError(
            f"out: {name} must be the end of its buffer, out[..., -{wanted[-2]}:, :] in the same "
            "memory"
        )
    return room


def _place(x: Any) -> tuple[int, tuple[int, ...]]:
    """Return where the rows of an array or a tensor lie."""
    if isinstance(x, np.ndarray):
        return x.ctypes.data, x.strides[-2:]
    return int(x.data_ptr()), tuple(x.stride()[-2:])


def _in_front(rows: list[Floats], cache: Any, buffer: Any, name: str) -> Any:
    """Write rows right before a cache; return both as a part of the buffer."""
    end = buffer.shape[-2] - cache.shape[-2]
    start = end - sum(map(len, rows))
    if rows:
        _arrays.fill(buffer[..., start:end, :], rows, name)
    return buffer[..., start:, :]


def attend(
    query: Any,
    store: Memory,
    layer_idx: int,
    top_k: int = 5,
    *,
    n_heads: int = 1,
    n_kv_heads: int | None = None,
    scale: float | None = None,
    search_query: Any = None,
    entry_ids: Any = None,
    **options: Any,
) -> tuple[Floats, Floats]:
    """Attend to the entries found where they lie, without bringing them together.

    Merge the result with the cache's own attention by `merge_attention`: the two together are
    attention over both.

    Parameters
    ----------
    query : array_like of float, shape (n_heads * head_dim,) or (m, n_heads * head_dim)
    store : Memory
        A store, or several that are layered.
    layer_idx : int
    top_k : int, default 5
    n_heads : int, default 1
        Heads of the query.
    n_kv_heads : int, optional
        Heads that a row of keys is made of, where groups of query heads share one; `n_heads` by
        default. `store.config.embed_dim` is `n_kv_heads * head_dim`.
    scale : float, optional
        Of the products; 1 / sqrt(head_dim) by default.
    search_query : array_like, optional
        What to search by, as for `Memory.query`; by default the query, summed over the heads of
        each group.
    entry_ids, **options
        As for `Memory.query`.

    Returns
    -------
    output : float32 array, shape (m, n_heads * head_dim)
        Zeros where nothing was found.
    log_sum_exp : float32 array, shape (m, n_heads)
        Of the scaled products, natural logarithm; -inf where nothing was found.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or what is stored is too large for attention in float32.
    """
    _check_store(store)
    heads = _arrays.count(n_heads, "n_heads", 1)
    kv_heads = heads if n_kv_heads is None else _arrays.count(n_kv_heads, "n_kv_heads", 1)
    width = store.config.embed_dim
    if n_kv_heads is None and width % heads:
        raise ValueError(f"n_heads: got {heads}, want a divisor of embed_dim={width}")
    if heads % kv_heads or width % kv_heads:
        raise ValueError(
            f"n_kv_heads: got {kv_heads}, want a divisor of n_heads={heads} and embed_dim={width}"
        )
    head_dim = width // kv_heads
    rows = _arrays.matrix(query, "query", heads * head_dim, vector_ok=True)
    if search_query is None:
        grouped = rows.reshape(len(rows), kv_heads, heads // kv_heads, head_dim)
        search_query = grouped.sum(axis=2).reshape(len(rows), width) if heads > kv_heads else rows
    factor = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    if not math.isfinite(factor):
        raise ValueError(f"scale: got {scale}, want a finite number")
    found = store.query_stored(search_query, layer_idx, top_k, entry_ids=entry_ids, **options)
    output = np.zeros(rows.shape, np.float32)
    top = np.full((len(rows), heads), -np.inf, np.float32)
    total = np.zeros((len(rows), heads), np.float32)
    state = Attention(rows, (heads, kv_heads, factor), (output, top, total))
    Codec.attend(found, state)
    if found:
        with np.errstate(invalid="ignore"):
            output.reshape(len(rows), heads, head_dim)[...] /= total[:, :, None]
        if not np.isfinite(output).all():
            raise ValueError(
                "query: its products with stored keys, or sums of stored values, overflow float32"
            )
    with np.errstate(divide="ignore"):
        return output, top + np.log(total)


def _check_store(store: object) -> None:
    if not isinstance(store, Memory):
        raise TypeError(f"store: got {type(store).__name__}, want an open hybridmem.Store")


def merge_attention(
    output: Any, log_sum_exp: Any, other_output: Any, other_log_sum_exp: Any
) -> tuple[Floats, Floats]:
    """Merge the attention over two sets of rows into that over both.

    Parameters
    ----------
    output, other_output : array_like of float, shape (m, heads * head_dim)
    log_sum_exp, other_log_sum_exp : array_like of float, shape (m, heads)

    Returns
    -------
    output, log_sum_exp : float32 arrays
        Of the same shapes. Zeros and -inf where both sets are empty.

    Raises
    ------
    ValueError
        If the shapes are others; nothing is broadcast.
    """
    parts, weights = (output, other_output), (log_sum_exp, other_log_sum_exp)
    arrays = [np.asarray(array, np.float32) for array in (*parts, *weights)]
    shapes = [array.shape for array in arrays]
    m, heads = shapes[2] if len(shapes[2]) == 2 else (0, 0)
    fits = shapes[0] == shapes[1] and shapes[2] == shapes[3] and len(shapes[0]) == 2 and heads
    if not fits or shapes[0][0] != m or shapes[0][1] % heads:
        raise ValueError(
            "want two outputs [m, heads * head_dim] and two log_sum_exp [m, heads], "
            f"got {shapes[0]} and {shapes[1]}, {shapes[2]} and {shapes[3]}"
        )
    total = np.logaddexp(arrays[2], arrays[3])
    with np.errstate(invalid="ignore"):
        shares = [np.nan_to_num(np.exp(lse - total), nan=0.0) for lse in arrays[2:]]
    merged = sum(
        part.reshape(m, heads, -1) * share[:, :, None]
        for part, share in zip(arrays[:2], shares, strict=True)
    )
    return np.asarray(merged).reshape(m, -1), total

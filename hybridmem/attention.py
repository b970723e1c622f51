"""The bridge to attention: what was found, in front of what the cache holds."""

from __future__ import annotations

from typing import Any

from hybridmem import _arrays
from hybridmem.store import Store

__all__ = ["augmented_kv"]


def augmented_kv(
    query: Any, cache_k: Any, cache_v: Any, store: Store, layer_idx: int, top_k: int = 5
) -> tuple[Any, Any]:
    """Return keys and values to attend to: the entries found, oldest first, then the cache.

    Parameters
    ----------
    query : array_like of float, shape (embed_dim,) or (n_tokens, embed_dim)
    cache_k, cache_v : array or torch tensor of float, shape (n_cache, embed_dim)
        Leading axes of length 1 are kept.
    store : Store
    layer_idx : int
    top_k : int, default 5

    Returns
    -------
    keys, values
        Shape (sum(n_tokens) + n_cache, embed_dim) after the cache's leading axes; type, dtype and
        device are the cache's. The cache itself where nothing was found.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid; no query is counted.
    """
    width = store.config.embed_dim
    n_keys = _arrays.cache_tokens(cache_k, "cache_k", width)
    n_values = _arrays.cache_tokens(cache_v, "cache_v", width)
    if n_keys != n_values:
        raise ValueError(
            f"cache_k and cache_v must have the same number of tokens, got {n_keys} and {n_values}"
        )
    hits = store.query(query, layer_idx, top_k)
    hits.sort(key=lambda hit: (hit.timestamp, hit.entry_id))
    return (
        _arrays.concatenate_like([hit.keys for hit in hits], cache_k, name="cache_k"),
        _arrays.concatenate_like([hit.values for hit in hits], cache_v, name="cache_v"),
    )

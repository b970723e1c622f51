"""Hooks into `rwkv_x.model_old.RWKV_X`, the earlier design with `enable_kv_cache_management`.

There `update_kv_cache` drops rows when the cache has grown too large, a choice of its own for each
head: the rows that go to the store mix tokens across heads. That is sound because attention is per
head and a row's key and value of one head belong to the same token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridmem.integrations.rwkv_x._attention import (
    KeysValues,
    attend_blocks,
    attend_one,
    by_head,
    side_by_side,
)
from hybridmem.integrations.rwkv_x._conversation import UNKNOWN, Conversation, Rows
from hybridmem.integrations.rwkv_x._tier import Tier

Patch = Callable[[Any, str, Callable[..., Any]], None]


class _Current(threading.local):
    """State of the layer that runs in this thread."""

    state: dict[str, Any] | None = None


def install(model: Any, tier: Tier, patch: Patch, *, corrected: bool) -> None:
    """Hook every attention layer of a model."""
    if corrected:
        raise ValueError('importance="corrected" needs a memory loss; model_old has none')
    current = _Current()
    for layer, block in enumerate(model.attn):
        _hook_attention(layer, block, tier, current, patch)


def _hook_attention(layer: int, block: Any, tier: Tier, current: _Current, patch: Patch) -> None:
    att = block.att
    plain_one, plain_seq = att.forward_one, att.forward_seq

    def forward_one(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
        if current.state is None:
            return plain_one(x, k_cache, v_cache)
        return _decode(layer, att, x, current.state, tier, plain_one)

    def forward_seq(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
        if current.state is None:
            return plain_seq(x, k_cache, v_cache)
        return _prefill(layer, att, x, current.state, tier, plain_seq)

    patch(att, "forward_one", forward_one)
    patch(att, "forward_seq", forward_seq)
    patch(block, "forward_one", _with_state(block.forward_one, current))
    patch(block, "forward_seq", _with_state(block.forward_seq, current))


def _with_state(run: Callable[..., Any], current: _Current) -> Callable[..., Any]:
    def running(x: Tensor, state: dict[str, Any]) -> Any:
        current.state = state
        try:
            return run(x, state)
        finally:
            current.state = None

    return running


def _decode(
    layer: int, att: Any, x: Tensor, state: dict[str, Any], tier: Tier, plain: Callable[..., Any]
) -> Any:
    x = x.view(1, -1)
    query = att.receptance(x)
    if tier.centring.learns(layer):
        tier.centring.learn(layer, att.key(x), query)
    held, k_cache, v_cache = _evict(layer, att, query[None], state, tier)
    held, runs = tier.find(layer, held, query, k_cache[0])
    tier.end(state, held)
    groups = [*tier.rows.of(runs[0][2])]
    if len(held.waiting):
        groups.append((held.waiting.keys, held.waiting.values))
    if not groups:
        return plain(x[0], k_cache, v_cache)
    key, value = att.key(x), att.value(x)
    groups += [_seen_in_decode(att, query, k_cache[0], v_cache[0]), (key, value)]
    mixed = attend_one(query, att.n_head, groups)
    return (
        att.output(mixed.view(-1)),
        torch.cat((k_cache, key[None]), 1),
        torch.cat((v_cache, value[None]), 1),
    )


def _prefill(
    layer: int, att: Any, x: Tensor, state: dict[str, Any], tier: Tier, plain: Callable[..., Any]
) -> Any:
    query = att.receptance(x)
    if tier.centring.learns(layer):
        tier.centring.learn(layer, att.key(x), query)
    # Upstream ranks with the layer's input here, not with queries; what it keeps is its affair.
    held, k_cache, v_cache = _evict(layer, att, x[None], state, tier)
    held, runs = tier.find(layer, held, query, k_cache[0])
    tier.end(state, held)
    if not len(held.waiting) and not any(found.ids for *_, found in runs):
        return plain(x, k_cache, v_cache)
    key, value = att.key(x), att.value(x)
    all_keys, all_values = torch.cat((k_cache[0], key)), torch.cat((v_cache[0], value))
    own = by_head(all_keys, all_values, att.n_head)
    cached, m = int(k_cache.shape[1]), len(x)
    full = cached + m <= att.short_sequence_criteria or att.prefill_attn_mode == "full"
    # Else upstream attends within windows only and does not see its cache.
    window = m if full else att.attn_chunk_size
    out = []
    for start, end, found in runs:
        rows = tier.rows.of(found)
        groups = [side_by_side(rows, att.n_head, x.device)] if rows else []
        if len(held.waiting):
            groups.append(by_head(held.waiting.keys, held.waiting.values, att.n_head))
        at = start
        while at < end:
            first = at // window * window
            stop = min(end, first + window)
            low = 0 if full else cached + first
            seen = KeysValues(own.keys[:, low : cached + stop], own.values[:, low : cached + stop])
            out.append(attend_blocks(query[at:stop], groups, seen))
            at = stop
    return att.output(torch.cat(out)), all_keys[None], all_values[None]


def _seen_in_decode(att: Any, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the cache that upstream attends to: all, or its best chunks and the remainder."""
    cached, size = len(keys), att.attn_chunk_size
    if cached <= att.short_sequence_criteria or att.decoding_attn_mode == "full":
        return keys, values
    whole = cached // size * size
    width = keys.shape[-1]
    means = keys[:whole].view(-1, size, width).mean(1)
    best = torch.topk(query @ means.t(), att.attn_topk).indices[0]

    def chosen(rows: Tensor) -> Tensor:
        return torch.cat((rows[:whole].view(-1, size, width)[best].view(-1, width), rows[whole:]))

    return chosen(keys), chosen(values)


def _evict(
    layer: int, att: Any, query: Tensor, state: dict[str, Any], tier: Tier
) -> tuple[Conversation, Tensor, Tensor]:
    """Let upstream shorten a cache that has grown too large, and put away what it drops."""
    held = tier.begin(state)
    keys, values = state["k_cache"], state["v_cache"]
    size, width = int(keys.shape[1]), int(keys.shape[2])
    if (
        not att.enable_kv_cache_management
        or size <= att.max_kv_cache_size
        or size <= att.min_kv_cache_size
    ):
        return held, keys, values
    heads = att.n_head
    # Upstream only gathers the values, so row numbers in their place say which row each head keeps.
    numbers = torch.arange(size, device=keys.device).view(1, size, 1).expand(1, size, width)
    kept_keys, kept = att.update_kv_cache(query, keys, numbers)
    kept = kept.view(-1, heads, width // heads)[:, :, 0]
    gone = torch.ones((size, heads), dtype=torch.bool, device=keys.device).scatter(0, kept, False)
    gone = gone.t().nonzero()[:, 1].view(heads, -1).t()
    meta = torch.tensor([[0.0, UNKNOWN]], dtype=torch.float64).expand(len(gone), 2)
    rows = Rows(_per_head(keys, gone), _per_head(values, gone), meta)
    held = tier.settle(layer, held.replace(waiting=held.waiting + rows))
    return held, kept_keys, _per_head(values, kept)[None]


def _per_head(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows of `[1, n, width]`, a row number for each head: `[len(index), width]`."""
    _, n, width = rows.shape
    by_heads = rows.view(n, index.shape[1], -1)
    picked = by_heads.gather(0, index[:, :, None].expand(-1, -1, by_heads.shape[2]))
    return picked.reshape(-1, width)

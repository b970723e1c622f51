"""Hooks into `rwkv_x.model.RWKV_X` (0.2.7): where its tokens are lost and where it attends.

Every hook is an attribute of one instance and `detach` deletes it again.
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
    by_head,
    side_by_side,
)
from hybridmem.integrations.rwkv_x._conversation import UNKNOWN, Conversation, Rows
from hybridmem.integrations.rwkv_x._found import Found
from hybridmem.integrations.rwkv_x._tier import Tier

Patch = Callable[[Any, str, Callable[..., Any]], None]


class _Current(threading.local):
    """What the layer that runs in this thread works on."""

    state: dict[str, Any] | None = None
    keep: Tensor | None = None
    loss: Tensor | None = None


def corrected_loss(block: Any, state: Any, k: Tensor, v: Tensor) -> Tensor:
    """Reconstruction loss of each token with the state contracted over its key axis.

    Upstream contracts the value axis: the state is `[head, value, key]`, its einsum reads `hkv`.
    """
    wkv = state[block.layer_id * 3 + 1].float()
    k = k.view(-1, block.n_head, block.head_size).float()
    v = v.view(-1, block.n_head, block.head_size).float()
    restored = torch.einsum("hvk,thk->thv", wkv, k)
    return ((v - restored) ** 2).mean(dim=(-1, -2))


def install(model: Any, tier: Tier, patch: Patch, *, corrected: bool) -> None:
    """Hook every attention layer of a model and the RWKV block before each."""
    current = _Current()
    before: Any = None
    layer = 0
    for block in model.get_block_exe_order():
        if not hasattr(block, "att"):
            before = block
            continue
        _hook_selection(before, current, patch, corrected=corrected)
        _hook_attention(layer, block, tier, current, patch)
        layer += 1


def _hook_selection(block: Any, current: _Current, patch: Patch, *, corrected: bool) -> None:
    """Note which rows upstream keeps after a prefill, and the loss by which it chose them."""
    prefill, loss = block.prefill, block.calculate_layer_memory_loss

    def noting_prefill(*args: Any, **kwargs: Any) -> Any:
        result = prefill(*args, **kwargs)
        current.keep = result[3]
        return result

    def noting_loss(state: Any, k: Tensor, v: Tensor) -> Tensor:
        result = loss(state, k, v)
        current.loss = corrected_loss(block, state, k, v) if corrected else result
        return result

    patch(block, "prefill", noting_prefill)
    patch(block, "calculate_layer_memory_loss", noting_loss)


def _hook_attention(layer: int, block: Any, tier: Tier, current: _Current, patch: Patch) -> None:
    att = block.att
    plain_prefill, plain_decode = att.prefill, att.decode

    def prefill(x: Tensor) -> Any:
        state, keep, loss = current.state, current.keep, current.loss
        current.keep = current.loss = None
        if state is None or keep is None or loss is None:
            return plain_prefill(x)
        return _prefill(layer, att, x, state, (keep, loss), tier, plain_prefill)

    def decode(x: Tensor, k_mem: Tensor, v_mem: Tensor) -> Any:
        if current.state is None:
            return plain_decode(x, k_mem, v_mem)
        return _decode(layer, att, x, current.state, tier)

    patch(att, "prefill", prefill)
    patch(att, "decode", decode)
    patch(block, "prefill", _with_state(block.prefill, current))
    patch(block, "decode", _with_state(block.decode, current))


def _with_state(run: Callable[..., Any], current: _Current) -> Callable[..., Any]:
    def running(x: Tensor, state: dict[str, Any]) -> Any:
        current.state = state
        try:
            return run(x, state)
        finally:
            current.state = None

    return running


def _decode(layer: int, att: Any, x: Tensor, state: dict[str, Any], tier: Tier) -> Tensor:
    x = x.view(1, -1)
    query, key, value = att.receptance(x), att.key(x), att.value(x)
    rows = tier.gather(layer, state, query, att.n_head)
    appended = rows.append(key, value, query)
    mixed = rows.attend(query)
    tier.centring.learn(layer, key, query)
    tier.go_on(layer, state, appended, rows)
    return att.output(mixed.view(-1))


def _prefill(
    layer: int,
    att: Any,
    x: Tensor,
    state: dict[str, Any],
    selection: tuple[Tensor, Tensor],
    tier: Tier,
    plain: Callable[[Tensor], Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the piece and to all that came before; put away what upstream is about to drop."""
    held = tier.begin(state)
    position = held.seen
    old = Rows(state["k_cache"][0], state["v_cache"][0], _cached_meta(held, state["k_cache"]))
    query = att.receptance(x)
    held, runs = tier.find(layer, held, query, old.keys)
    if not len(old) and not len(held.waiting) and not any(found.ids for *_, found in runs):
        out, keys, values = plain(x)  # nothing came before: bit for bit what upstream computes
    else:
        keys, values = att.key(x)[None], att.value(x)[None]
        own = by_head(keys[0], values[0], att.n_head)
        mixed = _attend_piece(query, own, old, held, runs, tier)
        out = att.output(mixed)
    keep, loss = selection
    piece = Rows(keys[0], values[0], _meta(position, loss))
    held = _count_losses(held, loss)
    kept, rest = keep.cpu(), torch.ones(len(piece), dtype=torch.bool)
    rest[kept] = False
    leaving = old + piece.take(rest.nonzero().view(-1))
    held = held.replace(waiting=held.waiting + leaving, cached=piece.meta[kept])
    tier.centring.learn(layer, piece.keys, query)
    tier.end(state, tier.settle(layer, held))
    return out, keys, values


def _attend_piece(
    query: Tensor,
    own: KeysValues,
    old: Rows,
    held: Conversation,
    runs: list[tuple[int, int, Found]],
    tier: Tier,
) -> Tensor:
    heads = int(own.keys.shape[0])
    before = [by_head(rows.keys, rows.values, heads) for rows in (old, held.waiting) if len(rows)]
    out = []
    for start, end, found in runs:
        rows = tier.rows.of(found)
        shared = [side_by_side(rows, heads, query.device), *before] if rows else before
        out.append(attend_blocks(query[start:end], shared, own.first(end)))
    return torch.cat(out)


def _cached_meta(held: Conversation, cache: Tensor) -> Tensor:
    """Position and loss of the rows of the upstream cache."""
    rows = int(cache.shape[1])
    if len(held.cached) == rows:
        return held.cached
    # The model went on without its memory in between; the order of the rows is all that is known.
    return torch.tensor([[0.0, UNKNOWN]], dtype=torch.float64).repeat(rows, 1)


def _meta(position: int, loss: Tensor) -> Tensor:
    positions = torch.arange(position, position + len(loss), dtype=torch.float64)
    return torch.stack((positions, loss.cpu().double()), 1)


def _count_losses(held: Conversation, loss: Tensor) -> Conversation:
    known = loss[torch.isfinite(loss)].double()
    total, count = held.losses
    return held.replace(losses=(total + float(known.sum()), count + len(known)))

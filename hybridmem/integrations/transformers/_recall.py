"""From queries to rows of keys and values: the search, the move of foreign entries, the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridmem.integrations._tensors import as_tensor
from hybridmem.integrations.transformers._call import Call
from hybridmem.integrations.transformers._fusion import Span
from hybridmem.integrations.transformers._layer import HybridLayer, Matrix, Row
from hybridmem.integrations.transformers._rope import move

__all__ = ["Block", "Memory", "recall"]

#: Hits a layer looks at, in parts of `top_k`, for entries that other conversations have put.
CANDIDATES = 4


@dataclasses.dataclass
class Memory:
    """Rows from the store, to be attended to before the window.

    Attributes
    ----------
    keys, values : tensor [batch, kv_heads, n, head_dim]
    valid : bool tensor [batch, n] or None
        False where a row of the batch has fewer.
    names : tuple of tuple of int
        Per row of the batch: the number of sinks, then the ids of the entries.
    """

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None
    names: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Block:
    """Queries [start, stop) of a forward, and the memory that they attend to."""

    start: int
    stop: int
    memory: Memory | None


def recall(
    layer: HybridLayer, call: Call, query: torch.Tensor, valid: torch.Tensor | None
) -> list[Block]:
    """Search the store for the queries of a forward, block by block.

    Blocks end at multiples of `block_tokens` in the sequence. Neighbours that found the same are
    one.

    Parameters
    ----------
    query : float32 tensor [batch, n_tokens, embed_dim]
        Unrotated, summed over the heads that share a key.
    valid : bool tensor [batch, n_tokens] or None
        False for padding.
    """
    cache = layer.cache
    count = query.shape[1]
    queries = layer.take(query, valid)
    before = queries.shape[1] - count
    first = layer.seen - count
    visible = [cache.visible(layer, row) for row in layer.rows]
    most = max(len(cache.store if ids is None else ids) for ids in visible)
    if most == 0:
        return [Block(0, count, _memory(layer, call, [()] * len(layer.rows)))]
    if count == 1 and layer.searched is not None and cache.is_recent(layer):
        return [Block(0, 1, _memory(layer, call, layer.searched[0]))]
    # Where everything is found anyway, one search says so.
    step = cache.block_tokens if most > cache.top_k else first + count
    stops = [*range((first // step + 1) * step - first, count, step), count]
    found = [
        _search(layer, queries, number, [before + stop for stop in stops], ids)
        for number, ids in enumerate(visible)
    ]
    blocks: list[Block] = []
    start = 0
    for stop, *hits in zip(stops, *found, strict=True):
        memory = _memory(layer, call, hits)
        if blocks and blocks[-1].memory is memory:
            blocks[-1].stop = stop
        else:
            blocks.append(Block(start, stop, memory))
        start = stop
    layer.searched = (hits, layer.seen, layer.base)
    return blocks


def _search(
    layer: HybridLayer,
    queries: torch.Tensor,
    number: int,
    stops: Sequence[int],
    ids: npt.NDArray[np.uint64] | None,
) -> list[list[Any]]:
    """Return the hits of one row of the batch for the queries before each stop.

    They are in the order in which they are attended to.
    """
    newest = [layer.newest_queries(queries, number, stop) for stop in stops]
    asked = [each for each in newest if len(each)]  # padding asks nothing
    if (ids is not None and len(ids) == 0) or not asked:
        return [[] for _ in stops]
    cache = layer.cache
    # Entries of others that the layers below found are looked for among more candidates.
    depth = cache.top_k * (CANDIDATES if cache.fuse_layers and ids is None else 1)
    found = iter(
        cache.store.query_many(asked, layer.layer_idx, depth, entry_ids=ids, rerank="signatures")
    )
    first = layer.seen - queries.shape[1]
    return [
        _chosen(layer, number, first + stop, each, next(found)) if len(each) else []
        for stop, each in zip(stops, newest, strict=True)
    ]


def _chosen(
    layer: HybridLayer, number: int, stop: int, query: Matrix, hits: Sequence[Any]
) -> list[Any]:
    """Return the entries to attend to, oldest first, for the queries before token `stop`.

    They are the best by the sum of the reciprocal ranks that their tokens have in this layer and in
    those below it.
    """
    cache, row = layer.cache, layer.rows[number]
    own = row.own()
    at_hand: dict[Span, Any] = {}
    for hit in hits:
        place = own.get(hit.entry_id)
        if place is not None:
            at_hand[0, place] = hit
        elif placement := cache.place(hit):
            at_hand[placement.session, placement.token] = hit
    if not cache.fuse_layers:
        return sorted(at_hand.values(), key=lambda hit: hit.entry_id)
    best = cache.fusion.best(layer.seen, (number, stop), list(at_hand)[: cache.top_k])
    chosen: list[Any] = []
    while best and len(chosen) < cache.top_k:  # again where the store has evicted some
        count = cache.top_k - len(chosen)
        some, best = best[:count], best[count:]
        missing = [at for session, at in some if session == 0 and (0, at) not in at_hand]
        if missing:  # a query, since to be read by a layer is an access
            among = [row.entry_ids[at] for at in missing]
            for hit in cache.store.query(query, layer.layer_idx, len(among), entry_ids=among):
                at_hand[0, own[hit.entry_id]] = hit
        chosen += [at_hand[span] for span in some if span in at_hand]
    return sorted(chosen, key=lambda hit: hit.entry_id)


def _memory(layer: HybridLayer, call: Call, found: Sequence[Sequence[Any]]) -> Memory | None:
    """Make tensors of what was found; the last ones again if it is the same."""
    names = tuple(
        (row.n_sinks, *(hit.entry_id for hit in hits))
        for row, hits in zip(layer.rows, found, strict=True)
    )
    if all(name == (0,) for name in names):
        return None
    last: Memory | None = layer.memory
    if last is not None and last.names == names:
        return last
    parts = [_rows(layer, call, row, hits) for row, hits in zip(layer.rows, found, strict=True)]
    if len(parts) == 1:
        keys, values = (part[None] for part in parts[0])
        layer.memory = new = Memory(keys, values, None, names)
        return new
    longest = max(keys.shape[1] for keys, _ in parts)
    keys = layer.keys.new_zeros((len(parts), layer.keys.shape[1], longest, layer.keys.shape[3]))
    values = torch.zeros_like(keys)
    valid = torch.zeros((len(parts), longest), dtype=torch.bool, device=keys.device)
    for number, (some_keys, some_values) in enumerate(parts):
        width = some_keys.shape[1]
        keys[number, :, longest - width :] = some_keys
        values[number, :, longest - width :] = some_values
        valid[number, longest - width :] = True
    layer.memory = new = Memory(keys, values, None if bool(valid.all()) else valid, names)
    return new


def _rows(
    layer: HybridLayer, call: Call, row: Row, hits: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of one conversation, each [kv_heads, n, head_dim]."""
    shape = (layer.keys.shape[1], layer.keys.shape[3])
    like = {"dtype": layer.dtype, "device": layer.device}
    own = row.own()
    foreign = [hit for hit in hits if hit.entry_id not in own]
    mine = [hit for hit in hits if hit.entry_id in own]
    keys, values = [], []
    if foreign:
        keys.append(_moved(layer, call, foreign, shape))
    keys += [_heads(hit.keys, shape) for hit in mine]
    values += [_heads(hit.values, shape) for hit in (*foreign, *mine)]
    if row.sink_keys is not None:
        keys.append(row.sink_keys)
        values.append(row.sink_values)
    if not keys:
        empty = layer.keys.new_empty((shape[0], 0, shape[1]))
        return empty, empty
    # The one copy of what is mapped.
    return tuple(torch.cat([x.to(**like) for x in some], dim=1) for some in (keys, values))


def _heads(matrix: npt.NDArray[np.float32], shape: tuple[int, int]) -> torch.Tensor:
    """View a matrix [n, embed_dim] as [kv_heads, n, head_dim]."""
    return as_tensor(matrix).unflatten(1, shape).transpose(0, 1)


def _moved(
    layer: HybridLayer, call: Call, hits: Sequence[Any], shape: tuple[int, int]
) -> torch.Tensor:
    """Rotate keys of other conversations to the places just before this one, oldest first."""
    cache = layer.cache
    keys = torch.cat([_heads(hit.keys, shape) for hit in hits], dim=1)
    if cache.track.angles is None or not getattr(call.module, "use_rope", True):
        return keys
    old = torch.cat([_positions(layer, hit) for hit in hits])
    new = torch.arange(-len(old), 0)
    angles = cache.track.angles_at
    return move(keys[None].to(layer.device), angles(old[None]), angles(new[None]))[0]


def _positions(layer: HybridLayer, hit: Any) -> torch.Tensor:
    placement = layer.cache.place(hit)
    assert placement is not None  # `_search` has dropped the others
    return torch.arange(placement.position, placement.position + placement.n_tokens)

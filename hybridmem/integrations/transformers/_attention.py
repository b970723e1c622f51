"""`retrieval(model)`: the attention function that searches with the query and widens the mask."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from hybridmem.integrations.transformers._cache import HybridCache
from hybridmem.integrations.transformers._call import Call, current
from hybridmem.integrations.transformers._layer import HybridLayer
from hybridmem.integrations.transformers._recall import Block, recall
from hybridmem.integrations.transformers._rope import Rotary, unrotate

__all__ = ["retrieval"]

_PREFIX = "hybridmem_"
Attention = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]


# -- the attention function ------------------------------------------------------------------------


def _attend(
    base: Attention,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to what the cache handed out and to what a search with the query finds, then evict."""
    call = current.call
    current.call = None
    layer = None if call is None or call.module is not module else call.layer
    if call is None or layer is None or key is not layer.keys:
        if call is not None and _is_other_layer(call, module):
            return base(module, query, key, value, attention_mask, **kwargs)
        raise RuntimeError(
            f"{type(module).__name__} did not hand the keys of its HybridCache to its attention "
            "function as they were; this model is not supported"
        )
    if kwargs.get("position_bias") is not None:
        raise TypeError(
            f"{type(module).__name__} adds a position bias, which keys of the store have none of; "
            "use a model with RoPE, or with positions in its embeddings"
        )
    count = query.shape[-2]
    _check_mask(attention_mask, key)
    valid = _validity(attention_mask, len(layer.rows))
    new_valid = None if valid is None else valid[:, -count:].cpu()
    blocks = recall(layer, call, _plain_queries(layer, call, query), new_valid)
    outputs = []
    weights = None
    for block in blocks:
        part, weights = _attend_block(
            base, module, query, key, value, attention_mask, block, count, kwargs
        )
        outputs.append(part)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    layer.evict(call, valid)
    return output, weights if len(outputs) == 1 else None


def _attend_block(
    base: Attention,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    block: Block,
    count: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    start, stop, memory = block.start, block.stop, block.memory
    whole = stop - start == count
    if memory is None and whole:
        return base(module, query, key, value, mask, **kwargs)
    if not whole:  # keys after the block are in its future
        end = key.shape[-2] - count + stop
        query, key, value = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        mask = None if mask is None else mask[:, :, start:stop, :end]
    n_query, n_key = query.shape[-2], key.shape[-2]
    if mask is None and n_query > 1:
        # sdpa's own causal mask would be aligned to the first key, which is a memory now.
        mask = torch.ones((1, 1, n_query, n_key), dtype=torch.bool, device=key.device)
        mask = mask.tril(n_key - n_query)
    if memory is not None:
        if mask is None and memory.valid is not None:
            mask = torch.ones((1, 1, n_query, n_key), dtype=torch.bool, device=key.device)
        key = torch.cat((memory.keys, key), dim=-2)
        value = torch.cat((memory.values, value), dim=-2)
        mask = _widened(mask, memory.valid, memory.keys.shape[-2])
    return base(module, query, key, value, mask, **kwargs)


def _widened(
    mask: torch.Tensor | None, valid: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """Put `width` columns before a mask, open to every query where `valid`."""
    if mask is None:
        return None
    if valid is None:
        valid = torch.ones((1, width), dtype=torch.bool, device=mask.device)
    batch = max(mask.shape[0], valid.shape[0])
    front = valid[:, None, None, :]
    if mask.dtype != torch.bool:
        front = torch.where(front, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype)
    front = front.expand(batch, *mask.shape[1:3], width)
    return torch.cat((front, mask.expand(batch, *mask.shape[1:])), dim=-1)


def _check_mask(mask: torch.Tensor | None, key: torch.Tensor) -> None:
    if mask is not None and (mask.ndim != 4 or mask.shape[-1] != key.shape[-2]):
        raise ValueError(
            f"the attention mask has shape {tuple(mask.shape)}, but the window holds "
            f"{key.shape[-2]} keys; "
            "pass the 2-D mask [batch, tokens seen and new], not a prepared one"
        )


def _validity(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Return which keys are no padding: those the newest query may see, bool [batch, keys]."""
    if mask is None:
        return None
    last = mask[:, 0, -1, :]
    if last.dtype != torch.bool:
        last = last > torch.finfo(last.dtype).min / 2
    return None if bool(last.all()) else last.expand(batch, -1)


def _plain_queries(layer: HybridLayer, call: Call, query: torch.Tensor) -> torch.Tensor:
    """Unrotate queries and sum those that share a key: float32 [batch, n_tokens, embed_dim]."""
    heads = layer.keys.shape[1]
    angles = layer.cache.track.newest(query.shape[-2])
    if not getattr(call.module, "use_rope", True):
        angles = None
    # Rotation is linear, so the sum can come first.
    summed = query.detach().float().unflatten(1, (heads, -1)).sum(2)
    return unrotate(summed, angles).transpose(1, 2).flatten(2).cpu()


def _is_other_layer(call: Call, module: Any) -> bool:
    """Whether the cache is ours but this layer of it (a sliding one, say) is not."""
    if call.module is not module or not isinstance(call.cache, HybridCache):
        return False
    return not isinstance(call.cache.layers[module.layer_idx], HybridLayer)


def _eager(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the eager attention of the model's own source file."""
    for owner in type(module).__mro__:
        forward = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if forward is not None:
            output: tuple[torch.Tensor, torch.Tensor | None] = forward(module, *args, **kwargs)
            return output
    raise TypeError(
        f"{type(module).__name__} has no eager attention that could be used; call "
        "model.set_attn_implementation('sdpa') first"
    )


_BASES: dict[str, tuple[Attention, Any]] = {
    "sdpa": (sdpa_attention_forward, sdpa_mask),
    "eager": (_eager, eager_mask),
}


# -- putting it into a model -----------------------------------------------------------------------


class _Installation:
    """Everything that is changed in a model while it is inside `retrieval`."""

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.get_text_config(decoder=True) is not config:
            raise TypeError(
                f"{type(model).__name__} has several parts (vision, audio); give its language model"
            )
        self.implementation = config._attn_implementation
        if self.implementation not in _BASES:
            raise ValueError(
                "retrieval() works with attention 'sdpa' and 'eager', not "
                f"{self.implementation!r}; call model.set_attn_implementation('sdpa') first"
            )
        base, mask = _BASES[self.implementation]
        name = _PREFIX + self.implementation
        AttentionInterface.register(name, functools.partial(_attend, base))
        AttentionMaskInterface.register(name, mask)
        self.users = 0
        self._model = weakref.ref(model)
        self._hooks: list[Any] = []
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise TypeError(
                f"{type(model).__name__} does not use transformers' AttentionInterface, by which "
                "memory is attended to; use a model that does"
            )
        weights = weights_fingerprint(model)
        for module in model.modules():
            kind = type(module).__name__
            if "Attention" in kind and getattr(module, "layer_idx", None) is not None:
                hook = functools.partial(_before_attention, weights)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(_after_attention, always_call=True))
            elif "Rotary" in kind:
                self._hooks.append(module.register_forward_hook(_after_rotary, with_kwargs=True))
        prepare = getattr(model, "_prepare_cache_for_generation", None)
        if prepare is not None:
            model._prepare_cache_for_generation = functools.partial(_check_generation, prepare)

    def remove(self) -> None:
        """Put the model back as it was."""
        model = self._model()
        for hook in self._hooks:
            hook.remove()
        if model is not None:
            vars(model).pop("_prepare_cache_for_generation", None)
            model.set_attn_implementation(self.implementation)


def _before_attention(weights: int, module: Any, args: Any, kwargs: Any) -> None:
    if module.training:
        raise RuntimeError("HybridCache is for inference: call model.eval() first")
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    cache = caches[0] if caches else None
    if not isinstance(cache, HybridCache):
        given = "no cache" if cache is None else type(cache).__name__
        raise TypeError(
            f"inside retrieval() every forward needs `cache=HybridCache(...)`, got {given}; "
            "leave the with block to run the model with another cache"
        )
    tables = kwargs.get("position_embeddings")
    rotary = current.rotary
    if tables is not None and (rotary is None or tables[0] is not rotary.cos):
        raise TypeError(
            f"the angles of {type(module).__name__} come from no rotary module that was seen to "
            "run, so its keys cannot be unrotated; use a model with a rotary module of its own"
        )
    current.call = Call(module, cache, None if tables is None else rotary)
    cache.check_weights(weights)
    _used(cache)


def _after_attention(module: Any, args: Any, output: Any) -> None:
    current.call = None  # also where it failed: what is left must not meet another forward


def _after_rotary(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    current.rotary = Rotary(module, args, kwargs, output)


def _check_generation(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse ways of generating that would have to take tokens back, before anything is stored."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, GenerationMode) and value not in (
            GenerationMode.GREEDY_SEARCH,
            GenerationMode.SAMPLE,
        ):
            raise ValueError(
                "HybridCache supports greedy search and sampling, not "
                f"{value.value.replace('_', ' ')}: what has gone to the store cannot be taken "
                "back; use num_beams=1 and no assistant"
            )
    return prepare(*args, **kwargs)


def weights_fingerprint(model: Any) -> int:
    """Return 64 bits of a sample of every weight, the same in float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":  # offloaded: its values are elsewhere
            continue
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 64)].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") or 1


_installations: weakref.WeakKeyDictionary[Any, _Installation] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Used(threading.local):
    stack: list[weakref.WeakSet[HybridCache]] | None = None


_in_use = _Used()


def _used(cache: HybridCache) -> None:
    for caches in _in_use.stack or []:
        caches.add(cache)


@contextlib.contextmanager
def retrieval(model: Any) -> Iterator[Any]:
    """Let a model attend to what left its `HybridCache`; the way in which such a cache can be used.

    On leaving the block everything that was stored is durable, and the model is as it was.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder, with `sdpa` or `eager` attention.

    Yields
    ------
    transformers.PreTrainedModel
        The model.

    Raises
    ------
    TypeError
        For models that do not use transformers' AttentionInterface, or are of several parts; from
        within for a forward without a `HybridCache`.
    ValueError
        For other attention implementations; from within for beam search and assisted decoding.

    Examples
    --------
    >>> cache = HybridCache(model.config, "mem/", window=1024, top_k=8)
    >>> with retrieval(model):
    ...     model.generate(**inputs, cache=cache)
    """
    with _lock:
        installation = _installations.get(model)
        if installation is None:
            installation = _installations[model] = _Installation(model)
        installation.users += 1
    caches: weakref.WeakSet[HybridCache] = weakref.WeakSet()
    _in_use.stack = [*(_in_use.stack or []), caches]
    try:
        yield model
    finally:
        _in_use.stack.pop()
        with _lock:
            installation.users -= 1
            if installation.users == 0:
                del _installations[model]
                installation.remove()
        for cache in list(caches):
            if not cache.closed:
                cache.flush()

"""`HybridCache`: a transformers cache whose layers keep a window and send the rest to a store."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import hybridmem
from hybridmem.errors import ModelMismatchError, ReadOnlyError, StoreNotFoundError
from hybridmem.integrations.transformers._call import Track
from hybridmem.integrations.transformers._entries import Placement
from hybridmem.integrations.transformers._fusion import Fusion
from hybridmem.integrations.transformers._layer import HybridLayer, Row
from hybridmem.integrations.transformers._rope import (
    LENGTH_DEPENDENT,
    fingerprint,
    head_dim,
    rope_types,
)
from hybridmem.integrations.transformers._state import read_settings, read_state, write_state
from hybridmem.results import Entry, Hit

__all__ = ["HybridCache"]

#: Bits of a token's signature: what found planted facts, re-ranked, as well as exact keys did.
SIGNATURE_BITS = 256
_KV_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class HybridCache(Cache):
    """A cache that remembers everything: a window in memory, what left it in a store on disk.

    Use it inside `retrieval(model)`, which searches the store with each query.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    store_or_path : hybridmem.Memory or path
        An open store, several that are layered, or the directory of one, which is made if there is
        none. A store that the cache opened is closed by `close`.
    window : int, default 1024
        Tokens that stay in memory at least; up to `chunk_tokens - 1` more wait to fill a chunk.
    top_k : int, default 8
        Entries that a search brings back, in each layer.
    chunk_tokens : int, default 64
        Tokens of an entry.
    sink_tokens : int, default 4
        First tokens of a conversation that stay in memory for good: models lean on them.
    query_tokens : int, default 8
        Newest tokens whose queries make a search.
    block_tokens : int, default 64
        In a forward of many tokens, queries that share a search.
    search_interval : int, default 1
        Decoded tokens per search; more is faster, and a change of subject is noticed later.
    recall : {"own", "all", "none"}, default "own"
        Whether a conversation sees only what it stored itself, everything in the store, or
        nothing: then it only stores, which is what an ordinary bounded cache answers, for
        comparison.
    fuse_layers : bool, default True
        Whether a layer goes by what the layers below it have found too, not by its own search only.
    centre : bool, default True
        Whether the store is calibrated for a layer before the layer's first entry: means of keys
        and queries, which say nothing about the text, are then taken off before they are compared.
    importance : float, default 1.0
        Importance of new entries; those of least importance and use are evicted first.
    kv_dtype : str, optional
        Stored type of a new store; by default the model's, so that nothing is rounded.
    model_id : str, optional
        Name of the weights; by default made from the configuration.
    limits : mapping, optional
        `max_entries`, `max_disk_bytes` and the like, for `hybridmem.create` and `open`.

    Raises
    ------
    ValueError
        If no layer of the model has full attention, or the store has another width.
    ModelMismatchError
        If the store's entries come from another model or other RoPE parameters.
    """

    def __init__(
        self,
        config: Any,
        store_or_path: hybridmem.Memory | os.PathLike[str] | str,
        *,
        window: int = 1024,
        top_k: int = 8,
        chunk_tokens: int = 64,
        sink_tokens: int = 4,
        query_tokens: int = 8,
        block_tokens: int = 64,
        search_interval: int = 1,
        recall: Literal["own", "all", "none"] = "own",
        fuse_layers: bool = True,
        centre: bool = True,
        importance: float = 1.0,
        kv_dtype: str | None = None,
        model_id: str | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (
            ("window", window, 1),
            ("top_k", top_k, 1),
            ("chunk_tokens", chunk_tokens, 1),
            ("sink_tokens", sink_tokens, 0),
            ("query_tokens", query_tokens, 1),
            ("block_tokens", block_tokens, 1),
            ("search_interval", search_interval, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if recall not in ("own", "all", "none"):
            raise ValueError(f'recall must be "own", "all" or "none", got {recall!r}')
        self.window, self.top_k, self.chunk_tokens = window, top_k, chunk_tokens
        self.sink_tokens, self.query_tokens = sink_tokens, query_tokens
        self.block_tokens, self.search_interval = block_tokens, search_interval
        self.recall, self.fuse_layers = recall, fuse_layers
        self.centre, self.importance = centre, importance
        self._kv_dtype = kv_dtype
        config = config.get_text_config(decoder=True)
        self.rope = fingerprint(config)
        self.model_id = model_id or _model_id(config)
        self._movable = not rope_types(config) & set(LENGTH_DEPENDENT)
        super().__init__(layers=self._layers(config))
        self.weights = 0  # fingerprint, once a model runs
        self.closed = False
        self._owns_store = not isinstance(store_or_path, hybridmem.Memory)
        self.store: hybridmem.Memory = self._opened(config, store_or_path, limits or {})
        try:
            self._check_store(config)
            self._check_rope()
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise
        self.track = Track()
        self.fusion = Fusion()
        self._sessions: list[int] = []

    # -- opening -----------------------------------------------------------------------------------

    def _layers(self, config: Any) -> list[Any]:
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("HybridCache is for decoders; this model has an encoder")
        layers = list(DynamicCache(config=config).layers)
        full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not full:
            raise ValueError(
                "no layer of this model has full attention (all slide or are of another kind), "
                "so nothing would ever leave the cache; use it with its own cache"
            )
        for number in full:
            layers[number] = HybridLayer(self, number)
        return layers

    def _opened(
        self,
        config: Any,
        store_or_path: hybridmem.Memory | os.PathLike[str] | str,
        limits: Mapping[str, Any],
    ) -> hybridmem.Memory:
        if isinstance(store_or_path, hybridmem.Memory):
            if store_or_path.mode != "r+":
                raise ReadOnlyError(
                    'HybridCache stores what leaves its window: open the store with mode="r+"'
                )
            return store_or_path
        try:
            return hybridmem.open(store_or_path, model_id=self.model_id, **limits)
        except StoreNotFoundError:
            pass
        dtype = getattr(config, "dtype", None) or torch.float32
        return hybridmem.create(
            store_or_path,
            embed_dim=config.num_key_value_heads * head_dim(config)
            if getattr(config, "num_key_value_heads", None)
            else config.num_attention_heads * head_dim(config),
            hdc_dim=SIGNATURE_BITS * self.chunk_tokens,
            signature_tokens=1,
            signature_bits=SIGNATURE_BITS,
            kv_dtype=self._kv_dtype or _KV_DTYPES.get(dtype, "float32"),
            model_id=self.model_id,
            **limits,
        )

    def _check_store(self, config: Any) -> None:
        told = self.store.config
        if told.signature_tokens:
            fit = told.hdc_dim // (told.signature_bits or told.hdc_dim) * told.signature_tokens
            if fit < self.chunk_tokens:
                raise ValueError(
                    f"a signature of this store covers {fit} tokens, fewer than "
                    f"chunk_tokens={self.chunk_tokens}: "
                    "the rest could not be found"
                )

    def _check_rope(self) -> None:
        self._check_first_entry()
        if self.recall == "all" and not self._movable:
            raise ValueError(
                'recall="all" moves keys to other positions, which this type of RoPE does not '
                'allow (its angles depend on the length of the text); use recall="own"'
            )

    def check_weights(self, weights: int) -> None:
        """Compare the weights of the model that runs with those of the store's first entry."""
        if weights == self.weights:
            return
        before, self.weights = self.weights, weights
        try:
            if before:
                raise ModelMismatchError(_other_model(self.store, "weights"))
            self._check_first_entry()
        except ModelMismatchError:
            self.weights = before
            raise

    def _check_first_entry(self) -> None:
        """Look at the first entry of the store, or of each of several."""
        store = self.store
        for one in store.stores if isinstance(store, hybridmem.Layered) else (store,):
            for entry_id in one:
                self.place(one.get(entry_id))
                break

    def place(self, entry: Entry | Hit) -> Placement | None:
        """Return where an entry stood, or None where its source does not say.

        Raises
        ------
        ModelMismatchError
            If its keys come from other weights or are rotated with other RoPE parameters.
        """
        placement = Placement.of(entry)
        if placement is not None:
            if placement.rope != self.rope:
                raise ModelMismatchError(_other_model(self.store, "RoPE parameters"))
            if self.weights and placement.weights != self.weights:
                raise ModelMismatchError(_other_model(self.store, "weights"))
        return placement

    def check_layer(self, width: int, dtype: torch.dtype) -> None:
        """Compare the keys of a layer with what the store keeps."""
        told = self.store.config
        if width != told.embed_dim:
            raise ValueError(
                f"keys are {width} wide, but the store's embed_dim is {told.embed_dim}; make a "
                f"store with hybridmem.create(path, embed_dim={width}, ...) and pass that"
            )
        wanted = _KV_DTYPES.get(dtype)
        rounds = told.kv_dtype not in ("float32", wanted) or wanted is None
        if rounds and self._kv_dtype != told.kv_dtype:
            raise ValueError(
                f"the model's keys are {dtype}, which a store of {told.kv_dtype} would round; pass "
                f"kv_dtype={told.kv_dtype!r} if that is wanted"
            )

    # -- what the layers ask -----------------------------------------------------------------------

    def sessions(self, batch: int) -> list[int]:
        """Return the names of the conversations of the batch, making them as far as needed."""
        while len(self._sessions) < batch:
            self._sessions.append(secrets.randbits(63) + 1)
        return self._sessions

    def visible(self, layer: HybridLayer, row: Row) -> npt.NDArray[np.uint64] | None:
        """Return the ids that one conversation may see in a layer, None for all of them."""
        if self.recall == "none":
            return np.empty(0, np.uint64)
        return None if self.recall == "all" else row.ids()

    def is_recent(self, layer: HybridLayer) -> bool:
        """Whether the last search still stands: few tokens ago, and nothing evicted since."""
        _, seen, base = layer.searched
        return bool(base == layer.base and layer.seen - seen < self.search_interval)

    # -- what a user asks --------------------------------------------------------------------------

    @property
    def hybrid_layers(self) -> list[HybridLayer]:
        """The layers that evict to the store."""
        return [layer for layer in self.layers if isinstance(layer, HybridLayer)]

    def placement(self, entry_id: int) -> Placement | None:
        """Return where an entry stood and in which conversation, or None if that is not known."""
        try:
            return Placement.of(self.store.get(entry_id))
        except KeyError:
            return None

    def flush(self) -> None:
        """Make everything that left the window durable."""
        self.store.flush()

    def save(self, path: os.PathLike[str] | str) -> None:
        """Make the store durable and write the conversation to a file; `load` goes on from it.

        After a crash the file is the old one or the new one, never a mixture.
        """
        self.flush()
        write_state(self, path)

    @classmethod
    def load(
        cls,
        config: Any,
        store_or_path: hybridmem.Memory | os.PathLike[str] | str,
        path: os.PathLike[str] | str,
        *,
        device: Any = "cpu",
        **changes: Any,
    ) -> HybridCache:
        """Return a cache that goes on with a saved conversation.

        Parameters
        ----------
        config, store_or_path
            As for `HybridCache`.
        path : path
            Written by `save`.
        device : torch device, default "cpu"
            Where the model is.
        **changes
            Settings that are to differ, `top_k` say.
        """
        cache = cls(config, store_or_path, **{**read_settings(path), **changes})
        try:
            read_state(cache, path, device)
        except BaseException:
            cache.close()
            raise
        return cache

    def close(self) -> None:
        """Flush, and close the store if this cache opened it."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> HybridCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def reset(self) -> None:
        """Begin a new conversation; what the old one stored stays in the store."""
        for layer in self.layers:
            layer.reset()
        self.track = Track()
        self.fusion = Fusion()
        self._sessions = []

    def branch(self) -> HybridCache:
        """Return a cache that goes on from here its own way; no K/V on disk is copied."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._owns_store = False
        new.layers = [
            _branched(layer, new) if isinstance(layer, HybridLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        new.fusion = Fusion()
        new.track = Track()
        new.track.__dict__.update(self.track.__dict__)
        new._sessions = []
        return new

    def __deepcopy__(self, memo: Any) -> HybridCache:
        return self.branch()

    # -- refused -----------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Refuse: assisted decoding would take tokens back."""
        raise ValueError(
            "HybridCache does not support assisted decoding: what has gone to the store cannot "
            "be taken back; generate without an assistant"
        )


def _branched(layer: HybridLayer, cache: HybridCache) -> HybridLayer:
    new = object.__new__(HybridLayer)
    new.__dict__.update(
        layer.__dict__
    )  # tensors are replaced, never written to, so they can be shared
    new.cache = cache
    new.rows = [row.copy() for row in layer.rows]
    return new


def _other_model(store: hybridmem.Memory, what: str) -> str:
    return f"{store!r} holds keys of other {what} than this model's; use another directory"


def _model_id(config: Any) -> str:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    told = {name: getattr(config, name, None) for name in names}
    told["rope"] = fingerprint(config)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return f"transformers:{config.model_type}:{digest}"

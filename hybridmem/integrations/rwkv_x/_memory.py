"""The memory of an attached model: attach, detach, save, load, forget."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

import hybridmem
from hybridmem.errors import ModelMismatchError
from hybridmem.integrations.rwkv_x import _hooks, _hooks_old, _snapshot
from hybridmem.integrations.rwkv_x._conversation import STATE_KEY, Conversation
from hybridmem.integrations.rwkv_x._fingerprint import model_id as fingerprint
from hybridmem.integrations.rwkv_x._tier import Tier
from hybridmem.memory import Memory

StrPath = str | os.PathLike[str]
_KV_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
#: Bits of the signature of one token.
SIGNATURE_BITS = 256
#: Shards that stay mapped: rows of one that was closed are faulted in anew when found again.
OPEN_SHARDS = 64
#: Fields of the configuration that `hybridmem.open` takes anew.
_LIMITS = ("max_entries", "max_disk_bytes", "shard_max_bytes", "max_open_shards")
_MISSING = object()
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


class RwkvMemory:
    """The third tier of an attached model. Made by `attach`; a context manager that detaches.

    Attributes
    ----------
    store : Memory
    model_id : str
        Fingerprint of the model's weights.
    """

    def __init__(
        self,
        model: Any,
        store: Memory | StrPath,
        *,
        top_k: int,
        chunk_tokens: int,
        search_every: int,
        search_at_end: bool,
        query_tokens: int,
        recall: str,
        importance: str,
        centre_tokens: int,
        query_options: Mapping[str, Any] | None,
        force: bool,
        config: dict[str, Any],
    ) -> None:
        for name, value, least in (
            ("top_k", top_k, 1),
            ("chunk_tokens", chunk_tokens, 1),
            ("search_every", search_every, 1),
            ("query_tokens", query_tokens, 1),
            ("centre_tokens", centre_tokens, 0),
        ):
            _check_count(name, value, least)
        if not isinstance(search_at_end, bool):
            raise ValueError(f"search_at_end must be True or False, got {search_at_end!r}")
        if recall not in ("own", "all"):
            raise ValueError(f'recall must be "own" or "all", got {recall!r}')
        if importance not in ("upstream", "corrected"):
            raise ValueError(f'importance must be "upstream" or "corrected", got {importance!r}')
        hooks = _hooks_for(model)
        self._model = model
        self._patched: list[tuple[Any, str, Any]] = []
        self._device = model.rwkv.z["emb.weight"].device
        self.model_id = fingerprint(model)
        self._force = force
        self._own_store = not isinstance(store, Memory)
        if isinstance(store, Memory):
            if config:
                raise TypeError(f"an open store has its configuration: got {sorted(config)}")
            self.store: Memory = store
            self._check_store(model.config.n_embd)
        else:
            self.store = self._open(model, store, chunk_tokens, config)
        try:
            if self.store.mode != "r+":
                raise ValueError('store must be open with mode="r+": the model puts entries')
            self._tier = Tier(
                self.store,
                layers=model.config.n_attn_layer,
                top_k=top_k,
                chunk_tokens=chunk_tokens,
                search_every=search_every,
                search_at_end=search_at_end,
                query_tokens=query_tokens,
                see_all=recall == "all",
                centre_tokens=centre_tokens,
                query_options=query_options or {},
            )
            self._tier.try_query()
            hooks.install(model, self._tier, self._patch, corrected=importance == "corrected")
            _attached.add(model)
        except BaseException:
            self.detach()
            raise

    # -- attaching --------------------------------------------------------------------------------

    def _open(self, model: Any, path: StrPath, chunk_tokens: int, config: dict[str, Any]) -> Memory:
        """Open the store of this model, or make it."""
        width = model.config.n_embd
        if (Path(path) / "index.json").exists():
            limits = {name: value for name, value in config.items() if name in _LIMITS}
            opened = hybridmem.open(path, model_id=None if self._force else self.model_id, **limits)
            for name, value in config.items():
                if getattr(opened.config, name) != value:
                    opened.close()
                    got = getattr(opened.config, name)
                    raise ValueError(f"{name} of the store in {path} is {got!r}, not {value!r}")
            if opened.config.embed_dim != width:
                opened.close()
                raise ModelMismatchError(_width_message(path, opened.config.embed_dim, width))
            return opened
        dtype = model.rwkv.z["emb.weight"].dtype
        fields: dict[str, Any] = {
            "embed_dim": width,
            "kv_dtype": _KV_DTYPES[dtype],
            "hdc_dim": SIGNATURE_BITS * chunk_tokens,
            "signature_tokens": 1,
            "signature_bits": SIGNATURE_BITS,
            "model_id": self.model_id,
            "max_open_shards": OPEN_SHARDS,
        }
        return hybridmem.create(path, **{**fields, **config})

    def _check_store(self, width: int) -> None:
        config = self.store.config
        if config.embed_dim != width:
            raise ModelMismatchError(_width_message(repr(self.store), config.embed_dim, width))
        if not self._force and config.model_id not in (None, self.model_id):
            raise ModelMismatchError(
                f"{self.store!r} holds keys and values of the model {config.model_id!r}, not of "
                f"{self.model_id!r}; force=True takes it all the same"
            )

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._patched.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, replacement)

    def detach(self) -> None:
        """Restore the model exactly and close the store if `attach` opened it. Safe to call twice.

        States go on working with the bare model; what they hold for the memory is left alone.
        """
        if self._patched:
            _attached.discard(self._model)
            self._tier.let_go()
        while self._patched:
            owner, name, before = self._patched.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if self._own_store:
            self.store.close()

    def __enter__(self) -> RwkvMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    # -- options that may change ------------------------------------------------------------------

    @property
    def top_k(self) -> int:
        """Entries that a search gives; the next search of every conversation uses it."""
        return self._tier.top_k

    @top_k.setter
    def top_k(self, value: int) -> None:
        _check_count("top_k", value, 1)
        self._tier.top_k = value

    # -- conversations ----------------------------------------------------------------------------

    def new_state(self) -> dict[str, Any]:
        """Return the state of a conversation that has not begun.

        `model.forward` and `PIPELINE.generate` change a state in place, and make one themselves
        where they get None; but `generate` does not return it.
        """
        config, like = self._model.config, self._model.rwkv.z["emb.weight"]
        width, size = config.n_embd, config.head_size
        rwkv = []
        for _ in range(config.n_rwkv_layer):
            wkv = like.new_zeros((width // size, size, size), dtype=torch.float32)
            rwkv += [like.new_zeros(width), wkv, like.new_zeros(width)]
        attention = [
            {
                "k_cache": like.new_zeros((1, 0, width)),
                "v_cache": like.new_zeros((1, 0, width)),
                "ffn_x_prev": like.new_zeros(width),
            }
            for _ in range(config.n_attn_layer)
        ]
        return {"rwkv": rwkv, "attn": attention}

    def save(self, state: dict[str, Any], path: StrPath) -> None:
        """Save a conversation: recurrent state, cache, waiting rows, and what it may see.

        When it returns, the store is flushed and `path` holds the new snapshot; after a crash
        before that, the old one (or none) and never a mixture.
        """
        self.store.flush()
        _snapshot.write(
            Path(path), state, model_id=self.model_id, generation=self.store.stats().generation
        )

    def load(self, path: StrPath) -> dict[str, Any]:
        """Return the state that `save` wrote, for `model.forward` and `PIPELINE.generate`.

        Raises
        ------
        FileNotFoundError
        CorruptStoreError
            If the file is damaged, or the store is an older copy than the snapshot.
        ModelMismatchError
            If the conversation was with other weights and attach was not forced.
        ValueError
            If it remembers entries of another store.
        """
        state: dict[str, Any] = _snapshot.read(
            Path(path),
            model_id=None if self._force else self.model_id,
            generation=self.store.stats().generation,
            device=self._device,
        )
        for layer_state in state["attn"]:
            if STATE_KEY in layer_state:
                _to_cpu(layer_state[STATE_KEY])
                self._tier.check(Conversation.from_plain(layer_state[STATE_KEY]))
        return state

    def forget(self, conversation: dict[str, Any] | StrPath) -> int:
        """Delete every entry that a conversation may see of the store, and what it holds itself.

        Branches share the entries from before they parted: those are gone for all of them. The
        deletion is committed when this returns; `memory.store.compact()` then takes the bytes off
        the disk.

        Parameters
        ----------
        conversation : state or path
            A state, which must not be used any more, or the path of a snapshot, which is removed.

        Returns
        -------
        int
            Entries deleted.
        """
        path = None
        if isinstance(conversation, dict):
            state = conversation
        else:
            path = Path(conversation)
            state = self.load(path)
        deleted = 0
        for layer_state in state["attn"]:
            plain = layer_state.pop(STATE_KEY, None)
            if plain is None:
                continue
            held = Conversation.from_plain(plain)
            self._tier.check(held)
            for entry_id in held.entries.tolist():
                try:
                    self.store.delete(entry_id)
                    deleted += 1
                except KeyError:  # evicted before
                    continue
        self.store.flush()
        self._tier.let_go()
        if path is not None:
            path.unlink()
        return deleted


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _hooks_for(model: Any) -> ModuleType:
    """Say which of the two designs a model is."""
    layers = getattr(model, "attn", None)
    if layers is None or not hasattr(model, "get_block_exe_order") or not len(layers):
        raise TypeError(
            "model must be an RWKV_X of rwkv_x.model or rwkv_x.model_old (rwkv-x 0.2.7) with "
            f"attention layers, got {type(model).__module__}.{type(model).__name__}"
        )
    if model in _attached:
        raise ValueError("model has a memory attached already: detach that one first")
    return _hooks_old if hasattr(layers[0].att, "update_kv_cache") else _hooks


def _to_cpu(plain: dict[str, Any]) -> None:
    """Bring what is looked at outside the model to the CPU, wherever the snapshot was loaded to."""
    for name in ("meta", "cached", "entries", "stamps", "hits"):
        plain[name] = plain[name].cpu()


def _width_message(path: object, got: int, wanted: int) -> str:
    return f"the store in {path} has embed_dim={got}; this model's keys have {wanted}"

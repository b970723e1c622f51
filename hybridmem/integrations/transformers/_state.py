"""A conversation as one file: what its cache holds in memory, and the ids of what it gave away.

A safetensors file, written beside its final name and renamed, after the store was flushed: after a
crash there is the old file or the new one, and the entries that it names are durable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hybridmem._fileio import Directory
from hybridmem.errors import CorruptStoreError, ModelMismatchError, VersionError
from hybridmem.integrations.transformers._layer import HybridLayer, Row
from hybridmem.integrations.transformers._rope import Angles, Rotation

if TYPE_CHECKING:
    from hybridmem.integrations.transformers._cache import HybridCache

__all__ = ["read_state", "write_state"]

_VERSION = 1
#: Attributes of a HybridCache that a conversation keeps for life.
SETTINGS = (
    "window",
    "top_k",
    "chunk_tokens",
    "sink_tokens",
    "query_tokens",
    "block_tokens",
    "search_interval",
    "recall",
    "fuse_layers",
    "centre",
    "importance",
)


def write_state(cache: HybridCache, path: os.PathLike[str] | str) -> None:
    """Write the conversation of a cache whose store has been flushed."""
    tensors: dict[str, torch.Tensor] = {}
    layers: list[dict[str, Any]] = []
    for number, layer in enumerate(cache.layers):
        layers.append(_pack_layer(f"layer_{number}", layer, tensors))
    track = cache.track
    told: dict[str, Any] = {
        "hybridmem_state": _VERSION,
        "rope": cache.rope,
        "model_id": cache.model_id,
        "settings": {name: getattr(cache, name) for name in SETTINGS},
        "sessions": cache.sessions(0),
        "layers": layers,
        "track": [track.start, track.end],
        "store_id": cache.store.store_id,
    }
    if track.end:
        tensors["positions"] = track.positions
    if track.angles is not None:
        tensors["cos"], tensors["sin"] = track.angles.cos, track.angles.sin
        rotation = track.angles.rotation
        told["rotation"] = [rotation.interleaved, rotation.repeated]
    data = save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        {"hybridmem": json.dumps(told)},
    )
    path = Path(path).absolute()
    directory = Directory.make(path.parent)
    try:
        temporary = directory.write_temporary([(0, [data])], path.name)
        directory.rename(temporary, path.name)
        directory.sync()
    finally:
        directory.close()


def read_settings(path: os.PathLike[str] | str) -> dict[str, Any]:
    """Return the settings of a saved conversation."""
    settings: dict[str, Any] = _told(path)["settings"]
    return settings


def read_state(cache: HybridCache, path: os.PathLike[str] | str, device: Any = "cpu") -> None:
    """Fill a new cache with a saved conversation.

    Raises
    ------
    ModelMismatchError
        If it was saved with another model or beside another store.
    CorruptStoreError
        If the file is damaged.
    """
    told = _told(path)
    if told["rope"] != cache.rope or told["model_id"] != cache.model_id:
        raise ModelMismatchError(f"{path} was saved with another model: {told['model_id']!r}")
    if told["store_id"] != cache.store.store_id:
        raise ModelMismatchError(
            f"{path} belongs to another store than {cache.store!r}: ids of entries are unique "
            "in one store only; open the store that it was saved beside"
        )
    with safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    if len(told["layers"]) != len(cache.layers):
        raise ModelMismatchError(
            f"{path} has {len(told['layers'])} layers, the model {len(cache.layers)}"
        )
    for number, (layer, fields) in enumerate(zip(cache.layers, told["layers"], strict=True)):
        _unpack_layer(f"layer_{number}", layer, fields, tensors)
    cache.sessions(0)[:] = told["sessions"]
    track = cache.track
    track.start, track.end = told["track"]
    if "positions" in tensors:
        track.positions = tensors["positions"].cpu()
    if "rotation" in told:
        track.rotation = Rotation(*told["rotation"])
        track.angles = Angles(tensors["cos"], tensors["sin"], track.rotation)


def _told(path: os.PathLike[str] | str) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            told: dict[str, Any] = json.loads((file.metadata() or {})["hybridmem"])
            version = told["hybridmem_state"]
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CorruptStoreError(
            f"{path} is no saved conversation: {error}", path=str(path)
        ) from error
    if version != _VERSION:
        raise VersionError(f"{path} has version {version}; this hybridmem reads {_VERSION}")
    return told


def _pack_layer(name: str, layer: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(layer).__name__}
    if layer.keys is not None:
        tensors[f"{name}.keys"], tensors[f"{name}.values"] = layer.keys, layer.values
    if not isinstance(layer, HybridLayer):
        if type(layer).__name__ not in ("DynamicSlidingWindowLayer", "DummyLayer"):
            raise TypeError(
                f"layers of type {type(layer).__name__} cannot be saved; keep the cache open, and "
                "go on in this process"
            )
        return fields | {"seen": getattr(layer, "cumulative_length", 0)}
    if layer.recent is not None and layer.recent_valid is not None:
        tensors[f"{name}.recent"] = layer.recent
        tensors[f"{name}.recent_valid"] = layer.recent_valid
    if layer.query_sum is not None:
        tensors[f"{name}.query_sum"] = torch.from_numpy(layer.query_sum)
    taken = []
    for number, row in enumerate(layer.rows):
        tensors[f"{name}.ids_{number}"] = torch.from_numpy(row.ids().view(np.int64))
        if row.sink_keys is not None and row.sink_values is not None:
            tensors[f"{name}.sink_keys_{number}"] = row.sink_keys
            tensors[f"{name}.sink_values_{number}"] = row.sink_values
        taken.append(row.taken)
    return fields | {"seen": layer.seen, "taken": taken, "query_count": layer.query_count}


def _unpack_layer(
    name: str, layer: Any, fields: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    if type(layer).__name__ != fields["kind"]:
        raise ModelMismatchError(
            f"{name} was saved as {fields['kind']}, not {type(layer).__name__}"
        )
    keys, values = tensors.get(f"{name}.keys"), tensors.get(f"{name}.values")
    if not isinstance(layer, HybridLayer):
        if keys is not None:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.cumulative_length = fields["seen"]
        return
    layer.rows = [
        _row(name, number, taken, tensors) for number, taken in enumerate(fields["taken"])
    ]
    if keys is not None and values is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    layer.seen = fields["seen"]
    recent, valid = tensors.get(f"{name}.recent"), tensors.get(f"{name}.recent_valid")
    if recent is not None and valid is not None:
        layer.recent, layer.recent_valid = recent.cpu(), valid.cpu()
    total = tensors.get(f"{name}.query_sum")
    layer.query_sum = None if total is None else total.cpu().numpy()
    layer.query_count = fields["query_count"]


def _row(name: str, number: int, taken: int, tensors: dict[str, torch.Tensor]) -> Row:
    ids = tensors[f"{name}.ids_{number}"].cpu().numpy().view(np.uint64)
    return Row(
        entry_ids=[int(entry_id) for entry_id in ids],
        sink_keys=tensors.get(f"{name}.sink_keys_{number}"),
        sink_values=tensors.get(f"{name}.sink_values_{number}"),
        taken=taken,
    )

"""A conversation on disk: one file, replaced as a whole or not at all.

The store is flushed before the file is written, so every id in it names a durable entry; entries
that were put later, or by others, are not named in it and stay unseen. So store and snapshot need
no joint commit.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from hybridmem._fileio import Directory
from hybridmem.errors import CorruptStoreError, ModelMismatchError
from hybridmem.integrations.rwkv_x._fingerprint import digest

_FORMAT, _VERSION = "hybridmem rwkv-x conversation", 1


def write(path: Path, state: Any, *, model_id: str, generation: int) -> None:
    """Write a snapshot: a temporary file, synced, renamed over `path`, and the directory synced."""
    state = _compact(state)
    buffer = io.BytesIO()
    torch.save(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "model_id": model_id,
            "generation": generation,
            "digest": digest(state),
            "state": state,
        },
        buffer,
    )
    directory = Directory.make(path.parent)
    try:
        temporary = directory.write_temporary([(0, [buffer.getbuffer()])], os.fspath(path))
        directory.rename(temporary, path.name)
        directory.sync()
    finally:
        directory.close()


def read(path: Path, *, model_id: str | None, generation: int, device: Any) -> Any:
    """Read a snapshot back and check that it is whole, of this model and no newer than the store.

    Raises
    ------
    FileNotFoundError
    CorruptStoreError
        If the file is damaged or is no snapshot, or the store is older than it.
    ModelMismatchError
        If it was made with other weights.
    """
    try:
        data = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, OSError) as error:
        raise CorruptStoreError(f"{path} is no whole snapshot: {error}", path=str(path)) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise CorruptStoreError(f"{path} is no snapshot of a conversation", path=str(path))
    if data["version"] != _VERSION:
        raise CorruptStoreError(
            f"{path} is a snapshot of version {data['version']}; this hybridmem reads {_VERSION}",
            path=str(path),
        )
    state = data["state"]
    if digest(state) != data["digest"]:
        raise CorruptStoreError(f"{path} is damaged: its checksum is wrong", path=str(path))
    if model_id is not None and data["model_id"] != model_id:
        raise ModelMismatchError(
            f"{path} is a conversation with the model {data['model_id']!r}, not with {model_id!r}"
        )
    if data["generation"] > generation:
        raise CorruptStoreError(
            f"{path} was saved at generation {data['generation']} of its store, which is at "
            f"{generation}: the store is an older copy or another one",
            path=str(path),
        )
    return state


def _compact(value: Any) -> Any:
    """Copy tensors that are part of a larger one, so that the rest is not saved with them."""
    if isinstance(value, torch.Tensor):
        whole = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
        return value if whole else value.clone()
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_compact(item) for item in value)
    return value

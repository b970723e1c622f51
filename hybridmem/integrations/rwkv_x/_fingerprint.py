"""SHA-256 of tensors in containers: which weights a model has, whether a snapshot is whole."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of numbers, strings and tensors in dicts, lists and tuples."""
    sha = hashlib.sha256()
    with torch.inference_mode():
        _update(sha, value)
    return sha.hexdigest()


def _update(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        sha.update(f"tensor {value.dtype} {list(value.shape)}\n".encode())
        flat = value.detach().reshape(-1).cpu().contiguous()
        sha.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, dict):
        sha.update(f"dict {len(value)}\n".encode())
        for key in sorted(value):
            sha.update(f"{key!r}\n".encode())
            _update(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"list {len(value)}\n".encode())
        for item in value:
            _update(sha, item)
    else:
        sha.update(f"{value!r}\n".encode())


def model_id(model: Any) -> str:
    """Name the weights of an RWKV-X model: values, shapes and dtype of what its keys come from.

    The embedding is left out: upstream normalises it when it loads, which may round differently on
    another machine; every other weight is taken as it is in the checkpoint.
    """
    rwkv = {name: weight for name, weight in model.rwkv.z.items() if name != "emb.weight"}
    attention = dict(model.attn.state_dict())
    return f"rwkv-x:{digest({'rwkv': rwkv, 'attention': attention})[:32]}"

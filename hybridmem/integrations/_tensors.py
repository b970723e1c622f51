"""Arrays that a store hands out, as tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_tensor"]


def as_tensor(array: Any) -> torch.Tensor:
    """View a read-only array as a tensor; a tensor is returned as it is."""
    if isinstance(array, torch.Tensor):
        return array
    try:
        return torch.from_dlpack(array)
    except BufferError:  # numpy before 2.1 exports no read-only memory
        return torch.from_numpy(array.copy())

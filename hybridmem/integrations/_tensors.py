"""Arrays that a store hands out, as tensors of PyTorch, and tensors as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_array", "as_tensor"]


def as_tensor(array: Any) -> torch.Tensor:
    """View a read-only array as a tensor; a tensor is returned as it is."""
    if isinstance(array, torch.Tensor):
        return array
    try:
        return torch.from_dlpack(array)
    except BufferError:  # numpy before 2.1 exports no read-only memory
        return torch.from_numpy(array.copy())


def as_array(rows: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """View a tensor as a float32 array (a copy only where it is not one on the CPU)."""
    array = rows.float().cpu().numpy() if isinstance(rows, torch.Tensor) else rows
    return np.ascontiguousarray(array)

"""Arrays in files that commands are given."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem._commands.group import fail, refuse

__all__ = ["Arrays", "array_in", "arrays_in", "keys_by_entry", "queries_by_layer"]

Arrays = dict[str, npt.NDArray[Any]]

_NPY, _ZIP = b"\x93NUMPY", b"PK"


def array_in(source: str) -> npt.NDArray[Any]:
    """Return the array of a .npy file, or of `FILE.safetensors:TENSOR`."""
    path, _, tensor = source.rpartition(":")
    if not path or os.path.exists(source):
        path, tensor = source, ""
    if not path.endswith(".safetensors"):
        loaded = _loaded(path)
        if isinstance(loaded, dict):
            fail(
                f"cannot read {path}: it has several arrays; give a .npy or FILE.safetensors:TENSOR"
            )
        return loaded
    arrays = _tensors(path)
    if tensor not in arrays:
        refuse(f"{path} has the tensors {', '.join(arrays)}; give one as {path}:NAME")
    return arrays[tensor]


def arrays_in(path: str) -> Arrays:
    """Return the arrays of a .npz or .safetensors file by name."""
    if path.endswith(".safetensors"):
        return _tensors(path)
    loaded = _loaded(path)
    if not isinstance(loaded, dict):
        fail(f"cannot read {path}: its array has no name; give a .npz or .safetensors file")
    return loaded


def _loaded(path: str) -> npt.NDArray[Any] | Arrays:
    try:
        with open(path, "rb") as file:
            start = file.read(6)
        if not start.startswith((_NPY, _ZIP)):
            fail(f"cannot read {path}: it is neither a .npy nor a .npz nor a .safetensors file")
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return dict(loaded)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    except (ValueError, EOFError) as error:
        why = "it holds Python objects" if "allow_pickle" in str(error) else error
        fail(f"cannot read {path}: {why}")


def _tensors(path: str) -> Arrays:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: np.asarray(file.get_tensor(name)) for name in sorted(file.keys())}
    except (OSError, SafetensorError, TypeError, AttributeError) as error:
        missing = isinstance(error, FileNotFoundError)
        fail(f"cannot read {path}: {'there is no such file' if missing else error}")


def queries_by_layer(path: str) -> dict[int, list[npt.NDArray[Any]]]:
    """Return the queries of each layer in a file, in order."""
    several: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}
    for name, array in arrays_in(path).items():
        match = re.fullmatch(r"q_(\d+)(?:_(\d+))?", name)
        if match is None or array.ndim not in ((2,) if match[2] else (2, 3)):
            refuse(
                f"{path}: {name} {list(array.shape)} is neither q_LAYER [n, width] or "
                "[n, tokens, width] nor q_LAYER_NUMBER [tokens, width]"
            )
        numbered = [(int(match[2]), array)] if match[2] else list(enumerate(array))
        several.setdefault(int(match[1]), []).extend(numbered)
    if not several:
        refuse(f"{path} has no queries")
    return {
        layer: [rows for _, rows in sorted(numbered, key=lambda one: one[0])]
        for layer, numbered in sorted(several.items())
    }


def keys_by_entry(path: str) -> dict[int, npt.NDArray[Any]]:
    """Return the keys of each entry in a file."""
    keys = {
        int(name[2:]): array
        for name, array in arrays_in(path).items()
        if re.fullmatch(r"k_\d+", name)
    }
    if not keys:
        refuse(f"{path} has no tensor named k_ENTRY")
    return keys

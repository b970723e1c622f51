"""Stored forms of keys and values: float32, float16, bfloat16, and INT8 with scales and zeros.

INT8 stores x as ``zero + scale * q``. Columns that share a scale are a group; its width follows
from how many groups there are (`group_width`), so that a tensor's shape says all. Two layouts are
written:

- by channel: a zero for each column and a scale for each two, for all tokens. Channels of keys
  have offsets and ranges of their own (Z. Liu et al., "KIVI", ICML 2024).
- by row: a scale and a zero for each group of each token, 96 columns wide for values, 32 for keys
  of a few tokens. Attention gives much weight to tokens with small values, so values need a scale
  of their own for each token, even where one for each channel has the smaller error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays, _kernels, _slabs

__all__ = ["Attention", "Codec", "Decoded", "Tensor", "group_width"]

Floats = npt.NDArray[np.float32]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
#: Tokens from which on keys are quantised by channel; fewer would be outweighed by their scales.
_CHANNEL_TOKENS = 16
_KEY_GROUP = 32
_VALUE_GROUP = 96
#: Groups of a row are a multiple of this wide.
_UNIT = 32
#: Largest magnitudes of a tensor whose scales and zeros are stored as float16.
_HALF_RANGE = (2.0**-8, 65504.0)


class Tensor(NamedTuple):
    """A tensor of an entry as it is stored.

    Attributes
    ----------
    suffix : {"k", "v", "k_scale", "k_zero", "v_scale", "v_zero"}
        Its name without the entry's id.
    dtype : {"F32", "F16", "BF16", "I8"}
        As safetensors names it.
    shape : tuple of int
    data : array
        Of `shape`; bfloat16 as uint16.
    """

    suffix: str
    dtype: str
    shape: tuple[int, int]
    data: Any


class Decoded(NamedTuple):
    """Keys and values of an entry as read-only float32, and its source as `_source` has it."""

    keys: Floats
    values: Floats
    escaped_source: bytes | None


class Attention(NamedTuple):
    """The state of attention that goes on from entry to entry.

    Attributes
    ----------
    query : float32 array, shape (m, heads * head_dim)
    shape : tuple of (int, int, float)
        Heads of the query, heads of keys and values, scale of the products.
    running : tuple of three float32 arrays
        Weighted sum of values [m, heads * head_dim], largest product and sum of weights [m, heads].
    """

    query: Floats
    shape: Any
    running: Any


class Codec:
    """Turns the keys and values of an entry into stored tensors and back.

    Parameters
    ----------
    kv_dtype : {"float32", "float16", "bfloat16"}
    quantize_stored : bool
        Store INT8 instead.
    """

    def __init__(self, kv_dtype: str = "float32", quantize_stored: bool = False) -> None:
        self.dtype = "I8" if quantize_stored else _DTYPES[kv_dtype]
        endings = ("", "_scale", "_zero") if quantize_stored else ("",)
        self._wanted = {
            letters: {letter + ending for letter in letters for ending in endings}
            for letters in ("kv", "k")
        }

    def nbytes(self, n_tokens: int, embed_dim: int) -> int:
        """Return the bytes of all tensors of an entry.

        INT8 entries of unusual magnitude take more: their scales and zeros are float32.
        """
        if self.dtype != "I8":
            return 2 * n_tokens * embed_dim * _ITEM_BYTES[self.dtype]
        values = 2 * n_tokens * -(-embed_dim // _VALUE_GROUP)
        if n_tokens >= _CHANNEL_TOKENS:
            keys = embed_dim + -(-embed_dim // 2)
        else:
            keys = 2 * n_tokens * -(-embed_dim // _KEY_GROUP)
        return 2 * n_tokens * embed_dim + 2 * (keys + values)

    def encode(self, keys: Floats, values: Floats, where: str = "") -> list[Tensor]:
        """Return the stored tensors; they share no memory with the arguments.

        Parameters
        ----------
        keys, values : float32 array, shape (n_tokens, embed_dim)
            C-contiguous, n_tokens >= 1; need not be finite.
        where : str
            Put before the names of the arguments in messages.

        Raises
        ------
        ValueError
            If an element is not finite, or is not when it is rounded to the stored type.
        """
        tensors = []
        for letter, name, x in (("k", "keys", keys), ("v", "values", values)):
            if self.dtype == "I8":
                tensors += _quantize(letter, x, where + name)
            else:
                tensors.append(_round(letter, x, where + name, self.dtype))
        return tensors

    def decode(
        self, tensors: Sequence[Tensor], n_tokens: int, embed_dim: int
    ) -> tuple[Floats, Floats]:
        """Return keys and values as read-only float32; float32 that is stored is not copied.

        Raises
        ------
        ValueError
            If these are not the tensors of such an entry, see `mismatch`.
        """
        fault = self.mismatch(tensors, n_tokens, embed_dim)
        if fault is not None:
            raise ValueError(fault)
        parts = {tensor.suffix: tensor for tensor in tensors}
        return _decoded(parts, "k"), _decoded(parts, "v")

    def decode_keys(self, tensors: Sequence[Tensor], n_tokens: int, embed_dim: int) -> Floats:
        """Return the keys alone, as `decode` does; no other tensors are looked at."""
        keys = [tensor for tensor in tensors if tensor.suffix.startswith("k")]
        fault = self.mismatch(keys, n_tokens, embed_dim, "k")
        if fault is not None:
            raise ValueError(fault)
        return _decoded({tensor.suffix: tensor for tensor in keys}, "k")

    @staticmethod
    def attend(entries: Sequence[Sequence[Tensor]], state: Attention) -> None:
        """Go on with attention over the tensors of some entries as they are stored.

        Entries of layered stores may be stored in different forms.
        """
        parts = [{tensor.suffix: tensor for tensor in tensors} for tensors in entries]
        for wide, some in itertools.groupby(parts, lambda one: one["k"].dtype == "F32"):
            if not wide:
                for one in some:
                    Codec._attend_narrow(one, state)
                continue
            rows = [(_aligned(one["k"].data), _aligned(one["v"].data)) for one in some]
            keys, values = zip(*rows, strict=True)
            _kernels.attend(state.query, keys, values, *state.shape, *state.running)

    @staticmethod
    def _attend_narrow(parts: dict[str, Tensor], state: Attention) -> None:
        k, v = (_aligned(parts[letter].data) for letter in "kv")
        dtype = parts["k"].dtype
        if dtype != "I8":
            is_bf16 = dtype == "BF16"
            _kernels.attend_half(
                state.query,
                k.view(np.uint16),
                v.view(np.uint16),
                is_bf16,
                *state.shape,
                *state.running,
            )
        else:
            forms: Any = [state.query]
            for letter, q in (("k", k), ("v", v)):
                stored = parts[f"{letter}_scale"], parts[f"{letter}_zero"]
                forms += [q, *_steps(*stored, q.shape[1])]
            _kernels.attend_int8(*forms, *state.shape, *state.running)

    def mismatch(
        self, tensors: Sequence[Tensor], n_tokens: int, embed_dim: int, letters: str = "kv"
    ) -> str | None:
        """Return what is wrong with the names, types or shapes of an entry's tensors, or None.

        The kernels rely on it: a scale of another shape would be read beyond its end.
        """
        parts = {tensor.suffix: tensor for tensor in tensors}
        wanted = self._wanted[letters]
        if len(parts) != len(tensors) or parts.keys() != wanted:
            return f"it has tensors {sorted(t.suffix for t in tensors)}, want {sorted(wanted)}"
        for letter in letters:
            x = parts[letter]
            if (x.dtype, x.shape) != (self.dtype, (n_tokens, embed_dim)):
                want = f"{self.dtype} {[n_tokens, embed_dim]}"
                return f"its tensor {letter} is {x.dtype} {list(x.shape)}, want {want}"
            if self.dtype == "I8":
                scale, zero = parts[f"{letter}_scale"], parts[f"{letter}_zero"]
                if not _is_layout(scale, zero, n_tokens, embed_dim):
                    return (
                        f"its {letter}_scale is {scale.dtype} {list(scale.shape)} and its "
                        f"{letter}_zero {zero.dtype} {list(zero.shape)}, which does not fit"
                    )
        return None


def group_width(embed_dim: int, groups: int) -> int:
    """Return how many columns share a scale (or a zero) where there are so many of them."""
    if groups == embed_dim:
        return 1
    if groups == -(-embed_dim // 2):
        return 2
    return _UNIT * -(-embed_dim // (_UNIT * groups))


def _is_layout(scale: Tensor, zero: Tensor, n_tokens: int, embed_dim: int) -> bool:
    """Whether these are a scale and a zero of one of the two layouts."""
    if scale.dtype != zero.dtype or scale.dtype not in ("F16", "F32"):
        return False
    if (scale.shape, zero.shape) == ((1, -(-embed_dim // 2)), (1, embed_dim)):
        return True
    rows, groups = scale.shape
    return (
        scale.shape == zero.shape
        and rows in (1, n_tokens)
        and 1 <= groups <= -(-embed_dim // _UNIT)
        and -(-embed_dim // group_width(embed_dim, groups)) == groups
    )


def _tensor(suffix: str, dtype: str, data: npt.NDArray[Any]) -> Tensor:
    data.flags.writeable = False
    return Tensor(suffix, dtype, (data.shape[0], data.shape[1]), data)


# -- floats ---------------------------------------------------------------------------------------


def _round(letter: str, x: Floats, name: str, dtype: str) -> Tensor:
    """Return `x` in a float type, rounded half to even."""
    if dtype == "F32":
        floats = _slabs.empty(x.shape, np.float32)
        if not _kernels.copy_finite(x, floats.fill):
            raise _arrays.not_finite(x, x, name, "float32")
        return _tensor(letter, dtype, floats.kept)
    bits = _slabs.empty(x.shape, np.uint16)
    if dtype == "F16":
        if not _kernels.to_float16(x, bits.fill):
            with np.errstate(all="ignore"):
                raise _arrays.not_finite(x, x.astype(np.float16), name, "float16")
        return _tensor(letter, dtype, bits.kept.view(np.float16))
    if not _kernels.to_bfloat16(x, bits.fill):
        kept = np.where(np.isfinite(x), _widened(bits.kept), np.float32(np.nan))
        raise _arrays.not_finite(x, kept, name, "bfloat16")
    return _tensor(letter, dtype, bits.kept)


def _widened(x: npt.NDArray[Any]) -> Floats:
    """Return float16, or bfloat16 as uint16, as float32."""
    room = _slabs.empty(x.shape, np.float32)
    if x.dtype == np.float16:
        _kernels.from_float16(x.view(np.uint16), room.fill)
    else:
        _kernels.from_bfloat16(x, room.fill)
    return room.kept


# -- INT8 -----------------------------------------------------------------------------------------


def _quantize(letter: str, x: Floats, name: str) -> list[Tensor]:
    """Return `x` as INT8 with its scale and zero."""
    n, d = x.shape
    q = _slabs.empty((n, d), np.int8)
    by_channel = letter == "k" and n >= _CHANNEL_TOKENS
    if by_channel:
        scales, zeros = (1, -(-d // 2)), (1, d)
    else:
        scales = zeros = (n, -(-d // (_KEY_GROUP if letter == "k" else _VALUE_GROUP)))

    def filled(wide: bool) -> tuple[float, npt.NDArray[Any], npt.NDArray[Any]]:
        dtype = np.float32 if wide else np.float16
        scale, zero = np.empty(scales, dtype), np.empty(zeros, dtype)
        stored = scale.view(np.uint8), zero.view(np.uint8)
        if by_channel:
            return _kernels.quantize_channels(x, wide, q.fill, *stored), scale, zero
        width = _row_width(scale, d)
        return _kernels.quantize_rows(x, width, wide, q.fill, *stored), scale, zero

    peak, scale, zero = filled(wide=False)  # nearly always right; whether it is, this pass tells
    if not math.isfinite(peak):
        raise _arrays.not_finite(x, x, name, "float32")
    is_wide = peak != 0 and not _HALF_RANGE[0] <= peak <= _HALF_RANGE[1]
    if is_wide:
        _, scale, zero = filled(wide=True)
    dtype = "F32" if is_wide else "F16"
    return [
        _tensor(letter, "I8", q.kept),
        _tensor(f"{letter}_scale", dtype, scale),
        _tensor(f"{letter}_zero", dtype, zero),
    ]


def _row_width(scale: npt.NDArray[Any], embed_dim: int) -> int:
    # One or two columns are one group, of whatever width.
    return max(group_width(embed_dim, scale.shape[1]), _UNIT)


def _decoded(parts: dict[str, Tensor], letter: str) -> Floats:
    stored = parts[letter]
    data = _aligned(stored.data)
    if stored.dtype == "F32":
        out: Floats = data.view()
    elif stored.dtype != "I8":
        out = _widened(data)
    else:
        out = _dequantized(data, parts[f"{letter}_scale"], parts[f"{letter}_zero"])
    out.flags.writeable = False
    return out


def _dequantized(q: npt.NDArray[np.int8], scale: Tensor, zero: Tensor) -> Floats:
    room = _slabs.empty(q.shape, np.float32)
    _kernels.dequantize(q, *_steps(scale, zero, q.shape[1]), room.fill)
    return room.kept


def _steps(scale: Tensor, zero: Tensor, embed_dim: int) -> tuple[Any, Any, int, bool]:
    """Return scales and zeros as the kernels take them: bytes, columns of a group, whether wide."""
    width = _row_width(scale.data, embed_dim) if scale.shape == zero.shape else 0
    by, at = (_aligned(part.data).view(np.uint8) for part in (scale, zero))
    return by, at, width, scale.dtype == "F32"


def _aligned(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flags = data.flags
    if flags.c_contiguous and flags.aligned:
        return data
    return np.require(data, requirements=("C", "A"))  # other writers need not align

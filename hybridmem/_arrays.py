"""The boundary: what a caller passes becomes a checked float32 matrix, or a clear error.

Nothing behind this module meets another type, another layout or a NaN, and no exception of numpy,
torch or a caller's own array type leaves it: `TypeError` says that the type or dtype is wrong,
`ValueError` that the shape or a value is. PyTorch is never imported here; a tensor can only be
passed by a program that has imported it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from . import _kernels

__all__ = [
    "cache_tokens",
    "concatenate_like",
    "count",
    "entry_id",
    "entry_ids",
    "fill",
    "importance",
    "layer_index",
    "matrix",
    "not_finite",
    "vectors",
]

Floats = npt.NDArray[np.float32]

_F32 = np.dtype(np.float32)
_U32 = 1 << 32
_FLOATS = "floats (float16, bfloat16, float32 or float64)"
_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__")


def matrix(
    x: object, name: str, width: int, *, vector_ok: bool = False, finite: bool = True
) -> Floats:
    """Return `x` as a float32 matrix in C order.

    Parameters
    ----------
    x : array_like of float, shape (n_tokens, width)
        Anything that numpy can view without loss: arrays of any strides, byte order and float
        type, torch tensors, objects with ``__array__``, the buffer protocol or DLPack, nested
        lists. Leading axes of length 1 are dropped.
    name : str
        What the caller calls the argument, for messages.
    width : int
        Columns wanted.
    vector_ok : bool, default False
        Whether shape (width,) is one row.
    finite : bool, default True
        Whether NaN and infinity are looked for. They always are where float64 is rounded.

    Returns
    -------
    float32 array, shape (n_tokens, width)
        C-contiguous, aligned, in native byte order, n_tokens >= 1. The caller's own memory where
        that is already so, a copy elsewhere.

    Raises
    ------
    TypeError
        The type or dtype is none of the above: integers, bool, complex, objects, strings.
    ValueError
        The shape is another one, an element is masked, NaN, infinite or too large for float32.
    """
    if _is_matrix(x, width, vector_ok):
        return _rows(x.reshape(-1, width), name, finite)
    wanted = f"[n_tokens, {width}]" + (f" or [{width}]" if vector_ok else "")
    a = _floats(x, name, wanted)
    n = _tokens(a, name, width, wanted, vector_ok)
    if not 0 < n < _U32:
        raise ValueError(f"{name}: got shape {_shape(a)}, want {wanted}, 1 to 2**32 - 1 rows")
    return _rows(_numpy(a, name).reshape(n, width), name, finite)


def _is_matrix(x: object, width: int, vector_ok: bool) -> TypeGuard[npt.NDArray[Any]]:
    """Whether nothing but the values of `x` is left to check, as of most that is passed."""
    if type(x) is not np.ndarray or x.dtype != _F32:
        return False
    n = x.shape[0] if x.ndim == 2 else int(vector_ok)
    return bool(0 < n < _U32 and x.shape[-1:] == (width,) and x.ndim <= 2)


def vectors(x: object, name: str, width: int) -> tuple[Floats, bool]:
    """Return `x`, `[width]` or `[n, width]`, as `matrix` does, and whether it was one vector.

    No leading axes are dropped, and n may be 0.
    """
    wanted = f"[{width}] or [n, {width}]"
    a = _floats(x, name, wanted)
    if a.ndim not in (1, 2) or a.shape[-1] != width:
        raise ValueError(f"{name}: got shape {_shape(a)}, want {wanted}")
    return _rows(_numpy(a, name).reshape(-1, width), name, finite=True), a.ndim == 1


def _rows(source: npt.NDArray[Any], name: str, finite: bool) -> Floats:
    out = _float32(source)
    if (finite or source.dtype.itemsize > 4) and not _kernels.all_finite(out):
        raise not_finite(source, out, name, "float32")
    return out


def not_finite(
    a: npt.NDArray[Any], kept: npt.NDArray[Any], name: str, kept_type: str
) -> ValueError:
    """Return the error for the first element of a matrix that is kept as NaN or infinity.

    Parameters
    ----------
    a : array, shape (n, width)
        The matrix as the caller gave it.
    kept : array of the same shape
        The same as float32, or in the type that it is stored in.
    name, kept_type : str
        What the argument and the type of `kept` are called.
    """
    row, column = divmod(int(np.argmin(np.isfinite(kept))), a.shape[1])
    value = float(a[row, column])
    where = f"{name}: row {row}, column {column} is {value!r}"
    if math.isfinite(value):
        return ValueError(f"{where}, which overflows {kept_type}")
    return ValueError(f"{where}, want finite values only")


# -- numbers --------------------------------------------------------------------------------------


def layer_index(v: object, name: str = "layer_idx") -> int:
    """Return a layer number: an integer from 0 to 2**32 - 1."""
    want = "an integer from 0 to 2**32 - 1"
    number = v if type(v) is int else _integer(v, name, want)
    if not 0 <= number < _U32:
        raise ValueError(f"{name}: got {_short(v)}, want {want}")
    return number


def count(v: object, name: str, minimum: int) -> int:
    """Return a number of things: an integer that is at least `minimum`."""
    number = v if type(v) is int else _integer(v, name, f"an integer >= {minimum}")
    if number < minimum:
        raise ValueError(f"{name}: got {_short(v)}, want an integer >= {minimum}")
    return number


def importance(v: object, name: str = "importance") -> float:
    """Return an importance, rounded to float32 as the record keeps it: finite and >= 0."""
    want = "a finite number >= 0"
    if not _is_real(v):
        raise TypeError(f"{name}: got {_short(v)}, want {want}")
    try:
        number = float(v)  # type: ignore[arg-type]  # checked just above
    except MemoryError:
        raise
    except OverflowError:
        number = math.inf
    except Exception as error:  # of the caller's own number type
        raise TypeError(f"{name}: got {_short(v)}, want {want}: {error}") from error
    if not number >= 0:
        raise ValueError(f"{name}: got {_short(v)}, want {want}")
    with np.errstate(all="ignore"):
        rounded = float(np.float32(number))
    if rounded == math.inf:
        raise ValueError(f"{name}: got {_short(v)}, want {want} that float32 can hold")
    return rounded + 0.0  # no -0.0


def _integer(v: object, name: str, want: str) -> int:
    torch = _torch_of(v)
    is_bool = isinstance(v, bool) or (torch is not None and getattr(v, "dtype", None) == torch.bool)
    try:
        if not is_bool:
            return operator.index(v)  # type: ignore[arg-type]  # that is the question
        cause = None
    except MemoryError:
        raise
    except Exception as error:  # of the caller's own number type
        cause = error
    raise TypeError(f"{name}: got {_short(v)}, want {want}") from cause


def _is_real(v: Any) -> bool:
    if isinstance(v, (bool, str, bytes, bytearray, complex)):
        return False
    if isinstance(v, (np.generic, np.ndarray)):  # float() would take text, complex and bool
        return v.ndim == 0 and (v.dtype.kind in "iu" or _is_float(v.dtype))
    torch = _torch_of(v)
    if torch is not None:
        return bool(v.ndim == 0 and v.dtype != torch.bool and not v.dtype.is_complex)
    return hasattr(type(v), "__float__") or hasattr(type(v), "__index__")


def entry_id(value: Any) -> int:
    """Return an id that is asked for; any integer may be, and most are in no store."""
    return _integer(value, "entry_id", "an integer")


def entry_ids(ids: Any) -> npt.NDArray[np.uint64]:
    """Return ids to search among; those that no entry can have are left out."""
    if not isinstance(ids, np.ndarray):
        try:
            each = None if isinstance(ids, (str, bytes)) else iter(ids)
        except TypeError:
            each = None
        if each is None:
            raise TypeError(f"entry_ids: got {_short(ids)}, want a sequence of integers")
        numbers = np.array([count(one, "entry_ids", 0) for one in each], object)
        kept = numbers[numbers < 1 << 64] if len(numbers) else numbers
        return kept.astype(np.uint64)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(
            f"entry_ids: got {ids.dtype} of shape {_shape(ids)}, want a sequence of integers"
        )
    return ids[ids > 0].astype(np.uint64)


# -- caches that retrieved rows are put before ----------------------------------------------------


def cache_tokens(cache: object, name: str, width: int) -> int:
    """Check type and shape of a K/V cache, `[n, width]` after axes of 1; return n, which may be 0.

    Its values are not looked at: `concatenate_like` does that on its way.
    """
    wanted = f"[n_tokens, {width}]"
    return _tokens(_floats(cache, name, wanted), name, width, wanted)


def concatenate_like(rows: Sequence[Floats], cache: Any, *, name: str = "cache") -> Any:
    """Return the retrieved rows followed by the cache, in the cache's own type.

    Parameters
    ----------
    rows : sequence of float32 arrays, shape (n_i, width)
        Finite. May be read-only.
    cache : array or tensor of float, shape (..., n, width)
        A numpy array of any float type or a torch tensor of any float type and device; its
        leading axes have length 1 and are kept. Anything else is taken as numpy sees it.
    name : str
        What the caller calls the cache, for messages.

    Returns
    -------
    array or tensor, shape (..., sum(n_i) + n, width)
        `cache` itself where there are no rows. Differentiable with respect to a torch cache.

    Raises
    ------
    TypeError, ValueError
        Naming the cache: another type or shape, NaN or infinity in it, or a retrieved value that
        is too large for its type.
    """
    width = rows[0].shape[1] if rows else None
    wanted = f"[n_tokens, {'width' if width is None else width}]"
    a = _floats(cache, name, wanted)
    _tokens(a, name, width, wanted)
    if isinstance(a, np.ndarray):
        out = _concatenate_numpy(rows, a, name)
    else:
        try:
            out = _concatenate_torch(sys.modules["torch"], rows, a, name)
        except RuntimeError as error:  # which torch raises for everything
            raise _foreign(ValueError, f"{name}: cannot extend {_got(a)}", error) from error
    return out if rows else cache


def _concatenate_numpy(rows: Sequence[Floats], a: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    cache = a.reshape(a.shape[-2], a.shape[-1])
    if not rows:
        if not _all_finite(cache):
            raise not_finite(cache, cache, name, str(a.dtype))
        return a
    n = sum(len(part) for part in rows)
    out = np.empty((n + len(cache), cache.shape[1]), a.dtype)
    with np.errstate(all="ignore"):
        np.concatenate(rows, out=out[:n], casting="unsafe")
        out[n:] = cache
    if not _all_finite(out):  # after the copy, while the rows are in the processor's cache
        if not _all_finite(cache):
            raise not_finite(cache, cache, name, str(a.dtype))
        raise _too_narrow(rows, name, a.dtype)
    return out.reshape(*a.shape[:-2], *out.shape)


def _concatenate_torch(torch: Any, rows: Sequence[Floats], cache: Any, name: str) -> Any:
    if not _tensor_finite(torch, cache):
        given = _numpy(cache.detach().to(torch.float64), name)
        given = given.reshape(given.shape[-2:])
        raise not_finite(given, given, name, str(cache.dtype))
    if not rows:
        return cache
    # First into a buffer of our own: torch warns of memory that it must not write to.
    found = torch.from_numpy(np.concatenate(rows)).to(device=cache.device, dtype=cache.dtype)
    if cache.dtype.itemsize < 4 and not _tensor_finite(torch, found):
        raise _too_narrow(rows, name, cache.dtype)
    return torch.cat([found.reshape(*cache.shape[:-2], *found.shape), cache], dim=-2)


def fill(part: Any, rows: Sequence[Floats], name: str) -> None:
    """Write retrieved rows into a part of a buffer, `[..., sum(n_i), width]`.

    As `concatenate_like` does, ValueError where a value is too large for the buffer's type.
    """
    part = part[(0,) * (len(part.shape) - 2)]
    if isinstance(part, np.ndarray):
        with np.errstate(all="ignore"):
            np.concatenate(rows, out=part, casting="unsafe")
        is_finite = part.dtype.itemsize >= 4 or bool(np.isfinite(part).all())
    else:
        torch = sys.modules["torch"]
        with torch.no_grad():
            part.copy_(torch.from_numpy(np.concatenate(rows)))
        is_finite = part.dtype.itemsize >= 4 or _tensor_finite(torch, part)
    if not is_finite:
        raise _too_narrow(rows, name, part.dtype)


def _all_finite(a: npt.NDArray[Any]) -> bool:
    if a.dtype == np.float32 and a.flags.c_contiguous and a.flags.aligned and a.size:
        return _kernels.all_finite(a)
    return bool(np.isfinite(a).all())


def _tensor_finite(torch: Any, x: Any) -> bool:
    if x.numel() == 0:
        return True
    x = x.detach()
    if x.dtype.itemsize == 1:  # float8 has few operations of its own
        x = x.to(torch.float32)
    low, high = torch.aminmax(x)  # one pass without a temporary; NaN comes through
    return math.isfinite(low) and math.isfinite(high)


def _too_narrow(rows: Sequence[Floats], name: str, dtype: object) -> ValueError:
    peak = max(float(np.abs(part).max()) for part in rows)
    return ValueError(f"{name}: a retrieved value of magnitude {peak:.9g} overflows its {dtype}")


# -- from any type to an array or a tensor of floats ----------------------------------------------


def _floats(x: object, name: str, wanted: str) -> Any:
    """Return a numpy array or a torch tensor of floats over `x`'s memory; no value is read."""
    want = f"{_FLOATS} of shape {wanted}"
    torch = _torch_of(x)
    if torch is not None:
        _check_tensor(torch, x, name, want)
        return x
    masked: Any = sys.modules.get("numpy.ma")
    kind = getattr(masked, "MaskedArray", ())  # not there while another thread imports the module
    if isinstance(x, kind) and masked.is_masked(x):
        raise ValueError(f"{name}: got a masked array with masked elements, want {want}")
    parts = _parts(x, name, wanted)
    try:
        a = _array(x) if parts is None else np.stack(parts)
    except MemoryError:
        raise
    except Exception as error:  # whatever an unknown type raises when numpy looks at it
        ragged = isinstance(x, (list, tuple)) and isinstance(error, ValueError)
        kind = ValueError if ragged else TypeError
        raise _foreign(kind, f"{name}: got {_got(x)}, want {want}", error) from error
    if not _is_float(a.dtype):
        hint = "; write 1.0, not 1" if a.dtype.kind == "i" and isinstance(x, (list, tuple)) else ""
        raise TypeError(f"{name}: got {_got(x, a)}, want {want}{hint}")
    return a


def _parts(x: object, name: str, wanted: str) -> list[npt.NDArray[Any]] | None:
    """Return the elements of a list that holds arrays.

    One by one, as numpy would let integers pass beside floats and read tensors by the element.
    """
    if not isinstance(x, (list, tuple)):
        return None
    if not any(_torch_of(part) is not None or isinstance(part, np.ndarray) for part in x):
        return None
    names = [f"{name}[{i}]" for i in range(len(x))]
    return [_numpy(_floats(part, at, wanted), at) for part, at in zip(x, names, strict=True)]


def _array(x: Any) -> npt.NDArray[Any]:
    if hasattr(x, "__dlpack__") and not any(hasattr(x, p) for p in _ARRAY_PROTOCOLS):
        return np.from_dlpack(x)
    return np.asarray(x)


def _is_float(dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return True
    # The types of ml_dtypes are of kind V; their names are all that is known of them here.
    return dtype.type.__module__ == "ml_dtypes" and dtype.name.startswith(("bfloat", "float"))


def _tokens(a: Any, name: str, width: int | None, wanted: str, vector_ok: bool = False) -> int:
    """Return the number of rows of an array or tensor of the shape wanted."""
    shape = tuple(a.shape)
    if vector_ok and len(shape) == 1:
        shape = (1, *shape)
    fits = len(shape) >= 2 and width in (None, shape[-1])
    if not fits or any(axis != 1 for axis in shape[:-2]):
        raise ValueError(f"{name}: got shape {_shape(a)}, want {wanted}{_hint(shape, width)}")
    return int(shape[-2])


def _hint(shape: tuple[int, ...], width: int | None) -> str:
    """What may help who brought heads in another form."""
    if not shape or width is None:
        return ""
    if len(shape) == 3 and shape[0] * shape[2] == width:
        return "; heads go side by side: x.swapaxes(0, 1).reshape(n_tokens, -1)"
    if len(shape) == 3 and shape[1] * shape[2] == width:
        return "; heads go side by side: x.reshape(n_tokens, -1)"
    if len(shape) < 3 and shape[-1] > width and shape[-1] % width == 0:
        return "; of grouped queries those that share keys are summed, or use hybridmem.attend"
    return ""


def _float32(a: npt.NDArray[Any]) -> Floats:
    if a.dtype == _F32 and a.flags.c_contiguous and a.flags.aligned:
        return a
    with np.errstate(all="ignore"):  # the caller looks for overflow
        return np.array(a, np.float32, order="C")


# -- torch ----------------------------------------------------------------------------------------


def _torch_of(x: object) -> Any:
    """Return the torch module where `x` is one of its tensors, else None."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return torch if isinstance(tensor, type) and isinstance(x, tensor) else None


def _check_tensor(torch: Any, x: Any, name: str, want: str) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name}: got {_got(x)}, want {want}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name}: got {_got(x)} of layout {x.layout}, want dense {want}")
    if x.device.type == "meta":
        raise TypeError(f"{name}: got {_got(x)} on the meta device, which holds no values")


def _numpy(a: Any, name: str) -> npt.NDArray[Any]:
    """Return a checked array or tensor as numpy, in the same memory where numpy has its type."""
    if isinstance(a, np.ndarray):
        return a
    torch = sys.modules["torch"]
    try:
        a = a.detach().resolve_neg()
        if a.dtype not in (torch.float16, torch.float32, torch.float64):
            a = a.to(torch.float32)  # bfloat16 and float8: exact
        return np.asarray(a.cpu().numpy())
    except MemoryError:
        raise
    except Exception as error:  # a tensor without values of its own: fake, functorch, distributed
        raise _foreign(TypeError, f"{name}: cannot read {_got(a)}", error) from error


# -- words of messages ----------------------------------------------------------------------------


def _foreign(kind: type[Exception], message: str, error: Exception) -> Exception:
    """Return our own error for another library's."""
    text = str(error)
    if "out of memory" in text or "allocate memory" in text:  # torch has no type for it
        return MemoryError(f"{message}: {text}")
    return kind(f"{message}: {text}")


def _shape(a: Any) -> str:
    return str([int(axis) for axis in a.shape])


def _got(x: Any, a: Any = None) -> str:
    """Say what `x` is: its type, and its dtype and shape where it has them."""
    kind = type(x)
    full = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    try:
        a = x if a is None else a
        return f"{full} of {str(a.dtype)[:60]}, shape {_shape(a)}"
    except Exception:  # a type of the caller's without either
        return full


def _short(v: object) -> str:
    try:
        return f"{v!r:.40} ({type(v).__name__})"
    except Exception:  # of the caller's own type
        return f"a value of type {type(v).__name__}"

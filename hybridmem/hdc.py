"""Hyperdimensional signatures: sign bits of a seeded random projection, and what is done with them.

The projection is a stack of random sign flips and fast Walsh-Hadamard transforms (three rounds),
which behaves like a dense Gaussian one but needs additions only; so its bits are the same on every
machine. This module needs numpy and the kernels, not a store.

References
----------
N. Ailon, B. Chazelle, "The fast Johnson-Lindenstrauss transform and approximate nearest
neighbors", SIAM J. Comput. 39 (2009). A. Andoni et al., "Practical and optimal LSH for angular
distance", NIPS 2015 (three rounds of flips and transforms). M. Charikar, "Similarity estimation
techniques from rounding algorithms", STOC 2002 (sign bits and angles). S. Vigna, SplitMix64 (public
domain), the generator of the flips.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridmem import _arrays, _kernels

__all__ = [
    "DEFAULT_SEED",
    "Projector",
    "SignatureSpec",
    "centred",
    "mean_pool",
    "round_query",
    "sign_entry",
    "sign_query",
    "similarity",
]

DEFAULT_SEED = 0x48594252_49444D31

MAX_EMBED_DIM = 1 << 24
MAX_HDC_DIM = 1 << 24
#: Of a sub-signature: 64 of them lie interleaved in memory.
MAX_SUB_BITS = 1 << 20

_CHUNK_BYTES = 1 << 24
#: Words of flips that are kept; where a projection has more they are made anew at each use.
_KEPT_WORDS = 1 << 20

#: Largest integer of a rounded query, which the kernel for it is made for.
_MOST = 15

_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {number}")
    return number


def _bits(value: Any, name: str) -> int:
    number = _integer(value, name, 64, MAX_HDC_DIM)
    if number % 64:
        raise ValueError(f"{name} must be a multiple of 64, got {number}")
    return number


def _power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def splitmix64(seed: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Words `start` to `start + count` of the SplitMix64 generator seeded with `seed`."""
    z = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _trusted(x: NDArray[np.float32], width: int, name: str) -> None:
    """Shape and layout that the kernels rely on; contents were checked by the caller."""
    if x.dtype != np.float32 or x.ndim != 2 or not x.flags.c_contiguous:
        raise TypeError(f"{name} must be a C-contiguous float32 matrix")
    if x.shape[0] < 1 or x.shape[1] != width:
        raise ValueError(f"{name} must be [n >= 1, {width}], got shape {x.shape}")


class Projector:
    """Seeded random projection to packed sign bits.

    Parameters
    ----------
    embed_dim : int
        Width of the input.
    hdc_dim : int
        Number of bits, a multiple of 64.
    seed : int
        Any number in [0, 2**64). The same seed gives the same bits on every machine.

    Notes
    -----
    The projection is normative (docs/format.md). Input is padded with zeros to a power of two P and
    each block gives F bits: F = P, but for wide input and few bits P is first folded by signed sums
    to F, about four times hdc_dim. A block scales its input by a power of two, flips signs, folds,
    and then transforms, flips, transforms, flips and transforms again.
    """

    __slots__ = ("_block_words", "_flips", "_folded", "_padded", "embed_dim", "hdc_dim", "seed")

    embed_dim: int
    hdc_dim: int
    seed: int

    def __init__(self, embed_dim: int, hdc_dim: int = 4096, seed: int = DEFAULT_SEED) -> None:
        self.embed_dim = _integer(embed_dim, "embed_dim", 1, MAX_EMBED_DIM)
        self.hdc_dim = _bits(hdc_dim, "hdc_dim")
        self.seed = _integer(seed, "seed", 0, 2**64 - 1)
        self._padded = _power_of_two(self.embed_dim)
        self._folded = min(self._padded, _power_of_two(4 * self.hdc_dim))
        blocks = -(-self.hdc_dim // self._folded)
        self._block_words = max(1, self._padded // 64) + 2 * max(1, self._folded // 64)
        self._flips = splitmix64(self.seed, min(blocks * self._block_words, _KEPT_WORDS))
        self._flips.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes of a packed signature."""
        return self.hdc_dim // 8

    def project(self, x: ArrayLike) -> NDArray[np.uint8]:
        """Packed signatures of vectors.

        Parameters
        ----------
        x : array_like, [embed_dim] or [n, embed_dim]
            Of any float type, as for `Store.put`; not pooled.

        Returns
        -------
        ndarray of uint8, [hdc_dim // 8] or [n, hdc_dim // 8]
            Bit j is bit j % 8 of byte j // 8 (numpy ``packbits(..., bitorder="little")``), 1 where
            the projection is >= 0.

        Raises
        ------
        TypeError
            x is not floating-point.
        ValueError
            Wrong shape, NaN or infinity.
        """
        rows, is_vector = _arrays.vectors(x, "x", self.embed_dim)
        out = self.project_rows(rows)
        return out[0] if is_vector else out

    def project_rows(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """As project, for a C-contiguous float32 matrix that is known to be finite."""
        out = np.empty((rows.shape[0], self.nbytes), np.uint8)
        for start, bits, flips in self._parts(rows):
            if bits == self.hdc_dim:
                _kernels.project(rows, flips, self._padded, self._folded, bits, out)
                break
            part = np.empty((rows.shape[0], bits // 8), np.uint8)
            _kernels.project(rows, flips, self._padded, self._folded, bits, part)
            out[:, start // 8 : (start + bits) // 8] = part
        return out

    def values_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """What `project_rows` takes the signs of, [n, hdc_dim], each row times a power of two."""
        out = np.empty((rows.shape[0], self.hdc_dim), np.float32)
        for start, bits, flips in self._parts(rows):
            part = np.empty((rows.shape[0], bits), np.float32)
            _kernels.project(rows, flips, self._padded, self._folded, bits, None, part)
            out[:, start : start + bits] = part
        return out

    def _parts(self, rows: NDArray[np.float32]) -> Iterator[tuple[int, int, NDArray[np.uint64]]]:
        """First bit, number of bits and flips of the pieces in which rows are projected."""
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != self.embed_dim:
            raise ValueError(f"rows must be float32 [n, {self.embed_dim}], got {rows.shape}")
        blocks = -(-self.hdc_dim // self._folded)
        if blocks * self._block_words <= len(self._flips):
            yield 0, self.hdc_dim, self._flips
            return
        # Only narrow input to very many bits comes here, in pieces of whole bytes.
        step = _KEPT_WORDS // self._block_words // 64 * 64
        for first in range(0, blocks, step):
            count = min(step, blocks - first) * self._block_words
            flips = splitmix64(self.seed, count, first * self._block_words)
            start = first * self._folded
            yield start, min(step * self._folded, self.hdc_dim - start), flips

    def __repr__(self) -> str:
        return f"Projector(embed_dim={self.embed_dim}, hdc_dim={self.hdc_dim}, seed={self.seed:#x})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Projector):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[type[Projector], tuple[int, int, int]]:
        return Projector, self._key()

    def _key(self) -> tuple[int, int, int]:
        return self.embed_dim, self.hdc_dim, self.seed


def similarity(a: ArrayLike | bytes, b: ArrayLike | bytes) -> Any:
    """Bipolar similarity of packed signatures, 1 - 2 * hamming / bits.

    Parameters
    ----------
    a, b : array_like of uint8, [..., nbytes], or bytes
        As `project` returns them and as entries hold them. Leading axes are broadcast as numpy
        does.

    Returns
    -------
    float64 or ndarray of float64
        In [-1, 1]; 1 where all bits agree.
    """
    x, y = (
        np.frombuffer(one, np.uint8) if isinstance(one, (bytes, bytearray)) else np.asarray(one)
        for one in (a, b)
    )
    if x.dtype != np.uint8 or y.dtype != np.uint8:
        raise TypeError(f"signatures must be uint8, got {x.dtype} and {y.dtype}")
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[-1] or x.shape[-1] == 0:
        raise ValueError(f"signatures of {x.shape} and {y.shape} have no common width")
    nbytes = x.shape[-1]
    lead = np.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    shape = (*(lead or (1,)), nbytes)
    x, y = np.broadcast_to(x, shape), np.broadcast_to(y, shape)
    different = np.empty(shape[:-1], np.float64)
    step = max(1, _CHUNK_BYTES // max(1, x[:1].size))
    for start in range(0, shape[0], step):
        part = slice(start, start + step)
        different[part] = _POPCOUNT[x[part] ^ y[part]].sum(axis=-1, dtype=np.int64)
    result = 1.0 - 2.0 * different / (8 * nbytes)
    return result if lead else result[0]


def mean_pool(x: NDArray[np.float32], run: int | None = None) -> NDArray[np.float32]:
    """Means of runs of consecutive rows: float64 sums in row order, rounded once to float32.

    Parameters
    ----------
    x : ndarray of float32, [n >= 1, d], C-contiguous
    run : int, optional
        Rows per mean (the last run may be shorter); all rows by default.

    Returns
    -------
    ndarray of float32, [ceil(n / run), d]
    """
    _trusted(x, x.shape[-1], "x")
    rows = x.shape[0]
    run = rows if run is None else _integer(run, "run", 1, 2**62)
    out = np.empty((-(-rows // run), x.shape[1]), np.float32)
    _kernels.mean_pool(x, min(run, rows), out)
    return out


@dataclass(frozen=True)
class SignatureSpec:
    """What the signature of an entry's record holds.

    Parameters
    ----------
    hdc_dim : int
        Bits of the record's signature field, a multiple of 64.
    signature_tokens : int
        0: one signature of the mean of all tokens. Otherwise one sub-signature for the mean of each
        run of so many tokens, side by side from bit 0; those of the first tokens, as many as fit.
    signature_bits : int
        Bits of a sub-signature, a multiple of 64 and at most 2**20; 0 means hdc_dim.
    """

    hdc_dim: int = 4096
    signature_tokens: int = 0
    signature_bits: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "hdc_dim", _bits(self.hdc_dim, "hdc_dim"))
        tokens = _integer(self.signature_tokens, "signature_tokens", 0, 2**32 - 1)
        set_(self, "signature_tokens", tokens)
        bits = _integer(self.signature_bits, "signature_bits", 0, self.hdc_dim)
        set_(self, "signature_bits", _bits(bits, "signature_bits") if bits else 0)
        if tokens == 0 and bits not in (0, self.hdc_dim):
            raise ValueError("signature_bits needs signature_tokens >= 1")
        if tokens and self.bits > MAX_SUB_BITS:
            raise ValueError(f"signature_bits must be at most {MAX_SUB_BITS}, got {self.bits}")

    @cached_property
    def pooled(self) -> bool:
        """One signature per entry; otherwise late interaction of sub-signatures."""
        return self.signature_tokens == 0

    @cached_property
    def bits(self) -> int:
        """Bits of a query's signature: hdc_dim, or those of a sub-signature."""
        return self.signature_bits or self.hdc_dim

    @property
    def slots(self) -> int:
        """Sub-signatures that fit a record."""
        return self.hdc_dim // self.bits

    @property
    def record_bytes(self) -> int:
        """Bytes of the record's signature field."""
        return self.hdc_dim // 8

    def projector(self, embed_dim: int, seed: int = DEFAULT_SEED) -> Projector:
        """The projector of this kind of signature."""
        return Projector(embed_dim, self.bits, seed)

    def used_slots(self, n_tokens: int) -> int:
        """Sub-signatures of an entry of n_tokens tokens."""
        if self.pooled:
            return 1
        return min(-(-n_tokens // self.signature_tokens), self.slots)

    def denominator(self, query_tokens: int) -> int:
        """score = 1 - 2 * distance / denominator."""
        return self.bits if self.pooled else self.bits * query_tokens

    def score(self, distance: Any, query_tokens: int) -> Any:
        """Mean over query tokens of the largest bipolar similarity; distance may be an array."""
        return 1.0 - 2.0 * distance / self.denominator(query_tokens)


def sign_entry(
    projector: Projector,
    spec: SignatureSpec,
    keys: NDArray[np.float32],
    centre: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Signature field of an entry's record.

    Parameters
    ----------
    projector : Projector
        Of ``spec.projector(embed_dim, seed)``.
    spec : SignatureSpec
    keys : ndarray of float32, [n_tokens >= 1, embed_dim]
        C-contiguous and finite.
    centre : ndarray of float32, [embed_dim], optional
        Subtracted from each mean before it is projected.

    Returns
    -------
    ndarray of uint8, [hdc_dim // 8]
    """
    _agree(projector, spec)
    _trusted(keys, projector.embed_dim, "keys")
    if spec.pooled:
        return projector.project_rows(centred(mean_pool(keys), centre, "keys")).reshape(-1)
    runs = keys[: spec.slots * spec.signature_tokens]
    if spec.signature_tokens > 1:
        runs = mean_pool(runs, spec.signature_tokens)
    out = np.zeros(spec.record_bytes, np.uint8)
    signed = projector.project_rows(centred(runs, centre, "keys"))
    out[: signed.size] = signed.reshape(-1)
    return out


def sign_query(
    projector: Projector,
    spec: SignatureSpec,
    query: NDArray[np.float32],
    centre: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Signatures of a query, [n_tokens, embed_dim] C-contiguous and finite, centred like the keys.

    Returns
    -------
    ndarray of uint8
        Pooled: [1, hdc_dim // 8], of the mean. Sub-signatures: [n_tokens, signature_bits // 8].
    """
    return projector.project_rows(_asked(projector, spec, query, centre))


def round_query(
    projector: Projector,
    spec: SignatureSpec,
    query: NDArray[np.float32],
    centre: NDArray[np.float32] | None = None,
) -> NDArray[np.int8]:
    """A query as `sign_query` projects it, rounded to small integers instead of signs.

    Each row is divided by its largest number, times 15. Dot products with the signs of entries
    (+1 for a bit that is set, else -1) estimate cosines better than Hamming distances do, since
    numbers near zero count little (asymmetric distances: A. Gordo, F. Perronnin, CVPR 2011; a
    query in few integers: J. Gao, C. Long, "RaBitQ", SIGMOD 2024). All are integers, so these are
    the same on every machine too.

    Returns
    -------
    ndarray of int8, [1, hdc_dim] or [n_tokens, signature_bits]
        Zeros where all of a row is zero.
    """
    values = projector.values_of_rows(_asked(projector, spec, query, centre))
    out = np.empty(values.shape, np.int8)
    _kernels.round_rows(values, _MOST, out)
    return out


def _asked(
    projector: Projector,
    spec: SignatureSpec,
    query: NDArray[np.float32],
    centre: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Rows of a query that are projected."""
    _agree(projector, spec)
    _trusted(query, projector.embed_dim, "query")
    rows = mean_pool(query) if spec.pooled and len(query) > 1 else query
    return centred(rows, centre, "query")


def centred(
    rows: NDArray[np.float32], centre: NDArray[np.float32] | None, name: str
) -> NDArray[np.float32]:
    """Rows less a centre, in float32; ValueError where that is too large for it."""
    if centre is None:
        return rows
    with np.errstate(over="ignore"):
        moved = rows - centre
    if not _kernels.all_finite(moved):
        raise ValueError(f"{name}: too far from the layer's mean for float32")
    return moved


def _agree(projector: Projector, spec: SignatureSpec) -> None:
    if projector.hdc_dim != spec.bits:
        raise ValueError(f"the projector gives {projector.hdc_dim} bits, {spec} wants {spec.bits}")

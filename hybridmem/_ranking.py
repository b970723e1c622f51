"""The options of a query, and the second stage: what is said of entries, and by their keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem import _arrays

__all__ = ["KEY_RERANKS", "Ranking", "Scores", "combined", "evidence", "said_by"]

Floats = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]

#: Second stages that read keys.
KEY_RERANKS = ("pooled", "tokens", "late")
_RERANKS = ("signatures", *KEY_RERANKS)
_ORDERS = ("hamming", "norm")
#: Entries that a second stage looks at, in multiples of top_k, where none are given.
_CANDIDATES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """The checked options of a query beyond layer and number.

    Attributes
    ----------
    order : {"hamming", "norm"}
        What the signatures are ranked by: similarity alone, or the norm of the entry's centred
        mean key times the cosine that the similarity stands for.
    rerank : {None, "signatures", "pooled", "tokens", "late"}
    candidates : int
        Entries that the next stage looks at; 0 leaves it to `depth`.
    n_heads : int
        Heads that a row of keys is made of, each scored by itself.
    max_run : int
        Most entries in the result that were put one after the other; 0 is any number.
    newest : int
        Entries put last that are always in the result.
    approximate : bool
        Whether entries of a large layer may be given up by a few of the query tokens, or by the
        clusters that they are in.
    threads : int
        Most threads that scan the signatures.
    """

    order: str = "hamming"
    rerank: str | None = None
    candidates: int = 0
    n_heads: int = 1
    max_run: int = 0
    newest: int = 0
    approximate: bool = False
    threads: int = 1

    @classmethod
    def checked(cls, top_k: int, embed_dim: int, **options: Any) -> Ranking:
        """Validate what a caller gave; None stands for the default."""
        if not _NAMES.issuperset(options):
            unknown = sorted(options.keys() - _NAMES)
            raise TypeError(f"query: got the options {unknown}, want some of {sorted(_NAMES)}")
        given = {name: value for name, value in options.items() if value is not None}
        if not given:
            return _PLAIN
        order = given.get("order", "hamming")
        if order not in _ORDERS:
            raise ValueError(f"order: got {order!r:.60}, want one of {_ORDERS}")
        rerank = given.get("rerank")
        if rerank is not None and rerank not in _RERANKS:
            raise ValueError(f"rerank: got {rerank!r:.60}, want None or one of {_RERANKS}")
        for name, least in (
            ("candidates", top_k),
            ("n_heads", 1),
            ("max_run", 1),
            ("newest", 0),
            ("threads", 1),
        ):
            if name in given:
                given[name] = _arrays.count(given[name], name, least)
        if not isinstance(given.get("approximate", False), (bool, np.bool_)):
            raise TypeError(f"approximate: got {given['approximate']!r:.60}, want True or False")
        if embed_dim % given.get("n_heads", 1):
            raise ValueError(
                f"n_heads: got {given['n_heads']}, want a divisor of embed_dim={embed_dim}"
            )
        return cls(**given)

    @property
    def is_plain(self) -> bool:
        """Whether the order of the signatures is the result."""
        return self.rerank is None and not self.max_run and not self.newest

    @property
    def scans_all(self) -> bool:
        """Whether the whole order of a layer is wanted, and not its first few."""
        return self.order == "norm" or self.max_run > 0 or self.newest > 0

    def depth(self, top_k: int) -> int:
        """Return how many entries the search by signatures is to return."""
        if self.is_plain:
            return top_k
        return max(top_k, self.candidates or _CANDIDATES * top_k)


_NAMES = frozenset(field.name for field in dataclasses.fields(Ranking))
_PLAIN = Ranking()


def said_by(keys: Sequence[Floats], rerank: str, query: Floats, n_heads: int) -> Scores:
    """Return what the keys of entries say to a query, from which `combined` makes their scores.

    Parameters
    ----------
    keys : sequence of float32 arrays, shape (n_i, embed_dim)
    rerank : {"pooled", "tokens", "late"}
        "pooled": dot product of the mean query with the mean key. "tokens": share of the softmax
        attention that goes to the entry's tokens, among all candidates, mean over query tokens and
        heads. "late": mean over query tokens and heads of the largest dot product with one of the
        entry's tokens (late interaction: O. Khattab, M. Zaharia, "ColBERT", SIGIR 2020).
    query : float32 array, shape (m, embed_dim)
    n_heads : int

    Returns
    -------
    float64 array, shape (n, heads, m)
    """
    if rerank == "pooled":
        query = query.mean(axis=0, keepdims=True, dtype=np.float64)
    return np.stack([evidence(rerank, query, key, n_heads) for key in keys])


def evidence(rerank: str, query: npt.NDArray[Any], keys: Floats, n_heads: int) -> Scores:
    """Return what one entry's keys say to each row of a query, shape (heads, m).

    The rows of "pooled" are mean queries, which have one head.
    """
    if rerank == "pooled":
        return np.asarray(query @ keys.mean(axis=0, dtype=np.float64))[None]
    head_dim = query.shape[1] // n_heads
    columns = [slice(head * head_dim, (head + 1) * head_dim) for head in range(n_heads)]
    products = [_products(query[:, part], keys[:, part]) for part in columns]
    if rerank == "late":
        return np.stack([product.max(axis=1) for product in products]).astype(np.float64)
    return np.stack([_log_sum_exp(product / math.sqrt(head_dim)) for product in products])


def combined(rerank: str, said: Scores) -> Scores:
    """Return the score of each entry from what all of them said, shape (n, heads, m)."""
    if rerank == "tokens":
        mass = np.exp(said - said.max(axis=0))
        said = mass / mass.sum(axis=0)
    scores: Scores = said.mean(axis=(1, 2))
    return scores


def _products(query: Floats, keys: Floats) -> Floats | Scores:
    """Return the dot products of rows, in float64 where float32 overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        products: Floats | Scores = query @ keys.T
    if not np.isfinite(products).all():
        products = query.astype(np.float64) @ keys.astype(np.float64).T
    return products


def _log_sum_exp(logits: Floats | Scores) -> Scores:
    wide = logits.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    sums: Scores = np.exp(wide - top).sum(axis=1, keepdims=True)
    return np.asarray((top + np.log(sums))[:, 0])

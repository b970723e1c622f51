"""The rankings that are compared: each orders the chunks of one layer by a query.

Signatures come from ``hybridmem.hdc``; the search is numpy, so that a ranking can be tried before
the package has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridmem.hdc import Projector, splitmix64

from .smollm2 import HEAD_DIM, KV_HEADS, WIDTH

Floats = NDArray[np.float32]
Scores = NDArray[np.floating[Any]]


@dataclass
class Keys:
    """What one layer of a memory may be indexed by; ``[tokens, 192]``, and the layer's mean key."""

    unrotated: Floats
    rotated: Floats
    mean: Floats
    chunk: int  # tokens of an entry


@dataclass
class Query:
    """The last query tokens of a question in one layer, summed over the heads of each group."""

    unrotated: Floats
    rotated: Floats
    mean: Floats
    chunk: int


def grouped(queries: Floats) -> Floats:
    """``[n, 576]`` summed over the query heads of each K/V head: ``[n, 192]``."""
    return queries.reshape(len(queries), KV_HEADS, -1, HEAD_DIM).sum(2).reshape(len(queries), WIDTH)


class Ranking(Protocol):
    """One way to order chunks."""

    @property
    def name(self) -> str: ...

    def entry_bytes(self, chunk: int) -> int: ...

    def index(self, keys: Keys) -> Any: ...

    def score(self, index: Any, query: Query) -> Scores: ...


def words(signatures: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Packed signatures as 64-bit words, word by word: ``[words, n]``."""
    return np.ascontiguousarray(signatures.view(np.uint64).T)


def hamming(index: NDArray[np.uint64], query: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """Distances ``[m, n]`` of signatures given as ``[words, n]`` and ``[words, m]``."""
    out = np.zeros((query.shape[1], index.shape[1]), np.uint16)
    for word, many in zip(query, index, strict=True):
        for row, one in zip(out, word, strict=True):
            row += np.bitwise_count(many ^ one)
    return out


def pooled(rows: Floats, run: int) -> Floats:
    """Means of runs of consecutive rows."""
    return rows.reshape(-1, run, rows.shape[1]).mean(1, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True)
class Recency:
    """The newest chunks."""

    name: str = "recency"

    def entry_bytes(self, chunk: int) -> int:
        return 0

    def index(self, keys: Keys) -> int:
        return len(keys.unrotated) // keys.chunk

    def score(self, index: int, query: Query) -> NDArray[np.float64]:
        return np.arange(index, dtype=np.float64)


@dataclass(frozen=True)
class Pooled:
    """One signature of the mean key of a chunk; the query is the mean of its tokens."""

    name: str
    rotated: bool = False
    centre: bool = False
    norms: bool = False
    bits: int = 4096

    def entry_bytes(self, chunk: int) -> int:
        return self.bits // 8

    def index(self, keys: Keys) -> tuple[NDArray[np.uint64], Floats]:
        means = pooled(keys.rotated if self.rotated else keys.unrotated, keys.chunk)
        if self.centre:
            means = means - keys.mean
        return words(Projector(means.shape[1], self.bits).project(means)), np.linalg.norm(
            means, axis=1
        )

    def score(self, index: Any, query: Query) -> NDArray[np.float64]:
        signatures, norms = index
        row = (query.rotated if self.rotated else query.unrotated).mean(0, keepdims=True)
        distance = hamming(signatures, words(Projector(row.shape[1], self.bits).project(row)))[0]
        return (
            norms * np.cos(np.pi * distance / self.bits)
            if self.norms
            else -distance.astype(np.float64)
        )


@dataclass(frozen=True)
class Late:
    """A signature a run of ``tokens`` tokens; mean over query tokens of the best of a chunk."""

    name: str
    bits: int
    tokens: int = 1
    centre_keys: bool = True
    centre_query: bool = True
    rotated: bool = False
    likeness: Callable[[Scores], Scores] | None = None  # of the best distances, in parts of 1

    def entry_bytes(self, chunk: int) -> int:
        return chunk // self.tokens * self.bits // 8

    def index(self, keys: Keys) -> NDArray[np.uint64]:
        rows = keys.rotated if self.rotated else keys.unrotated
        rows = pooled(rows, self.tokens) if self.tokens > 1 else rows
        if self.centre_keys:
            rows = rows - keys.mean
        return words(Projector(rows.shape[1], self.bits).project(rows))

    def score(self, index: NDArray[np.uint64], query: Query) -> NDArray[np.float64]:
        rows = query.rotated if self.rotated else query.unrotated
        if self.centre_query:
            rows = rows - query.mean
        distance = hamming(index, words(Projector(rows.shape[1], self.bits).project(rows)))
        run = query.chunk // self.tokens
        if self.likeness is None:
            return -best(distance, run, np.minimum)
        least = np.minimum.reduce(distance.reshape(len(distance), -1, run), axis=2)
        return np.asarray(self.likeness(least / self.bits).mean(0))


def projected(rows: Floats, bits: int) -> Floats:
    """What `Projector` takes the signs of, for rows that it does not fold."""
    padded = 1 << (rows.shape[1] - 1).bit_length()
    assert padded <= 4 * bits
    blocks = -(-bits // padded)
    words = splitmix64(Projector(rows.shape[1], bits).seed, blocks * 3 * padded // 64)
    flipped = np.unpackbits(np.asarray(words, "<u8").view(np.uint8), bitorder="little")
    signs = np.where(flipped.reshape(blocks, 3, padded) == 1, -1, 1).astype(np.float32)
    out = []
    for flips in signs:
        y = np.pad(rows, ((0, 0), (0, padded - rows.shape[1])))
        for flip in flips:
            y = y * flip
            stride = 1
            while stride < padded:
                a, b = y.reshape(len(y), -1, 2, stride).transpose(2, 0, 1, 3)
                y = np.stack((a + b, a - b), axis=2).reshape(len(y), padded)
                stride *= 2
        out.append(y)
    return np.concatenate(out, axis=1)[:, :bits]


@dataclass(frozen=True)
class WholeQuery:
    """The signatures of `Late`, compared with the query as it is before its signs are taken.

    Attributes
    ----------
    levels : int
        What the query is rounded to: integers up to this, by its largest number; 0 for not at all.
    """

    name: str
    bits: int
    levels: int = 0

    def entry_bytes(self, chunk: int) -> int:
        return chunk * self.bits // 8

    def index(self, keys: Keys) -> NDArray[np.uint8]:
        rows = keys.unrotated - keys.mean
        return Projector(rows.shape[1], self.bits).project(rows)

    def score(self, index: NDArray[np.uint8], query: Query) -> NDArray[np.float64]:
        rows = projected(query.unrotated - query.mean, self.bits)
        if self.levels:
            rows = np.rint(rows * (self.levels / np.abs(rows).max(axis=1, keepdims=True)))
        signs = np.unpackbits(index, axis=1, bitorder="little").astype(np.float32) * 2 - 1
        norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        return best(rows @ signs.T / norms, query.chunk, np.maximum)


@dataclass(frozen=True)
class Staged:
    """``first`` keeps the best ``keep`` chunks, of all documents together; ``second`` orders those.

    ``score`` gives both, side by side; `decisive` makes of them what decides.
    """

    name: str
    first: Ranking
    second: Ranking
    keep: int = 40

    def entry_bytes(self, chunk: int) -> int:
        return self.second.entry_bytes(chunk)

    def index(self, keys: Keys) -> tuple[Any, Any]:
        return self.first.index(keys), self.second.index(keys)

    def score(self, index: Any, query: Query) -> Scores:
        both = self.first.score(index[0], query), self.second.score(index[1], query)
        return np.stack(both, axis=1)

    def settled(self, scores: Scores) -> Scores:
        """Scores of the entries that are kept, -inf of the others."""
        out = np.full(len(scores), -np.inf)
        kept = np.argsort(-scores[:, 0], kind="stable")[: self.keep]
        out[kept] = scores[kept, 1]
        return out


@dataclass(frozen=True)
class Layers:
    """What the layers below found counts too, since entries of all layers are of the same tokens.

    ``score`` is that of one layer; ``together`` makes of the layers' scores what decides.

    Attributes
    ----------
    how : {"ranks", "excess", "z"}
        A layer counts for its ``top`` best entries with their reciprocal ranks, or with their
        scores less that of the last of them; or for all entries with its scores less their mean, in
        parts of their standard deviation.
    decay : float
        What the count of the layers below is multiplied by in every layer.
    offset : float
        Added to the ranks, which count from 1.
    """

    name: str
    of: Ranking
    how: str = "ranks"
    top: int = 10
    decay: float = 1.0
    offset: float = 0.0

    def entry_bytes(self, chunk: int) -> int:
        return self.of.entry_bytes(chunk)

    def index(self, keys: Keys) -> Any:
        return self.of.index(keys)

    def score(self, index: Any, query: Query) -> Scores:
        return self.of.score(index, query)

    def together(self, layers: list[Scores]) -> Scores:
        """Scores of the last of ``layers``, the first ones of the model up to it."""
        total = np.zeros(len(layers[-1]))
        for scores in layers:
            total = total * self.decay + self._counted(settled(self.of, scores))
        return total

    def _counted(self, scores: Scores) -> Scores:
        if self.how == "z":
            return np.asarray((scores - scores.mean()) / scores.std())
        out = np.zeros(len(scores))
        best = np.argsort(-scores, kind="stable")[: self.top]
        if self.how == "excess":
            out[best] = scores[best] - scores[best[-1]]
        else:
            out[best] = 1 / (self.offset + np.arange(1, len(best) + 1))
        return out


def settled(ranking: Ranking, scores: Scores) -> Scores:
    """What the ranking of one layer orders entries by."""
    return ranking.settled(scores) if isinstance(ranking, Staged) else scores


def decisive(ranking: Ranking, layers: list[Scores]) -> Scores:
    """What ``ranking`` orders the entries of a layer by: the last of ``layers``, whose scores
    stand in the order of the model."""
    if isinstance(ranking, Layers):
        return ranking.together(layers)
    return settled(ranking, layers[-1])


def reranked(name: str, bits: int) -> Staged:
    """What the store does for ``rerank="signatures"``."""
    return Staged(name, Late("", bits), WholeQuery("", bits, levels=15))


@dataclass(frozen=True)
class ExactLate:
    """Late interaction with the keys themselves: reads all of them."""

    name: str
    cosine: bool = False

    def entry_bytes(self, chunk: int) -> int:
        return chunk * WIDTH * 4

    def index(self, keys: Keys) -> Floats:
        rows = keys.unrotated - keys.mean
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) if self.cosine else rows

    def score(self, index: Floats, query: Query) -> NDArray[np.float64]:
        rows = query.unrotated - query.mean
        if self.cosine:
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return best(rows @ index.T, query.chunk, np.maximum)


def best(scores: NDArray[Any], run: int, pick: np.ufunc) -> NDArray[np.float64]:
    """Mean over rows of the best of each run of columns."""
    return pick.reduce(scores.reshape(len(scores), -1, run), axis=2).mean(0, dtype=np.float64)


# Measured by needle recall only: no answers are generated from what these retrieve.
NEEDLES_ONLY = frozenset(
    (
        "pooled 4096, unrotated",
        "pooled 4096, centred, norms",
        "tokens x 256, query not centred",
        "tokens x 256, rotated keys",
        "tokens x 256, nothing centred",
    )
)
# Measured once more with a cache that does not keep the first tokens.
WITHOUT_SINK = frozenset(("pooled 4096, centred", "tokens x 256"))


def all_rankings() -> list[Ranking]:
    """The rankings of the tables, in their order."""
    return [
        Recency(),
        Pooled("pooled 4096, rotated keys", rotated=True),
        Pooled("pooled 4096, unrotated"),
        Pooled("pooled 4096, centred", centre=True),
        Pooled("pooled 4096, centred, norms", centre=True, norms=True),
        Late(
            "tokens x 256, rotated keys", 256, centre_keys=False, centre_query=False, rotated=True
        ),
        Late("16 tokens x 256", 256, tokens=16),
        Late("tokens x 64", 64),
        Late("tokens x 128", 128),
        Late("tokens x 256", 256),
        Late("tokens x 512", 512),
        Late("tokens x 256, query not centred", 256, centre_query=False),
        Late("tokens x 256, nothing centred", 256, centre_keys=False, centre_query=False),
        Staged("tokens x 64 keeps 4k, x 256 decides", Late("", 64), Late("", 256)),
        Layers("tokens x 256, layers fused", Late("", 256)),
        Layers("tokens x 512, layers fused", Late("", 512)),
        Layers("tokens x 1024, layers fused", Late("", 1024)),
        Layers("tokens x 128, layers fused", Late("", 128)),
        Layers("16 tokens x 256, layers fused", Late("", 256, tokens=16)),
        ExactLate("late interaction, exact keys"),
        ExactLate("late interaction, exact cosine", cosine=True),
        reranked("tokens x 256, re-ranked", 256),
        Layers("tokens x 256, re-ranked, layers fused", reranked("", 256)),
        reranked("tokens x 512, re-ranked", 512),
        Layers("tokens x 512, re-ranked, layers fused", reranked("", 512)),
        WholeQuery("tokens x 256, whole query", 256),
        Layers("tokens x 256, whole query, layers fused", WholeQuery("", 256)),
        Layers("exact keys, layers fused", ExactLate("")),
        Layers("exact cosine, layers fused", ExactLate("", cosine=True)),
    ]

"""The audit of a layer: how well each ranking finds what a brute force over its keys finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridmem._index import LayerIndex
from hybridmem._ranking import KEY_RERANKS, combined, evidence
from hybridmem._signatures import Bytes, Floats, Signatures, first_mean
from hybridmem._view import IndexView
from hybridmem.config import Config
from hybridmem.hdc import SignatureSpec, sign_query
from hybridmem.results import Audit

__all__ = ["Layer", "audit"]

#: Queries that must be given for the mean of the others to stand for a layer's mean query.
_CENTRING_QUERIES = 8
_MAX_SLOTS = 1 << 10

Ids = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer that is looked at.

    Attributes
    ----------
    ids : uint64 array, shape (n,)
        The entries, ascending.
    n_tokens, paddings : uint32 arrays, shape (n,)
    signed : callable
        Iterates over id, keys and the record's signature of each of them.
    view : IndexView
        The signatures as the store searches them, of these entries and perhaps others.
    """

    number: int
    ids: Ids
    n_tokens: npt.NDArray[np.uint32]
    paddings: npt.NDArray[np.uint32]
    signed: Callable[[], Iterable[tuple[int, Floats, Bytes]]]
    view: IndexView


def audit(
    config: Config,
    signatures: Signatures,
    layer: Layer,
    queries: Sequence[Floats],
    exact: Sequence[Floats] | None,
    top_k: int,
    candidates: int,
    n_heads: int,
    rerank: bool,
) -> Audit:
    """Compare rankings with brute force.

    Parameters
    ----------
    queries : sequence of float32 arrays, shape (m_i, embed_dim)
        In the space that is indexed.
    exact : the same, optional
        In the space of the keys, where that is another one.
    rerank : bool
        Whether the keys are those that a second stage reads.
    """
    forms = _other_forms(config, signatures, layer, queries)
    said: dict[str, list[npt.NDArray[Any]]] = {truth: [] for truth in KEY_RERANKS}
    asked = queries if exact is None else exact
    centred = [
        signatures.centred_query(layer.number, rows) if exact is None else rows for rows in asked
    ]
    rows = {
        "pooled": np.stack([rows.mean(axis=0, dtype=np.float64) for rows in asked]),
        "tokens": np.concatenate(asked),
        "late": np.concatenate(centred),
    }
    other_keys = 0
    for _, keys, signature in layer.signed():
        other_keys += not signatures.is_of(layer.number, keys, signature)
        for truth in KEY_RERANKS:
            found = evidence(truth, rows[truth], keys, n_heads)
            said[truth].append(found.astype(np.float64 if truth == "pooled" else np.float32))
        for form in forms:
            form.add(keys)
    scores = _scores({truth: np.stack(some) for truth, some in said.items()}, asked)

    k = min(top_k, len(layer.ids))
    wanted = {truth: [_best(layer.ids, one)[:k] for one in of] for truth, of in scores.items()}
    own = _described(signatures.spec, centred=layer.number in signatures.centres)
    signed = [signatures.of_query(layer.number, rows) for rows in queries]
    depth = max(k, min(candidates, len(layer.ids)))
    base = [ids for ids, _ in layer.view.search(signed, depth, layer.ids)]
    orders = {
        "random": None,
        "recency": [layer.ids[::-1]] * len(queries),
        f"{own}: this store": base,
    }
    if any(layer.view.is_large(query, len(layer.ids), k) for query in signed):
        orders[f"{own}, approximate: this store"] = [
            ids for ids, _ in layer.view.search(signed, k, layer.ids, approximate=True)
        ]
    if signatures.spec.pooled and layer.number in signatures.centres:
        everything = layer.view.search(signed, len(layer.ids), layer.ids)
        orders[f"{own}, by norm: this store"] = [
            signatures.by_norm(ids, far, layer.paddings[np.searchsorted(layer.ids, ids)])[0]
            for ids, far in everything
        ]
    orders[f"{own}, {depth} re-ranked by signatures: this store"] = [
        _best(ids, signatures.cosines(layer.number, layer.view, query, ids).mean(axis=(1, 2)))
        for query, ids in zip(queries, base, strict=True)
    ]
    if rerank:
        for truth in KEY_RERANKS:
            orders[f"{own}, {depth} re-ranked by {truth}: this store"] = [
                _best(np.sort(ids), one[np.searchsorted(layer.ids, np.sort(ids))])
                for ids, one in zip(base, scores[truth], strict=True)
            ]
    for form in forms:
        orders[form.name] = form.search(k)
    chance = np.full(len(queries), k / len(layer.ids))
    recall = {
        name: {
            truth: chance
            if order is None
            else np.array([_share(mine[:k], best) for mine, best in zip(order, of, strict=True)])
            for truth, of in wanted.items()
        }
        for name, order in orders.items()
    }
    return Audit(
        layer_idx=layer.number,
        entries=len(layer.ids),
        queries=len(queries),
        top_k=k,
        other_keys=other_keys,
        recall=recall,
    )


def _scores(said: dict[str, npt.NDArray[Any]], asked: Sequence[Floats]) -> dict[str, list[Scores]]:
    """Scores of all entries for each query, by truth; `said` is [entries, heads, query rows]."""
    ends = np.cumsum([len(rows) for rows in asked])
    scores: dict[str, list[Scores]] = {}
    for truth, some in said.items():
        parts = [slice(at, at + 1) for at in range(len(asked))]
        if truth != "pooled":
            parts = [
                slice(end - len(rows), end) for end, rows in zip(ends.tolist(), asked, strict=True)
            ]
        scores[truth] = [combined(truth, some[:, :, part].astype(np.float64)) for part in parts]
    return scores


def _best(ids: Ids, scores: Scores) -> Ids:
    return ids[np.lexsort((ids, -scores))]


def _share(found: Ids, wanted: Ids) -> float:
    return float(np.isin(wanted, found).mean())


def _described(spec: SignatureSpec, *, centred: bool) -> str:
    if spec.pooled:
        name = "pooled"
    else:
        run = spec.signature_tokens
        name = "every token" if run == 1 else f"every {run} tokens"
    return f"{name}, {spec.bits:,} bits{', centred' if centred else ''}"


class _Form:
    """Signatures that the store might have instead, of the same keys."""

    def __init__(
        self,
        config: Config,
        layer: Layer,
        queries: Sequence[Floats],
        centre: Floats | None,
        query_centres: Sequence[Floats | None],
        by_norm: bool = False,
    ) -> None:
        self._signatures = Signatures(config)
        if centre is not None:
            self._signatures.centres = {layer.number: (centre, None)}
        spec = self._signatures.spec
        self.name = _described(spec, centred=centre is not None) + ", by norm" * by_norm
        projector = spec.projector(config.embed_dim, config.seed)
        self._queries = [
            sign_query(projector, spec, rows, middle)
            for rows, middle in zip(queries, query_centres, strict=True)
        ]
        self._layer, self._by_norm = layer, by_norm
        self._index = LayerIndex(spec)
        self._paddings: list[int] = []

    def add(self, keys: Floats) -> None:
        """Sign the next entry."""
        signature, padding = self._signatures.of_entry(self._layer.number, keys)
        at = len(self._paddings)
        self._index.extend(
            self._layer.ids[at : at + 1], self._layer.n_tokens[at : at + 1], signature[None]
        )
        self._paddings.append(padding)

    def search(self, k: int) -> list[Ids]:
        """Best first, for each query."""
        ids = self._layer.ids
        found = self._index.view().search(self._queries, len(ids) if self._by_norm else k)
        if not self._by_norm:
            return [best for best, _ in found]
        paddings = np.array(self._paddings, np.uint32)
        return [
            self._signatures.by_norm(best, far, paddings[np.searchsorted(ids, best)])[0]
            for best, far in found
        ]


def _other_forms(
    config: Config, signatures: Signatures, layer: Layer, queries: Sequence[Floats]
) -> list[_Form]:
    """The usual forms, but for the one that the store has."""
    slots = min(int(layer.n_tokens.max()), _MAX_SLOTS)
    pooled = config.replace(hdc_dim=4096, signature_tokens=0, signature_bits=0)
    tokens = config.replace(hdc_dim=256 * slots, signature_tokens=1, signature_bits=256)
    mean_key, mean_query = signatures.centres.get(layer.number, (None, None))
    if mean_key is None:
        mean_key = first_mean(keys for _, keys, _ in layer.signed())
    middles = _others_mean(queries) if mean_query is None else [mean_query] * len(queries)
    plain: list[Floats | None] = [None] * len(queries)
    forms = [
        _Form(pooled, layer, queries, None, plain),
        _Form(pooled, layer, queries, mean_key, middles),
        _Form(pooled, layer, queries, mean_key, middles, by_norm=True),
        _Form(tokens, layer, queries, None, plain),
        _Form(tokens, layer, queries, mean_key, middles),
    ]
    own = _described(signatures.spec, centred=layer.number in signatures.centres)
    return [form for form in forms if form.name not in (own, f"{own}, by norm")]


def _others_mean(queries: Sequence[Floats]) -> list[Floats | None]:
    """For each query the mean of the tokens of all others, where these are enough."""
    if len(queries) < _CENTRING_QUERIES:
        return [None] * len(queries)
    sums = [rows.sum(axis=0, dtype=np.float64) for rows in queries]
    total, count = np.sum(sums, axis=0), sum(len(rows) for rows in queries)
    return [
        ((total - mine) / (count - len(rows))).astype(np.float32)
        for mine, rows in zip(sums, queries, strict=True)
    ]

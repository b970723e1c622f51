"""What a store answers with: hits, entries, statistics."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hybridmem import _html
from hybridmem import _text as text
from hybridmem.errors import CorruptStoreError

__all__ = ["Audit", "Entry", "Fault", "Hit", "Hits", "Report", "Stats"]

Stored = TypeVar("Stored", bound="_Stored")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Stored:
    """What hits and entries have in common.

    Attributes
    ----------
    entry_id : int
    layer_idx : int
    n_tokens : int
    importance : float
    timestamp : int
        Of the put, in nanoseconds since the Unix epoch.
    access_count : int
        Queries that returned the entry before.
    keys, values : float32 arrays, shape (n_tokens, embed_dim)
        Read-only. They stay valid and unchanged for as long as they are held, through eviction,
        compaction and close. In a float32 store they are views of the mapped shard.
    escaped_source : bytes or None
        Where the entry comes from, as its shard has it; None where `put` was not told. `source`
        has it parsed, `source_json` as JSON text; both are made when they are asked for.
    """

    entry_id: int
    layer_idx: int
    n_tokens: int
    importance: float
    timestamp: int
    access_count: int
    keys: npt.NDArray[np.float32] = dataclasses.field(repr=False)
    values: npt.NDArray[np.float32] = dataclasses.field(repr=False)
    escaped_source: bytes | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def of(cls: type[Stored], fields: dict[str, Any]) -> Stored:
        """Return one with these fields, which must be all; it keeps the dictionary.

        `__init__` sets one after the other past the freeze, which takes as long as finding them.
        """
        made = object.__new__(cls)
        object.__setattr__(made, "__dict__", fields)
        return made

    @property
    def source_json(self) -> str | None:
        """What `put` was given as `source`, as JSON text."""
        if self.escaped_source is None:
            return None
        text: str = json.loads(b'"%s"' % self.escaped_source)
        return text

    @property
    def source(self) -> Any:
        """What `put` was given as `source`, as JSON gives it back: tuples are lists."""
        try:
            text = self.source_json
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(
                f"the source of entry {self.entry_id} is not JSON: {error}"
            ) from None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Entry(_Stored):
    """An entry with all fields of its record.

    Attributes
    ----------
    shard_idx : int
        Number of the shard that holds keys and values, 0 where they are not written yet.
    padding : int
        The float32 bits of the norm of the centred mean key in a calibrated layer, else 0.
    signature : bytes
        Packed bits.
    """

    shard_idx: int
    padding: int
    signature: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Hit(_Stored):
    """An entry that a query found.

    Attributes
    ----------
    score : float
        Bipolar similarity of the signatures, `1 - 2 * hamming / hdc_dim`, in [-1, 1]. In a store
        with sub-signatures the mean over query tokens of the largest similarity to one of the
        entry's.
    """

    score: float


class Hits(list[Hit]):
    """What a query found, best first: a list, which a notebook shows as a table.

    Attributes
    ----------
    missing : tuple of str
        Partitions of a cluster that did not answer, where that was to be reported and not raised.
    """

    missing: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        has_source = any(hit.source_json for hit in self)
        rows = [
            (
                rank,
                f"{hit.score:+.4f}",
                hit.entry_id,
                hit.n_tokens,
                f"{hit.importance:.4g}",
                *([text.short(hit.source_json)] * has_source),
            )
            for rank, hit in enumerate(self, 1)
        ]
        layers = ", ".join(map(str, sorted({hit.layer_idx for hit in self})))
        caption = text.plural(len(self), "hit") + (f" of layer {layers}" if layers else "")
        header = ("rank", "score", "id", "tokens", "importance", *(["source"] * has_source))
        return _html.table(caption, header, rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts and sizes of a store.

    Attributes
    ----------
    entries : int
        Live entries, flushed or not.
    entries_by_layer : dict of int to int
    tokens : int
        Tokens of the live entries.
    shards : int
        Committed shards.
    disk_bytes : int
        Sum of the sizes of all files of the directory.
    live_bytes, dead_bytes : int
        Bytes of shards and records on disk that belong to live entries, and to evicted or deleted
        ones that a compaction would give back.
    unflushed_bytes : int
        Bytes of keys and values that the next flush makes durable.
    generation : int
        Number of the last commit.
    queries, hits, evicted : int
        Queries answered, entries returned by them and entries evicted since this store object was
        opened.
    """

    entries: int
    entries_by_layer: dict[int, int]
    tokens: int
    shards: int
    disk_bytes: int
    live_bytes: int
    dead_bytes: int
    unflushed_bytes: int
    generation: int
    queries: int
    hits: int
    evicted: int

    def _repr_html_(self) -> str:
        shown = [f"{layer}: {n:,}" for layer, n in list(self.entries_by_layer.items())[:12]]
        more = len(self.entries_by_layer) - len(shown)
        return _html.pairs(
            "Stats",
            [
                ("entries", f"{self.entries:,} of {text.plural(self.tokens, 'token')}"),
                ("layers", (", ".join(shown) or "none") + (f", and {more} more" if more else "")),
                ("on disk", f"{text.size(self.disk_bytes)} in {text.plural(self.shards, 'shard')}"),
                ("live", text.size(self.live_bytes)),
                ("dead", text.size(self.dead_bytes)),
                ("not flushed", text.size(self.unflushed_bytes)),
                ("generation", f"{self.generation:,}"),
                ("queries", f"{self.queries:,}, {text.plural(self.hits, 'hit')}"),
                ("evicted", f"{self.evicted:,}"),
            ],
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something in a store that is not what was committed.

    Attributes
    ----------
    file : str
        Name of the file in the store's directory.
    message : str
    offset : int or None
        Byte offset in the file.
    records : tuple of (int, int) or None
        First and last record of entries.bin that are affected.
    entry_id : int or None
        The entry that is affected, where it is one.
    """

    file: str
    message: str
    offset: int | None = None
    records: tuple[int, int] | None = None
    entry_id: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found, or `salvage` kept.

    Attributes
    ----------
    path : str
    entries : int
        Live entries that there should be.
    sound : int
        Those of them that verify, with all of their tensors.
    faults : tuple of Fault
    orphans : tuple of str
        Files that no commit names, left by a writer that died; the next writer removes them.
    """

    path: str
    entries: int
    sound: int
    faults: tuple[Fault, ...]
    orphans: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything verifies."""
        return not self.faults


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Audit:
    """How much of what a brute force over the keys of a layer finds each ranking finds too.

    Attributes
    ----------
    layer_idx : int
    entries, queries : int
        How many were compared.
    top_k : int
        Entries that each ranking returns.
    other_keys : int
        Entries whose signatures were made of other keys than those compared (`index_keys`): if
        there are many, recall against these keys says little.
    recall : dict of str to dict of str to float64 array, shape (queries,)
        By ranking, by what brute force scored the keys by ("pooled", "tokens" or "late", as
        `rerank` of `query` does), for each query: the share of the best `top_k` of all entries that
        are among the first `top_k` of the ranking. For "random" its expectation.
    """

    layer_idx: int
    entries: int
    queries: int
    top_k: int
    other_keys: int
    recall: dict[str, dict[str, npt.NDArray[np.float64]]] = dataclasses.field(repr=False)

    def mean(self) -> dict[str, dict[str, float]]:
        """Return the mean recall over queries, by ranking and by what brute force scored by."""
        return {
            ranking: {truth: float(each.mean()) for truth, each in by_truth.items()}
            for ranking, by_truth in self.recall.items()
        }

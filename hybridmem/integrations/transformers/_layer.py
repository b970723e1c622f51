"""One layer of the cache: a window of keys and values, whose overflow goes to the store."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from hybridmem.integrations.transformers._call import Call, current
from hybridmem.integrations.transformers._entries import Placement
from hybridmem.integrations.transformers._rope import Angles, unrotate

if TYPE_CHECKING:
    from hybridmem.integrations.transformers._cache import HybridCache

__all__ = ["HybridLayer", "Matrix", "Row"]

Matrix = npt.NDArray[np.float32]


@dataclasses.dataclass
class Row:
    """What one row of the batch, one conversation, has given away in one layer.

    Attributes
    ----------
    entry_ids : list of int
        Its entries in the store, oldest first.
    sink_keys, sink_values : tensor [kv_heads, n, head_dim] or None
        The first tokens of the conversation, which always stay.
    taken : int
        Tokens that have left the window so far, padding not counted.
    """

    entry_ids: list[int] = dataclasses.field(default_factory=list)
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    taken: int = 0
    _places: dict[int, int] = dataclasses.field(default_factory=dict, repr=False)
    _array: npt.NDArray[np.uint64] | None = dataclasses.field(default=None, repr=False)

    def own(self) -> dict[int, int]:
        """Return the place of each id in `entry_ids`."""
        if len(self._places) != len(self.entry_ids):
            self._places = {entry_id: at for at, entry_id in enumerate(self.entry_ids)}
        return self._places

    def ids(self) -> npt.NDArray[np.uint64]:
        """Return `entry_ids` as an array."""
        if self._array is None or len(self._array) != len(self.entry_ids):
            self._array = np.array(self.entry_ids, np.uint64)
        return self._array

    def copy(self) -> Row:
        """Return a copy that can go another way."""
        return dataclasses.replace(self, entry_ids=list(self.entry_ids))

    @property
    def n_sinks(self) -> int:
        """Tokens kept for good."""
        return 0 if self.sink_keys is None else int(self.sink_keys.shape[1])


class HybridLayer(CacheLayerMixin):
    """A layer that keeps a window and lets older tokens go to the store in chunks.

    It takes new keys in `update` and hands them to the attention function with all that it holds;
    that function calls `evict` when the keys have been attended to.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: HybridCache, layer_idx: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer_idx = layer_idx
        self.rows: list[Row] = []
        self._untaken = self._settled = False
        self.reset()

    # -- what transformers asks of a layer ---------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes and types from the first keys and values."""
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"layer {self.layer_idx}: keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} differ in shape; the store needs the same width of "
                "both"
            )
        batch, heads, _, head_dim = key_states.shape
        self.cache.check_layer(heads * head_dim, key_states.dtype)
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys = key_states.new_empty((batch, heads, 0, head_dim))
        self.values = key_states.new_empty((batch, heads, 0, head_dim))
        if not self.rows:  # else they were loaded
            self.rows = [Row() for _ in range(batch)]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new keys and values and return all that is held, the new ones last.

        Raises
        ------
        RuntimeError
            Outside `retrieval(model)`, where what leaves the window would be lost.
        """
        call = current.call
        if call is None or call.layer is not None or self._untaken:
            raise RuntimeError(
                "a HybridCache works only inside `with retrieval(model):`, because what leaves "
                "its window is found again by a search with the query, which a cache never sees"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.rows):
            raise ValueError(
                f"this HybridCache holds {len(self.rows)} sequences, got a batch of "
                f"{key_states.shape[0]}"
            )
        count = key_states.shape[-2]
        self.cache.track.extend(call, self.seen, self.base, len(self.rows), count)
        self.keys = torch.cat((self.keys, key_states.detach()), dim=-2)
        self.values = torch.cat((self.values, value_states.detach()), dim=-2)
        self.seen += count
        self._untaken = True
        call.layer = self
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys `update` will hand out, and the index of the first of them."""
        return self.held + query_length, self.base

    def get_seq_length(self) -> int:
        """Return the number of tokens seen: positions of new ones are counted from it."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Forget the conversation; its entries stay in the store."""
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = 0
        self.rows = []
        self.recent: torch.Tensor | None = None  # newest queries, [batch, n, embed_dim]
        self.recent_valid: torch.Tensor | None = None
        self.query_sum: Matrix | None = None
        self.query_count = 0
        self.searched: Any = None  # hits of the last search, and the state of the layer then
        self.memory: Any = None  # the tensors made of them
        self._untaken = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refuse: entries belong to one sequence each."""
        raise ValueError("HybridCache does not support beam search; use num_beams=1")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what has gone to the store does not come back."""
        raise ValueError(
            "HybridCache cannot be cropped, so assisted decoding and prompt lookup are not "
            "supported; use branch() before what you may want to take back"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: entries belong to one sequence each."""
        raise ValueError(
            "the batch of a HybridCache cannot be repeated, because entries belong to one sequence "
            "each; use branch() for each"
        )

    def batch_select_indices(self, indices: Any) -> None:
        """Refuse: entries belong to one sequence each."""
        raise ValueError(
            "rows of the batch of a HybridCache cannot be selected; give each sequence a cache of "
            "its own"
        )

    # -- what the attention function asks ----------------------------------------------------------

    @property
    def held(self) -> int:
        """Tokens in the window."""
        return 0 if self.keys is None else int(self.keys.shape[-2])

    @property
    def base(self) -> int:
        """Index in the sequence of the first token in the window."""
        return self.seen - self.held

    def take(self, query: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Note the queries of the new tokens; return them with the recent ones before them.

        Parameters
        ----------
        query : tensor [batch, n_tokens, embed_dim]
            Unrotated, summed over the heads that share a key.
        valid : bool tensor [batch, n_tokens] or None
            False for padding.

        Returns
        -------
        tensor [batch, n_recent + n_tokens, embed_dim]
        """
        self._untaken = False
        if valid is None:
            valid = torch.ones(query.shape[:2], dtype=torch.bool)
        if not self._is_settled():
            some = query[valid]
            total = some.sum(0, dtype=torch.float64).numpy()
            self.query_sum = total if self.query_sum is None else self.query_sum + total
            self.query_count += len(some)
        if self.recent is not None and self.recent_valid is not None:
            query = torch.cat((self.recent, query), dim=1)
            valid = torch.cat((self.recent_valid, valid), dim=1)
        keep = self.cache.query_tokens
        self.recent, self.recent_valid = query[:, -keep:].clone(), valid[:, -keep:].clone()
        self._valid = valid
        return query

    def newest_queries(self, queries: torch.Tensor, row: int, stop: int) -> Matrix:
        """Return the last valid queries before `stop` of what `take` returned."""
        start = max(0, stop - self.cache.query_tokens)
        some: Matrix = queries[row, start:stop][self._valid[row, start:stop]].numpy()
        return some

    def evict(self, call: Call, valid: torch.Tensor | None) -> None:
        """Send what is more than the window to the store, in whole chunks.

        Parameters
        ----------
        call : Call
            The attention call that has just attended to everything held.
        valid : bool tensor [batch, held] or None
            False for padding, which is dropped.
        """
        chunk = self.cache.chunk_tokens
        count = max(0, self.held - self.cache.window) // chunk * chunk
        if count == 0:
            return
        track = self.cache.track
        angles = track.angles if getattr(call.module, "use_rope", True) else None
        if not self._is_settled():
            self._calibrate(angles, valid)
        plain = unrotate(self.keys[:, :, :count], None if angles is None else angles[:, :count])
        for number, row in enumerate(self.rows):
            parts = []
            for start in range(0, count, chunk):
                columns = torch.arange(start, start + chunk)
                if valid is not None:
                    columns = columns[valid[number, start : start + chunk].cpu()]
                parts += self._split(number, row, columns)
            self._put(number, row, parts, plain)
        self.keys = self.keys[:, :, count:].clone()
        self.values = self.values[:, :, count:].clone()

    # -- pieces ------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        """Whether the means that are taken off keys and queries of this layer are known."""
        if not self._settled:
            self._settled = not self.cache.centre or self.layer_idx in self.cache.store.calibration
        return self._settled

    def _calibrate(self, angles: Angles | None, valid: torch.Tensor | None) -> None:
        """Set the means before the layer's first entry, from all that was seen until now."""
        tokens = unrotate(self.keys, angles).transpose(1, 2).flatten(2)
        some = tokens.flatten(0, 1) if valid is None else tokens[valid]
        assert self.query_sum is not None
        query = (self.query_sum / max(1, self.query_count)).astype(np.float32)
        # Where entries are there already, or another conversation came first, it stays as it is.
        with contextlib.suppress(ValueError):
            self.cache.store.calibrate(
                self.layer_idx, keys=some.float().cpu().numpy(), queries=query
            )
        self._settled = True

    def _split(self, number: int, row: Row, columns: torch.Tensor) -> list[torch.Tensor]:
        """Keep the first tokens of a conversation as sinks; return the others, entry by entry."""
        wanted = min(self.cache.sink_tokens - row.n_sinks, len(columns))
        if wanted > 0:
            keys, values = (x[number, :, columns[:wanted]] for x in (self.keys, self.values))
            if row.sink_keys is not None and row.sink_values is not None:
                keys = torch.cat((row.sink_keys, keys), dim=1)
                values = torch.cat((row.sink_values, values), dim=1)
            row.sink_keys, row.sink_values = keys, values
            row.taken += wanted
            columns = columns[wanted:]
        positions = self.cache.track.positions[number, columns]
        # An entry has one position and the rest follow: a gap in the positions begins another one.
        gaps = torch.nonzero(positions[1:] - positions[:-1] != 1).flatten() + 1
        return [part for part in torch.tensor_split(columns, gaps.tolist()) if len(part)]

    def _put(self, number: int, row: Row, parts: list[torch.Tensor], plain: torch.Tensor) -> None:
        """Put tokens of one conversation into the store, an entry for each part."""
        cache = self.cache
        keys, values, index_keys = (
            x[number].transpose(0, 1).flatten(1).float().cpu().numpy()
            for x in (self.keys, self.values, plain)
        )
        columns = [part.numpy() for part in parts]
        places = []
        for some in columns:
            position = int(cache.track.positions[number, some[0]])
            session = cache.sessions(number + 1)[number]
            places.append(
                Placement(session, cache.weights, cache.rope, position, row.taken, len(some))
            )
            row.taken += len(some)
        row.entry_ids += cache.store.put_many(
            [(keys[some], values[some]) for some in columns],
            self.layer_idx,
            cache.importance,
            index_keys=[index_keys[some] for some in columns],
            sources=[place.source() for place in places],
        )

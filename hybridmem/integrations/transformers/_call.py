"""The attention call that is running, and the positions of the tokens that the cache holds.

`Cache.update` never sees the query and the attention function never sees the cache. A hook in
front of each attention module opens a `Call` for its thread; `update` and the attention function
meet there.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from hybridmem.integrations.transformers._rope import Angles, Rotary, Rotation, head_dim, probe

if TYPE_CHECKING:
    from hybridmem.integrations.transformers._layer import HybridLayer

__all__ = ["Call", "Track", "current"]


class Call:
    """One call of one attention module.

    Attributes
    ----------
    module : torch.nn.Module
        The attention module.
    cache : Cache or None
        The cache that it was given.
    rotary : Rotary or None
        The call of the rotary module whose angles it was given, or None where there are none.
    layer : HybridLayer or None
        The layer of the cache that has taken the new keys, once it has.
    """

    def __init__(self, module: Any, cache: Any, rotary: Rotary | None) -> None:
        self.module = module
        self.cache = cache
        self.rotary = rotary
        self.layer: HybridLayer | None = None


class _Current(threading.local):
    call: Call | None = None
    rotary: Rotary | None = None


current = _Current()


class Track:
    """Positions and angles of the newest tokens, for all layers that hold them.

    Attributes
    ----------
    start, end : int
        Indices in the sequence of the first token tracked and of the one after the last.
    positions : int64 tensor [batch, end - start]
        RoPE positions; indices in the sequence where the model has no RoPE.
    angles : Angles or None
        As they were applied to the keys; None where the model has no RoPE.
    rotary : Rotary or None
        The newest call of the rotary module.
    rotation : Rotation or None
        How the model rotates, once that is known.
    """

    def __init__(self) -> None:
        self.start = self.end = 0
        self.positions = torch.empty((0, 0), dtype=torch.int64)
        self.angles: Angles | None = None
        self.rotary: Rotary | None = None
        self.rotation: Rotation | None = None

    def extend(self, call: Call, seen: int, base: int, batch: int, count: int) -> None:
        """Note `count` new tokens after `seen` of them, and forget those before `base`.

        Every layer calls this in every forward; the first one does the work.

        Raises
        ------
        RuntimeError
            If layers disagree on what has been seen: a forward was interrupted.
        """
        if seen == self.end:
            self._append(call, base, batch, count)
        if seen + count != self.end:
            raise RuntimeError(
                "the layers of this HybridCache have seen different numbers of tokens: an "
                "earlier forward "
                "failed half-way. Load the last saved state, or reset() and begin again"
            )

    def _append(self, call: Call, base: int, batch: int, count: int) -> None:
        rotary = call.rotary
        if rotary is None:
            positions = torch.arange(self.end, self.end + count)[None]
            new = None
        else:
            if self.rotation is None:
                dim = getattr(call.module, "head_dim", None) or head_dim(call.module.config)
                self.rotation = probe(call.module, rotary, dim)
            positions = rotary.position_ids.detach().to("cpu", torch.int64)
            new = self.rotation.angles(rotary.cos.detach(), rotary.sin.detach())
        positions = positions.expand(batch, count)
        drop = base - self.start
        if self.end > self.start:
            positions = torch.cat((self.positions[:, drop:], positions), dim=1)
        if new is not None:
            cos = new.cos.expand(batch, count, -1)
            sin = new.sin.expand(batch, count, -1)
            if self.angles is not None and self.end > self.start:
                cos = torch.cat((self.angles.cos[:, drop:], cos), dim=1)
                sin = torch.cat((self.angles.sin[:, drop:], sin), dim=1)
            new = Angles(cos, sin, new.rotation)
        self.positions, self.angles, self.rotary = positions, new, rotary
        self.start, self.end = base, self.end + count

    def newest(self, count: int) -> Angles | None:
        """Return the angles of the last `count` tokens."""
        if self.angles is None:
            return None
        return self.angles[:, self.angles.cos.shape[1] - count :]

    def angles_at(self, positions: torch.Tensor) -> Angles:
        """Return the angles of other positions [rows, n_tokens], as the model computes them."""
        assert self.rotary is not None
        assert self.rotation is not None
        return self.rotation.angles(*self.rotary.tables(positions.to(self.rotary.cos.device)))

"""What the layers of a forward have found together.

In every layer a token range is one entry, but not every layer asks for what a question is about.
So a layer goes by its own ranks and by those of the layers below it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["Fusion", "Span"]

#: A token range, the same in all layers: 0 and the place among the entries of this conversation,
#: or another conversation and the first token.
Span = tuple[int, int]


class Fusion:
    """Reciprocal ranks of token ranges, summed over the layers of one forward."""

    def __init__(self) -> None:
        self._forward = -1
        self._sums: dict[Hashable, dict[Span, float]] = {}

    def best(self, forward: int, search: Hashable, ranked: Sequence[Span]) -> list[Span]:
        """Count what one more layer has found; return all that was found, best first.

        Parameters
        ----------
        forward : int
            Differs from that of the forward before; what that one found is forgotten.
        search : hashable
            The layers' searches for the same tokens are counted together.
        ranked : sequence of Span
            What the layer has found, best first.
        """
        if forward != self._forward:
            self._forward = forward
            self._sums = {}
        sums = self._sums.setdefault(search, {})
        for rank, span in enumerate(ranked, 1):
            sums[span] = sums.get(span, 0.0) + 1 / rank
        return sorted(sums, key=lambda span: -sums[span])

"""Where an entry stood in its text, which the store keeps as the entry's source."""

from __future__ import annotations

from typing import Any, NamedTuple

from hybridmem.results import Entry, Hit

__all__ = ["Placement"]

#: Under this key of a source.
_KEY = "transformers"


class Placement(NamedTuple):
    """Where an entry stood in the text that it comes from.

    Attributes
    ----------
    session : int
        The conversation (one row of one batch) that it belongs to.
    weights : int
        Fingerprint of the weights of the model.
    rope : int
        Fingerprint of the RoPE parameters with which its keys are rotated.
    position : int
        RoPE position of its first token; the others follow one by one.
    token : int
        Index of its first token in the conversation.
    n_tokens : int
        Its tokens are [token, token + n_tokens).
    """

    session: int
    weights: int
    rope: int
    position: int
    token: int
    n_tokens: int

    def source(self) -> dict[str, Any]:
        """Return what `Store.put` is to keep. Numbers of 64 bits are hexadecimal text."""
        names = {name: f"{getattr(self, name):016x}" for name in ("session", "weights", "rope")}
        span = [self.token, self.token + self.n_tokens]
        return {_KEY: names | {"position": self.position, "tokens": span}}

    @classmethod
    def of(cls, entry: Entry | Hit) -> Placement | None:
        """Return where an entry stood, or None where its source does not say."""
        try:
            told = entry.source[_KEY]
            session, weights, rope = (
                int(told[name], 16) for name in ("session", "weights", "rope")
            )
            position, (token, _) = int(told["position"]), map(int, told["tokens"])
        except (TypeError, KeyError, ValueError):  # another program put it
            return None
        return cls(session, weights, rope, position, token, entry.n_tokens)

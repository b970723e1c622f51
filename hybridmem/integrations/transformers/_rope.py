"""Rotary position embedding as a model applied it: undo it, and move keys to other positions.

Nothing here knows a model. How pairs of columns are rotated is found by probing the model's own
function, and angles are the cosines and sines that its own rotary module returned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from typing import Any

import torch

__all__ = [
    "Angles",
    "Rotary",
    "Rotation",
    "fingerprint",
    "head_dim",
    "move",
    "probe",
    "rope_types",
    "rotate",
    "unrotate",
]

#: Types of RoPE whose angles depend on the length of the text and not on the position alone.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How a model rotates: which columns form a pair, and how its tables of angles are laid out.

    Attributes
    ----------
    interleaved : bool
        Pairs are columns (2i, 2i+1); otherwise (i, i + width/2).
    repeated : bool
        The tables hold each angle twice side by side; otherwise all angles, then all again.
    """

    interleaved: bool
    repeated: bool

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Keep each angle once: tables [..., rotary_dim] to float32 [..., rotary_dim/2]."""
        if self.repeated:
            return Angles(cos[..., 0::2].float(), sin[..., 0::2].float(), self)
        half = cos.shape[-1] // 2
        return Angles(cos[..., :half].float(), sin[..., :half].float(), self)


@dataclasses.dataclass
class Angles:
    """Cosines and sines of tokens, float32 [rows, n_tokens, rotary_dim/2], and their use."""

    cos: torch.Tensor
    sin: torch.Tensor
    rotation: Rotation

    def __getitem__(self, index: Any) -> Angles:
        return Angles(self.cos[index], self.sin[index], self.rotation)


class Rotary:
    """A call that a model made of its rotary module, to be made again for other positions.

    Attributes
    ----------
    position_ids : tensor [rows, n_tokens]
        Positions of the tokens of that call.
    cos, sin : tensor [rows, n_tokens, rotary_dim]
        What it returned.
    """

    def __init__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._module = module
        self._bound = inspect.signature(module.forward).bind(*args, **kwargs)
        for name, value in self._bound.arguments.items():
            if name != "position_ids" and isinstance(value, torch.Tensor):
                # Only its type and device matter, and it may be large.
                self._bound.arguments[name] = value[:1, :1].clone()
        self.position_ids: torch.Tensor = self._bound.arguments["position_ids"]
        self.cos, self.sin = output

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for positions [rows, n_tokens], negative ones too."""
        arguments = dict(self._bound.arguments)
        extra = arguments.pop("kwargs", {})
        arguments["position_ids"] = positions
        cos, sin = self._module.forward(**arguments, **extra)
        return cos, sin


def probe(attention: Any, rotary: Rotary, head_dim: int) -> Rotation:
    """Find out how the model of an attention module rotates its keys.

    Its source file has an `apply_rotary_pos_emb`; that is tried on random keys.

    Raises
    ------
    TypeError
        If it rotates in no way known here.
    """
    apply = None
    for owner in type(attention).__mro__:
        apply = apply or getattr(sys.modules.get(owner.__module__), "apply_rotary_pos_emb", None)
    if apply is not None:
        # Position 0 would not do: there every way of rotating is the same.
        cos, sin = rotary.tables(torch.arange(1, 6, device=rotary.cos.device)[None])
        cos, sin = cos.float().cpu(), sin.float().cpu()
        keys = torch.randn((1, 1, 5, head_dim), generator=torch.Generator().manual_seed(0))
        try:
            wanted = apply(keys, keys, cos, sin)[1]
        except Exception:  # another signature: not the function that is undone here
            wanted = keys.new_empty(0)
        for interleaved in (False, True):
            for repeated in (False, True):
                rotation = Rotation(interleaved, repeated)
                got = rotate(keys, rotation.angles(cos, sin))
                if got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-5):
                    return rotation
    raise TypeError(
        f"{type(attention).__name__} rotates its keys in a way that is not known here; use a model "
        "with the half-split or the interleaved form of RoPE, or one without RoPE"
    )


def _pairs(x: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = 2 * angles.cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:].float()
    if angles.rotation.interleaved:
        return turned[..., 0::2], turned[..., 1::2], rest
    return turned[..., : width // 2], turned[..., width // 2 :], rest


def _joined(
    first: torch.Tensor, second: torch.Tensor, rest: torch.Tensor, angles: Angles
) -> torch.Tensor:
    if angles.rotation.interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate [rows, heads, n_tokens, head_dim] as the model does; float32."""
    first, second, rest = _pairs(x, angles)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    return _joined(first * cos - second * sin, second * cos + first * sin, rest, angles)


def unrotate(x: torch.Tensor, angles: Angles | None) -> torch.Tensor:
    """Undo `rotate`; float32. Without angles the model has no rotation and `x` is returned."""
    if angles is None:
        return x.float()
    first, second, rest = _pairs(x, angles)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    # Some models scale both tables ("attention scaling"), which the inverse has to take back twice.
    norm = cos * cos + sin * sin
    first, second = (first * cos + second * sin) / norm, (second * cos - first * sin) / norm
    return _joined(first, second, rest, angles)


def move(keys: torch.Tensor, old: Angles, new: Angles) -> torch.Tensor:
    """Take keys rotated for one place and rotate them once to another, as the model would have."""
    return rotate(unrotate(keys, old), new)


def fingerprint(config: Any) -> int:
    """Return 64 bits that two configurations share if keys of one can be rotated for the other."""
    parameters = getattr(config, "rope_parameters", None)
    told = {
        "model_type": config.model_type,
        "rope": parameters,
        "head_dim": head_dim(config),
        "partial": getattr(config, "partial_rotary_factor", None),
    }
    if any(kind in LENGTH_DEPENDENT for kind in rope_types(config)):
        told["length"] = getattr(config, "max_position_embeddings", None)
    text = json.dumps(told, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def rope_types(config: Any) -> set[str]:
    """Return the types of RoPE that a configuration names, one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in nested or [parameters] if each}


def head_dim(config: Any) -> int:
    """Return the columns of one head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)

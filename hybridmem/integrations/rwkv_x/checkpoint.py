"""A small random checkpoint in the real layout, for trying the client without a trained one."""

from __future__ import annotations

import os

import torch

HEAD_SIZE = 64


def random_checkpoint(
    path: str | os.PathLike[str],
    *,
    vocab: int = 65_536,
    width: int = 128,
    rwkv_layers: int = 4,
    attention_layers: int = 2,
    seed: int = 0,
) -> None:
    """Write random weights under the names and shapes of a published RWKV-X checkpoint.

    The text that such a model produces is noise. Its magnitudes are chosen so that attention
    matters: logits have a standard deviation of about 2 to 3 and move by as much without memory.

    Parameters
    ----------
    path : path
        File to write, by `torch.save`.
    vocab : int
        Number of tokens; the tokenizer of the rwkv-x package needs 65,536.
    width : int
        Embedding width, a multiple of 64 (the head size).
    rwkv_layers, attention_layers : int
        Layers of each kind; upstream interleaves them evenly.
    seed : int
        Seeds the weights.
    """
    if width % HEAD_SIZE:
        raise ValueError(f"width must be a multiple of {HEAD_SIZE}, got {width}")
    weights = _Weights(width, seed)
    weights.embedding(vocab)
    for layer in range(rwkv_layers):
        weights.rwkv_block(layer)
    for layer in range(attention_layers):
        weights.attention_block(layer)
    torch.save(weights.tensors, path)


class _Weights:
    """Fills the state dict block by block."""

    def __init__(self, width: int, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._width = width
        self._generator = torch.Generator().manual_seed(seed)

    def _normal(self, *shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator)

    def _linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = self._normal(rows, columns, scale=gain * columns**-0.5)

    def _norm(self, name: str) -> None:
        self.tensors[f"{name}.weight"] = 1 + self._normal(self._width, scale=0.05)
        self.tensors[f"{name}.bias"] = self._normal(self._width, scale=0.05)

    def embedding(self, vocab: int) -> None:
        self.tensors["rwkv.emb.weight"] = self._normal(vocab, self._width, scale=1.0)
        self._linear("rwkv.head", vocab, self._width, gain=2.5)
        self._norm("rwkv.ln_out")

    def rwkv_block(self, layer: int) -> None:
        block, width = f"rwkv.blocks.{layer}", self._width
        heads, rank = width // HEAD_SIZE, max(16, width // 12)
        for name in ("ln0", "ln1", "ln2") if layer == 0 else ("ln1", "ln2"):
            self._norm(f"{block}.{name}")
        att = f"{block}.att"
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
            self.tensors[f"{att}.{name}"] = self._uniform(1, 1, width)
        gates = ("w", "a", "g") if layer == 0 else ("w", "a", "v", "g")
        for gate in gates:
            if gate != "g":
                self.tensors[f"{att}.{gate}0"] = self._normal(1, 1, width, scale=0.5)
            self.tensors[f"{att}.{gate}1"] = self._normal(width, rank, scale=width**-0.5)
            self.tensors[f"{att}.{gate}2"] = self._normal(rank, width, scale=rank**-0.5)
        self.tensors[f"{att}.k_k"] = 0.85 + self._normal(1, 1, width, scale=0.1)
        self.tensors[f"{att}.k_a"] = 1 + self._normal(1, 1, width, scale=0.1)
        self.tensors[f"{att}.r_k"] = self._normal(heads, HEAD_SIZE, scale=0.1)
        for name in ("receptance", "key", "value", "output"):
            self._linear(f"{att}.{name}", width, width, gain=0.5)
        self._norm(f"{att}.ln_x")
        self._channel_mix(f"{block}.ffn")

    def attention_block(self, layer: int) -> None:
        block, width = f"moba.{layer}", self._width
        self._norm(f"{block}.ln1")
        self._norm(f"{block}.ln2")
        # Sharp attention: a row's weight must depend on its key for retrieval to make a difference.
        for name, gain in (("receptance", 1.5), ("key", 1.5), ("value", 1.5), ("output", 1.5)):
            self._linear(f"{block}.att.{name}", width, width, gain=gain)
        self._channel_mix(f"{block}.ffn")

    def _channel_mix(self, name: str) -> None:
        self.tensors[f"{name}.x_k"] = self._uniform(1, 1, self._width)
        self._linear(f"{name}.key", 4 * self._width, self._width, gain=0.5)
        self._linear(f"{name}.value", self._width, 4 * self._width, gain=0.5)

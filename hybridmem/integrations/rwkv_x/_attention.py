"""Attention over several separate groups of rows, without concatenating them.

One query, a token of decode of the earlier design, reads rows of the store where they are mapped,
by the kernel of `hybridmem.attend`. More queries are a matrix product for each group; for these
keys are laid out head-major, `[heads, rows, head_size]`, as views wherever they lie row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridmem import _kernels
from hybridmem.integrations._tensors import as_array, as_tensor

#: Query rows whose scores are held at once.
BLOCK_ROWS = 128


class KeysValues(NamedTuple):
    """Keys and values of some rows, each `[heads, rows, head_size]`, float32."""

    keys: Tensor
    values: Tensor

    def first(self, rows: int) -> KeysValues:
        """Return the first rows."""
        return KeysValues(self.keys[:, :rows], self.values[:, :rows])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.keys.shape[1])


def by_head(keys: Tensor, values: Tensor, heads: int) -> KeysValues:
    """View `[rows, width]` keys and values by head (a copy only where they are not float32)."""
    return KeysValues(_by_head(keys, heads), _by_head(values, heads))


def _by_head(rows: Tensor, heads: int) -> Tensor:
    width = rows.shape[-1]
    return rows.reshape(-1, heads, width // heads).transpose(0, 1).float()


def side_by_side(rows: Sequence[tuple[Any, Any]], heads: int, device: Any) -> KeysValues:
    """Bring keys and values of several entries together: one product is faster than many."""
    keys, values = (
        torch.cat([_by_head(as_tensor(some), heads) for some in column], 1).to(device)
        for column in zip(*rows, strict=True)
    )
    return KeysValues(keys, values)


def attend(queries: Tensor, groups: Sequence[KeysValues]) -> Tensor:
    """Attend to all groups under one softmax; the last group is causal.

    Parameters
    ----------
    queries : Tensor
        `[m, width]`.
    groups : sequence of KeysValues
        The last one ends with the rows of the queries themselves: query row i sees all but its
        last m - 1 - i rows. Every other group is seen whole.

    Returns
    -------
    Tensor
        `[m, width]` in the dtype of `queries`; computed in float32.
    """
    m, width = queries.shape
    heads, _, head_size = groups[-1].keys.shape
    scaled = (queries.float() * head_size**-0.5).view(m, heads, head_size).transpose(0, 1)
    groups = [group for group in groups if group.rows]
    scores = [torch.bmm(scaled, group.keys.transpose(1, 2)) for group in groups]
    if m > 1:
        scores[-1] = scores[-1].masked_fill(_future(m, groups[-1].rows, queries.device), -torch.inf)
    sizes = [group.rows for group in groups]
    weights = torch.softmax(torch.cat(scores, -1), -1).split(sizes, -1)
    mixed = torch.bmm(weights[0], groups[0].values)
    for weight, group in zip(weights[1:], groups[1:], strict=True):
        mixed = mixed + torch.bmm(weight, group.values)
    return mixed.transpose(0, 1).reshape(m, width).to(queries.dtype)


def attend_one(query: Tensor, heads: int, groups: Sequence[tuple[Any, Any]]) -> Tensor:
    """Attend to all groups under one softmax with one query.

    Parameters
    ----------
    query : Tensor
        `[1, width]`.
    groups : sequence of (keys, values)
        Tensors or float32 arrays, each `[rows, width]`. The query sees all of them.

    Returns
    -------
    Tensor
        `[1, width]` in the dtype of `query`; computed in float32.
    """
    if query.device.type != "cpu":
        device = query.device
        return attend(query, [by_head(*_tensors(group, device), heads) for group in groups])
    row = as_array(query)
    width = row.shape[1]
    out = np.zeros((1, width), np.float32)
    top, total = np.full((1, heads), -np.inf, np.float32), np.zeros((1, heads), np.float32)
    scale = (width // heads) ** -0.5
    rows = [group for group in groups if len(group[0])]
    keys, values = (tuple(map(as_array, column)) for column in zip(*rows, strict=True))
    _kernels.attend(row, keys, values, heads, heads, scale, out, top, total)
    out.reshape(heads, -1)[...] /= total.reshape(heads, 1)
    return torch.from_numpy(out).to(query.dtype)


def _tensors(group: tuple[Any, Any], device: Any) -> tuple[Tensor, Tensor]:
    keys, values = (as_tensor(rows).to(device) for rows in group)
    return keys, values


def _future(m: int, rows: int, device: torch.device) -> Tensor:
    return torch.ones((m, rows), dtype=torch.bool, device=device).triu(rows - m + 1)


def attend_blocks(queries: Tensor, shared: Sequence[KeysValues], own: KeysValues) -> Tensor:
    """Attend as `attend` does, a block of query rows at a time.

    `own` ends with the rows of the queries; `shared` groups are seen whole by every row.
    """
    m = queries.shape[0]
    before = own.rows - m
    out = [
        attend(
            queries[at : at + BLOCK_ROWS], [*shared, own.first(before + min(at + BLOCK_ROWS, m))]
        )
        for at in range(0, m, BLOCK_ROWS)
    ]
    return torch.cat(out) if len(out) > 1 else out[0]

"""How many bytes a directory takes: what max_disk_bytes is held against before a write."""

from __future__ import annotations

from hybridmem._format import HEADER_FIXED_BYTES, HEADER_TENSOR_BYTES
from hybridmem.config import Config

__all__ = ["disk_estimate"]

#: Most bytes of a shard in index.json.
_SHARD_INFO_BYTES = 64
_PAGE = 4096


def disk_estimate(config: Config, index_bytes: int, n_entries: int, payload: int) -> int:
    """Return an upper bound of the size of a directory that holds no dead entries.

    Parameters
    ----------
    index_bytes : int
        Size of the last index.json.
    n_entries, payload : int
        Entries, and bytes of their tensors.
    """
    tensors = 6 if config.quantize_stored else 2
    record = 40 + config.hdc_dim // 8
    # In the worst case each entry has a shard of its own.
    shard = tensors * HEADER_TENSOR_BYTES + HEADER_FIXED_BYTES + _SHARD_INFO_BYTES
    reserve = -(-2 * (index_bytes + 512) // _PAGE) * _PAGE
    return payload + n_entries * (record + shard) + index_bytes + 512 + reserve

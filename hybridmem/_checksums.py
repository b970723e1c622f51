"""CRC-32C, loaded when the first one is computed: its package takes a quarter of the import."""

from __future__ import annotations

from typing import Any

__all__ = ["crc32c"]


def crc32c(data: Any, value: int = 0) -> int:
    """Return the checksum of a buffer, going on from that of what stands before it."""
    from crc32c import crc32c as compute

    checksum: int = compute(data, value)
    return checksum

"""The configuration of a store: frozen, validated, written into index.json."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from hybridmem.hdc import DEFAULT_SEED, SignatureSpec

__all__ = ["KV_DTYPES", "Config"]

KV_DTYPES = ("float32", "float16", "bfloat16")

_MIB = 1 << 20
_U32 = 1 << 32
_U63 = 1 << 63
_U64 = 1 << 64
#: Largest width and largest signature that are accepted; far above any model, far below overflow.
_MAX_DIM = 1 << 24
#: Characters of a model_id; index.json must stay small.
_MAX_MODEL_ID = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What a store is made for; fixed at `create`, except the four limits.

    Parameters
    ----------
    embed_dim : int
        Width of one token's keys, and of its values, all heads side by side.
    hdc_dim : int, default 4096
        Bits of a signature; a multiple of 64.
    seed : int
        Seeds the projection; the same seed gives the same bits on every machine.
    max_entries : int, default 0
        Entries kept; `put` evicts to keep it, others than the one that it brings. 0 is unlimited.
    max_disk_bytes : int, default 0
        Bytes of all files of the directory, held after every flush. 0 is unlimited.
    shard_max_bytes : int, default 256 MiB
        Size at which a shard is closed and the next one begun. An entry that is larger gets
        a shard of its own.
    max_open_shards : int, default 4
        Shards mapped at a time; the least recently used one is closed first.
    quantize_stored : bool, default False
        Store keys and values as INT8.
    kv_dtype : {"float32", "float16", "bfloat16"}
        Stored type of keys and values where they are not quantised.
    signature_tokens : int, default 0
        Tokens per sub-signature; 0 makes one signature of the whole entry.
    signature_bits : int, default 0
        Bits of a sub-signature, a multiple of 64 up to `hdc_dim`; 0 is `hdc_dim`. An entry has
        room for `hdc_dim // signature_bits` of them; tokens beyond have none. For one of 256 bits
        for each token of entries of 64: `hdc_dim=16384, signature_tokens=1, signature_bits=256`.
    model_id : str, optional
        Any name of the weights that the keys and values come from, of at most 1,024 characters.

    Raises
    ------
    TypeError, ValueError
        Naming the field, what was given and what is wanted.
    """

    embed_dim: int
    hdc_dim: int = 4096
    seed: int = DEFAULT_SEED
    max_entries: int = 0
    max_disk_bytes: int = 0
    shard_max_bytes: int = 256 * _MIB
    max_open_shards: int = 4
    quantize_stored: bool = False
    kv_dtype: str = "float32"
    signature_tokens: int = 0
    signature_bits: int = 0
    model_id: str | None = None

    #: The fields that `open` may give anew.
    LIMITS = ("max_entries", "max_disk_bytes", "shard_max_bytes", "max_open_shards")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("embed_dim", 1, _MAX_DIM),
            ("hdc_dim", 64, _MAX_DIM),
            ("seed", 0, _U64 - 1),
            ("max_entries", 0, _U63 - 1),
            ("max_disk_bytes", 0, _U63 - 1),
            ("shard_max_bytes", 1, _U63 - 1),
            ("max_open_shards", 1, _U32 - 1),
            ("signature_tokens", 0, _U32 - 1),
            ("signature_bits", 0, _MAX_DIM),
        ):
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))
        if self.hdc_dim % 64:
            raise ValueError(f"hdc_dim must be a multiple of 64, got {self.hdc_dim}")
        if not isinstance(self.quantize_stored, bool):
            raise TypeError(
                f"quantize_stored must be True or False, got {_described(self.quantize_stored)}"
            )
        if not isinstance(self.kv_dtype, str):
            raise TypeError(f"kv_dtype must be one of {KV_DTYPES}, got {_described(self.kv_dtype)}")
        if self.kv_dtype not in KV_DTYPES:
            hint = "; for INT8 give quantize_stored=True" if "int8" in self.kv_dtype.lower() else ""
            raise ValueError(f"kv_dtype must be one of {KV_DTYPES}, got {self.kv_dtype!r}{hint}")
        if self.model_id is not None:
            if not isinstance(self.model_id, str):
                raise TypeError(
                    f"model_id must be a string or None, got {_described(self.model_id)}"
                )
            if len(self.model_id) > _MAX_MODEL_ID:
                raise ValueError(
                    f"model_id must have at most {_MAX_MODEL_ID} characters, "
                    f"got {len(self.model_id)}"
                )
            try:
                self.model_id.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"model_id must be valid Unicode: {error}") from None
        try:
            _ = self.signature
        except ValueError as error:
            raise ValueError(f"signature_tokens and signature_bits: {error}") from None

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict, as they stand in index.json."""
        return dataclasses.asdict(self)

    @property
    def signature(self) -> SignatureSpec:
        """What the signature of a record holds."""
        return SignatureSpec(self.hdc_dim, self.signature_tokens, self.signature_bits)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {_described(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {_described(value)}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {number}")
    return number


def _described(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"

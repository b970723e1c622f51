"""FORMAT-AND-API section 3, the Config table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model import DEFAULT_SEED

import hybridmem

DEFAULTS = {
    "hdc_dim": 4096,
    "seed": DEFAULT_SEED,
    "max_entries": 0,
    "max_disk_bytes": 0,
    "shard_max_bytes": 256 * 2**20,
    "max_open_shards": 4,
    "quantize_stored": False,
    "kv_dtype": "float32",
    "signature_tokens": 0,
    "signature_bits": 0,
    "model_id": None,
}

OTHERS = {
    "hdc_dim": 256,
    "seed": 12345,
    "max_entries": 77,
    "max_disk_bytes": 50_000_000,
    "shard_max_bytes": 123_456,
    "max_open_shards": 2,
    "quantize_stored": True,
    "signature_tokens": 2,
    "signature_bits": 64,
    "model_id": "some/model@rev 1 \u00e4\u6f22",
}


@pytest.mark.parametrize("field", DEFAULTS)
def test_default(field: str) -> None:
    assert getattr(hybridmem.Config(embed_dim=8), field) == DEFAULTS[field]


def test_embed_dim_is_required() -> None:
    with pytest.raises(TypeError, match="embed_dim"):
        hybridmem.Config()  # type: ignore[call-arg]


def test_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_entrys"):
        hybridmem.Config(embed_dim=8, max_entrys=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_entrys"):
        hybridmem.create(tmp_path / "mem", embed_dim=8, max_entrys=3)
    assert not (tmp_path / "mem" / "index.json").exists()


def test_frozen_and_comparable() -> None:
    config = hybridmem.Config(embed_dim=8, max_entries=3)
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        config.max_entries = 4  # type: ignore[misc]
    assert config.max_entries == 3
    assert config == hybridmem.Config(embed_dim=8, max_entries=3)
    assert config != hybridmem.Config(embed_dim=8, max_entries=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("embed_dim", 0),
        ("embed_dim", -1),
        ("embed_dim", 2.5),
        ("embed_dim", "8"),
        ("embed_dim", None),
        ("hdc_dim", 0),
        ("hdc_dim", -64),
        ("hdc_dim", 63),
        ("hdc_dim", 100),
        ("hdc_dim", 64.0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("max_entries", -1),
        ("max_entries", 1.5),
        ("max_disk_bytes", -1),
        ("max_disk_bytes", "1 GB"),
        ("shard_max_bytes", 0),
        ("shard_max_bytes", -5),
        ("max_open_shards", 0),
        ("max_open_shards", -1),
        ("kv_dtype", "float64"),
        ("kv_dtype", "int8"),
        ("kv_dtype", None),
        ("signature_tokens", -1),
        ("signature_tokens", 1.5),
        ("signature_bits", -64),
        ("signature_bits", 96),
        ("signature_bits", 8192),
        ("model_id", 7),
        ("model_id", "m" * 1025),
    ],
)
def test_bad_value_is_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"embed_dim": 8, field: value}
    if field == "signature_bits":
        fields["signature_tokens"] = 1
    with pytest.raises((ValueError, TypeError), match=field):
        hybridmem.Config(**fields)
    with pytest.raises((ValueError, TypeError), match=field):
        hybridmem.create(tmp_path / "mem", **fields)
    assert not (tmp_path / "mem" / "index.json").exists()


def test_numpy_integers_are_integers() -> None:
    config = hybridmem.Config(embed_dim=np.int64(8), hdc_dim=np.uint16(128))
    assert (config.embed_dim, config.hdc_dim) == (8, 128)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_kv_dtype_is_kept(kv_dtype: str, new_store: Callable[..., Any]) -> None:
    store = new_store(kv_dtype=kv_dtype)
    store.close()
    with hybridmem.open(store.path) as again:
        assert again.config.kv_dtype == kv_dtype


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_survives_reopening(field: str, new_store: Callable[..., Any]) -> None:
    fields = {field: OTHERS[field]}
    if field == "signature_bits":
        fields["signature_tokens"] = 1
    store = new_store(**fields)
    assert getattr(store.config, field) == OTHERS[field]
    store.close()
    for mode in ("r", "r+"):
        with hybridmem.open(store.path, mode=mode) as again:
            assert again.config == store.config
            assert getattr(again.config, field) == OTHERS[field]


def test_create_takes_a_config(tmp_path: Path) -> None:
    config = hybridmem.Config(embed_dim=8, hdc_dim=128, max_entries=9)
    with hybridmem.create(tmp_path / "a", config=config) as store:
        assert store.config == config
    with hybridmem.create(tmp_path / "b", embed_dim=8, hdc_dim=128, max_entries=9) as store:
        assert store.config == config


def test_seed_decides_the_bits(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    keys = rng.standard_normal((3, 24)).astype(np.float32)
    signatures = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        store = new_store(name, seed=seed)
        store.put(keys, keys, layer_idx=0)
        signatures.append(bytes(store.entries["signature"][0]))
    assert signatures[0] == signatures[1] != signatures[2]

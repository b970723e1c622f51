"""Mistakes of a newcomer: each is met by a message that says what to do."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem


def test_fields_that_create_does_not_know_and_the_one_it_needs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="embed_dim is missing, the width of one token's keys"):
        hybridmem.create(tmp_path / "mem")
    with pytest.raises(TypeError, match=r"no field is called dim; there are .*'embed_dim'"):
        hybridmem.create(tmp_path / "mem", dim=8)
    with pytest.raises(ValueError, match="quantize_stored=True"):
        hybridmem.create(tmp_path / "mem", embed_dim=8, kv_dtype="int8")
    assert not (tmp_path / "mem").exists()


def test_a_file_in_the_place_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "mem").write_bytes(b"")
    with pytest.raises(hybridmem.StoreNotFoundError, match="a file and no directory"):
        hybridmem.open(tmp_path / "mem")


def test_a_store_without_a_name_of_its_model(new_store: Callable[..., Any]) -> None:
    store = new_store()
    store.close()
    with pytest.raises(hybridmem.ModelMismatchError, match="of an unnamed model, not of 'mine'"):
        hybridmem.open(store.path, model_id="mine")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_that_is_dropped_says_what_is_lost(tmp_path: Path) -> None:
    rows = np.ones((4, 8), np.float32)

    def drop(path: Path, flush: bool) -> None:
        store = hybridmem.create(path, embed_dim=8)
        store.put(rows, rows, 0)
        if flush:
            store.flush()
        del store
        gc.collect()

    with pytest.warns(RuntimeWarning, match="256 bytes that were put and not flushed are lost"):
        drop(tmp_path / "a", flush=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        drop(tmp_path / "b", flush=True)


def test_heads_in_another_form(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    store = new_store(embed_dim=12)
    heads = rng.standard_normal((3, 5, 4), np.float32)  # [heads, tokens, head_dim]
    with pytest.raises(ValueError, match=r"x\.swapaxes\(0, 1\)\.reshape\(n_tokens, -1\)"):
        store.put(heads, heads, 0)
    tokens = heads.swapaxes(0, 1)
    with pytest.raises(ValueError, match=r"side by side: x\.reshape\(n_tokens, -1\)"):
        store.put(tokens, tokens, 0)
    rows = tokens.reshape(5, -1)
    store.put(rows, rows, 0)
    with pytest.raises(ValueError, match=r"those that share keys are summed, or use hybridmem"):
        store.query(np.ones(24, np.float32), 0)


def test_tokens_that_no_signature_has_room_for(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    keys = rng.standard_normal((65, 8), np.float32)
    store = new_store(embed_dim=8, hdc_dim=4096, signature_tokens=1)
    with pytest.warns(UserWarning, match="only the first 1 tokens.* hdc_dim=4096 has room for 1"):
        store.put(keys, keys, 0)
    roomy = new_store("roomy", embed_dim=8, hdc_dim=16384, signature_tokens=1, signature_bits=256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        roomy.put(keys[:64], keys[:64], 0)
    with pytest.warns(UserWarning, match="only the first 64 tokens"):
        roomy.put(keys, keys, 0)


def test_a_store_that_is_removed_while_it_is_open(new_store: Callable[..., Any]) -> None:
    store = new_store(embed_dim=8)
    rows = np.ones((4, 8), np.float32)
    store.put(rows, rows, 0)
    store.flush()
    shutil.rmtree(store.path)
    for call in (lambda: store.entries, lambda: store.get(1)):
        with pytest.raises(hybridmem.CorruptStoreError, match="removed while the store was open"):
            call()


def test_arguments_of_the_bridge_in_another_order(store: Any) -> None:
    rows = np.ones((2, store.config.embed_dim), np.float32)
    with pytest.raises(TypeError, match=r"store: got ndarray, want an open hybridmem\.Store"):
        hybridmem.augmented_kv(rows, rows, store, rows, 0)
    with pytest.raises(TypeError, match="store: got ndarray"):
        hybridmem.attend(rows, rows, 0)
    with pytest.raises(ValueError, match="n_heads: got 5, want a divisor of embed_dim"):
        hybridmem.attend(rows, store, 0, n_heads=5)


def test_modules_are_there_without_an_import_of_their_own() -> None:
    assert callable(hybridmem.verify.verify)
    assert callable(hybridmem.archive.export_store)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hybridmem.nothing

"""attend and merge_attention against softmax attention in float64 numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridmem


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return output [m, heads * d] and log-sum-exp [m, heads]."""
    d = k.shape[1] // kv_heads
    out, lse = np.zeros((len(q), heads * d)), np.zeros((len(q), heads))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        columns, own = slice(kv * d, (kv + 1) * d), slice(head * d, (head + 1) * d)
        logits = q[:, own].astype(float) @ k[:, columns].astype(float).T * scale
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        lse[:, head] = top[:, 0] + np.log(weights.sum(axis=1))
        out[:, own] = weights @ v[:, columns].astype(float) / weights.sum(axis=1, keepdims=True)
    return out, lse


FORMS = {
    "float32": {},
    "float16": {"kv_dtype": "float16"},
    "bfloat16": {"kv_dtype": "bfloat16"},
    "int8": {"quantize_stored": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 5), (6, 3, 64), (4, 4, 33)])
@pytest.mark.parametrize("flushed", [False, True])
def test_attend_is_attention_over_what_is_stored(
    tmp_path: Path, form: str, heads: int, kv_heads: int, head_dim: int, flushed: bool, simd: str
) -> None:
    rng = np.random.default_rng(3)
    width = kv_heads * head_dim
    with hybridmem.create(tmp_path / "s", embed_dim=width, **FORMS[form]) as store:
        for n in (1, 3, 16, 33, 64, 65):
            store.put(rng.normal(size=(n, width)) * 3, rng.normal(size=(n, width)), 0)
        if flushed:
            store.flush()
        q = rng.normal(size=(3, heads * head_dim)).astype(np.float32)
        got, lse = hybridmem.attend(q, store, 0, 4, n_heads=heads, n_kv_heads=kv_heads)
        grouped = q.reshape(3, kv_heads, heads // kv_heads, head_dim).sum(axis=2).reshape(3, width)
        hits = store.query(grouped, 0, 4)
        k, v = (np.concatenate([getattr(hit, name) for hit in hits]) for name in ("keys", "values"))
        want, want_lse = softmax_attention(q, k, v, heads, kv_heads, head_dim**-0.5)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
        assert store.stats().queries == 2
        assert {store.get(hit.entry_id).access_count for hit in hits} == {2}


def test_merging_is_attention_over_both(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    with hybridmem.create(tmp_path / "s", embed_dim=32) as store:
        keys, values = rng.normal(size=(2, 40, 32)).astype(np.float32)
        store.put(keys, values, 0)
        cache_k, cache_v = rng.normal(size=(2, 25, 32)).astype(np.float32)
        q = rng.normal(size=(2, 32)).astype(np.float32)
        mine = hybridmem.attend(q, store, 0, n_heads=2)
        cached = softmax_attention(q, cache_k, cache_v, 2, 2, 0.25)
        got, lse = hybridmem.merge_attention(*mine, *cached)
        k, v = np.concatenate([keys, cache_k]), np.concatenate([values, cache_v])
        want, want_lse = softmax_attention(q, k, v, 2, 2, 0.25)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


def test_nothing_found_changes_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with hybridmem.create(tmp_path / "s", embed_dim=8) as store:
        nothing = hybridmem.attend(rng.normal(size=8), store, 0, n_heads=2)
        assert not nothing[0].any()
        assert (nothing[1] == -np.inf).all()
        other = rng.normal(size=(1, 8)).astype(np.float32), np.array([[0.5, -3.0]], np.float32)
        for pair in ((*nothing, *other), (*other, *nothing)):
            got, lse = hybridmem.merge_attention(*pair)
            np.testing.assert_allclose(got, other[0], rtol=1e-6)
            np.testing.assert_allclose(lse, other[1], rtol=1e-6)
        got, lse = hybridmem.merge_attention(*nothing, *nothing)
        assert not got.any()
        assert (lse == -np.inf).all()


def test_large_products_do_not_overflow(tmp_path: Path) -> None:
    with hybridmem.create(tmp_path / "s", embed_dim=4) as store:
        keys = np.array([[300.0] * 4, [-300.0] * 4, [299.0] * 4], np.float32)
        store.put(keys, np.eye(3, 4), 0)
        got, lse = hybridmem.attend(np.full(4, 100.0), store, 0)
        np.testing.assert_allclose(got, [[1, 0, 0, 0]], atol=1e-6)
        np.testing.assert_allclose(lse, [[60000.0]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("key", "value"), [(1e30, 1.0), (1.0, 3e38)])
def test_attention_that_overflows_is_an_error_and_no_nan(
    key: float, value: float, kv_dtype: str, tmp_path: Path
) -> None:
    with hybridmem.create(tmp_path / "s", embed_dim=4, kv_dtype=kv_dtype) as store:
        for sign in (1, -1) if key > 1 else (1, 1):
            store.put(np.full((2, 4), sign * key), np.full((2, 4), value), 0)
        with pytest.raises(ValueError, match="overflow float32"):
            hybridmem.attend(np.full(4, key), store, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"n_heads": 3}, {"n_heads": 4, "n_kv_heads": 3}, {"n_heads": 0}, {"scale": float("nan")}],
    ids=repr,
)
def test_bad_arguments(tmp_path: Path, wrong: dict[str, object]) -> None:
    with hybridmem.create(tmp_path / "s", embed_dim=8) as store:
        store.put(np.ones((2, 8)), np.ones((2, 8)), 0)
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            hybridmem.attend(np.ones(8), store, 0, **wrong)
        assert store.stats().queries == 0


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("shape", [(), (2,), (1, 2), (3, 1), (3, 3), (1, 3, 2)])
def test_merging_refuses_what_would_be_broadcast(at: int, shape: tuple[int, ...]) -> None:
    parts = [np.ones((3, 8)), np.ones((3, 2)), np.ones((3, 8)), np.ones((3, 2))]
    hybridmem.merge_attention(*parts)
    parts[at] = np.ones(shape)
    with pytest.raises(ValueError, match=r"want two outputs \[m, heads \* head_dim\]"):
        hybridmem.merge_attention(*parts)

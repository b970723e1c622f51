"""hybridmem audit: what it reads, prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import hybridmem

from . import WIDTH, helpers
from .helpers import run


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


@pytest.fixture
def store(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two layers of 20 entries; those of layer 1 are indexed by other keys."""
    path = tmp_path / "mem"
    with hybridmem.create(path, embed_dim=WIDTH) as opened:
        for _ in range(20):
            keys, values = rng.normal(size=(2, 3, WIDTH)).astype(np.float32)
            opened.put(keys, values, layer_idx=0)
            opened.put(keys, values, layer_idx=1, index_keys=-keys)
    return path


def document(*arguments: object) -> dict[str, Any]:
    return helpers.document("audit", *arguments)


def test_audit_of_all_layers_of_a_file(
    store: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    many = rng.normal(size=(5, 2, WIDTH)).astype(np.float32)
    lone = [rng.normal(size=(n, WIDTH)).astype(np.float32) for n in (1, 3, 2)]
    files: dict[str, Any] = {"q_0": many, **{f"q_1_{at}": one for at, one in enumerate(lone)}}
    np.savez(tmp_path / "q.npz", **files)
    save_file(files, tmp_path / "q.safetensors")
    with hybridmem.open(store, mode="r") as opened:
        wanted = [
            opened.audit(queries, layer, 4, candidates=8, n_heads=2)
            for layer, queries in ((0, list(many)), (1, lone))
        ]
    options = ["-k", 4, "--candidates", 8, "--heads", 2]
    for name in ("q.npz", "q.safetensors"):
        shown = document(store, "--queries", tmp_path / name, *options)
        assert shown["top_k"] == 4
        assert shown["layers"] == [
            {
                "layer_idx": one.layer_idx,
                "entries": 20,
                "queries": one.queries,
                "top_k": 4,
                "other_keys": one.other_keys,
                "recall": one.mean(),
            }
            for one in wanted
        ]
    assert [one.other_keys for one in wanted] == [0, 20]
    text = run("audit", store, "--queries", tmp_path / "q.npz", *options).stdout
    assert "layer 0: 20 entries, 5 queries, recall of the best 4 by brute force" in text
    means = wanted[0].mean()
    for ranking, by_truth in means.items():
        figures = [f"{by_truth[truth]:.2f}" for truth in ("pooled", "tokens", "late")]
        assert any(line.split() == [*figures, *ranking.split()] for line in text.splitlines())
    assert text.count("indexed by other keys") == 1
    only = document(store, "--queries", tmp_path / "q.npz", "--layer", 1)["layers"]
    assert [one["layer_idx"] for one in only] == [1]


def test_audit_with_the_keys_of_the_index(
    store: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    with hybridmem.open(store, mode="r") as opened:
        keys = {i: -opened.get(i).keys for i in opened if i % 2 == 0}
        queries = rng.normal(size=(6, WIDTH)).astype(np.float32)
        wanted = opened.audit(queries, 1, keys=keys)
        turned = opened.audit(queries, 1, rerank_queries=list(-queries))
    np.savez(tmp_path / "k.npz", **{f"k_{i}": one for i, one in keys.items()})
    np.savez(tmp_path / "q.npz", q_1=queries)
    np.savez(tmp_path / "r.npz", q_1=-queries)
    ask = [store, "--queries", tmp_path / "q.npz"]
    (shown,) = document(*ask, "--keys", tmp_path / "k.npz")["layers"]
    assert (shown["other_keys"], shown["recall"]) == (0, wanted.mean())
    (shown,) = document(*ask, "--rerank-queries", tmp_path / "r.npz")["layers"]
    assert (shown["other_keys"], shown["recall"]) == (20, turned.mean())


@pytest.mark.parametrize(
    ("name", "arrays", "options", "code", "words"),
    [
        ("q.npz", {"layer0": np.ones((2, WIDTH))}, [], 2, "neither q_LAYER"),
        ("q.npz", {"q_0": np.ones(WIDTH)}, [], 2, "neither q_LAYER"),
        ("q.npz", {}, [], 2, "has no queries"),
        ("q.npz", {"q_0": np.ones((2, 3))}, [], 2, "do not fit the store"),
        ("q.npz", {"q_9": np.ones((2, WIDTH))}, [], 2, "layer 9 has no entries"),
        ("q.npz", {"q_0": np.ones((2, WIDTH))}, ["--layer", "1"], 2, "no queries of layer 1"),
        ("q.npz", {"q_0": np.ones((2, WIDTH))}, ["--keys", "Q"], 2, "no tensor named k_ENTRY"),
        ("q.npz", {"q_0": np.ones((2, WIDTH))}, ["--plot", "Q/x.png"], 1, "cannot write"),
        ("q.npz", None, [], 1, "cannot read"),
        ("q.safetensors", None, [], 1, "cannot read"),
    ],
)
def test_audit_says_what_is_wrong(
    name: str,
    arrays: dict[str, Any] | None,
    options: list[str],
    code: int,
    words: str,
    store: Path,
    tmp_path: Path,
) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hybridmem[plot]'")
    path = tmp_path / name
    if arrays is None:
        path.write_bytes(b"no arrays")
    else:
        np.savez(path, **arrays)
    given = [option.replace("Q", str(path)) for option in options]
    assert words in run("audit", store, "--queries", path, *given, code=code).stderr


def test_audit_draws(store: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hybridmem[plot]'")
    np.savez(tmp_path / "q.npz", q_0=rng.normal(size=(4, WIDTH)))
    run("audit", store, "--queries", tmp_path / "q.npz", "--plot", tmp_path / "audit.svg")
    drawing = (tmp_path / "audit.svg").read_text()
    assert "<svg" in drawing
    run("audit", store, "--queries", tmp_path / "q.npz", "--plot", tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")

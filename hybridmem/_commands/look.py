"""Commands that only look: info, ls, show, query."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from hybridmem import Entry, Hit, Layered, Memory, Store, report
from hybridmem import _text as text
from hybridmem._commands.clusters import read_memory
from hybridmem._commands.files import array_in
from hybridmem._commands.group import (
    commands,
    emit,
    fail,
    json_option,
    pread_option,
    read_store,
    refuse,
    store_argument,
    stores_argument,
    working,
)
from hybridmem._sums import SUMS_NAME

if TYPE_CHECKING:
    from hybridmem.integrations.ray import Cluster

FIELDS = ("entry_id", "layer_idx", "n_tokens", "importance", "timestamp", "access_count")
_ORDERS = {
    "id": "entry_id",
    "layer": "layer_idx",
    "tokens": "n_tokens",
    "importance": "importance",
    "age": "timestamp",
    "access": "access_count",
}


@commands.command()
@stores_argument
@pread_option
@json_option
def info(stores: tuple[str, ...], io: str) -> None:
    """Show what a store is, what it holds and how large it is.

    Of several stores, each by itself, and that they can answer as one. Of the directory of a
    cluster, the cluster, if Ray runs here.
    """
    with read_memory(stores, io) as opened:
        if not isinstance(opened, Layered):
            emit(*_of_cluster(opened))
            return
        documents = [_told(store) for store in opened.stores]
        lines = [line for store in opened.stores for line in [*_lines(store), ""]]
        if len(stores) == 1:
            emit(documents[0], lines[:-1])
            return
        stats = opened.stats()
        together = {
            "entries": stats.entries,
            "entries_by_layer": stats.entries_by_layer,
            "tokens": stats.tokens,
            "disk_bytes": stats.disk_bytes,
        }
    lines += text.pairs(
        [
            ("together", text.plural(len(stores), "store") + " that answer as one"),
            ("entries", f"{stats.entries:,} of {text.plural(stats.tokens, 'token')}"),
            ("layers", _layers(stats.entries_by_layer)),
            ("on disk", text.size(stats.disk_bytes)),
        ]
    )
    emit({"stores": documents, **together}, lines)


def _of_cluster(cluster: Cluster) -> tuple[dict[str, Any], list[str]]:
    replicas = cluster.replicas()
    document = {
        "path": cluster.path,
        "store_id": cluster.store_id,
        "route": cluster.route,
        "partitions": replicas,
        **_counted(cluster),
    }
    lines = text.pairs(
        [
            ("path", cluster.path),
            ("cluster", f"{text.plural(len(replicas), 'partition')}, by {cluster.route}"),
            *_shown(cluster),
        ]
    )
    return document, [*lines, "", *(", ".join(each) or "on no node" for each in replicas)]


def _told(store: Store) -> dict[str, Any]:
    return {
        "path": str(store.path),
        "store_id": store.store_id,
        "pack": _is_pack(store),
        **_counted(store),
    }


def _counted(memory: Memory) -> dict[str, Any]:
    return {
        "config": memory.config.to_dict(),
        "record_bytes": 40 + memory.config.hdc_dim // 8,
        **{
            name: value
            for name, value in dataclasses.asdict(memory.stats()).items()
            if name not in ("queries", "hits", "evicted", "unflushed_bytes")
        },
    }


def _is_pack(store: Store) -> bool:
    return SUMS_NAME in os.listdir(store.path)


def _lines(store: Store) -> list[str]:
    return text.pairs(
        [
            ("path", store.path),
            *([("pack", "yes: it does not change")] * _is_pack(store)),
            *_shown(store),
            ("limits", _limits(store)),
        ]
    )


def _shown(memory: Memory) -> list[tuple[str, str]]:
    stats, config = memory.stats(), memory.config
    kept = "INT8" if config.quantize_stored else config.kv_dtype
    return [
        ("store id", memory.store_id),
        ("model", config.model_id or "not named"),
        ("generation", f"{stats.generation:,}"),
        ("entries", f"{stats.entries:,} of {text.plural(stats.tokens, 'token')}"),
        ("layers", _layers(stats.entries_by_layer)),
        ("width", f"{config.embed_dim:,}, kept as {kept}"),
        ("signature", _signature(memory)),
        ("on disk", text.size(stats.disk_bytes)),
        ("shards", f"{stats.shards:,}"),
        ("live", text.size(stats.live_bytes)),
        ("dead", f"{text.size(stats.dead_bytes)}, which compact gives back"),
    ]


def _layers(by_layer: dict[int, int]) -> str:
    shown = [f"{layer}: {count:,}" for layer, count in list(by_layer.items())[:12]]
    more = len(by_layer) - len(shown)
    return (", ".join(shown) or "none") + (f", and {more} more" if more else "")


def _signature(memory: Memory) -> str:
    config = memory.config
    bits = config.signature.bits
    most = f", {config.hdc_dim // bits} at most" if config.signature_tokens else ""
    return text.signature(bits, config.signature_tokens) + most


def _limits(store: Store) -> str:
    config = store.config
    entries = text.plural(config.max_entries, "entry") if config.max_entries else "any entries"
    disk = f"{text.size(config.max_disk_bytes)} on disk" if config.max_disk_bytes else "any size"
    shard = f"{text.size(config.shard_max_bytes)} a shard"
    return f"{entries}, {disk}, {shard}, {text.plural(config.max_open_shards, 'open shard')}"


@commands.command("ls")
@store_argument
@click.option("--layer", type=click.IntRange(0), help="Only entries of this layer.")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="id",
    show_default=True,
    help="Order; ties by id.",
)
@click.option("--reverse", is_flag=True, help="The largest first.")
@click.option("-n", "--limit", type=click.IntRange(1), help="List at most this many.")
@pread_option
@json_option
def list_entries(
    store: str, layer: int | None, sort: str, reverse: bool, limit: int | None, io: str
) -> None:
    """List entries."""
    with read_store(store, io) as opened:
        records = opened.entries
    if layer is not None:
        records = records[records["layer_idx"] == layer]
    rank = np.unique(records[_ORDERS[sort]], return_inverse=True)[1]
    if reverse != (sort == "age"):  # the youngest has the latest timestamp
        rank = -rank
    order = np.lexsort((records["entry_id"], rank))
    total = len(records)
    records = records[order[:limit]]
    now = time.time_ns()
    lines = text.table(
        ("id", "layer", "tokens", "importance", "accesses", "age"),
        (
            (
                record["entry_id"],
                record["layer_idx"],
                record["n_tokens"],
                f"{record['importance']:.4g}",
                record["access_count"],
                text.age((now - int(record["timestamp"])) / 1e9),
            )
            for record in records
        ),
    )
    if len(records) < total:
        lines.append(f"{len(records):,} of {text.plural(total, 'entry')}")
    emit({"total": total, "entries": [_record(record) for record in records]}, lines)


def _record(record: Any) -> dict[str, Any]:
    return {name: record[name].item() for name in (*FIELDS, "shard_idx")}


@commands.command()
@store_argument
@click.argument("entry_id", type=click.IntRange(1))
@pread_option
@json_option
def show(store: str, entry_id: int, io: str) -> None:
    """Show one entry: its record, and what its keys and values look like."""
    with read_store(store, io) as opened:
        entry = entry_of(opened, entry_id)
        document = {
            **_fields(entry),
            "source": entry.source,
            "keys": _summary(entry.keys),
            "values": _summary(entry.values),
        }
        lines = text.pairs(
            [
                ("entry", entry.entry_id),
                ("layer", entry.layer_idx),
                ("tokens", entry.n_tokens),
                ("importance", f"{entry.importance:.6g}"),
                ("put", text.moment(entry.timestamp)),
                ("accesses", f"{entry.access_count:,}"),
                ("keys", _described(entry.keys)),
                ("values", _described(entry.values)),
                *([("source", text.short(entry.source_json, 1000))] if entry.source_json else []),
            ]
        )
    emit(document, lines)


def entry_of(store: Store | Cluster, entry_id: int) -> Entry:
    """Return an entry, or end the command where there is none."""
    try:
        return store.get(entry_id)
    except KeyError:
        fail(f"{store.path} has no entry {entry_id}; `hybridmem ls` lists those there are")


def _fields(entry: Entry | Hit) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in FIELDS}


def _summary(rows: npt.NDArray[np.float32]) -> dict[str, Any]:
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    return {
        "shape": list(rows.shape),
        "min": float(rows.min()),
        "max": float(rows.max()),
        "mean": float(rows.mean(dtype=np.float64)),
        "mean_norm": float(norms.mean()),
    }


def _described(rows: npt.NDArray[np.float32]) -> str:
    of = _summary(rows)
    return (
        f"{rows.shape[0]:,} x {rows.shape[1]:,}, from {of['min']:.4g} to {of['max']:.4g}, "
        f"mean {of['mean']:.3g}, mean norm of a row {of['mean_norm']:.4g}"
    )


@commands.command()
@stores_argument
@click.option(
    "--layer", type=click.IntRange(0), help="Layer to search; that of --entry by default."
)
@click.option("-k", "--top-k", type=click.IntRange(1), default=5, show_default=True, help="Hits.")
@click.option(
    "--entry", type=click.IntRange(1), help="Ask with the keys of this entry of the first store."
)
@click.option(
    "--file",
    "source",
    metavar="FILE",
    help="Ask with the rows of a .npy file, or of FILE.safetensors:TENSOR.",
)
@click.option(
    "--rerank",
    type=click.Choice(["signatures", "pooled", "tokens", "late"]),
    help="Let the signatures and the whole query, or the stored keys, decide among the candidates.",
)
@click.option("--candidates", type=click.IntRange(1), help="Candidates; 4 * top-k by default.")
@pread_option
@json_option
def query(
    stores: tuple[str, ...],
    layer: int | None,
    top_k: int,
    entry: int | None,
    source: str | None,
    rerank: str | None,
    candidates: int | None,
    io: str,
) -> None:
    """Find the entries of a layer that are most similar to some keys. Counts as no access.

    Several stores, such as memory packs, answer as one; so does the directory of a cluster, if Ray
    runs here.
    """
    if (entry is None) == (source is None):
        refuse("give either --entry or --file")
    if candidates is not None and rerank is None:
        refuse("--candidates needs --rerank")
    with read_memory(stores, io) as opened:
        if entry is not None:
            asked = entry_of(opened.stores[0] if isinstance(opened, Layered) else opened, entry)
            rows: Any = asked.keys
            layer = asked.layer_idx if layer is None else layer
        else:
            rows = array_in(str(source))
        if layer is None:
            refuse("--file needs --layer")
        try:
            hits = opened.query(rows, layer, top_k, rerank=rerank, candidates=candidates)
        except (TypeError, ValueError) as error:
            refuse(f"the query does not fit the store: {error}")
        found = []
        for hit in hits:
            where, entry_id = (
                opened.locate(hit.entry_id)
                if isinstance(opened, Layered)
                else (opened, hit.entry_id)
            )
            found.append(
                {
                    **_fields(hit),
                    "entry_id": entry_id,
                    "store": str(where.path),
                    "score": hit.score,
                    "source": hit.source,
                }
            )
    several = len(stores) > 1
    with_source = any(hit.source_json for hit in hits)
    now = time.time_ns()
    lines = text.table(
        (
            "rank",
            "score",
            *(["store"] * several),
            "id",
            "tokens",
            "importance",
            "age",
            *(["source"] * with_source),
        ),
        (
            (
                rank,
                f"{hit['score']:+.4f}",
                *([hit["store"]] * several),
                hit["entry_id"],
                hit["n_tokens"],
                f"{hit['importance']:.4g}",
                text.age((now - hit["timestamp"]) / 1e9),
                *([text.short(hits[rank - 1].source_json)] * with_source),
            )
            for rank, hit in enumerate(found, 1)
        ),
    )
    if not found:
        lines = [f"layer {layer} has no entries"]
    emit({"layer_idx": layer, "top_k": top_k, "hits": found}, lines)


@commands.command("report")
@store_argument
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="File to write.",
)
@pread_option
@json_option
def make_report(store: str, output: str, io: str) -> None:
    """Write a page about a store: size, layers, importance, what is alike, what goes next.

    One HTML file without scripts, for a browser on any device.
    """
    with read_store(store, io) as opened, working("report"):
        try:
            facts = report.write(opened, output)
        except OSError as error:
            fail(f"cannot write {output}: {error}")
    n_bytes = os.path.getsize(output)
    emit(
        {"path": output, "bytes": n_bytes, "entries": facts.stats.entries},
        [f"wrote {output}, {text.size(n_bytes)}"],
    )

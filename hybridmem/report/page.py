"""The report as HTML: one file, no scripts, nothing loaded."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hybridmem import _text as text
from hybridmem.report import charts
from hybridmem.report.facts import Facts

__all__ = ["render"]

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def render(facts: Facts) -> str:
    """Return the page."""
    name = html.escape(facts.path.rstrip("/").rsplit("/", 1)[-1])
    stats = facts.stats
    body = [
        f"<header><h1>{name}</h1><p>{html.escape(facts.path)} at "
        f"{html.escape(text.moment(facts.made))}</p></header>",
        _tiles(
            [
                (f"{stats.entries:,}", "entries"),
                (f"{stats.tokens:,}", "tokens"),
                (f"{len(stats.entries_by_layer):,}", "layers"),
                (text.size(stats.disk_bytes), "on disk"),
                (text.size(stats.dead_bytes), "dead, back with compact"),
                (f"{stats.generation:,}", "commits"),
            ]
        ),
        '<div class="cards">',
        _growth(facts),
        _layers(facts),
        _importance(facts),
        _similarity(facts),
        _next_out(facts),
        _shards(facts),
        _maps(facts),
        _about(facts),
        "</div>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: HybridMem report</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(filter(None, body))}</main></body></html>\n"
    )


def _tiles(values: Iterable[tuple[str, str]]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for value, name in values
    )
    return f'<div class="tiles">{tiles}</div>'


def _card(title: str, about: str, content: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return (
        f'<section class="{kind}"><h2>{html.escape(title)}</h2>'
        f"<p>{html.escape(about)}</p>{content}</section>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = "".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )  # fmt: skip
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _meter(live: float, dead: float = 0.0) -> str:
    rest = f'<i class="dead" style="width:{100 * dead:.1f}%"></i>' if dead else ""
    return (
        f'<td class="share"><div class="meter"><i style="width:{100 * live:.1f}%"></i>{rest}'
        "</div></td>"
    )


def _growth(facts: Facts) -> str:
    if not facts.growth:
        return _card("Growth", "Nothing is stored yet.", "")
    # Times as seconds from the first, which float64 holds exactly enough.
    start = facts.growth[0][0]
    series = [((time - start) / 1e9, float(total)) for time, total in facts.growth]
    shown = slice(11, 19) if series[-1][0] < 3600 else slice(5, 16)  # seconds, or the day
    chart = charts.line(
        series,
        "tokens stored over time",
        lambda x: text.moment(start + int(x * 1e9))[shown],
        _count,
    )
    return _card(
        "Growth", "Tokens of the entries that are still there, by when they were put.", chart
    )


def _layers(facts: Facts) -> str:
    most = max((layer.tokens for layer in facts.layers), default=1)
    rows = [
        (str(layer.number), f"{layer.entries:,}", f"{layer.tokens:,}", _meter(layer.tokens / most))
        for layer in facts.layers
    ]
    return _card(
        "Layers", "Entries and tokens of each.", _table(("layer", "entries", "tokens", ""), rows)
    )


def _importance(facts: Facts) -> str:
    if not len(facts.importance):
        return ""
    chart = charts.points(
        facts.accesses, facts.importance, "importance against accesses", _count, _short
    )
    return _card("Importance", "Of each entry, against how often queries have returned it.", chart)


def _similarity(facts: Facts) -> str:
    pairs = [layer.similarities for layer in facts.layers if len(layer.similarities)]
    if not pairs:
        return ""
    values = np.concatenate(pairs)
    chart = charts.histogram(
        values, "similarity of entries", _short, lambda share: f"{100 * share:.3g} %"
    )
    about = (
        f"Of the signatures of two entries of a layer, {len(values):,} pairs; "
        f"half of them above {np.median(values):.3f}."
    )
    return _card("Similarity", about, chart)


def _maps(facts: Facts) -> str:
    drawn = [layer for layer in facts.layers if len(layer.compared) >= 3]
    if not drawn:
        return ""
    figures = "".join(
        "<figure>"
        + charts.neighbours(
            layer.places, layer.nearest, layer.compared, f"entries of layer {layer.number}"
        )
        + f"<figcaption>layer {layer.number}: {len(layer.compared):,} of "
        f"{text.plural(layer.entries, 'entry')}</figcaption></figure>"
        for layer in drawn
    )
    about = (
        "What is alike lies close; each entry is joined to the one most like it, older ones are "
        "fainter. Two dimensions keep only a part of the distances."
    )
    return _card("Neighbours", about, f'<div class="maps">{figures}</div>', wide=True)


def _next_out(facts: Facts) -> str:
    if not facts.next_out:
        return ""
    header = ("entry", "layer", "importance", "accesses", "age")
    rows: list[tuple[str, ...]] = []
    for entry in facts.next_out:
        rows.append(
            (
                str(entry["entry_id"]),
                str(entry["layer_idx"]),
                f"{entry['importance']:.3g}",
                f"{entry['access_count']:,}",
                text.age((facts.made - entry["timestamp"]) / 1e9),
            )
        )
        if entry["source"] is not None:
            said = text.short(json.dumps(entry["source"], ensure_ascii=False), 90)
            rows.append((f'<td class="said" colspan="{len(header)}">{html.escape(said)}</td>',))
    about = "What an eviction would take, in this order: importance * (1 + log(1 + accesses))."
    return _card("Next to go", about, _table(header, rows))


def _shards(facts: Facts) -> str:
    if not facts.shards:
        return _card("Shards", "None is written yet.", "")
    shown = sorted(facts.shards, key=lambda shard: (shard.live / shard.entries, shard.number))[:12]
    rows = [
        (
            f"{shard.number:04d}",
            text.size(shard.size),
            f"{shard.live:,} of {shard.entries:,}",
            _meter(shard.live / shard.entries, 1 - shard.live / shard.entries),
        )
        for shard in shown
    ]
    about = f"{text.plural(len(facts.shards), 'file')}, the most worn first; orange is dead."
    return _card("Shards", about, _table(("shard", "size", "alive", ""), rows))


def _about(facts: Facts) -> str:
    config, stats = facts.config, facts.stats
    kept = "INT8" if config.quantize_stored else config.kv_dtype
    values = (
        ("model", config.model_id or "not named"),
        ("width", f"{config.embed_dim:,}, kept as {kept}"),
        ("signatures", text.signature(config.signature.bits, config.signature_tokens)),
        ("most entries", f"{config.max_entries:,}" if config.max_entries else "any number"),
        ("most bytes", text.size(config.max_disk_bytes) if config.max_disk_bytes else "any number"),
        ("live", text.size(stats.live_bytes)),
        ("health", "index, records and shard sizes matched their checksums when this was made"),
        ("store id", facts.store_id),
    )
    content = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in values
    )
    return _card("The store", "", f"<dl>{content}</dl>", wide=True)


def _count(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"


def _short(value: float) -> str:
    return f"{value:.3g}"

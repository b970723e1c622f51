"""The report: its numbers, its charts, and a page that stands alone."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem import hdc, report
from hybridmem._text import moment
from hybridmem.report import charts, facts

WIDTH = 32


def fill(store: hybridmem.Store, n: int = 24) -> None:
    rng = np.random.default_rng(3)
    for at in range(n):
        keys, values = rng.normal(size=(2, 1 + at % 5, WIDTH)).astype(np.float32)
        store.put(keys, values, at % 2, importance=float(rng.random()))
    store.query(np.ones(WIDTH, np.float32), 0)
    store.flush()


@pytest.fixture(params=["pooled", "tokens"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hybridmem.Store]:
    fields = {"signature_tokens": 1, "signature_bits": 512} if request.param == "tokens" else {}
    with hybridmem.create(tmp_path / "mem <&>", embed_dim=WIDTH, **fields) as opened:
        fill(opened)
        yield opened


def test_similarities_are_those_of_the_store(store: hybridmem.Store) -> None:
    (layer, _) = report.gather(store).layers
    assert layer.compared == [number for number in store if store.get(number).layer_idx == 0]
    n = len(layer.compared)
    expected = np.zeros((n, n))
    for i, number in enumerate(layer.compared):
        scores = {h.entry_id: h.score for h in store.query(store.get(number).keys, 0, n)}
        expected[i] = [scores[other] for other in layer.compared]
    both = (expected + expected.T) / 2
    assert layer.similarities == pytest.approx(both[np.triu_indices(n, 1)], abs=1e-6)
    np.fill_diagonal(both, -9)
    chosen = both[np.arange(n), layer.nearest]
    assert chosen == pytest.approx(both.max(axis=1), abs=1e-6)


def test_places_keep_distances_that_fit_a_plane() -> None:
    at = np.random.default_rng(0).normal(size=(12, 2))
    squared = ((at[:, None] - at[None]) ** 2).sum(-1)
    places = facts._places(1 - squared)
    assert ((places[:, None] - places[None]) ** 2).sum(-1) == pytest.approx(squared, abs=1e-9)


def test_totals_shards_and_growth(store: hybridmem.Store) -> None:
    store.delete(3)
    store.flush()
    told = report.gather(store)
    records = store.entries
    assert sum(layer.tokens for layer in told.layers) == records["n_tokens"].sum()
    assert [layer.entries for layer in told.layers] == [11, 12]
    assert [(s.entries, s.live) for s in told.shards] == [(24, 23)]
    assert told.shards[0].size == (store.path / "shard_0000.safetensors").stat().st_size
    assert told.growth[-1][1] == records["n_tokens"].sum()
    assert [total for _, total in told.growth] == np.cumsum(records["n_tokens"]).tolist()


def test_next_to_go_is_what_eviction_takes(store: hybridmem.Store) -> None:
    told = report.gather(store)
    ids = {entry["entry_id"] for entry in told.next_out}
    before = set(store)
    store.evict(len(store) - 10)
    assert before - set(store) == ids


def test_making_a_report_is_no_access(store: hybridmem.Store) -> None:
    before = store.entries["access_count"].tolist(), store.stats().queries
    report.gather(store)
    assert (store.entries["access_count"].tolist(), store.stats().queries) == before


class _Checker(HTMLParser):
    """Refuses a page whose tags do not match, or that loads or runs anything."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href"), value
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return  # an SVG element without content

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone_and_names_what_it_shows(
    store: hybridmem.Store, tmp_path: Path
) -> None:
    told = report.write(store, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert "url(" not in page
    assert "@import" not in page
    text = " ".join(checker.text)
    assert "mem <&>" in text  # as text, not as markup
    for title in ("Growth", "Layers", "Importance", "Similarity", "Neighbours", "Next to go"):
        assert title in text
    assert f"{told.stats.tokens:,}" in text
    assert told.store_id in text
    for time, _ in (told.growth[0], told.growth[-1]):  # within an hour: to the second
        assert moment(time)[11:19] in checker.text
    assert "prefers-color-scheme: dark" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        root = ElementTree.fromstring(svg)
        for element in root.iter():
            for name in ("x", "y", "cx", "cy"):
                if name in element.attrib:
                    limit = charts.WIDTH if name in ("x", "cx") else charts.HEIGHT
                    assert -1 <= float(element.attrib[name]) <= limit + 1


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_a_store_of_next_to_nothing_has_a_page_too(tmp_path: Path, entries: int) -> None:
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH) as opened:
        for _ in range(entries):
            opened.put(np.ones((1, WIDTH), np.float32), np.ones((1, WIDTH), np.float32), 0)
        checker = _Checker()
        checker.feed(report.render(report.gather(opened)))
        assert checker.open == []


def test_a_large_store_is_sampled(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with hybridmem.create(tmp_path / "mem", embed_dim=8, hdc_dim=64) as opened:
        rows = rng.normal(size=(2000, 1, 8)).astype(np.float32)
        opened.put_many([(row, row) for row in rows], 0)
        told = report.gather(opened)
    assert len(told.layers[0].compared) <= 240
    assert told.layers[0].entries == 2000
    assert len(told.importance) <= 1500
    assert len(report.render(told)) < 1 << 20


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (-0.2, 0.83), (0, 1e9), (0, 1e-7)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = charts.ticks(low, high)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 * (high - low) <= found[0]
    assert found[-1] <= high + 1e-9 * (high - low)
    step = found[1] - found[0]
    assert np.diff(found) == pytest.approx(step)
    assert f"{step:.12e}"[0] in "125"


def test_ticks_of_a_single_value() -> None:
    assert charts.ticks(3.0, 3.0) == [3.0]


def test_pooled_similarity_is_that_of_hdc(tmp_path: Path) -> None:
    with hybridmem.create(tmp_path / "mem", embed_dim=WIDTH) as opened:
        fill(opened, 6)
        packed = [np.frombuffer(s, np.uint8) for s in opened.entries["signature"]]
        told = report.gather(opened).layers[0]
    assert told.similarities[0] == pytest.approx(hdc.similarity(packed[0], packed[2]), abs=1e-6)

"""What notebooks show: short tables in which everything that was given is text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem

NASTY = "<script>alert(1)</script>&<b>"


class Cells(HTMLParser):
    """The text of each cell, row by row; elements that are no part of a table fail."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.caption = ""
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"table", "caption", "thead", "tbody", "tr", "th", "td"}, tag
        assert not attrs
        self._in = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._in == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


def cells(shown: Any) -> Cells:
    parsed = Cells()
    parsed.feed(shown._repr_html_())
    parsed.close()
    return parsed


@pytest.fixture
def store(tmp_path: Path) -> Any:
    rng = np.random.default_rng(0)
    with hybridmem.create(tmp_path / "a<b>", embed_dim=8, model_id=NASTY) as store:
        for n in range(30):
            keys, values = rng.normal(size=(2, 3, 8)).astype(np.float32)
            store.put(keys, values, n % 2, source={"text": NASTY} if n == 4 else None)
        store.flush()
        yield store


def test_hits(store: Any) -> None:
    hits = store.query(store.get(5).keys, 0, 3)
    shown = cells(hits)
    assert shown.caption == "3 hits of layer 0"
    assert shown.rows[0] == ["rank", "score", "id", "tokens", "importance", "source"]
    assert shown.rows[1][:5] == ["1", "+1.0000", "5", "3", "1"]
    assert shown.rows[1][5] == '{"text":"' + NASTY + '"}'
    assert [row[2] for row in shown.rows[1:]] == [str(hit.entry_id) for hit in hits]
    plain = cells(store.query(store.get(2).keys, 1, 2))
    assert plain.rows[0][-1] == "importance"
    many = cells(store.query_many(store.get(2).keys, 1, 2)[0])
    assert len(many.rows) == 3


def test_many_hits_are_cut_and_none_are_said(store: Any) -> None:
    for number in range(30):
        store.put(np.ones((1, 8)), np.ones((1, 8)), 7, importance=number)
    shown = cells(store.query(np.ones(8), 7, 30))
    assert shown.caption == "30 hits of layer 7"
    assert len(shown.rows) == 22
    assert shown.rows[-1] == ["and 10 more"]
    assert cells(store.query(np.ones(8), 99)).caption == "0 hits"


def test_hits_are_a_list(store: Any) -> None:
    hits = store.query(np.ones(8), 0, 3)
    assert isinstance(hits, list)
    assert hits == list(hits)
    assert store.query(np.ones(8), 99) == []


def test_stats(store: Any) -> None:
    store.put(np.ones((2, 8)), np.ones((2, 8)), 0)
    shown = dict(cells(store.stats()).rows)
    assert shown["entries"] == "31 of 92 tokens"
    assert shown["layers"] == "0: 16, 1: 15"
    assert shown["not flushed"] == "128 B"
    assert shown["on disk"].endswith(" in 1 shard")


def test_a_store_open_and_closed(store: Any) -> None:
    shown = dict(cells(store).rows)
    assert shown["path"] == str(store.path)
    assert shown["model"] == NASTY
    assert shown["entries"] == "30 of 90 tokens"
    assert shown["width"] == "8, kept as float32"
    store.close()
    assert dict(cells(store).rows)["state"] == "closed"

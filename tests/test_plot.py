"""Figures: what is drawn is what the report says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hybridmem
from hybridmem import plot, report

matplotlib = pytest.importorskip(
    "matplotlib", reason="needs matplotlib: pip install 'hybridmem[plot]'"
)
matplotlib.use("Agg")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hybridmem.Store]:
    rng = np.random.default_rng(3)
    with hybridmem.create(tmp_path / "mem", embed_dim=16) as opened:
        for at in range(12):
            keys, values = rng.normal(size=(2, 1 + at % 3, 16)).astype(np.float32)
            opened.put(keys, values, at % 2, importance=float(rng.random()))
        yield opened


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def test_figures_of_a_store(store: hybridmem.Store) -> None:
    facts = report.gather(store)
    assert [bar.get_height() for bar in plot.layers(store).patches] == [12, 12]
    (line,) = plot.growth(facts).lines
    assert line.get_ydata().tolist() == [total for _, total in facts.growth]
    points = plot.importance(facts).collections[0].get_offsets()
    assert np.array_equal(points[:, 1], facts.importance)
    assert len(plot.similarity(facts).patches) == 2
    places = plot.neighbours(store, 1).collections[0].get_offsets()
    assert np.allclose(places, facts.layers[1].places)


def test_recall_of_an_audit(store: hybridmem.Store) -> None:
    queries = np.random.default_rng(4).normal(size=(5, 16))
    found = [store.audit(queries, layer, 2) for layer in (0, 1)]
    axes = plot.audit(found)
    names = [label.get_text() for label in axes.get_yticklabels()]
    truths = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == list(found[0].recall)
    assert truths == ["pooled", "tokens", "late"]
    drawn = np.array([bar.get_width() for bar in axes.patches]).reshape(len(truths), len(names))
    for row, truth in zip(drawn, truths, strict=True):
        for width, name in zip(row, names, strict=True):
            assert width == pytest.approx(np.mean([one.mean()[name][truth] for one in found]))
    assert len(axes.collections[0].get_offsets()) == len(names) * 2
    assert plot.audit(found[0]).get_xlabel() == "recall of the best 2"


def test_given_axes_are_drawn_into(store: hybridmem.Store) -> None:
    from matplotlib import pyplot

    _, axes = pyplot.subplots()
    assert plot.layers(store, axes) is axes
    axes.figure.canvas.draw()


def test_what_cannot_be_drawn_is_said(store: hybridmem.Store) -> None:
    with pytest.raises(ValueError, match="layer 7"):
        plot.neighbours(store, 7)

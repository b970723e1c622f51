"""Figures of a store for notebooks and papers, with matplotlib (extra `plot`).

Each function draws into the axes it is given, or into new ones, and returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridmem.report.facts import Facts, gather
from hybridmem.results import Audit
from hybridmem.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["audit", "growth", "importance", "layers", "neighbours", "similarity"]


def _axes(ax: Axes | None) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "hybridmem.plot needs matplotlib: pip install 'hybridmem[plot]'"
        ) from error
    return pyplot.subplots()[1]


def _facts(source: Store | Facts) -> Facts:
    return source if isinstance(source, Facts) else gather(source)


def growth(source: Store | Facts, ax: Axes | None = None) -> Axes:
    """Draw the tokens of the live entries by the time they were put.

    Parameters
    ----------
    source : Store or Facts
        Facts, of `hybridmem.report.gather`, spare reading the store for each figure.
    ax : matplotlib.axes.Axes, optional
    """
    facts, axes = _facts(source), _axes(ax)
    times = np.array([time for time, _ in facts.growth], "datetime64[ns]")
    axes.step(times, [total for _, total in facts.growth], where="post")
    axes.set(ylabel="tokens", title="Growth", ylim=(0, None))
    axes.tick_params(axis="x", labelrotation=30)
    drawn: Axes = axes
    return drawn


def layers(source: Store | Facts, ax: Axes | None = None) -> Axes:
    """Draw the tokens of each layer. Parameters as for `growth`."""
    facts, axes = _facts(source), _axes(ax)
    axes.bar([str(layer.number) for layer in facts.layers], [x.tokens for x in facts.layers])
    axes.set(xlabel="layer", ylabel="tokens", title="Layers")
    drawn: Axes = axes
    return drawn


def importance(source: Store | Facts, ax: Axes | None = None) -> Axes:
    """Draw the importance of each entry against its accesses. Parameters as for `growth`."""
    facts, axes = _facts(source), _axes(ax)
    axes.scatter(facts.accesses, facts.importance, s=12, alpha=0.5)
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="accesses", ylabel="importance", title="Importance", xlim=(-0.2, None))
    drawn: Axes = axes
    return drawn


def similarity(source: Store | Facts, ax: Axes | None = None) -> Axes:
    """Draw how similar two entries of a layer are, by layer. Parameters as for `growth`."""
    facts, axes = _facts(source), _axes(ax)
    for layer in facts.layers:
        if len(layer.similarities):
            axes.hist(
                layer.similarities, bins=40, density=True, histtype="step", label=str(layer.number)
            )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="layer")
    axes.set(xlabel="similarity of two entries", ylabel="density", title="Similarity")
    drawn: Axes = axes
    return drawn


def neighbours(source: Store | Facts, layer_idx: int, ax: Axes | None = None) -> Axes:
    """Draw the entries of a layer in a plane, each joined to the one most like it.

    Parameters
    ----------
    source, ax
        As for `growth`.
    layer_idx : int

    Raises
    ------
    ValueError
        If fewer than three entries of the layer were compared.
    """
    facts = _facts(source)
    layer = next((layer for layer in facts.layers if layer.number == layer_idx), None)
    if layer is None or len(layer.compared) < 3:
        raise ValueError(f"layer_idx: fewer than three entries of layer {layer_idx} were compared")
    axes = _axes(ax)
    for at, other in enumerate(layer.nearest):
        axes.plot(*layer.places[[at, other]].T, color="0.7", linewidth=0.7, zorder=1)
    shown = axes.scatter(*layer.places.T, c=np.arange(len(layer.compared)), s=18, zorder=2)
    axes.figure.colorbar(shown, ax=axes, label="age: the newest last")
    axes.set(title=f"Neighbours in layer {layer_idx}", xticks=[], yticks=[])
    drawn: Axes = axes
    return drawn


def audit(found: Audit | Sequence[Audit], ax: Axes | None = None) -> Axes:
    """Draw what `Store.audit` found: recall by ranking, for each way to score the keys.

    Parameters
    ----------
    found : Audit or sequence of Audit
        Of several layers the mean is drawn, and each layer as a dot.
    ax : matplotlib.axes.Axes, optional
    """
    layers = [found] if isinstance(found, Audit) else list(found)
    means = [one.mean() for one in layers]
    rankings = list(dict.fromkeys(name for one in means for name in one))
    truths = list(means[0][rankings[0]])
    axes = _axes(ax)
    if ax is None:
        axes.figure.set_size_inches(8, 0.6 + 0.45 * len(rankings))
    thickness = 0.8 / len(truths)
    for number, truth in enumerate(truths):
        places = np.arange(len(rankings)) + (number - (len(truths) - 1) / 2) * thickness
        values = [[one[name][truth] for one in means if name in one] for name in rankings]
        axes.barh(places, [np.mean(each) for each in values], thickness, label=truth)
        if len(layers) > 1:
            dots = [(x, y) for y, each in zip(places, values, strict=True) for x in each]
            axes.scatter(*np.array(dots).T, s=6, color="0.3", zorder=3)
    axes.set_yticks(range(len(rankings)), rankings)
    axes.invert_yaxis()
    axes.legend(title="keys scored by")
    axes.set(xlim=(0, 1), xlabel=f"recall of the best {layers[0].top_k}", title="Audit")
    drawn: Axes = axes
    return drawn

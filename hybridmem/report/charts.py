"""Charts as SVG text: lines, points, bars of a distribution. Colours are variables of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["histogram", "line", "neighbours", "points", "ticks"]

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 30

Floats = npt.NDArray[np.float64]
Label = Callable[[float], str]


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers from `low` to `high`, about as many as wanted.

    Examples
    --------
    >>> ticks(0, 100)
    [0.0, 25.0, 50.0, 75.0, 100.0]
    """
    span = high - low
    if not span > 0:
        return [low]
    raw = span / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


class _Frame:
    """A chart's coordinates, axes and parts."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], title: str) -> None:
        self.x_low, self.x_high = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self.y_low, self.y_high = y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5)
        self.title = title
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(
        self, x_at: Iterable[float], y_at: Iterable[float], x_label: Label, y_label: Label
    ) -> None:
        for value in y_at:
            y = self.y(value)
            self.parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            self.text(LEFT - 6, y + 3.5, y_label(value), "end")
        self.parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        for value in x_at:
            x = self.x(value)
            anchor = "start" if x < LEFT + 20 else "end" if x > WIDTH - RIGHT - 20 else "middle"
            self.text(x, HEIGHT - BOTTOM + 16, x_label(value), anchor)

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def svg(self) -> str:
        title = html.escape(self.title, quote=True)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
            + "".join(self.parts)
            + "</svg>"
        )


def line(series: Sequence[tuple[float, float]], title: str, x_label: Label, y_label: Label) -> str:
    """Return a curve that rises in steps, with the area below it."""
    xs, ys = [x for x, _ in series], [y for _, y in series]
    frame = _Frame((min(xs), max(xs)), (0.0, max(ys)), title)
    frame.axes((min(xs), max(xs)), ticks(0.0, max(ys)), x_label, y_label)
    path = f"M{frame.x(xs[0]):.1f} {frame.y(0):.1f}V{frame.y(ys[0]):.1f}" + "".join(
        f"H{frame.x(x):.1f}V{frame.y(y):.1f}" for x, y in series[1:]
    )
    frame.parts.append(f'<path class="area" d="{path}H{frame.x(xs[-1]):.1f}V{frame.y(0):.1f}Z"/>')
    frame.parts.append(f'<path class="line" d="{path}"/>')
    return frame.svg()


def points(x: Floats, y: Floats, title: str, x_label: Label, y_label: Label) -> str:
    """Return a cloud of points; x is a count, drawn as log(1 + x)."""
    across = np.log1p(x)
    most = max(float(x.max()), 1.0)
    marks = [0.0] + [10.0**e for e in range(int(math.log10(most)) + 1)]
    frame = _Frame((0.0, math.log1p(most)), (0.0, max(float(y.max()), 1e-9)), title)
    frame.axes(
        [math.log1p(mark) for mark in marks],
        ticks(0.0, frame.y_high),
        lambda value: x_label(math.expm1(value)),
        y_label,
    )
    frame.parts += [
        f'<circle class="dot" cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}" r="2.6"/>'
        for a, b in zip(across.tolist(), y.tolist(), strict=True)
    ]
    return frame.svg()


def histogram(values: Floats, title: str, x_label: Label, y_label: Label) -> str:
    """Return how often values fall into each of forty equal parts of their range."""
    low, high = float(values.min()), float(values.max())
    counts, edges = np.histogram(values, bins=40, range=(low, high) if high > low else None)
    shares = counts / counts.sum()
    frame = _Frame((float(edges[0]), float(edges[-1])), (0.0, float(shares.max())), title)
    frame.axes(ticks(frame.x_low, frame.x_high), ticks(0.0, frame.y_high, 3), x_label, y_label)
    for at, share in enumerate(shares.tolist()):
        if share:
            left, right = frame.x(float(edges[at])), frame.x(float(edges[at + 1]))
            top = frame.y(share)
            frame.parts.append(
                f'<rect class="bar" x="{left + 0.4:.1f}" y="{top:.1f}" '
                f'width="{max(0.6, right - left - 0.8):.1f}" height="{frame.y(0) - top:.1f}"/>'
            )
    return frame.svg()


def neighbours(
    places: Floats, nearest: npt.NDArray[np.int64], ids: Sequence[int], title: str
) -> str:
    """Return entries as points in a plane, each joined to the one most similar to it.

    Older entries are fainter.
    """
    frame = _Frame(
        (float(places[:, 0].min()), float(places[:, 0].max())),
        (float(places[:, 1].min()), float(places[:, 1].max())),
        title,
    )
    at = [(frame.x(a), frame.y(b)) for a, b in places.tolist()]
    drawn = {tuple(sorted((i, int(j)))) for i, j in enumerate(nearest)}
    frame.parts += [
        f'<path class="edge" d="M{at[i][0]:.1f} {at[i][1]:.1f}L{at[j][0]:.1f} {at[j][1]:.1f}"/>'
        for i, j in sorted(drawn)
    ]
    for i, ((x, y), entry) in enumerate(zip(at, ids, strict=True)):
        faint = 0.35 + 0.65 * i / max(1, len(ids) - 1)
        frame.parts.append(
            f'<circle class="place" cx="{x:.1f}" cy="{y:.1f}" r="3.2" opacity="{faint:.2f}">'
            f"<title>entry {entry}, most like {ids[int(nearest[i])]}</title></circle>"
        )
    return frame.svg()

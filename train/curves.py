"""Curves as inline SVG: no script, no file beside it; colours are classes, so that a page can have light and dark ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
COLOURS = 8
"""Classes c0 to c7; further lines begin again, dashed."""
MOST_POINTS = 400
"""Of a line; more are averaged in groups, and the page stays small."""
Kind = Literal["line", "faint", "points"]


@dataclass(frozen=True)
class Curve:
    """Points of one thing; `number` is its colour, the same for the same run or draft step in all charts."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    number: int = 0
    kind: Kind = "line"
    """faint: without a name in the legend, behind the others."""


def chart(title: str, curves: Sequence[Curve], x_name: str, reach: float, *, log: bool = False) -> str:
    """Return an <svg> element with axes, curves and, of several names, a legend; '' where there is no finite point.

    The horizontal axis goes from 0 to `reach`, so that charts can be compared. With `log` the vertical one is logarithmic,
    and points of 0 or less are left out.
    """
    drawn = [cleaned for curve in curves if (cleaned := _clean(curve, log)).x]
    if not drawn:
        return ""
    ys = [y for c in drawn for y in c.y]
    across, up = Axis.to(max(reach, *(x for c in drawn for x in c.x))), Axis.over(min(ys), max(ys), log=log)
    svg = ElementTree.Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": title})
    _draw_axes(svg, across, up, x_name)
    for curve in sorted(drawn, key=lambda c: ("faint", "line", "points").index(c.kind)):
        _draw_curve(svg, curve, across, up)
    names = list(dict.fromkeys((c.name, c.number) for c in drawn if c.kind != "faint"))
    if len(names) > 1:
        _draw_legend(svg, names)
    return ElementTree.tostring(svg, encoding="unicode")


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to shares from 0 to 1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @staticmethod
    def over(least: float, most: float, *, log: bool = False) -> Axis:
        """Return an axis that holds both values, with three to eight ticks at round numbers."""
        if log:
            low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
            high = max(high, low + 1)
            every = max(1, math.ceil((high - low) / 6))
            return Axis(10.0**low, 10.0**high, tuple(10.0**e for e in range(low, high + 1, every)), log=True)
        if most <= least:
            pad = abs(least) * 0.1 or 1.0
            least, most = least - pad, most + pad
        step = _round_step(most - least)
        first, last = math.floor(least / step), math.ceil(most / step)
        return Axis(first * step, last * step, tuple(i * step for i in range(first, last + 1)))

    @staticmethod
    def to(most: float) -> Axis:
        """Return an axis from 0 to exactly `most`, with ticks at round numbers."""
        most = most if most > 0 else 1.0
        step = _round_step(most)
        return Axis(0.0, most, tuple(i * step for i in range(math.floor(most / step) + 1)))

    def share(self, value: float) -> float:
        """Return where a value lies between low and high."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def _round_step(width: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, which fits two to six times into the width."""
    step = 10.0 ** math.floor(math.log10(width / 4))
    return step * next(m for m in (1, 2, 2.5, 5, 10) if width / (step * m) <= 6)


def smooth(y: Sequence[float]) -> list[float]:
    """Return running means over a twenty-fifth of the values, each of the values up to its own."""
    width = max(1, len(y) // 25)
    sums = [0.0]
    for value in y:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(width, i + 1) for i in range(len(y))]


def spell(value: float) -> str:
    """Return a number as short as four digits allow."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.4g}{unit}"
    return f"{value:.4g}"


def _clean(curve: Curve, log: bool) -> Curve:
    """Return the curve without points that are not finite, and few enough."""
    pairs = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    pairs = [(x, y) for x, y in pairs if y > 0] if log else pairs
    group = math.ceil(len(pairs) / MOST_POINTS)
    if group > 1 and curve.kind != "points":
        groups = [pairs[i : i + group] for i in range(0, len(pairs), group)]
        pairs = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return Curve(curve.name, [x for x, _ in pairs], [y for _, y in pairs], curve.number, curve.kind)


def _place(x: float, y: float) -> tuple[float, float]:
    """Return the place in the picture of shares of its axes."""
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _add(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str | float) -> ElementTree.Element:
    given = {k.rstrip("_").replace("_", "-"): v if isinstance(v, str) else f"{v:.1f}" for k, v in attributes.items()}
    child = ElementTree.SubElement(parent, tag, given)
    if text:
        child.text = text
    return child


def _draw_axes(svg: ElementTree.Element, across: Axis, up: Axis, x_name: str) -> None:
    for tick in up.ticks:
        x0, y = _place(0, up.share(tick))
        _add(svg, "line", x1=x0, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        _add(svg, "text", spell(tick), x=x0 - 6, y=y + 4, class_="up")
    for tick in across.ticks:
        x, y0 = _place(across.share(tick), 0)
        _add(svg, "line", x1=x, x2=x, y1=y0, y2=y0 + 4, class_="grid")
        _add(svg, "text", spell(tick), x=x, y=y0 + 17, class_="across")
    middle, _ = _place(0.5, 0)
    _add(svg, "text", x_name, x=middle, y=HEIGHT - 5, class_="across")


def _draw_curve(svg: ElementTree.Element, curve: Curve, across: Axis, up: Axis) -> None:
    points = [_place(across.share(x), up.share(y)) for x, y in zip(curve.x, curve.y, strict=True)]
    colour = f"c{curve.number % COLOURS}" + (" dashed" if curve.number >= COLOURS else "")
    if curve.kind == "points" or len(points) == 1:
        for (px, py), x, y in zip(points, curve.x, curve.y, strict=True):
            dot = _add(svg, "circle", cx=px, cy=py, r=3.5, class_=f"dot {colour}")
            _add(dot, "title", f"{curve.name}: {spell(y)} at {spell(x)}")
    if curve.kind != "points" or len(points) > 1:
        style = {"line": "curve", "faint": "curve faint", "points": "curve thin"}[curve.kind]
        _add(svg, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=f"{style} {colour}")


def _draw_legend(svg: ElementTree.Element, names: Sequence[tuple[str, int]]) -> None:
    """Write the names in rows above the picture, which grows upwards for them."""
    x, row, height = float(LEFT), 0, 18
    places = []
    for name, number in names:
        name = name if len(name) <= 60 else "…" + name[-59:]
        width = 24 + 7.0 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, row = float(LEFT), row + 1
        places.append((name, number, x, row))
        x += width
    above = (row + 1) * height
    svg.set("viewBox", f"0 {-above} {WIDTH} {HEIGHT + above}")
    for name, number, x, row in places:
        y = TOP - 6 - (places[-1][3] - row) * height - 6
        colour = f"c{number % COLOURS}" + (" dashed" if number >= COLOURS else "")
        _add(svg, "line", x1=x, x2=x + 14, y1=y, y2=y, class_=f"curve {colour}")
        _add(svg, "text", name, x=x + 19, y=y + 4, class_="name")

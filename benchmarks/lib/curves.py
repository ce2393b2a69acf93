"""Pictures of curves, as SVG: panels beside each other that share their horizontal axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.picture import STYLE, text

HEIGHT, LEFT, TOP, BOTTOM = 330, 52, 78, 62


@dataclass(frozen=True)
class Curve:
    title: str
    colour: str
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float]] = ()  #: of each point: the least and the most
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    most: float | None = None  #: of the vertical axis; None: what holds all


def svg(title: str, axis: str, panels: Sequence[Panel], caption: str, width: int = 880) -> str:
    """The panels; ``axis`` names the horizontal one, and ``caption`` is a line below."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(16, 26, title, 15, "text", weight=600),
        *_legend(panels),
    ]
    panel_width = width / len(panels)
    for i, panel in enumerate(panels):
        parts += _panel(panel, i * panel_width + LEFT, (i + 1) * panel_width - 16, axis)
    parts.append(text(16, HEIGHT - 12, caption, 10.5, "soft"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(panels: Sequence[Panel]) -> list[str]:
    parts, x = [], 16.0
    for curve in {curve.title: curve for panel in panels for curve in panel.curves}.values():
        parts.append(_line(x, 46, x + 22, 46, curve))
        parts.append(text(x + 28, 50, curve.title, 12, "text"))
        x += 46 + 6.6 * len(curve.title)
    return parts


def _panel(panel: Panel, left: float, right: float, axis: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    xs = [x for curve in panel.curves for x, _ in curve.points]
    ys = [y for curve in panel.curves for _, y in curve.points]
    ys += [y for curve in panel.curves for pair in curve.ranges for y in pair]
    step = _step(panel.most or max(ys))
    top = step * math.ceil((panel.most or max(ys)) / step - 1e-9)
    least, most = min(xs), max(xs)

    def x_of(x: float) -> float:
        return left + (right - left) * (x - least) / (most - least or 1)

    def y_of(y: float) -> float:
        return bottom - (bottom - TOP) * y / top

    parts = [text(left, TOP - 10, panel.title, 12.5, "text", weight=600)]
    for i in range(round(top / step) + 1):
        y = y_of(i * step)
        parts.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        parts.append(text(left - 6, y + 4, f"{i * step:g}", 10.5, "soft", anchor="end"))
    for x in sorted(set(xs)):
        parts.append(text(x_of(x), bottom + 16, f"{x:g}", 10.5, "soft", anchor="middle"))
    parts.append(text((left + right) / 2, bottom + 32, axis, 11, "soft", anchor="middle"))
    for curve in panel.curves:
        places = [(x_of(x), y_of(y)) for x, y in curve.points]
        for (x, _), (low, high) in zip(places, curve.ranges, strict=False):
            parts.append(_line(x, y_of(low), x, y_of(high), curve))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="2"{dash}/>'
        )
        if not curve.dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"/>' for x, y in places]
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, curve: Curve) -> str:
    dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{curve.colour}" stroke-width="2"{dash}/>'


def _step(most: float) -> float:
    """Between lines of a grid of four to ten."""
    power = 10.0 ** math.floor(math.log10(most / 4)) if most else 1.0
    return next(power * n for n in (1, 2, 2.5, 5, 10) if most / (power * n) <= 6)

"""Draws perplexity against sparsity, as SVG."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 580, 44, 380  # ends of the axes
_COLOURS = ("#1f77b4", "#d6604d", "#10a37f", "#8f6bb3")
_TICKS = 5
_SPAN = 4.0  # how many times the lowest perplexity the axis reaches at most


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]  #: share of zeros, perplexity


def sparsity_picture(title: str, curves: Sequence[Curve], level: tuple[str, float] | None = None) -> str:
    """A line for each curve, and a dashed one at a perplexity with a name. The vertical axis is logarithmic
    and ends at four times the lowest perplexity: points above it lie on its end."""
    points = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    values = [value for _, value in points] + ([level[1]] if level else [])
    low, left = min(values), min(share for share, _ in points)
    high = max(min(max(values), low * _SPAN), low * 1.02)
    right = max(max(share for share, _ in points), left + 0.01)

    def x_of(share: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (share - left) / (right - left)

    def y_of(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * math.log(min(value, high) / low) / math.log(high / low)

    def text(x: float, y: float, words: str, attributes: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{html.escape(words)}</text>'

    middle = (_LEFT + _RIGHT) / 2
    turned = 'text-anchor="middle" transform="rotate(-90)"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_RIGHT + 150} {_BOTTOM + 60}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        text(middle, _TOP - 18, title),
        text(middle, _BOTTOM + 44, "activations that are zero"),
        text(-(_TOP + _BOTTOM) / 2, 16, "perplexity of held-out text", turned),
    ]
    for tick in range(_TICKS):
        share = left + (right - left) * tick / (_TICKS - 1)
        value = low * (high / low) ** (tick / (_TICKS - 1))
        x, y = x_of(share), y_of(value)
        parts.append(f'<path d="M{x:.0f} {_TOP}V{_BOTTOM}M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#ccc"/>')
        parts.append(text(x, _BOTTOM + 20, f"{100 * share:.1f} %"))
        parts.append(text(_LEFT - 8, y + 4, f"{value:.4g}", 'text-anchor="end"'))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve.points if math.isfinite(y))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(_RIGHT + 12, _TOP + 12 + 20 * number, curve.name, f'fill="{colour}"'))
    if level:
        y = y_of(level[1])
        parts.append(f'<path d="M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#333" stroke-dasharray="5 4"/>')
        parts.append(text(_RIGHT + 12, _TOP + 12 + 20 * len(curves), f"- - {level[0]}", 'fill="#333"'))
    return "\n".join([*parts, "</svg>", ""])

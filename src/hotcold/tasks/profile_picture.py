"""Picture of a profile: how often the neurons of each layer are active."""

import colorsys
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 580, 40, 380  # ends of the axes
_DECADES, _NAMED = 4, 16  # decades of the vertical axis; limit for labelled layers


def power_law_picture(name: str, firing: Sequence[npt.NDArray[Any]]) -> str:
    """Returns an SVG with a line per layer on logarithmic axes, where a power law is straight."""
    widest = max(map(len, firing))
    centred = 'text-anchor="middle"'

    def text(x: float, y: float, words: str, attributes: str = centred) -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{html.escape(words)}</text>'

    def x_of(share: Any) -> Any:
        return _RIGHT + (_RIGHT - _LEFT) * np.log10(share) / np.log10(widest)

    def y_of(share: Any) -> Any:
        return _TOP + (_TOP - _BOTTOM) * np.log10(np.maximum(share, 10.0**-_DECADES)) / _DECADES

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_RIGHT + 100} {_BOTTOM + 60}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        text((_LEFT + _RIGHT) / 2, _TOP - 14, f"How often neurons are active: {name}"),
        text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, "neurons of the layer, the most active first"),
        text(
            -(_TOP + _BOTTOM) / 2,
            16,
            "share of tokens for which a neuron is active",
            centred + ' transform="rotate(-90)"',
        ),
    ]
    for share in 10.0 ** np.arange(-_DECADES, 1):
        x, y = x_of(share), y_of(share)
        words = f"{100 * share:g} %"
        parts += [f'<path d="M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#ccc"/>', text(_LEFT - 38, y + 4, words)]
        if x >= _LEFT:
            parts += [f'<path d="M{x:.0f} {_TOP}V{_BOTTOM}" stroke="#ccc"/>', text(x, _BOTTOM + 20, words)]
    for i, shares in enumerate(firing):
        n = len(shares)
        step = -(-len(firing) // _NAMED)
        ranks = np.unique(np.append(np.geomspace(1, n, 60), np.linspace(n // 2, n, 30)).astype(int))
        points = zip(x_of(ranks / n), y_of(np.sort(shares)[::-1][ranks - 1]), strict=True)
        red, green, blue = (int(255 * c) for c in colorsys.hsv_to_rgb(0.65 * (1 - i / len(firing)), 1, 0.8))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = f"#{red:02x}{green:02x}{blue:02x}"
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if i % step == 0:
            parts.append(text(_RIGHT + 14, _TOP + 12 + 20 * i // step, f"layer {i}", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])

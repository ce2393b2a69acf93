"""The picture of ``cpu/compare.py``: how many times as fast as llama.cpp, as SVG for the README.

It has a background of its own, dark where the reader's system is, so that it is readable on any page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

#: Contestants with their names and colours, which can be told apart on both backgrounds.
BARS = {
    "dense": ("Hotcold, dense", "#3b82f6"),
    "exact": ("Hotcold, exact (10 % active)", "#10a37f"),
    "predicted": ("Hotcold, predicted", "#e08a1e"),
    "ik_llama_cpp": ("ik_llama.cpp", "#8f96a3"),
    "openvino": ("OpenVINO GenAI", "#b48ac9"),
}
WIDTH, LEFT, TOP = 880, 70, 84
BAR, GAP = 13, 12  #: heights of a bar and between types
STYLE = """
.page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e }
.grid { stroke: #d0d7de } .one { stroke: #1f2328 }
.text { stroke: #ffffff; stroke-width: 3; paint-order: stroke }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .soft { fill: #9198a1 }
  .grid { stroke: #3d444d } .one { stroke: #f0f6fc } .text { stroke: #0d1117 }
}
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
"""


def svg(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A panel for each measure, a group for each type, a bar for each contestant; llama.cpp is the line."""
    types = summary["types"]
    measures = list(dict.fromkeys(measure for each in types.values() for measure in each))
    values = {
        (type, measure, name): ratio["median"]
        for type, rows in types.items()
        for measure, row in rows.items()
        for name in BARS
        if (ratio := row["ratios"].get(f"{name}_over_llama_cpp"))
    }
    names = [name for name in BARS if any(key[2] == name for key in values)]
    heights = {type: BAR * max(1, len(_bars(values, type, measures, names))) + GAP for type in types}
    height = TOP + sum(heights.values()) + 44
    panel = (WIDTH - LEFT - 14) / max(1, len(measures))
    scale = (panel - 44) / max([1.0, *values.values()])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(16, 26, "Tokens a second, llama.cpp = 1", 15, "text", weight=600),
        *_legend(names),
    ]
    for i, measure in enumerate(measures):
        x = LEFT + i * panel
        parts.append(text(x, TOP - 12, measure, 12.5, "text", weight=600))
        bottom = height - 40
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_one(x + scale, TOP - 4, bottom))
        y = TOP + GAP / 2
        for type in types:
            if i == 0:
                middle = y + (heights[type] - GAP) / 2 + 4
                parts.append(text(LEFT - 8, middle, type, 12, "text", anchor="end", weight=600))
            for j, name in enumerate(_bars(values, type, measures, names)):
                value = values.get((type, measure, name))
                if value is not None:
                    parts += _bar(x, y + j * BAR, value, scale, BARS[name][1])
            y += heights[type]
    settings_text = [str(settings.get(name, "")) for name in ("processor", "shape")]
    settings_text.append(f"{settings.get('threads')} threads, commit {settings.get('commit')}")
    parts.append(text(16, height - 16, "; ".join(settings_text), 10.5, "soft"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(
    values: Mapping[tuple[str, str, str], float], type: str, measures: list[str], names: list[str]
) -> list[str]:
    """The contestants with a value of the type in any measure."""
    return [name for name in names if any((type, measure, name) in values for measure in measures)]


def _bar(x: float, y: float, value: float, scale: float, colour: str) -> list[str]:
    """Its figure is bold where it is slower than llama.cpp."""
    width = value * scale
    return [
        f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>',
        text(x + width + 4, y + BAR - 2.5, f"{value:.2f}", 10.5, "text", weight=700 if value < 1 else 400),
    ]


def _legend(names: list[str]) -> list[str]:
    parts, x = [], 16.0
    for name in names:
        title, colour = BARS[name]
        parts.append(f'<rect x="{x:.0f}" y="40" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 16, 50, title, 12, "text"))
        x += 34 + 6.6 * len(title)
    return [*parts, _one(x, 39, 52), text(x + 8, 50, "llama.cpp", 12, "text")]


def _one(x: float, top: float, bottom: float) -> str:
    """llama.cpp."""
    place = f'x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"'
    return f'<line class="one" {place} stroke-dasharray="3 3"/>'


def text(
    x: float, y: float, text: str, size: float, style: str, *, anchor: str = "start", weight: int = 400
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'

"""The picture of ``hotcold profile``: a power law whose numbers are known, on its axes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support.torch_files import vector, write

from hotcold.commands import cli

N, TOKENS = 1024, 10**6
LEFT, RIGHT, TOP, BOTTOM = 80, 580, 40, 380


@pytest.fixture
def shares() -> np.ndarray:
    """``[6, 1024]``, the most active first: straight lines of different slopes."""
    ranks = np.arange(1, N + 1)
    return np.array([np.round(TOKENS * ranks**-slope) / TOKENS for slope in np.linspace(0.2, 1.2, 6)])


@pytest.fixture
def svg(tmp_path: Path, shares: np.ndarray) -> ElementTree.Element:
    random = np.random.default_rng(3)
    for i, layer in enumerate(shares):
        counts = random.permutation(layer * TOKENS).astype("<f4")
        write(tmp_path / f"activation_{i}.pt", vector(length=N, size=N), counts.tobytes())
    output = [str(tmp_path / "x.profile"), "--picture", str(tmp_path / "x.svg")]
    assert cli.main(["profile", "--import", str(tmp_path), "--tokens", str(TOKENS), "-o", *output]) == 0
    return ElementTree.parse(tmp_path / "x.svg").getroot()


def texts(svg: ElementTree.Element) -> list[tuple[str, float, float, dict[str, str]]]:
    found = svg.findall(".//{*}text")
    return [
        (each.text or "", float(each.attrib["x"]), float(each.attrib["y"]), each.attrib) for each in found
    ]


def test_lines_show_every_rank_and_share_where_the_axes_say(
    svg: ElementTree.Element, shares: np.ndarray
) -> None:
    lines = svg.findall(".//{*}polyline")
    assert len(lines) == len(shares)
    for line, layer in zip(lines, shares, strict=True):
        x, y = np.array([point.split(",") for point in line.attrib["points"].split()], float).T
        assert (x[0], x[-1]) == (LEFT, RIGHT)
        ranks = np.round(N * 10 ** ((x - RIGHT) / (RIGHT - LEFT) * np.log10(N))).astype(int)
        assert len(set(ranks)) == len(ranks) > 30
        expected = np.maximum(layer[ranks - 1], 1e-4)  # four decades
        np.testing.assert_allclose(10 ** (-4 * (y - TOP) / (BOTTOM - TOP)), expected, rtol=0.01)


def test_ticks_stand_where_their_shares_are(svg: ElementTree.Element) -> None:
    ticks = [
        (float(words.removesuffix(" %")) / 100, x, y) for words, x, y, _ in texts(svg) if words.endswith(" %")
    ]
    beside = {share: y for share, x, y in ticks if x < LEFT}
    below = {share: x for share, x, y in ticks if x >= LEFT}
    assert sorted(beside) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert sorted(below) == pytest.approx([1e-3, 1e-2, 1e-1, 1])
    for share, y in beside.items():
        assert y == pytest.approx(TOP - (BOTTOM - TOP) * np.log10(share) / 4, abs=6)
    for share, x in below.items():
        assert x == pytest.approx(RIGHT + (RIGHT - LEFT) * np.log10(share) / np.log10(N), abs=1)
    grid = [path.attrib["d"] for path in svg.findall(".//{*}path")]
    assert sum(each.endswith(f"H{RIGHT}") for each in grid) == 5 and len(grid) == 9

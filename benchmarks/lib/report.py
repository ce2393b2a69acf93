"""Reports samples: paired ratios and their spread, a table in Markdown, an object for JSON."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = {
    "dense": "Hotcold, dense",
    "exact": "Hotcold, `exact`",
    "predicted": "Hotcold, `predicted`",
    "llama_cpp": "llama.cpp",
    "ik_llama_cpp": "ik_llama.cpp",
    "openvino": "OpenVINO GenAI",
    "powerinfer": "PowerInfer",
}
OURS = ("dense", "exact", "predicted")
#: Who is compared with whom.
COMPARED = {
    "llama_cpp": OURS,
    "ik_llama_cpp": ("dense",),
    "openvino": ("dense",),
    "powerinfer": ("exact", "predicted"),
}


@dataclass(frozen=True)
class Sample:
    """One measure of one contestant in one round, with the conditions that it was taken under."""

    type: str
    measure: str
    contestant: str
    round: int
    tok_s: float
    gb_s: float | None  #: of weights and KV cache that had to be read
    read_gb_s: float  #: of the probe just before
    state: str  #: of the machine: see machine.py


def ratios(samples: Sequence[Sample], above: str, below: str) -> list[float]:
    """Returns the ratios of one type and measure, within rounds, without those in which another process had a
    processor."""
    speeds = {(sample.round, sample.contestant): sample.tok_s for sample in samples if sample.state != "busy"}
    rounds = sorted({round for round, _ in speeds})
    return [
        speeds[round, above] / speeds[round, below]
        for round in rounds
        if (round, above) in speeds and (round, below) in speeds
    ]


def interval(values: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % of the medians of samples that are drawn anew."""
    chosen = random.Random(0)
    medians = sorted(statistics.median(chosen.choices(values, k=len(values))) for _ in range(rounds))
    return medians[rounds // 40], medians[-rounds // 40 - 1]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """None where there are not two."""
    cuts: Sequence[float | None] = [None] * 99
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {name: cuts[at] for name, at in (("p50", 49), ("p95", 94), ("p99", 98))}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    figures = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 4) for name, value in figures.items()} | {"n": len(values)}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """By type and measure: ``tok_s`` and ``probe_share`` of each contestant, ``ratios`` as
    compared, and of peers to llama.cpp; all with median, low, high and n. ``losing`` names what of ours is
    slower."""
    rows_by_type: dict[str, Any] = {}
    losing: list[str] = []
    for type, measure in dict.fromkeys((each.type, each.measure) for each in samples):
        of_measure = [each for each in samples if (each.type, each.measure) == (type, measure)]
        by = {name: [each for each in of_measure if each.contestant == name] for name in NAMES}
        row: dict[str, Any] = {"tok_s": {}, "probe_share": {}, "ratios": {}}
        for name, mine in by.items():
            if mine:
                row["tok_s"][name] = spread([each.tok_s for each in mine])
                shares = [each.gb_s / each.read_gb_s for each in mine if each.gb_s is not None]
                row["probe_share"][name] = spread(shares)
        for below, ours in COMPARED.items():
            for above in (*NAMES,) if below == "llama_cpp" else ours:
                pairs = spread(ratios(of_measure, above, below))
                if pairs is not None and above != below:
                    row["ratios"][f"{above}_over_{below}"] = pairs
                    if pairs["median"] < 1 and above in OURS:
                        losing.append(f"{type}, {measure}: {above} over {below} {pairs['median']:.2f}")
        rows_by_type.setdefault(type, {})[measure] = row
    return {"types": rows_by_type, "losing": losing}


def markdown(samples: Sequence[Sample], settings: Mapping[str, Any]) -> str:
    """A row for each type and measure."""
    figures = summary(samples)
    present = [name for name in NAMES if any(each.contestant == name for each in samples)]
    compared = [(above, below) for below, ours in COMPARED.items() for above in ours]
    compared = [pair for pair in compared if set(pair) <= set(present)]
    titles = [NAMES[name] for name in present]
    titles += [f"{_short(above)} / {NAMES[below]}" for above, below in compared]
    lines = ["# Speed on a CPU", ""] + [f"- {name}: {value}" for name, value in settings.items()]
    lines += [
        "",
        "Medians, tokens a second; in brackets the share of the read probe. Paired ratios: median (range).",
        "",
    ]
    lines += [f"| type | measure | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for type, measures in figures["types"].items():
        for measure, row in measures.items():
            cells = [_speed(row, name, measure) for name in present]
            cells += [_ratio(row["ratios"].get(f"{above}_over_{below}")) for above, below in compared]
            lines.append(f"| {type} | {measure} | {' | '.join(cells)} |")
    lines += ["", "Losing cases: " + ("; ".join(figures["losing"]) or "none") + "."]
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name if name == "dense" else f"`{name}`"


def _speed(row: Mapping[str, Any], name: str, measure: str) -> str:
    figures = row["tok_s"].get(name)
    if figures is None:
        return "-"
    speed = f"{figures['median']:.0f}" if figures["median"] >= 100 else f"{figures['median']:.1f}"
    share = row["probe_share"].get(name)
    return f"{speed} ({share['median']:.2f})" if share and measure.startswith("decode") else speed


def _ratio(ratio: Mapping[str, float] | None) -> str:
    """Bold where it loses."""
    if ratio is None:
        return "-"
    text = f"{ratio['median']:.2f}"
    marked = f"**{text}**" if ratio["median"] < 1 else text
    return f"{marked} ({ratio['low']:.2f} to {ratio['high']:.2f})"

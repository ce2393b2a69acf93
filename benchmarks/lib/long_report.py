"""What the samples of benchmarks/cpu/compare.py say: paired ratios by state, tables in Markdown, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.long_contestants import MEASURES
from lib.machine import STATES

#: A ratio is of speeds: contestant and measure over contestant and measure.
RATIOS = {
    "dense_over_llama_cpp": ("dense", "llama_cpp", "generation"),
    "exact_over_llama_cpp": ("exact", "llama_cpp", "generation"),
    "exact_stock_over_llama_cpp": ("exact_stock", "llama_cpp", "generation"),
    "predicted_over_llama_cpp": ("predicted", "llama_cpp", "generation"),
    "predicted_over_powerinfer": ("predicted", "powerinfer", "generation"),
    "exact_over_powerinfer": ("exact", "powerinfer", "generation"),
    "exact_over_dense": ("exact", "dense", "generation"),
    "prompt_gguf_over_llama_cpp": ("dense", "llama_cpp", "prompt"),
    "prompt_stock_over_llama_cpp": ("exact_stock", "llama_cpp", "prompt"),
    "prompt_by_neuron_over_llama_cpp": ("exact", "llama_cpp", "prompt"),
    "parallel_dense_over_llama_cpp": ("dense", "llama_cpp", "parallel"),
    "parallel_exact_over_llama_cpp": ("exact", "llama_cpp", "parallel"),
    "parallel_exact_stock_over_llama_cpp": ("exact_stock", "llama_cpp", "parallel"),
}
#: The worst, state by state, of others.
WORST_OF = {
    "prompt_over_llama_cpp": ("prompt_gguf_over_llama_cpp", "prompt_by_neuron_over_llama_cpp"),
    "parallel8_over_llama_cpp": ("parallel_dense_over_llama_cpp", "parallel_exact_over_llama_cpp"),
}
NAMES = {
    "dense": "ours dense, the stock file",
    "exact": "ours `exact`, by neuron",
    "exact_stock": "ours `exact`, stock ReLU file",
    "predicted": "ours `predicted`, PWRI",
    "llama_cpp": "llama.cpp dense, the stock file",
    "powerinfer": "PowerInfer, PWRI",
}


@dataclass(frozen=True)
class Sample:
    """One measure of one contestant in one round, with the conditions that it was taken under."""

    type: str
    active: float
    round: int
    contestant: str
    measure: str  #: prompt, generation or parallel
    tok_s: float
    gb_s: float | None
    active_share: float | None
    state: str
    barrier_ns: tuple[float, float]
    read_gb_s: float

    @property
    def read_share(self) -> float | None:
        return None if self.gb_s is None else self.gb_s / self.read_gb_s


Paired = dict[str, list[float]]  #: state -> ratios


def paired(samples: Iterable[Sample]) -> dict[str, Paired]:
    """Ratios within rounds, of samples in the same state; ``any`` has those of all rounds."""
    found = {(each.round, each.contestant, each.measure): each for each in samples}
    rounds = sorted({each[0] for each in found})
    ratios: dict[str, Paired] = {}
    for name, (above, below, measure) in RATIOS.items():
        ratios[name] = {state: [] for state in (*STATES, "any")}
        for round in rounds:
            first, second = found.get((round, above, measure)), found.get((round, below, measure))
            if first is None or second is None:
                continue
            ratios[name]["any"].append(first.tok_s / second.tok_s)
            if first.state == second.state and first.state in STATES:
                ratios[name][first.state].append(first.tok_s / second.tok_s)
    return ratios


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """By state the medians of the paired ratios, and how many: ``ratios``, ``pairs``; and ``any_state``."""
    all_pairs = paired(samples)
    ratios = {name: {state: _median(pairs[state]) for state in STATES} for name, pairs in all_pairs.items()}
    counts = {name: {state: len(pairs[state]) for state in STATES} for name, pairs in all_pairs.items()}
    every = {name: _median(pairs["any"]) for name, pairs in all_pairs.items()}
    for name, parts in WORST_OF.items():
        ratios[name] = {state: _least([ratios[part][state] for part in parts]) for state in STATES}
        counts[name] = {state: min(counts[part][state] for part in parts) for state in STATES}
        every[name] = _least([every[part] for part in parts])
    return {"ratios": ratios, "pairs": counts, "any_state": every}


def markdown(samples: Sequence[Sample], settings: Mapping[str, Any]) -> str:
    lines = ["# Speed on a CPU, measured against llama.cpp and PowerInfer", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    for type, active in dict.fromkeys((each.type, each.active) for each in samples):
        chosen = [each for each in samples if (each.type, each.active) == (type, active)]
        lines += ["", f"## {type}, {active:.0%} of neurons active", ""]
        lines += _speeds(chosen) + [""] + _ratio_table(chosen)
    return "\n".join(lines) + "\n"


def _speeds(samples: Sequence[Sample]) -> list[str]:
    lines = [
        "| medians; n samples | state | prompt, tok/s | generation, tok/s | read, GB/s | of the probe | "
        "8 sequences, tok/s | neurons computed | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for contestant, title in NAMES.items():
        for state in dict.fromkeys([*STATES, *(each.state for each in samples)]):
            own = [each for each in samples if (each.contestant, each.state) == (contestant, state)]
            if not own:
                continue
            by = {name: [each for each in own if each.measure == name] for name in MEASURES}
            generation = by["generation"]
            cells = [
                _cell([each.tok_s for each in by["prompt"]], "{:.0f}"),
                _cell([each.tok_s for each in generation], "{:.1f}"),
                _cell([each.gb_s for each in generation], "{:.1f}"),
                _cell([each.read_share for each in generation], "{:.2f}"),
                _cell([each.tok_s for each in by["parallel"]], "{:.0f}"),
                _cell([each.active_share for each in generation], "{:.1%}"),
                "/".join(str(len(by[name])) for name in MEASURES),
            ]
            lines.append(f"| {title} | {state} | {' | '.join(cells)} |")
    return lines


def _ratio_table(samples: Sequence[Sample]) -> list[str]:
    lines = [
        f"| paired ratio: median (pairs) | {' | '.join(STATES)} | any state |",
        "|---" * (len(STATES) + 2) + "|",
    ]
    figures, all_pairs = summary(samples), paired(samples)
    for name in (*RATIOS, *WORST_OF):
        if figures["any_state"][name] is None:
            continue
        cells = [
            f"{ratio:.2f} ({figures['pairs'][name][state]})" if ratio else "-"
            for state, ratio in figures["ratios"][name].items()
        ]
        every = f"{figures['any_state'][name]:.2f}"
        if name in all_pairs:
            values = all_pairs[name]["any"]
            every += f" ({len(values)}; {min(values):.2f} to {max(values):.2f})"
        lines.append(f"| {name} | {' | '.join(cells)} | {every} |")
    return lines


def plot(samples: Sequence[Sample], path: Path) -> bool:
    """Generation over active share, a panel for each type, in the state with more samples.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = {state: sum(each.state == state for each in samples) for state in STATES}
    state = max(counts, key=lambda name: counts[name])
    chosen = [each for each in samples if each.measure == "generation" and each.state == state]
    types = list(dict.fromkeys(each.type for each in samples))
    figure, panels = pyplot.subplots(1, len(types), figsize=(4.5 * len(types), 4), squeeze=False)
    for panel, type in zip(panels[0], types, strict=True):
        for contestant, title in NAMES.items():
            by_share: dict[float, list[float]] = {}
            for each in chosen:
                if (each.type, each.contestant) == (type, contestant):
                    by_share.setdefault(each.active, []).append(each.tok_s)
            shares = sorted(by_share)
            if shares:
                medians = [statistics.median(by_share[share]) for share in shares]
                panel.plot([100 * share for share in shares], medians, marker="o", label=title)
        panel.set_title(type)
        panel.set_xlabel("neurons active, %")
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel(f"generation, tok/s ({state})")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _least(values: Sequence[float | None]) -> float | None:
    """None unless all are known: the worst of some is not the worst."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None


def _cell(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else "-"

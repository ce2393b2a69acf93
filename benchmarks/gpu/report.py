"""Reports the rows of benchmarks/gpu/compare.py: goals, and tables of 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

QUARTER = 0.25
HBM_GB_S = 1200.0  #: what streams faster is a data centre's card
#: The measurements of doctor, each with its title: GB/s, and seconds as us.
MACHINE = {
    "cpu_stream_gb_s": "processor, stream, GB/s",
    "gpu_stream_gb_s": "GPU, stream, GB/s",
    "gpu_rows_gb_s": "GPU, gathered rows, GB/s",
    "to_gpu_gb_s": "link, to the GPU, GB/s",
    "from_gpu_gb_s": "link, from the GPU, GB/s",
    "step_s": "an empty step, us",
    "handshake_submit_s": "handshake, submit on answer, us",
    "handshake_spin_s": "handshake, shader waits, us",
}
#: The order of contestants in tables.
ORDER = (
    "CPU dense", "CPU exact", "CPU predicted", "layer split", "some layers", "random", "frequency", "solver",
    "solver exact", "GPU dense", "GPU exact", "GPU predicted",
)  # fmt: skip
PC_BALANCE = 11  #: a PC's bandwidths, card to processor
MOST_LOGITS_ERROR = 1e-3
MOST_MEMORY_ERROR = 0.02
LEAST_MEMORY_ERROR = 256 << 10  #: bytes that are allowed in any case
FASTER = ("llama2-70b", "falcon-40b")  #: attention is a small part of them
_HEADING = (
    f"{'':<15}{'tok/s':>8}{'P50':>8}{'P95':>8}{'P99':>8}{'GB/s':>7}{'of bw':>6}{'GPU':>5}{'x':>6}{'/plan':>6}"
)


@dataclass(frozen=True)
class Goal:
    """``met`` is None where nothing was measured."""

    title: str
    measured: str
    wanted: str
    met: bool | None

    @property
    def line(self) -> str:
        sign = {True: "ok  ", False: "MISS", None: "  ? "}[self.met]
        return f"{sign} {self.title:<40}{self.measured:>14}   {self.wanted}"[:80]


def key_of(row: Row) -> str:
    names = (
        "part",
        "model",
        "type",
        "share",
        "contestant",
        "case",
        "side",
        "decode",
        "prompt",
        "name",
        "shader",
    )
    return "/".join(str(row.get(name, "")) for name in names)


def rounded(value: Any) -> Any:
    """Floats to 5 digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def line_of(row: Row) -> str:
    """One line while things run."""
    case = (
        " ".join(filter(None, (row.get("case"), row.get("shader"))))
        or row.get("contestant")
        or row.get("name")
        or ""
    )
    where = " ".join(str(row[name]) for name in ("model", "type") if name in row)
    if "share" in row:
        where += f" {row['share']:.0%}"
    title = " ".join(filter(None, (row["part"] if row["part"] != "slices" else "", where, str(case))))
    if isinstance(row.get("failed"), str):
        return f"{title}: {row['failed']}"
    forms = {
        "full_tok_s": "{:.4g} tok/s",
        "tok_s": "{:.4g} tok/s",
        "gb_s": "{:.4g} GB/s",
        "equal": "{} equal",
        "us": "{:.4g} us",
        "checked": "{} checked",
        "failed": "{} failed",
        "layers": "{} layers",
        "seconds": "{:.3g} s",
    }
    rows = f"{row['decode']}+{row['prompt']} rows" if "decode" in row else ""
    figures = [form.format(row[name]) for name, form in forms.items() if row.get(name) is not None]
    return f"{title}: {', '.join(filter(None, [rows, *figures[:3]]))}"


def slices_of(rows: Sequence[Row]) -> dict[tuple[str, str, float], dict[str, Row]]:
    """By model, type and share: the rows of contestants that ran."""
    slices: dict[tuple[str, str, float], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "slices" and row.get("contestant") and "failed" not in row:
            key = row["model"], row["type"], row["share"]
            slices.setdefault(key, {})[row["contestant"]] = row
    return slices


def ratio(above: Row | None, below: Row | None) -> float | None:
    """How many times faster the first is: the median of the rounds' ratios, of whole models; None where one
    is missing."""
    if above is None or below is None:
        return None
    pairs = list(zip(_full_rounds(above), _full_rounds(below), strict=False))
    if not pairs:
        return above["full_tok_s"] / below["full_tok_s"]
    return statistics.median(slow / fast for fast, slow in pairs)


def _full_rounds(row: Row) -> list[float]:
    factor, python_ms = row.get("factor", 1.0), row.get("python_ms", 0.0)
    return [python_ms + (ms - python_ms) * factor for ms in row.get("round_ms", [])]


def goals(report: Mapping[str, Any]) -> list[Goal]:
    """The goals that this command is to show. Those of speed are a card's, and no processor's that plays
    one."""
    rows: list[Row] = report["rows"]
    if report["settings"].get("small"):
        return [*_correct(rows)]
    slices = slices_of(rows)
    return [
        *_correct(rows),
        _matrix(rows),
        *_over_layer_split(slices),
        *_placements(slices),
        *_on_the_gpu(slices),
        *_plan(slices),
    ]


def _correct(rows: Sequence[Row]) -> Iterator[Goal]:
    table = next((row for row in rows if row["part"] == "op table"), {})
    failed, checked = table.get("failed"), table.get("checked", 0)
    known = isinstance(failed, int)
    yield Goal(
        "op table", f"{failed} of {checked} fail" if known else "-", "0", failed == 0 if known else None
    )
    models = [row for row in rows if row["part"] == "built-in model" and row["case"] != "CPU"]
    equal, of = (sum(row.get(name, 0) for row in models) for name in ("equal", "of"))
    met = equal == of and not any("failed" in row for row in models) if models else None
    yield Goal("built-in model: tokens as on the CPU", f"{equal} of {of}", "all", met)
    errors = [row["logits_error"] for row in rows if "logits_error" in row]
    worst = max(errors, default=None)
    measured = "-" if worst is None else f"{worst:.1e}"
    met = None if worst is None else worst <= MOST_LOGITS_ERROR
    yield Goal("logits, largest difference to the CPU", measured, f"at most {MOST_LOGITS_ERROR:g}", met)


def _matrix(rows: Sequence[Row]) -> Goal:
    wanted = {"part": "matrices", "case": "Q4_0 8192 x 28672", "decode": 1, "prompt": 0}
    shares = [row.get("bandwidth_share") for row in rows if wanted.items() <= row.items()]
    sum_gb_s = next((row["gb_s"] for row in rows if row.get("case") == "sum of two buffers"), 0)
    least, aim = (0.5, 0.7) if sum_gb_s > HBM_GB_S else (0.7, 0.85)
    share = shares[0] if shares else None
    title = "Q4_0 8192 x 28672, one row, of the card's"
    return _at_least(title, share, least, aim, "{:.2f}")


def _of_hardware(row: Row, name: str) -> float:
    return float(row.get("hardware", {}).get(name, 0))


def _at_least(title: str, value: float | None, least: float, aim: float, form: str = "{:.2f} x") -> Goal:
    measured = "-" if value is None else form.format(value)
    met = None if value is None else value >= least
    return Goal(title, measured, f">= {least:g}, aim {aim:g}", met)


def _over_layer_split(slices: Mapping[tuple[str, str, float], Mapping[str, Row]]) -> Iterator[Goal]:
    for (model, type, share), contestants in slices.items():
        if type == "F16" and share == QUARTER:
            least, aim = (5, 12) if model in FASTER else (2, 3.5)
            value = ratio(contestants.get("solver"), contestants.get("layer split"))
            yield _at_least(f"{model} F16 25 %: over layer split", value, least, aim)


def _placements(slices: Mapping[tuple[str, str, float], Mapping[str, Row]]) -> Iterator[Goal]:
    for above, below in (("solver", "frequency"), ("frequency", "random")):
        ratios = [
            times
            for (_, type, share), contestants in slices.items()
            if share == QUARTER and type == "F16"
            if (times := ratio(contestants.get(above), contestants.get(below))) is not None
        ]
        value = min(ratios, default=None)
        yield _at_least(f"{above} over {below}, the least", value, 1, 1)


def _on_the_gpu(slices: Mapping[tuple[str, str, float], Mapping[str, Row]]) -> Iterator[Goal]:
    for model in ("llama2-13b", "llama2-70b"):
        contestants = slices.get((model, "F16", QUARTER), {})
        value = ratio(contestants.get("GPU predicted"), contestants.get("GPU dense"))
        yield _at_least(f"{model} F16, all GPU: sparse over dense", value, 1.3, 1.8)
    contestants = slices.get(("llama2-7b", "Q4_0", QUARTER), {})
    value = ratio(contestants.get("GPU dense"), contestants.get("llama.cpp GPU"))
    yield _at_least("llama2-7b Q4_0, all GPU: over llama.cpp", value, 1, 1)


def _plan(slices: Mapping[tuple[str, str, float], Mapping[str, Row]]) -> Iterator[Goal]:
    off, memory = [], []
    for contestants in slices.values():
        for row in contestants.values():
            if "measured_over_predicted" in row and "gpu_layers" in row:
                off.append(abs(row["measured_over_predicted"] - 1))
            planned, taken = row.get("planned_bytes"), row.get("allocated_bytes")
            if planned and taken is not None:
                allowed = max(MOST_MEMORY_ERROR * planned, LEAST_MEMORY_ERROR)
                memory.append((taken - planned) / allowed)
    worst = max(off, default=None)
    measured = "-" if worst is None else f"{worst:.0%} off"
    yield Goal(
        "plan, the worst on the GPU", measured, "25 %, aim 15 %", None if worst is None else worst <= 0.25
    )
    most = max(memory, default=None, key=abs)
    measured = "-" if most is None else f"{2 * most:+.1f} %"
    yield Goal("device memory beside the plan", measured, "2 %", None if most is None else abs(most) <= 1)


def text(report: Mapping[str, Any]) -> list[str]:
    rows: list[Row] = report["rows"]
    lines, judged = [], not report["settings"].get("small")
    for key, contestants in slices_of(rows).items():
        lines += ["", *_table(key, contestants, judged=judged)]
    lines += _end_to_end(rows) + _matrices(rows) + _experts(rows) + _machine(rows) + [""]
    lines += [f"{name}: {value}"[:80] for name, value in report["settings"].items()]
    lines += _failures(rows)
    return [*lines, "", "Goals", *(goal.line for goal in goals(report))]


def _machine(rows: Sequence[Row]) -> list[str]:
    doctor = next((row for row in rows if row["part"] == "doctor" and "hardware" in row), None)
    if doctor is None:
        return []
    machine = doctor["hardware"].get("machine") or {}
    figures = {**doctor["hardware"], **((machine.get("gpu") or {}).get("link") or {})}
    lines = ["", "Machine (hotcold doctor)"]
    for name, title in MACHINE.items():
        value = figures.get(name)
        if value is not None:
            scale = 1 if name.endswith("gb_s") else 1e6
            lines.append(f"{title:<34}{scale * value:>10.1f}")
    cpu, gpu = (_of_hardware(doctor, name) for name in ("cpu_stream_gb_s", "gpu_stream_gb_s"))
    if cpu and gpu:
        lines.append(f"balance of the two: {gpu / cpu:.1f} to 1 (a PC's is about {PC_BALANCE} to 1)")
    return lines


def _table(key: tuple[str, str, float], contestants: Mapping[str, Row], *, judged: bool) -> list[str]:
    """ms are a token of the slice, tok/s the whole model's; x is over the layer split. Beside bandwidth and
    plan it is only ``judged`` where those are a card's."""
    model, type, share = key
    layers = next((row["layers"] for row in contestants.values() if "layers" in row), "")
    split = contestants.get("layer split")
    lines = [f"{model} {type}, {share:.0%} on the GPU; {layers} layers measured, in ms; tok/s of all layers"]
    lines.append(_HEADING)
    for name, row in sorted(contestants.items(), key=lambda each: _place(each[0])):
        cells = [
            _cell(row.get("full_tok_s"), 8, "{:.2f}"),
            *(_cell(row.get(each), 8, "{:.3f}") for each in ("ms", "p95_ms", "p99_ms")),
            _cell(row.get("gb_s"), 7, "{:.1f}"),
            _cell(row.get("bandwidth_share") if judged else None, 6, "{:.0%}"),
            _cell(row.get("gpu_firing_share"), 5, "{:.0%}"),
            _cell(ratio(row, split), 6, "{:.2f}"),
            _cell(row.get("measured_over_predicted") if judged else None, 6, "{:.2f}"),
        ]
        lines.append(f"{name:<15}" + "".join(cells))
    for name, row in contestants.items():
        if "split_layers" in row:
            lines += _handshakes(name, row)
    if judged and split is not None and "predicted_ratio" in split:
        here, pc = split["predicted_ratio"], split["predicted_ratio_pc"]
        lines.append(f"  predicted over the layer split: {here:.1f} x here, {pc:.1f} x on a PC (preset)")
    return [line[:80] for line in lines]


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _handshakes(name: str, row: Row) -> list[str]:
    took = _cell(row["post_to_take_us"], 1, "{:.1f}")
    got = _cell(row["answer_to_collect_us"], 1, "{:.1f}")
    waits, overlap = row["hot_waits_ms"], _cell(row["overlap"], 1, "{:.0%}")
    return [
        f"  {name}: {row['split_layers']} handshakes, post to take {took} us, answer to collect {got} us;",
        f"    the GPU waits {waits:.3f} ms a token; it is busy {overlap} of the CPU's busy time",
    ]


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else form.format(value):>{width}}"


def _end_to_end(rows: Sequence[Row]) -> list[str]:
    """The paper's metric: tokens a second with the prompt's time."""
    lines: list[str] = []
    for (model, type, share), contestants in slices_of(rows).items():
        solver, split = (
            contestants.get(name, {}).get("end_to_end_tok_s") for name in ("solver", "layer split")
        )
        if "random" in contestants and solver and split:
            cells = [
                f"{lengths} {solver[lengths]:.2f} ({solver[lengths] / split[lengths]:.1f} x)"
                for lengths in solver
                if lengths in split
            ]
            lines.append(f"{model} {type}, {share:.0%}")
            lines += [f"  {'; '.join(cells[i : i + 3])}"[:80] for i in range(0, len(cells), 3)]
    heading = "End to end: input+output, tok/s with the prompt, and over the layer split"
    return ["", heading, *lines] if lines else []


def _matrices(rows: Sequence[Row]) -> list[str]:
    matrices = [row for row in rows if row["part"] == "matrices" and "decode" in row]
    sums = [row["gb_s"] for row in rows if row.get("case") == "sum of two buffers"]
    lines = (
        [f"{'matrix':<22}{'rows':>8}{'us':>10}{'GB/s':>10}{'of its own':>11}{'Tops':>9}"] if matrices else []
    )
    for row in matrices:
        share, tops = row.get("bandwidth_share"), row.get("tops")
        size = f"{row['decode']}+{row['prompt']}"
        cells = (
            f"{row['us']:>10.1f}{row['gb_s']:>10.1f}{_cell(share, 11, '{:.2f}')}{_cell(tops, 9, '{:.2f}')}"
        )
        lines.append(f"{row['case']:<22}{size:>8}{cells}")
    heading = "Matrices on the GPU: decode + prompt rows; its own is a sum of buffers"
    return ["", heading, *(f"{each:.1f} GB/s" for each in sums), *lines] if lines else []


def _experts(rows: Sequence[Row]) -> list[str]:
    of_experts = [row for row in rows if row["part"] == "experts" and "ms" in row]
    lines = [f"{'layer of experts':<26}{'side':>5}{'rows':>8}{'ms':>10}{'GB/s':>9}{'32 layers, ms':>15}"]
    for row in of_experts:
        size = f"{row['decode']}+{row['prompt']}"
        cells = f"{row['ms']:>10.3f}{row['gb_s']:>9.1f}{row['layers_ms']:>15.2f}"
        lines.append(f"{row['case']:<26}{row['side']:>5}{size:>8}{cells}")
    return ["", *lines] if of_experts else []


def _failures(rows: Sequence[Row]) -> list[str]:
    """By reason: what failed of it first, and how much more."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.get("failed"), str):
            title = line_of(row).removesuffix(f": {row['failed']}")
            reasons.setdefault(row["failed"], []).append(title)
    lines = ["", "Failed, or left out"] if reasons else []
    for reason, titles in reasons.items():
        others = f", and {len(titles) - 1} more" if len(titles) > 1 else ""
        lines += [f"{titles[0]}{others}:", f"  {reason[:160]}"]
    notes = {row["note"] for row in rows if row.get("note")}
    return lines + [f"note: {note}" for note in sorted(notes)]

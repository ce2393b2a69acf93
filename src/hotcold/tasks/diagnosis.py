"""Findings of ``hotcold doctor``: this machine, its GPUs and their speeds, as a report and as sections of
text."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hotcold.extras import EXTRAS, command
from hotcold.kernels.gpu import GPU
from hotcold.kernels.processor import STREAMS
from hotcold.placement.disk_speed import DiskSpeed
from hotcold.placement.hardware import ATTENTION, KERNEL_TYPES, Hardware
from hotcold.placement.measuring import RUNS
from hotcold.values import printable, size

GPU_FIGURES = ("GPU stream and masked rows", "link", "handshake")  #: figures that a CPU alone lacks

_TEXT = """\
processor   {processor}
ISA         {isa}
prefetch    {fetching} (distance in bytes, cache level)
threads     {threads} (fast cores {fast_cores} of {physical_cores}, CPUs allowed {cpus}, CPU quota {quota})
caches      {caches}
memory      {memory} available
huge pages  {huge_pages}
versions    hotcold {hotcold}, Python {python}, NumPy {numpy}"""

_HEADING = f"""\
GB/s, median of {RUNS} runs (and their range)
memory: plain reads, the fastest of {STREAMS[0]} to {STREAMS[-1]} streams per thread
dense: an FFN of Q4_0 with all its neurons
N B: an FFN with one neuron in ten, read in pieces of N bytes
"""

#: Called with each section of the text as soon as it is known.
Show: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """Facts about this machine and its measurements; ``str()`` gives the lines that ``hotcold doctor``
    prints."""

    machine: dict[str, Any]  #: processor, threads, caches, memory and versions
    hardware: Hardware | None  #: None if too little could be measured
    from_cache: bool  #: whether the figures are from an earlier call
    cache: Path  #: the file that stores them
    notes: tuple[str, ...]
    gpus: tuple[GPU, ...]
    gpu: GPU | None  #: the measured GPU
    gpu_reason: str  #: reason why there is none
    disk: DiskSpeed | None = None  #: speed of the given file's disk
    unmeasured: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()  #: sections of the text

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            "from_cache": self.from_cache,
            "cache": str(self.cache),
            "notes": list(self.notes),
            "unmeasured": list(self.unmeasured),
            **self.machine,
            "gpus": [asdict(each) for each in self.gpus],
            "gpu": self.gpu and self.gpu.index,
            "gpu_reason": self.gpu_reason,
            "hardware": self.hardware and asdict(self.hardware),
            "disk": self.disk and self.disk.report(),
        }

    def __str__(self) -> str:
        return "\n".join(self.sections)


def facts(machine: dict[str, Any], gpus: Sequence[GPU], gpu: GPU | None, gpu_reason: str) -> str:
    """Returns the section of the text about this machine's parts."""
    lines = _machine(machine)
    wrapped = _list(gpus, gpu)
    if gpu_reason:
        wrapped.append(f"{'GPU':<12}{gpu_reason}")
    if machine["missing_extras"]:
        wrapped.append(f"{'optional':<12}{command('EXTRA')} adds packages:")
    for extra, modules in machine["missing_extras"].items():
        wrapped.append(f"{'':<12}{extra}, for {EXTRAS[extra].purpose}: {', '.join(modules)}")
    for line in wrapped:
        lines += textwrap.wrap(line, 80, subsequent_indent=12 * " ", break_on_hyphens=False)
    return _section(lines)


def cpu_speed(source: str, bandwidths: Sequence[dict[str, Any]]) -> str:
    """Returns the section of the text about reads of memory."""
    return _section(["", source, *_HEADING.split("\n"), *_table(bandwidths)])


def gpu_speed(of_gpu: dict[str, Any]) -> str:
    """Returns the section of the text about a measured GPU."""
    return _section(_gpu_figures(of_gpu))


def prompt_speed(cpu_gflops: float, gpu_gflops: float) -> str:
    """Returns the section of the text about an FFN in Q4_0 with many rows on both sides."""
    both = f"{_digits(cpu_gflops)} GFLOPS on the CPU, {_digits(gpu_gflops)} on the GPU"
    return _section([f"{'prompts':<12}{both} (an FFN in Q4_0)"])


def disk_speed(disk: DiskSpeed) -> str:
    """Returns the section of the text about a disk."""
    return _section(["", *str(disk).split("\n")])


def _section(lines: Sequence[str]) -> str:
    return "\n".join(printable(line, 80) for line in lines)


def speeds(hardware: Hardware) -> list[str]:
    """Returns the sections of all figures. ArithmeticError, LookupError, TypeError or ValueError: a figure is
    missing or has another type, as in a damaged file."""
    machine = hardware.machine or {}
    of_gpu = machine.get("gpu")
    sections = [cpu_speed(hardware.source, machine["bandwidths"]), *([gpu_speed(of_gpu)] if of_gpu else [])]
    if hardware.knows_prompts:
        sections.append(prompt_speed(hardware.cpu_prompt_gflops, hardware.gpu_prompt_gflops))
    return sections


def _machine(machine: dict[str, Any]) -> list[str]:
    free = machine["free_bytes"]
    slow = "never, which is slow: set transparent_hugepage to madvise"
    words = machine | {
        "quota": machine["quota"] or "none",
        "caches": size(machine["cache_bytes"]) if machine["cache_bytes"] else "unknown",
        "memory": "unknown" if free is None else size(free),
        "huge_pages": slow if machine["huge_pages"] == "never" else machine["huge_pages"],
    }
    return _TEXT.format(**words).splitlines()


def _table(bandwidths: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each number of threads."""
    rows: dict[int, dict[str, str]] = {}
    streams = []
    for bandwidth in bandwidths:
        title = f"{bandwidth['run_bytes']:d} B" if bandwidth["run_bytes"] else f"{bandwidth['access']:s}"
        spread = (bandwidth["most_gb_s"] - bandwidth["least_gb_s"]) / bandwidth["gb_s"]
        rows.setdefault(bandwidth["threads"], {})[title] = f"{bandwidth['gb_s']:.1f} ({spread:.0%})"
        if bandwidth["streams"]:
            plural = "s" if bandwidth["threads"] > 1 else ""
            streams.append(f"{bandwidth['streams']:d} ({bandwidth['threads']:d} thread{plural})")
    titles = dict.fromkeys(title for row in rows.values() for title in row)
    lines = [f"{'threads':<8}" + "".join(f"{title:>12}" for title in titles)]
    for threads, row in rows.items():
        lines.append(f"{threads:<8d}" + "".join(f"{row.get(title, '-'):>12}" for title in titles))
    fastest = f"fastest number of streams per thread: {', '.join(streams)}"
    return [*lines, *textwrap.wrap(fastest, 80)] if streams else lines


def _list(devices: Sequence[GPU], chosen: GPU | None) -> list[str]:
    """Returns lines for each device, with a star at the measured one, and its problem if it is not usable."""
    lines = []
    for gpu in devices:
        mark = "*" if gpu == chosen else " "
        lines.append(f"GPU {gpu.index:<3d}{mark}    {gpu.name}")
        free = "" if gpu.free_bytes is None else f", {size(gpu.free_bytes)} free"
        shared = ", shared with the processor" if gpu.shares_memory else ""
        lines.append(f"{'':<12}{gpu.kind}, {size(gpu.memory_bytes)}{free}{shared}")
        lines.append(f"{'':<12}{gpu.driver}, {gpu.api}")
        if gpu.problem:
            lines.append(f"{'':<12}not usable: {gpu.problem}")
    return lines


#: Meaning of each of ``KERNELS`` in hardware.py; titles and meanings of its kinds of layers, and of the head.
_KERNELS = {
    "matrix": "a matrix in Q4_0",
    "stream": "all gate and up rows of an FFN",
    "rows": "a tenth of these rows",
    "down": "a tenth of its down rows",
}
_LAYERS = {
    "dense": ("layer", "kernels of a layer start and wait"),
    "exact": ("", "if it leaves out inactive neurons"),
    "predicted": ("", "if it has a predictor"),
    "experts": ("", "if it has experts"),
    "head": ("head", "kernels of the head"),
}


def _both(kind: str, figures: dict[str, float], what: str, factor: float = 1.0) -> tuple[float, str]:
    """Returns a figure in the first of :data:`KERNEL_TYPES`, and its meaning with the figures in others."""
    first, *others = (factor * figures[key] for type in KERNEL_TYPES if (key := f"{kind} {type}") in figures)
    return first, "; in F16 ".join([what, *map(_digits, others)])


def _gpu_figures(of_gpu: dict[str, Any]) -> list[str]:
    link, kernels, layers = of_gpu["link"], of_gpu["kernels_gb_s"], of_gpu["layers_s"]
    spin = link["handshake_spin_s"]
    rows = [
        *((kind, "GB/s", *_both(kind, kernels, what)) for kind, what in _KERNELS.items()),
        ("attention", "GB/s", kernels[ATTENTION], "keys and values"),
        ("to the GPU", "GB/s", link["to_gpu_gb_s"], "from the driver's memory"),
        ("", "GB/s", link["pageable_gb_s"], "from pageable memory"),
        ("back", "GB/s", link["from_gpu_gb_s"], "to the driver's memory"),
        *((title, "us", *_both(kind, layers, what, 1e6)) for kind, (title, what) in _LAYERS.items()),
        ("step", "us", 1e6 * link["step_s"], "to submit an empty step and wait for it"),
        ("handshake", "us", 1e6 * link["handshake_submit_s"], "there and back, by submits"),
    ]
    if spin is not None:
        rows.append(("", "us", 1e6 * spin, "by a waiting shader"))
    lines = ["", f"GPU {of_gpu['index']:d}: {of_gpu['name']}"]
    lines += [f"{title:<12}{_digits(value):>9} {unit:<5}{what}" for title, unit, value, what in rows]
    if spin is None:
        lines.append(f"{'':<12}{'-':>9} us   by a waiting shader: does not work with this driver")
    return lines


def _digits(value: float) -> str:
    """Formats a value with three digits, or with all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"

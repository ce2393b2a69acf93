"""Shows what this machine has, and how fast it and its GPU read memory. The measurement takes about 10 s and
is cached."""

import argparse
import datetime
import json
import os
import platform
import re
import sys
import textwrap
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.errors import UserError
from hotcold.formats.files import replacing
from hotcold.kernels.cores import available_cores, cache_bytes, find_cores, read_text
from hotcold.kernels.cpu import default_isa
from hotcold.kernels.fetching import default_fetching
from hotcold.kernels.gpu import GPU, GPUError
from hotcold.kernels.gpus import OFF, choose_gpu, find_gpus, wished
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.placement.measuring import RUNS, Bandwidth, GPUSpeed, buffer_bytes, measure, measure_gpu
from hotcold.runtime.machine import cache_path, machine_name
from hotcold.runtime.memory import available_memory
from hotcold.values import printable
from hotcold.version import __version__

#: Modules of the optional extras, and what these are for.
_EXTRAS = {
    "convert": (("ml_dtypes", "safetensors"), "hotcold convert"),
    "test": (("gguf", "hypothesis", "pytest", "scipy", "sentencepiece"), "the tests"),
    "bench": (("llama_cpp", "matplotlib"), "benchmarks beside llama.cpp"),
}
_UNMEASURED = ["GPU stream and masked rows", "link", "handshake"]  #: without a GPU
_SECONDS = 6.0  # of reading in all
_GPU_SECONDS = 1.0
_GPU_BUFFER = 512 << 20  # more than a GPU's caches hold
_SOFTWARE_BUFFER = 2 << 20

_TEXT = """\
processor   {processor}
ISA         {isa}
fetching    {fetching} (bytes ahead and level of the cache)
threads     {threads} (fast cores {fast_cores} of {physical_cores}, CPUs allowed {cpus}, CPU quota {quota})
caches      {caches}
memory      {memory} available
huge pages  {huge_pages}
versions    hotcold {hotcold}, Python {python}, NumPy {numpy}"""

_HEADING = f"""\
GB/s, median of {RUNS} runs (and their range)
memory: plain reads; dense: an FFN of Q4_0 with all its neurons;
N B: an FFN with one neuron in ten, read in pieces of N bytes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="measure again, even if figures are cached")
    parser.add_argument(
        "-o",
        "--output",
        type=options.new_file,
        metavar="FILE",
        help="also write the figures to a new file, for hotcold plan --hardware",
    )
    options.add_gpu_option(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    notes: list[str] = []
    devices, gpu, reason = _gpus(args.gpu, notes)
    path = cache_path(gpu)
    machine = _facts(gpu)
    hardware = None if args.again else _cached(path, machine, notes)
    from_cache = hardware is not None
    if hardware is None:
        hardware = _measure(machine, gpu, notes)
        _keep(path, hardware, notes)
    else:
        notes.append(f"figures from {path}; --again measures")
    if args.output:
        _write(args.output, hardware)
    unmeasured = [] if hardware.vram_bytes else _UNMEASURED
    _print(machine, hardware, [*_list(devices, gpu), *([f"{'GPU':<12}{reason}"] if reason else [])])
    if unmeasured:
        print(f"not measured: {', '.join(unmeasured)}")
    for note in notes:
        print(f"note: {printable(note, 4096)}", file=sys.stderr)
    report = {"from_cache": from_cache, "cache": str(path), "notes": notes, "unmeasured": unmeasured}
    found = {"gpus": [asdict(each) for each in devices], "gpu": gpu and gpu.index, "gpu_reason": reason}
    return options.end(args, report | machine | found | {"hardware": asdict(hardware)})


def _gpus(asked: str | None, notes: list[str]) -> tuple[list[GPU], GPU | None, str]:
    """All devices, that which is to be measured, and why there is none."""
    gpu, passed_over = choose_gpu(asked)
    if passed_over:
        notes.append(passed_over)
    if wished(asked) == OFF:
        return [], None, "not looked for (--gpu off)"
    devices, reason = find_gpus()
    if gpu is None and devices:
        reason = "no GPU found but a software driver: --gpu NAME measures it" if not passed_over else ""
    return devices, gpu, reason


def _facts(gpu: GPU | None) -> dict[str, Any]:
    """What the report says of this machine; ``name`` has all that the figures depend on."""
    cores = find_cores()
    missing = [name for name, (modules, _) in _EXTRAS.items() if not all(map(find_spec, modules))]
    huge_pages = re.findall(r"\[(\w+)\]", read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return {
        "name": machine_name(gpu),
        "processor": options.processor(),
        "isa": default_isa(),
        "fetching": str(default_fetching()),
        "threads": available_cores(),
        "physical_cores": cores.physical,
        "fast_cores": cores.fast,
        "cpus": len(cores.cpus),
        "quota": cores.quota,
        "cache_bytes": cache_bytes(cores.cpus),
        "free_bytes": available_memory(),
        "huge_pages": huge_pages[0] if huge_pages else "unknown",
        "hotcold": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "missing_extras": missing,
    }


def _cached(path: Path, machine: dict[str, Any], notes: list[str]) -> Hardware | None:
    """The figures of this machine; None, with a note, where they are another's or damaged."""
    if not os.path.exists(path):
        return None
    try:
        found = find_hardware(str(path))
        if found.name != machine["name"]:
            raise UserError(f"they are of {found.name!r}, and this is {machine['name']!r}")
        json.dumps(
            [asdict(found), _table(found), _gpu_figures(found)], allow_nan=False
        )  # what is printed later
        return found
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        notes.append(f"measured anew, as the cached figures are of no use: {error}")
        return None


def _measure(machine: dict[str, Any], gpu: GPU | None, notes: list[str]) -> Hardware:
    caches, all_threads = machine["cache_bytes"], machine["threads"]
    nbytes = buffer_bytes(caches, machine["free_bytes"])
    if nbytes < 2 * caches:
        seen = f"only {options.size(nbytes)} were read by turns, as memory is short"
        notes.append(f"{seen}: the caches ({options.size(caches)}) keep much of it, and figures are too high")
    powers_of_two = [1 << i for i in range((all_threads - 1).bit_length())]
    with progress("measuring") as advance:
        found = measure([*powers_of_two, all_threads], nbytes, _SECONDS, advance)
    speed = None if gpu is None else _measure_gpu(gpu, notes)
    machine = machine | {"buffer_bytes": nbytes, "bandwidths": [asdict(each) for each in found]}
    return _hardware(machine, [each for each in found if each.threads == all_threads], gpu, speed)


def _measure_gpu(gpu: GPU, notes: list[str]) -> GPUSpeed | None:
    """None, with a note, where it fails."""
    most = _SOFTWARE_BUFFER if gpu.kind == "software" else _GPU_BUFFER
    try:
        with progress("measuring the GPU") as advance:
            return measure_gpu(gpu, min(most, gpu.default_budget // 4), _GPU_SECONDS, advance)
    except GPUError as error:
        notes.append(f"GPU {gpu.title} was not measured: {error}")
        return None


def _hardware(
    machine: dict[str, Any], on_all: list[Bandwidth], gpu: GPU | None, speed: GPUSpeed | None
) -> Hardware:
    link = speed.link if speed else None
    of_gpu = None if gpu is None or speed is None else {**asdict(gpu), **asdict(speed)}
    return Hardware(
        name=machine["name"],
        source=f"measured by hotcold doctor, {datetime.datetime.now():%Y-%m-%d %H:%M}",
        cpu_stream_gb_s=next(each.gb_s for each in on_all if each.access == "dense"),
        cpu_gather_gb_s=[[each.run_bytes, each.gb_s] for each in on_all if each.access == "rows"],
        vram_bytes=gpu.memory_bytes if gpu and speed else 0,
        gpu_stream_gb_s=speed.stream_gb_s if speed else 0,
        gpu_rows_gb_s=speed.rows_gb_s if speed else 0,
        link_pinned_gb_s=min(link.to_gpu_gb_s, link.from_gpu_gb_s) if link else 0,
        link_pageable_gb_s=link.pageable_gb_s if link else 0,
        handshake_s=link.handshake_s if link else 0,
        spins=link is not None and link.spins,
        step_s=link.step_s if link else 0,
        layer_s=speed.layer_s if speed else 0,
        machine=machine | {"gpu": of_gpu},
    )


def _keep(path: Path, hardware: Hardware, notes: list[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, hardware)
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", error)
        notes.append(f"not cached, so the next call measures again: {path}: {reason}")


def _write(path: Path, hardware: Hardware) -> None:
    with replacing(path) as file:
        file.write(json.dumps(asdict(hardware), indent=1, allow_nan=False).encode() + b"\n")


def _table(hardware: Hardware) -> list[str]:
    """A line for each number of threads; also tells whether a cached file holds what it should."""
    rows: dict[int, dict[str, str]] = {}
    for each in (hardware.machine or {})["bandwidths"]:
        title = f"{each['run_bytes']:d} B" if each["run_bytes"] else f"{each['access']:s}"
        spread = (each["most_gb_s"] - each["least_gb_s"]) / each["gb_s"]
        rows.setdefault(each["threads"], {})[title] = f"{each['gb_s']:.1f} ({spread:.0%})"
    titles = dict.fromkeys(title for row in rows.values() for title in row)
    lines = [f"{'threads':<8}" + "".join(f"{title:>12}" for title in titles)]
    for threads, row in rows.items():
        lines.append(f"{threads:<8d}" + "".join(f"{row[title]:>12}" for title in titles))
    return lines


def _list(devices: list[GPU], chosen: GPU | None) -> list[str]:
    """A line for each device, with a star at the one that is measured, and one for what is wrong with it."""
    lines = []
    for gpu in devices:
        mark = "*" if gpu == chosen else " "
        lines.append(f"GPU {gpu.index:<3d}{mark}    {gpu.name}")
        free = "" if gpu.free_bytes is None else f", {options.size(gpu.free_bytes)} free"
        shared = ", the processor's" if gpu.shares_memory else ""
        lines.append(f"{'':<12}{gpu.kind}, {options.size(gpu.memory_bytes)}{free}{shared}")
        lines.append(f"{'':<12}{gpu.driver}, {gpu.api}")
        if gpu.problem:
            lines.append(f"{'':<12}not usable: {gpu.problem}")
    return lines


def _gpu_figures(hardware: Hardware) -> list[str]:
    of_gpu = (hardware.machine or {}).get("gpu")
    if not of_gpu:
        return []
    link = of_gpu["link"]
    spin = link["handshake_spin_s"]
    rows = [
        ("stream", "GB/s", of_gpu["stream_gb_s"], "an FFN of Q4_0 that is read whole"),
        ("rows", "GB/s", of_gpu["rows_gb_s"], "one of which a tenth of the neurons is read"),
        ("to the GPU", "GB/s", link["to_gpu_gb_s"], "from the driver's memory"),
        ("", "GB/s", link["pageable_gb_s"], "from any other"),
        ("back", "GB/s", link["from_gpu_gb_s"], "to the driver's memory"),
        ("layer", "us", 1e6 * of_gpu["layer_s"], "of the smallest one, whose kernels begin and end"),
        ("step", "us", 1e6 * link["step_s"], "to submit next to nothing and wait for it"),
        ("handshake", "us", 1e6 * link["handshake_submit_s"], "there and back, by submits"),
    ]
    if spin is not None:
        rows.append(("", "us", 1e6 * spin, "by a shader that waits"))
    lines = ["", f"GPU {of_gpu['index']:d}: {of_gpu['name']}"]
    lines += [f"{title:<12}{_digits(value):>9} {unit:<5}{what}" for title, unit, value, what in rows]
    if spin is None:
        lines.append(f"{'':<12}{'-':>9} us   by a shader that waits: does not work on this driver")
    return lines


def _digits(value: float) -> str:
    """Three of them, or those before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _print(machine: dict[str, Any], hardware: Hardware, gpus: list[str]) -> None:
    free = machine["free_bytes"]
    slow = "never, which is slow: let the system allow 'madvise'"
    words = machine | {
        "quota": machine["quota"] or "none",
        "caches": options.size(machine["cache_bytes"]),
        "memory": "unknown" if free is None else options.size(free),
        "huge_pages": slow if machine["huge_pages"] == "never" else machine["huge_pages"],
    }
    lines = _TEXT.format(**words).splitlines()
    for line in gpus:
        lines += textwrap.wrap(line, 80, subsequent_indent=12 * " ", drop_whitespace=True) or [""]
    for extra in machine["missing_extras"]:
        purpose = _EXTRAS[extra][1]
        lines.append(f"{'missing':<12}for {purpose}: pip install '.[{extra}]'")
    lines += ["", hardware.source, *_HEADING.split("\n"), *_table(hardware), *_gpu_figures(hardware), ""]
    print("\n".join(printable(line, 80) for line in lines))

"""Says what this machine has, and how fast it reads memory: measured once, in about 10 s, and cached."""

import argparse
import datetime
import json
import os
import platform
import re
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.engine.memory import available_memory
from hotcold.errors import UserError
from hotcold.formats.files import printable, replacing
from hotcold.kernels.cores import available_cores, cache_bytes, find_cores, read_text
from hotcold.kernels.cpu import default_isa
from hotcold.sparse.hardware import Hardware, find_hardware
from hotcold.sparse.measuring import RUNS, buffer_bytes, measure
from hotcold.version import __version__

#: Modules of the optional extras, and what these are for.
_EXTRAS = {
    "convert": (("ml_dtypes", "safetensors"), "hotcold convert"),
    "test": (("gguf", "hypothesis", "pytest", "scipy", "sentencepiece"), "the tests"),
    "bench": (("llama_cpp", "matplotlib"), "benchmarks beside llama.cpp"),
}
_UNMEASURED = ["GPU stream and masked rows", "link", "handshake", "free GPU memory"]
_SECONDS = 6.0  # of reading in all

_TEXT = """\
processor   {processor}
ISA         {isa}
threads     {threads} (physical cores {physical_cores}, CPUs of the affinity {cpus}, CPU quota {quota})
caches      {caches}
memory      {memory} available
huge pages  {huge_pages}
versions    hotcold {hotcold}, Python {python}, NumPy {numpy}
GPU         not looked for (torch {torch}; no GPU kernels in this version)"""

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
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    path = _cache_path()
    machine = _facts()
    notes: list[str] = []
    hardware = None if args.again else _cached(path, machine, notes)
    from_cache = hardware is not None
    if hardware is None:
        hardware = _measure(machine, notes)
        _keep(path, hardware, notes)
    else:
        notes.append(f"figures from {path}; --again measures")
    if args.output:
        _write(args.output, hardware)
    _print(machine, hardware)
    for note in notes:
        print(f"note: {printable(note, 4096)}", file=sys.stderr)
    report = {"from_cache": from_cache, "cache": str(path), "notes": notes, "unmeasured": _UNMEASURED}
    return options.end(args, report | machine | {"hardware": asdict(hardware)})


def _cache_path() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise UserError(f"cache folder {folder!r}: set XDG_CACHE_HOME to an absolute path")
    return Path(folder, "hotcold", "hardware.json")


def _facts() -> dict[str, Any]:
    """What the report says of this machine; ``name`` has all that the figures depend on."""
    cores = find_cores()
    processor, isa, threads = options.processor(), default_isa(), available_cores()
    missing = [name for name, (modules, _) in _EXTRAS.items() if not all(map(find_spec, modules))]
    huge_pages = re.findall(r"\[(\w+)\]", read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return {
        "name": f"{processor}, {isa}, {threads} threads, hotcold {__version__}",
        "processor": processor,
        "isa": isa,
        "threads": threads,
        "physical_cores": cores.physical,
        "cpus": len(cores.cpus),
        "quota": cores.quota,
        "cache_bytes": cache_bytes(cores.cpus),
        "free_bytes": available_memory(),
        "huge_pages": huge_pages[0] if huge_pages else "unknown",
        "hotcold": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": find_spec("torch") is not None,
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
        json.dumps([asdict(found), _table(found)], allow_nan=False)  # what is printed later
        return found
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        notes.append(f"measured anew, as the cached figures are of no use: {error}")
        return None


def _measure(machine: dict[str, Any], notes: list[str]) -> Hardware:
    caches, all_threads = machine["cache_bytes"], machine["threads"]
    nbytes = buffer_bytes(caches, machine["free_bytes"])
    if nbytes < 2 * caches:
        seen = f"only {options.size(nbytes)} were read by turns, as memory is short"
        notes.append(f"{seen}: the caches ({options.size(caches)}) keep much of it, and figures are too high")
    powers_of_two = [1 << i for i in range((all_threads - 1).bit_length())]
    with progress("measuring") as advance:
        found = measure([*powers_of_two, all_threads], nbytes, _SECONDS, advance)
    on_all = [each for each in found if each.threads == all_threads]
    return Hardware(
        name=machine["name"],
        source=f"measured by hotcold doctor, {datetime.datetime.now():%Y-%m-%d %H:%M}",
        cpu_stream_gb_s=next(each.gb_s for each in on_all if each.access == "dense"),
        cpu_gather_gb_s=[[each.run_bytes, each.gb_s] for each in on_all if each.access == "rows"],
        # No GPU is looked for.
        vram_bytes=0,
        gpu_stream_gb_s=0,
        gpu_rows_gb_s=0,
        link_pinned_gb_s=0,
        link_pageable_gb_s=0,
        handshake_s=0,
        machine=machine | {"buffer_bytes": nbytes, "bandwidths": [asdict(each) for each in found]},
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


def _print(machine: dict[str, Any], hardware: Hardware) -> None:
    free = machine["free_bytes"]
    slow = "never, which is slow: let the system allow 'madvise'"
    words = machine | {
        "quota": machine["quota"] or "none",
        "caches": options.size(machine["cache_bytes"]),
        "memory": "unknown" if free is None else options.size(free),
        "huge_pages": slow if machine["huge_pages"] == "never" else machine["huge_pages"],
        "torch": "installed" if machine["torch"] else "missing",
    }
    lines = _TEXT.format(**words).splitlines()
    for extra in machine["missing_extras"]:
        purpose = _EXTRAS[extra][1]
        lines.append(f"{'missing':<12}for {purpose}: pip install '.[{extra}]'")
    lines += ["", hardware.source, *_HEADING.split("\n"), *_table(hardware)]
    lines += ["", f"not measured: {', '.join(_UNMEASURED)}"]
    print("\n".join(printable(line, 80) for line in lines))

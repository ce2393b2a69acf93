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

from hotcold import __version__
from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.engine.memory import available_memory
from hotcold.formats.files import printable, replacing
from hotcold.kernels.cores import available_cores, cache_bytes, find_cores, read_text
from hotcold.kernels.cpu import default_isa
from hotcold.sparse.hardware import Hardware, find_hardware
from hotcold.sparse.measuring import RUNS, measure

#: Modules of the optional extras, and what these are for.
_EXTRAS = {
    "convert": (("ml_dtypes", "safetensors"), "hotcold convert"),
    "test": (("gguf", "hypothesis", "pytest", "scipy", "sentencepiece"), "the tests"),
    "bench": (("llama_cpp", "matplotlib"), "benchmarks beside llama.cpp"),
}
_UNMEASURED = ["GPU stream and masked rows", "link", "handshake", "free GPU memory"]
_LEAST, _MOST, _SECONDS = 128 << 20, 1 << 30, 6.0  # bytes of a buffer, and seconds of reading in all

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
GB/s, median of {RUNS} runs (and their range). memory: only read; dense: all of an
FFN of Q4_0; N B: one neuron in ten, which lies in pieces of N bytes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="measure, though figures are cached")
    what = "write the figures to a new file as well, for --hardware"
    parser.add_argument("-o", "--output", type=options.new_file, metavar="FILE", help=what)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise ValueError(f"cache folder {folder!r}: set XDG_CACHE_HOME to an absolute path")
    path, machine, notes = Path(folder, "hotcold", "hardware.json"), _facts(), list[str]()
    hardware = None if args.again else _cached(path, machine, notes)
    if from_cache := hardware is not None:
        notes.append(f"figures from {path}; --again measures")
    else:
        hardware = _measure(machine, notes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, hardware)
        except (ValueError, OSError) as error:
            reason = getattr(error, "strerror", error)
            notes.append(f"not cached, so the next call measures again: {path}: {reason}")
    if args.output:
        _write(args.output, hardware)
    _print(machine, hardware)
    for note in notes:
        print(f"note: {printable(note, 4096)}", file=sys.stderr)
    report = {"from_cache": from_cache, "cache": str(path), "notes": notes, "unmeasured": _UNMEASURED}
    return options.end(args, report | machine | {"hardware": asdict(hardware)})


def _facts() -> dict[str, Any]:
    cores, pages = find_cores(), read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    missing = [extra for extra, (modules, _) in _EXTRAS.items() if not all(map(find_spec, modules))]
    facts = {
        "processor": options.processor(), "isa": default_isa(), "threads": available_cores(),
        "hotcold": __version__, "cpus": len(cores.cpus), "physical_cores": cores.physical,
        "quota": cores.quota, "cache_bytes": cache_bytes(cores.cpus), "free_bytes": available_memory(),
        "huge_pages": "".join(re.findall(r"\[(\w+)\]", pages)) or "unknown",
        "python": platform.python_version(), "numpy": np.__version__,
        "torch": find_spec("torch") is not None, "missing_extras": missing,
    }  # fmt: skip
    # What the figures depend on: those of another machine are not these.
    return facts | {"name": "{processor}, {isa}, {threads} threads, hotcold {hotcold}".format(**facts)}


def _cached(path: Path, machine: dict[str, Any], notes: list[str]) -> Hardware | None:
    """The figures of this machine; None, with a note, where they are another's or damaged."""
    if not os.path.exists(path):
        return None
    try:
        found = find_hardware(str(path))
        if found.name != machine["name"]:
            raise ValueError(f"they are of {found.name!r}, and this is {machine['name']!r}")
        json.dumps([asdict(found), _table(found)], allow_nan=False)
        return found
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        notes.append(f"measured anew, as the cached figures are of no use: {error}")
        return None


def _measure(machine: dict[str, Any], notes: list[str]) -> Hardware:
    cores, caches, free = (machine[key] for key in ("threads", "cache_bytes", "free_bytes"))
    nbytes = min(max(_LEAST, 4 * caches), _MOST, _MOST if free is None else max(1 << 20, free // 8))
    if nbytes < 2 * caches:
        notes.append(
            f"only {options.size(nbytes)} were read; caches ({options.size(caches)}) keep much of it"
        )
    threads = [1 << i for i in range((cores - 1).bit_length())] + [cores]
    with progress("measuring") as advance:
        found = measure(threads, nbytes, _SECONDS, advance)
    best = [(each["run_bytes"], each["gb_s"]) for each in found if each["threads"] == cores]
    stream, *gather = [list(each) for each in best[1:]]  # after what memory gives
    source = f"measured by hotcold doctor, {datetime.datetime.now():%Y-%m-%d %H:%M}"
    more = machine | {"buffer_bytes": nbytes, "bandwidths": found}
    return Hardware(machine["name"], source, 0, stream[1], gather, 0, 0, 0, 0, 0, more)


def _write(path: Path, hardware: Hardware) -> None:
    with replacing(path) as file:
        file.write(json.dumps(asdict(hardware), indent=1, allow_nan=False).encode() + b"\n")


def _table(hardware: Hardware) -> list[str]:
    rows: dict[str, dict[str, str]] = {"threads": {}}
    for each in (hardware.machine or {})["bandwidths"]:
        n, least, median, most = (each[key] for key in ("run_bytes", "least_gb_s", "gb_s", "most_gb_s"))
        head = f"{n:d} B" if n else f"{each['access']:s}"
        rows["threads"][head] = head
        rows.setdefault(f"{each['threads']:d}", {})[head] = f"{median:.1f} ({(most - least) / median:.0%})"
    return [f"{label:<8}" + "".join(f"{cell:>12}" for cell in row.values()) for label, row in rows.items()]


def _print(machine: dict[str, Any], hardware: Hardware) -> None:
    free, slow = machine["free_bytes"], "never, which is slow: let the system allow 'madvise'"
    words = {
        "quota": machine["quota"] or "none", "caches": options.size(machine["cache_bytes"]),
        "memory": "unknown" if free is None else options.size(free),
        "huge_pages": machine["huge_pages"].replace("never", slow),
        "torch": "installed" if machine["torch"] else "missing",
    }  # fmt: skip
    missing = [f"for {_EXTRAS[extra][1]}: pip install '.[{extra}]'" for extra in machine["missing_extras"]]
    lines = [*_TEXT.format(**machine | words).splitlines(), *(f"{'missing':<12}{each}" for each in missing)]
    lines += ["", hardware.source, *_HEADING.split("\n"), *_table(hardware)]
    lines += ["", f"not measured: {', '.join(_UNMEASURED)}"]
    print("\n".join(printable(line, 80) for line in lines))

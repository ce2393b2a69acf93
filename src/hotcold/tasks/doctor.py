"""Facts about this machine, and measurements, which a file stores by machine and GPU."""

import datetime
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.extras import EXTRAS, missing
from hotcold.formats.files import output_file, write_text
from hotcold.kernels.cores import available_cores, cache_bytes, find_cores, read_text
from hotcold.kernels.gpu import GPU
from hotcold.kernels.gpus import OFF, choose_gpu, find_gpus, wished
from hotcold.kernels.instruction_sets import default_isa, slow_kernels
from hotcold.kernels.processor import FETCHING, fetching, fetching_is_measured
from hotcold.placement.disk_speed import DiskSpeed, large_file, measure_disk
from hotcold.placement.gpu_measuring import GPUSpeed, measure_gpu
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.placement.measuring import (
    FAILURES,
    Bandwidth,
    buffer_bytes,
    measure,
    measure_fetching,
    measure_prompts,
    reason_of,
)
from hotcold.runtime.machine import cache_path, machine_name, processor, use_measured_fetching
from hotcold.runtime.memory import available_memory
from hotcold.runtime.options import Progress
from hotcold.tasks.diagnosis import (
    GPU_FIGURES,
    Diagnosis,
    Show,
    cpu_speed,
    disk_speed,
    facts,
    gpu_speed,
    prompt_speed,
    speeds,
)
from hotcold.values import size
from hotcold.version import __version__

_SECONDS = 6.0  # of reading, in total
_FETCHING_SECONDS = 3.0  # of reading with each prefetch setting, in total
_GPU_SECONDS = 1.0  # of decoding, and of prompts
_PROMPT_SECONDS = 1.0
_GPU_BUFFER = 512 << 20  # more than the caches of a GPU
_SOFTWARE_BUFFER = 2 << 20


def doctor(
    *,
    gpu: str | None = None,
    again: bool = False,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    disk: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    show: Show | None = None,
) -> Diagnosis:
    """Describes this machine, and measures how fast it and its GPU read memory. A measurement takes about 10
    s; later calls and plans use the stored figures. A failed measurement becomes a note, and the others
    continue.

    >>> print(hotcold.doctor())

    Args:
        gpu: a part of the GPU's name, or its number; ``off`` measures the CPU alone.
        again: whether to measure even if there are stored figures.
        output: file for the figures, for ``hotcold.plan(hardware=...)``.
        force: whether to replace an existing ``output``.
        disk: a large file, such as a model, whose disk is also measured, on every call.
        progress: called with the phases ``measuring``, ``measuring the GPU`` and ``measuring the disk``.
        show: called with each section of the text as soon as it is known.

    UserError: an unknown GPU, an ``output`` that exists or without figures to write, or a file for ``disk``
    that is small or cannot be opened."""
    to_write = output_file(output, force=force, inputs=[disk])
    if disk is not None:
        large_file(Path(disk))
    advance = progress or (lambda phase, done, total: None)
    text, notes = _Text(show or (lambda section: None)), [note for note in (slow_kernels(),) if note]
    devices, chosen, reason = _gpus(gpu, notes)
    path = cache_path(chosen)
    use_measured_fetching()
    machine = _facts(chosen)
    text.add(facts(machine, devices, chosen, reason))
    hardware = None if again else _cached(path, machine, notes)
    from_cache = hardware is not None
    if hardware is None:
        hardware, with_gpu = _measure(machine, chosen, notes, text, advance)
        if hardware is not None:
            _keep(path, hardware, notes)
    else:
        with_gpu = hardware.vram_bytes > 0
        notes.append(f"figures from {path}; `again` measures anew")
        for section in speeds(hardware):
            text.add(section)
    if to_write is not None:
        if hardware is None:
            raise UserError(f"{to_write} was not written: {'; '.join(notes)}")
        _write(to_write, hardware)
    speed = None
    if disk is not None:
        speed = _measure_disk(Path(disk), notes, text, partial(advance, "measuring the disk"))
    lacking = (*(() if hardware else ("memory",)), *(() if with_gpu else GPU_FIGURES))
    if lacking:
        text.add(f"\nnot measured: {', '.join(lacking)}")
    known = machine, hardware, from_cache, path, tuple(notes), tuple(devices), chosen, reason, speed
    return Diagnosis(*known, lacking, tuple(text.sections))


class _Text:
    """The sections of the text, each shown when it is added."""

    def __init__(self, show: Show) -> None:
        self.sections: list[str] = []
        self._show = show

    def add(self, section: str) -> None:
        self.sections.append(section)
        self._show(section)


def _gpus(asked: str | None, notes: list[str]) -> tuple[list[GPU], GPU | None, str]:
    """Returns all devices, the device to measure, and the reason if there is none."""
    gpu, passed_over = choose_gpu(asked)
    if passed_over:
        notes.append(passed_over)
    if wished(asked) == OFF:
        return [], None, "not looked for (`gpu=off`)"
    devices, reason = find_gpus()
    if gpu is None and devices:
        reason = "no GPU found, only a software driver: `gpu=NAME` measures it" if not passed_over else ""
    return devices, gpu, reason


def _facts(gpu: GPU | None) -> dict[str, Any]:
    """Returns the report's facts about this machine; ``name`` has all facts that affect figures."""
    cores = find_cores()
    huge_pages = re.findall(r"\[(\w+)\]", read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return {
        "name": machine_name(gpu),
        "processor": processor(),
        "isa": default_isa(),
        "fetching": fetching(),
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
        "missing_extras": {name: modules for name in EXTRAS if (modules := missing(name))},
    }


def _cached(path: Path, machine: dict[str, Any], notes: list[str]) -> Hardware | None:
    """Returns the stored figures of this machine; None, with a note, if they are another's or damaged."""
    if not os.path.exists(path):
        return None
    try:
        stored = find_hardware(str(path))
        if stored.name != machine["name"]:
            raise UserError(f"they are from {stored.name!r}, and this machine is {machine['name']!r}")
        json.dumps([asdict(stored), speeds(stored)], allow_nan=False)  # fails now rather than when printed
        return stored
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        notes.append(f"measured anew, since the cached figures cannot be used: {error}")
        return None


def _measure(
    machine: dict[str, Any], gpu: GPU | None, notes: list[str], text: _Text, progress: Progress
) -> tuple[Hardware | None, bool]:
    """Measures memory and a GPU; returns the figures, and whether a GPU was measured. The figures are None,
    with a note, if those of all threads are missing."""
    caches, all_threads = machine["cache_bytes"], machine["threads"]
    source = f"measured by hotcold doctor, {datetime.datetime.now():%Y-%m-%d %H:%M}"
    measured: list[Bandwidth] = []
    nbytes, prefetch = 0, ""
    try:
        nbytes = buffer_bytes(caches, machine["free_bytes"])
        if nbytes < 2 * caches:
            got = f"only {size(nbytes)} were used for the measurement, since memory is short"
            notes.append(
                f"{got}: much of it fits in the caches ({size(caches)}), so the figures are too high"
            )
        prefetch = _measure_fetching(all_threads, nbytes, notes, text)
        powers_of_two = [1 << i for i in range((all_threads - 1).bit_length())]
        threads = [*powers_of_two, all_threads]
        measured = measure(threads, nbytes, _SECONDS, partial(progress, "measuring"), notes.append)
    except FAILURES as error:
        notes.append(f"memory was not measured: {reason_of(error)}")
    bandwidths = [asdict(each) for each in measured]
    if measured:
        text.add(cpu_speed(source, bandwidths))
    speed = None if gpu is None else _measure_gpu(gpu, notes, partial(progress, "measuring the GPU"))
    of_gpu = None if gpu is None or speed is None else {**asdict(gpu), **asdict(speed)}
    if of_gpu is not None:
        text.add(gpu_speed(of_gpu))
    prompts = 0.0
    if speed is not None and measured:
        prompts = _measure_prompts(all_threads, nbytes, notes)
        if prompts:
            text.add(prompt_speed(prompts, speed.prompt_gflops))
    machine = machine | {"buffer_bytes": nbytes, "bandwidths": bandwidths, "gpu": of_gpu}
    on_all = [each for each in measured if each.threads == all_threads]
    if {"dense", "rows"} - {each.access for each in on_all}:
        return None, speed is not None
    hardware = _hardware(machine, source, on_all, gpu, speed)
    return replace(hardware, fetching=prefetch, cpu_prompt_gflops=prompts), speed is not None


def _measure_fetching(threads: int, nbytes: int, notes: list[str], text: _Text) -> str:
    """Returns the prefetch setting that is used from now on; empty if the default was measured on such a
    processor, or, with a note, if the measurement fails."""
    if fetching_is_measured():
        return ""
    try:
        best = measure_fetching(threads, nbytes, _FETCHING_SECONDS)
    except FAILURES as error:
        notes.append(f"prefetch settings were not measured: {reason_of(error)}")
        return ""
    text.add(f"\nprefetch    {best}; measured, none of {', '.join(FETCHING)} is clearly faster")
    return best


def _measure_prompts(threads: int, nbytes: int, notes: list[str]) -> float:
    """Returns the GFLOPS of prompts on the CPU; 0, with a note, if the measurement fails."""
    try:
        return measure_prompts(threads, nbytes, _PROMPT_SECONDS)
    except FAILURES as error:
        notes.append(f"prompts were not measured on the CPU: {reason_of(error)}")
        return 0.0


def _measure_gpu(gpu: GPU, notes: list[str], advance: Callable[[int, int], None]) -> GPUSpeed | None:
    """Measures a GPU; returns None and adds a note if that fails."""
    most = _SOFTWARE_BUFFER if gpu.kind == "software" else _GPU_BUFFER
    try:
        return measure_gpu(gpu, min(most, gpu.default_budget // 4), _GPU_SECONDS, advance)
    except FAILURES as error:
        notes.append(f"GPU {gpu.title} was not measured: {reason_of(error)}")
        return None


def _measure_disk(
    path: Path, notes: list[str], text: _Text, advance: Callable[[int, int], None]
) -> DiskSpeed | None:
    """Measures a disk; returns None and adds a note if that fails."""
    try:
        speed = measure_disk(path, advance)
    except FAILURES as error:
        notes.append(f"the disk was not measured: {reason_of(error)}")
        return None
    text.add(disk_speed(speed))
    return speed


def _hardware(
    machine: dict[str, Any], source: str, on_all: list[Bandwidth], gpu: GPU | None, speed: GPUSpeed | None
) -> Hardware:
    link = speed.link if speed else None
    return Hardware(
        name=machine["name"],
        source=source,
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
        kernels_gb_s=speed.kernels_gb_s if speed else {},
        layers_s=speed.layers_s if speed else {},
        gpu_prompt_gflops=speed.prompt_gflops if speed else 0,
        machine=machine,
    )


def _keep(path: Path, hardware: Hardware, notes: list[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, hardware)
    except (ValueError, OSError) as error:
        reason = f"{path.parent}: {error.strerror}" if isinstance(error, OSError) else error
        notes.append(f"not cached, so the next call measures again: {reason}")


def _write(path: Path, hardware: Hardware) -> None:
    write_text(path, json.dumps(asdict(hardware), indent=1, allow_nan=False) + "\n")

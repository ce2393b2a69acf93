"""The GPUs of this machine, for any interface: listed, chosen by name, opened, measured."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from hotcold.formats.blocks import BlockType
from hotcold.kernels.backend import BatchLimits
from hotcold.kernels.gpu import ALIGNMENT, GPU, GPUBackend, GPUError, StepShape

OFF = "off"  #: in place of a name: no GPU
ENVIRONMENT = "HOTCOLD_GPU"  #: environment variable that replaces ``--gpu`` where that is not given

#: Kinds of GPU that are used without a name: the first available one.
USUAL_KINDS = ("discrete", "integrated")

#: The most host memory in which weights are staged for a GPU.
STAGING_BYTES = 64 << 20


def find_gpus() -> tuple[list[GPU], str]:
    """Lists all devices, also unusable ones. Without any, also returns why and what to install."""
    from hotcold.kernels.vulkan.devices import find_devices

    return find_devices()


def unread_types(names: Iterable[str]) -> list[str]:
    """Returns the block types among these that a GPU cannot compute with."""
    from hotcold.kernels.vulkan.packing import holds

    return sorted(name for name in {*names} if not holds(name))


def unsupported(ops: Iterable[str]) -> str | None:
    """Returns why GPUs cannot run these ops; None: they can."""
    from hotcold.kernels.vulkan.recurrent import MISSING

    missing = [MISSING[op] for op in ops if op in MISSING]
    return f"GPUs do not compute {missing[0]} yet" if missing else None


def held_bytes(type: BlockType, nbytes: int) -> int:
    """Returns the bytes on a GPU of rows that have ``nbytes`` in a file."""
    from hotcold.kernels.vulkan import packing

    return packing.held_bytes(type, nbytes)


def wished(asked: str | None) -> str | None:
    """Returns the requested GPU, or else the one that :data:`ENVIRONMENT` names."""
    return asked or os.environ.get(ENVIRONMENT) or None


def choose_gpu(asked: str | None, *, needed: bool = False) -> tuple[GPU | None, str]:
    """Returns the device to use (None: only the processor), and a note on a device that was skipped.

    ``asked`` is a part of a name in any case, a number in the list, or ``off``. None takes
    :data:`ENVIRONMENT`, else a discrete GPU, else an integrated one, else none. GPUError: no device matches,
    or several do; or the named or ``needed`` device is absent or unusable."""
    asked = wished(asked)
    if asked == OFF:
        return None, ""
    gpus, reason = find_gpus()
    if asked is not None:
        return _named(asked, gpus, reason), ""
    usable = [gpu for kind in USUAL_KINDS for gpu in gpus if gpu.kind == kind and not gpu.problem]
    if usable:
        return usable[0], ""
    refused = [gpu for gpu in gpus if gpu.kind in USUAL_KINDS]
    note = f"GPU {refused[0].title} is not used: {refused[0].problem}" if refused else ""
    if needed:
        unusual = f"only software drivers found, {titles(gpus)}: name one to use it (`gpu`)"
        raise GPUError(note or (unusual if gpus else reason))
    return None, note


def choose_gpus(asked: str | None, *, needed: bool = False) -> tuple[tuple[GPU, ...], str]:
    """Does the same for several devices, with commas between their names or numbers."""
    text = wished(asked) or ""
    gpus, reason = find_gpus() if "," in text else ([], "")
    if "," not in text or any(text.casefold() in gpu.name.casefold() for gpu in gpus):  # a name has commas
        gpu, note = choose_gpu(asked, needed=needed)
        return (() if gpu is None else (gpu,)), note
    chosen = tuple(_named(each.strip(), gpus, reason) for each in text.split(","))
    if twice := [gpu for gpu in chosen if chosen.count(gpu) > 1]:
        raise GPUError(f"`gpu={text}`: {twice[0].title} is given twice: give it once")
    return chosen, ""


def titles(gpus: Sequence[GPU]) -> str:
    return ", ".join(gpu.title for gpu in gpus)


def _named(asked: str, gpus: Sequence[GPU], reason: str) -> GPU:
    if not gpus:
        raise GPUError(f"`gpu={asked}`: {reason}")
    matching = [gpu for gpu in gpus if str(gpu.index) == asked]
    if not matching and not re.fullmatch("[0-9]{1,2}", asked):  # 7600 is a part of a name
        matching = [gpu for gpu in gpus if asked.casefold() in gpu.name.casefold()]
    if not matching:
        raise GPUError(f"`gpu={asked}`: no such device: choose from {titles(gpus)}, or {OFF}")
    exactly = [gpu for gpu in matching if asked.casefold() == gpu.name.casefold()]
    matching = exactly or matching
    if len(matching) > 1:
        raise GPUError(f"`gpu={asked}`: {len(matching)} devices match: give the number of {titles(matching)}")
    if matching[0].problem:
        raise GPUError(f"`gpu={asked}`: {matching[0].name}: {matching[0].problem}")
    return matching[0]


def open_gpu(gpu: GPU, budget: int | None, *, spin: bool = False) -> GPUBackend:
    """Opens a device's backend. ``budget``: the most bytes of its memory to allocate, scratch included.
    ``spin``: shaders wait for the other side's answers; else each answer submits the next commands.

    GPUMemoryError, GPUError: no memory, or a driver that fails or lacks a required feature."""
    from hotcold.kernels.vulkan.backend import VulkanBackend

    return VulkanBackend(gpu.index, budget, spin=spin)


def scratch_bytes(shape: StepShape) -> int:
    """Returns bytes of scratch that all ops of a step share on a GPU: the largest op's need."""
    from hotcold.kernels.vulkan.scratch import step_scratch_bytes

    return step_scratch_bytes(shape)


def allocated_bytes(*nbytes: int) -> int:
    """Returns bytes of a GPU's memory that buffers of these sizes take."""
    return sum(-(-max(n, 1) // ALIGNMENT) * ALIGNMENT for n in nbytes)


def slack_bytes(nbytes: int) -> int:
    """Returns how much an allocation may exceed ``nbytes``: drivers allocate larger pieces."""
    return max(256 << 10, nbytes // 50)


def batch_bytes(limits: BatchLimits) -> int:
    """Returns bytes of a step's :class:`~hotcold.kernels.backend.Batch` on a GPU."""
    from hotcold.kernels.vulkan import recording

    return recording.batch_bytes(limits)

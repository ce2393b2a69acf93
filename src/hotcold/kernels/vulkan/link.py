"""Layers whose cold neurons the CPU computes: mailboxes that the device fills, and the ops post and collect.

csrc/vulkan/vulkan_link.h describes the signals between the two sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native
from hotcold.kernels.backend import Batch, BatchLimits, Buffer, Chosen, Mailbox
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.memory import Range, bytes_of
from hotcold.kernels.vulkan.recording import Recording, Written

_GROUP = 256  # values of a row that one workgroup copies


@dataclass(frozen=True, kw_only=True)
class DeviceMailbox(Mailbox):
    """A mailbox with the device's ranges of its arrays."""

    owner: DeviceMemory
    counts: Range
    x_range: Range
    y_range: Range
    mask_range: Range | None
    ids: Range | None
    factors: Range | None


class _Shared:
    """An array in host memory that the device reads or writes."""

    def __init__(
        self, device: _native.VulkanDevice, shape: tuple[int, ...], dtype: npt.DTypeLike, where: str
    ) -> None:
        nbytes = bytes_of(shape, dtype)
        memory = device.allocate(nbytes, where)
        assert memory.host is not None
        memory.host[:] = 0
        self.range = Range(memory, 0, nbytes)
        self.array: npt.NDArray[Any] = memory.host.view(dtype).reshape(shape)


def mailboxes(
    memory: DeviceMemory,
    link: _native.VulkanLink,
    limits: BatchLimits,
    dim: int,
    words: Mapping[int, int],
    experts: int,
) -> dict[int, Mailbox]:
    """Makes mailboxes (:meth:`hotcold.kernels.backend.Backend.mailboxes`). One layer is posted at a time, so
    all share x, y and chosen, and mailboxes of one width share a mask."""

    def filled(*shape: int, dtype: npt.DTypeLike = np.float32) -> _Shared:
        return _Shared(memory.device, shape, dtype, "download")

    rows = limits.tokens
    batch, counts, x = Batch(limits), filled(4, dtype=np.int32), filled(rows, dim)
    batch.counts = counts.array
    y = _Shared(memory.device, (rows, dim), np.float32, "upload")
    masks = {width: filled(rows, width, dtype=np.uint64) for width in {*words.values()} if width}
    ids = filled(rows, experts, dtype=np.int32) if experts else None
    factors = filled(rows, experts) if experts else None
    boxes: dict[int, Mailbox] = {}
    for layer, width in words.items():
        mask = masks.get(width)
        boxes[layer] = DeviceMailbox(
            link,
            layer,
            batch,
            x.array,
            mask.array if mask else None,
            y.array,
            Chosen(ids.array, factors.array) if ids and factors else None,
            owner=memory,
            counts=counts.range,
            x_range=x.range,
            y_range=y.range,
            mask_range=mask.range if mask else None,
            ids=ids.range if ids else None,
            factors=factors.range if factors else None,
        )
    return boxes


def own_mailbox(memory: DeviceMemory, box: Mailbox) -> DeviceMailbox:
    """Returns this device's mailbox. TypeError: another backend made it."""
    if not isinstance(box, DeviceMailbox) or box.owner is not memory:
        raise TypeError(f"a mailbox with a {type(box.link).__name__}: a link of this device is needed")
    return box


@dataclass(frozen=True)
class _Post:
    """Signals the cold side that the mailbox is full."""

    box: DeviceMailbox

    def record(self, recorder: _native.VulkanRecorder) -> None:
        assert isinstance(self.box.link, _native.VulkanLink)
        recorder.post(self.box.link, self.box.layer)


@dataclass(frozen=True)
class _Collect:
    """Marks the point where the next commands need the answer."""

    box: DeviceMailbox

    def record(self, recorder: _native.VulkanRecorder) -> None:
        assert isinstance(self.box.link, _native.VulkanLink)
        recorder.collect(self.box.link, self.box.layer)


def post(
    recording: Recording,
    box: Mailbox,
    x: Buffer,
    mask: Buffer | None,
    chosen: Chosen | None,
) -> None:
    mailbox = own_mailbox(recording.memory, box)
    dim, rows = mailbox.x.shape[1], recording.rows
    source = recording.range_of("post: x", x, dim)
    unread, unwritten = source, Written(mailbox.counts)  # bindings that the shader ignores
    masks, box_mask, mask_words, box_words = unread, unwritten, 0, 0
    if (mask is None) != (mailbox.mask_range is None):
        raise ValueError("post: a mask, and a mailbox without one, or the other way round")
    if mask is not None and mailbox.mask is not None and mailbox.mask_range is not None:
        mask_words, box_words = recording.memory.own(mask).width, mailbox.mask.shape[1]
        if mask_words < box_words:
            raise ValueError(f"post: a mask of {mask_words} words, and the mailbox has {box_words}")
        masks, box_mask = _decode_masks(recording, mask), Written(mailbox.mask_range)
    ids, factors, box_ids, box_factors, experts = unread, unread, unwritten, unwritten, 0
    if (chosen is None) != (mailbox.ids is None):
        raise ValueError("post: chosen experts, and a mailbox without room for them, or the other way round")
    if (
        chosen is not None
        and mailbox.ids is not None
        and mailbox.factors is not None
        and mailbox.chosen is not None
    ):
        experts = mailbox.chosen.ids.shape[1]
        ids = recording.range_of("post: ids", chosen.ids, experts, np.int32)
        factors = recording.range_of("post: factors", chosen.factors, experts)
        box_ids, box_factors = Written(mailbox.ids), Written(mailbox.factors)
    read = source, masks, ids, factors
    written = Written(mailbox.counts), Written(mailbox.x_range), box_mask, box_ids, box_factors
    widest = max(dim, 2 * box_words, experts, 4)
    recording.run(
        "post",
        [*read, *written],
        [dim, 2 * mask_words, 2 * box_words, experts],
        (-(-widest // _GROUP), rows, 1),
        [int(mask is not None), int(chosen is not None)],
    )
    recording.steps.append(_Post(mailbox))


def _decode_masks(recording: Recording, mask: Buffer) -> Range:
    buffer = recording.memory.own(mask)
    if buffer.dtype != np.uint64:
        raise TypeError(f"post: mask is {buffer.dtype}: uint64 is needed")
    if buffer.shape[0] < recording.decode:
        raise ValueError(f"post: mask: expected at least {recording.decode} rows, got {buffer.shape[0]}")
    return buffer.range


def collect(recording: Recording, box: Mailbox, out: Buffer) -> None:
    mailbox = own_mailbox(recording.memory, box)
    dim = mailbox.y.shape[1]
    target = recording.range_of("collect: out", out, dim)
    recording.steps.append(_Collect(mailbox))
    groups = -(-dim // _GROUP), recording.rows, 1
    recording.run("collect", [mailbox.y_range, Written(target)], [dim], groups)

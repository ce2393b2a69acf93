"""Check, when a device opens, of the operations that shaders rely on.

Drivers differ where the specification allows it (Vulkan 1.3, "Precision and Operation of SPIR-V
Instructions"), and some compute wrongly."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from hotcold.kernels import _native
from hotcold.kernels.backend import Floats
from hotcold.kernels.gpu import GPUError
from hotcold.kernels.vulkan.shaders import spirv

Words = npt.NDArray[np.uint32]

GROUP = 256  #: invocations of a shader that run together
_CHANGED = 4 * GROUP  # words
#: Names in messages, in the order of csrc/shaders/probe.comp.
OPERATIONS = (
    "a product and a sum", "a sum of three", "a dot of signed bytes", "rounding to an integer",
    "a float16's value", "rounding to float16", "a division by 127", "a division of 127", "exp",
    "a sum over a group", "a maximum over a group", "changing half a word", "a comparison", "a quotient",
    "a square root", "a float16's value by hardware",
)  # fmt: skip
#: The specification allows errors here. With them, the last places of results differ from other devices'.
INEXACT = ("a quotient", "a square root")
#: If this errs, shaders use integers.
HARDWARE_HALVES = "a float16's value by hardware"
MAY_ERR = (*INEXACT, HARDWARE_HALVES)
_INTEGERS = ("rounding to an integer", "rounding to float16", "changing half a word", "a comparison")


@dataclass(frozen=True)
class Check:
    """Inputs and results of one operation."""

    name: str
    given: Words  #: ``[n, 3]``: inputs of each invocation; a float16's value uses its number
    expected: Words  #: ``[n]``
    floats: bool  #: results are float32, and all NaNs are equal

    @property
    def operation(self) -> int:
        return OPERATIONS.index(self.name)

    def wrong(self, device_results: Words) -> Words:
        """Returns the indices of the wrong results."""
        differ = device_results != self.expected
        if self.floats:
            differ &= ~(np.isnan(device_results.view(np.float32)) & np.isnan(self.expected.view(np.float32)))
        where: Words = np.flatnonzero(differ).astype(np.uint32)
        return where


def exponential(x: Floats) -> Floats:
    """Computes exp as csrc/shaders/activation.glsl does."""
    above = np.where(x < np.float32(-87), np.float32(-87), x)
    clamped = np.where(above > np.float32(88), np.float32(88), above)
    n = np.rint(clamped * np.float32(1.44269504))
    r = n * np.float32(-0.693145752) + clamped
    r = n * np.float32(-1.42860677e-6) + r
    p = np.full_like(r, 1 / 720)
    for constant in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = p * r + np.float32(constant)
    scale = (np.nan_to_num(n).astype(np.int32) + 127 << 23).view(np.float32)
    return np.asarray(p * scale, np.float32)


def _tree(values: Floats, fold: Callable[[Floats, Floats], Floats]) -> Floats:
    """Folds each group of ``[groups, 256]`` like csrc/shaders/tree.glsl; all of a group get its result."""
    groups = len(values)
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = fold(values[:, :half], values[:, half:])
    return np.repeat(values, GROUP, axis=1).reshape(groups * GROUP)


def _chosen_sums(values: Floats, chosen: Words) -> Floats:
    sums, steps = np.zeros_like(values), np.zeros(len(values), np.int64)
    powers = [values]
    for _ in range(8):
        powers.append(powers[-1] * np.float32(0.75))
    for i in range(8):
        taken = chosen >> i & 1 == 1
        now = np.stack(powers)[steps, np.arange(len(values))]
        sums[taken] = sums[taken] + _tree(now, np.add).reshape(now.shape)[taken]
        steps += taken
    return sums.reshape(-1)


def _check(name: str, expected: npt.NDArray[np.generic], *given: npt.NDArray[np.generic]) -> Check:
    words = np.zeros((expected.size, 3), np.uint32)
    for i, column in enumerate(given):
        words[:, i] = np.ascontiguousarray(column).reshape(-1).view(np.uint32)
    results = np.ascontiguousarray(expected).reshape(-1).view(np.uint32)
    return Check(name, words, results, name not in _INTEGERS)


@cache
def checks() -> tuple[Check, ...]:
    """Returns every operation, with values that show a wrong device."""
    random = np.random.default_rng(0)

    def floats(*shape: int, spread: float = 8) -> Floats:
        return (random.normal(0, 1, shape) * np.exp2(random.uniform(-spread, spread, shape))).astype(
            np.float32
        )

    with np.errstate(all="ignore"):
        return (*_arithmetic(random, floats), *_roundings(random, floats), *_groups(random, floats))


def _arithmetic(random: np.random.Generator, floats: Callable[..., Floats]) -> list[Check]:
    a, b, c = floats(3, 2048)
    c[:1024] = -(a * b)[:1024]  # a fused product and sum keeps bits that the product loses
    terms = floats(3, 1024, spread=20)
    terms[2] = -terms[0]  # another order loses other bits
    terms[1] = terms[0] * floats(1024, spread=3)
    bytes_ = random.integers(0, 256, (2, 1024, 4), np.uint8)
    bytes_[:, :4], bytes_[0, 4:8], bytes_[1, 4:8] = 128, 128, 127  # the largest products
    scales = random.integers(-128, 128, 1024).astype(np.int32)
    dots = scales * (bytes_[0].view(np.int8).astype(np.int32) * bytes_[1].view(np.int8)).sum(
        axis=1, dtype=np.int32
    )
    x, y = floats(2, 1024)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-30], np.float32)
    left, right = np.resize(np.repeat(ends, 8), GROUP), np.resize(ends, GROUP)
    curve = np.concatenate(
        [floats(1024, spread=6), np.linspace(-90, 90, 1012, dtype=np.float32), ends, ends[:4]]
    )
    return [
        _check("a product and a sum", a * b + c, a, b, c),
        _check("a sum of three", terms[0] + terms[1] + terms[2], *terms),
        _check(
            "a dot of signed bytes",
            dots.astype(np.float32),
            *(each.reshape(-1, 4).view(np.uint32) for each in bytes_),
            scales,
        ),
        _check("a comparison", (left > right) | (left < right).astype(np.uint32) << 1, left, right),
        _check("exp", exponential(curve), curve),
        _check("a quotient", x / y, x, y),
        _check("a square root", np.sqrt(np.abs(x)), np.abs(x)),
    ]


def _roundings(random: np.random.Generator, floats: Callable[..., Floats]) -> list[Check]:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    between = halves[:0x7C00].astype(np.float32)
    between = (between[1:] + between[:-1]) * np.float32(0.5)
    near = between[random.integers(0, len(between), 1019)]
    rounded = [
        near,
        np.nextafter(near, np.float32(np.inf)),
        -np.nextafter(near, np.float32(0)),
        floats(1024, spread=20),
    ]
    rounded.append(
        np.array([65519.996, 65520, -1e9, np.inf, -np.inf, 0, -0.0, 2.0**-25, 1e-30] + [0] * 6, np.float32)
    )
    to_half = np.concatenate(rounded)
    ties = np.concatenate([np.arange(-256, 256) / 2, floats(512)]).astype(np.float32)
    amax = random.integers(0x0D800000, 0x7F800000, 2048).astype(np.uint32)
    amax[:4] = 0x0D800000, 0x7F7FFFFF, 0x3F800000, 0x42FE0000  # the ends, 1, 127
    return [
        _check("rounding to an integer", np.rint(ties).astype(np.int32), ties),
        _check("a float16's value", halves.astype(np.float32)),
        _check(HARDWARE_HALVES, halves.astype(np.float32)),
        _check("rounding to float16", to_half.astype(np.float16).view(np.uint16).astype(np.uint32), to_half),
        _check("a division by 127", amax.view(np.float32) / np.float32(127), amax),
        _check("a division of 127", np.float32(127) / amax.view(np.float32), amax),
    ]


def _groups(random: np.random.Generator, floats: Callable[..., Floats]) -> list[Check]:
    values, chosen = floats(4, GROUP), np.array([0b11111111, 0, 0b01011010, 0b10000001], np.uint32)
    words = random.integers(0, 1 << 32, (2, _CHANGED), np.uint64).astype(np.uint32)
    changed = words[1].copy()
    changed[::2] = words[0][::2] & np.uint32(0xFFFF) | words[0][1::2] & np.uint32(0xFFFF0000)
    return [
        _check("a sum over a group", _chosen_sums(values, chosen), values, np.repeat(chosen, GROUP)),
        _check("a maximum over a group", _tree(values, np.maximum), values),
        _check("changing half a word", changed, *words),
    ]


def results(device: _native.VulkanDevice, shader: bytes) -> list[Words]:
    """Returns the device's results for each of :func:`checks`."""
    all_ = checks()
    inputs = device.allocate(sum(each.given.nbytes for each in all_), "upload")
    outputs = device.allocate(sum(each.expected.nbytes for each in all_), "download")
    changed = device.allocate(4 * _CHANGED)  # by atomics, which host memory may not allow
    pipeline = device.pipeline(shader, 3, 12, [])
    recorder = device.recorder()
    start = to = 0
    for check in all_:
        data = check.given.reshape(-1).view(np.uint8)
        _host(inputs)[start : start + len(data)] = data
        push = struct.pack("<3I", check.operation, start // 4, to // 4)
        ranges = [(inputs, 0, inputs.nbytes, False), (outputs, 0, outputs.nbytes, True)]
        ranges.append((changed, 0, changed.nbytes, True))
        recorder.dispatch(pipeline, ranges, push, len(check.expected) // GROUP, 1, 1)
        start, to = start + len(data), to + check.expected.nbytes
    recorder.finish().run()
    words = _host(outputs)[:to].view(np.uint32).copy()
    return np.split(words, np.cumsum([len(each.expected) for each in all_])[:-1])


def _host(memory: _native.VulkanMemory) -> npt.NDArray[np.uint8]:
    assert memory.host is not None  # allocated where the host has access
    return memory.host


def _shown(check: Check, word: np.uint32) -> str:
    return repr(float(word.view(np.float32))) if check.floats else str(word)


_probed: dict[tuple[str, str, str], frozenset[str]] = {}  # by device and driver


def errors(device: _native.VulkanDevice) -> frozenset[str]:
    """Checks the device. Returns the operations of :data:`MAY_ERR` that err: without one of :data:`INEXACT`
    the device's results equal those of any other such device, bit for bit. GPUError: the device computes a
    needed operation wrongly."""
    info = device.info
    key = info.uuid, info.name, info.driver
    if key not in _probed:
        _probed[key] = check_results(info, results(device, spirv("probe")))
    return _probed[key]


def check_results(info: _native.VulkanDeviceInfo, device_results: list[Words]) -> frozenset[str]:
    """Checks a device's results; result and errors as in :func:`errors`."""
    erring = set()
    for check, words in zip(checks(), device_results, strict=True):
        wrong = check.wrong(words)
        if not len(wrong):
            continue
        if check.name in MAY_ERR:
            erring.add(check.name)
            continue
        at = int(wrong[0])
        got, expected = _shown(check, words[at]), _shown(check, check.expected[at])
        error = f"{check.name} gives {got} instead of {expected} ({len(wrong)} of {len(words)} are wrong)"
        advice = "hotcold cannot rely on this driver; update it, or choose another `gpu`"
        raise GPUError(f"{info.name} ({info.driver}): {error}: {advice}")
    return frozenset(erring)

"""A device that computes wrongly what the shaders rely on is refused by name when it opens."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.mirrored_backend import MirroredBackend
from support.ordered_ffn import exponential
from support.vulkan.table import cases, wrong

from hotcold.kernels import _native
from hotcold.kernels.gpu import GPUError
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.probe import (
    GROUP,
    HARDWARE_HALVES,
    MAY_ERR,
    OPERATIONS,
    Check,
    check_results,
    checks,
)
from hotcold.kernels.vulkan.probe import exponential as own_exponential
from hotcold.kernels.vulkan.shaders import spirv

CHECKS = {check.name: check for check in checks()}

f32 = np.float32


def test_software_drivers_round_quotients_and_roots_correctly(vulkan: VulkanBackend) -> None:
    assert vulkan.exact


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_wrong_value_is_enough(vulkan: VulkanBackend, name: str) -> None:
    found = [check.expected.copy() for check in checks()]
    assert not check_results(vulkan.info, found)
    check, at = CHECKS[name], list(CHECKS).index(name)
    found[at][7] ^= 1
    if name in MAY_ERR:
        assert check_results(vulkan.info, found) == {name}
        return
    with pytest.raises(GPUError) as error:
        check_results(vulkan.info, found)
    kind = np.float32 if check.floats else np.uint32
    got, expected = (words[7:8].view(kind)[0] for words in (found[at], check.expected))
    said = f"{name} gives {got!r} instead of {expected!r} (1 of {len(check.expected)} are wrong)"
    said = re.sub(r"np\.(float32|uint32)\((.*?)\)", lambda match: repr(eval_number(match[2], kind)), said)
    advice = "hotcold cannot rely on this driver; update it, or choose another `gpu`"
    assert str(error.value) == f"{vulkan.info.name} ({vulkan.info.driver}): {said}: {advice}"


def eval_number(shown: str, kind: type) -> float | int:
    return float(f32(shown)) if kind is np.float32 else int(shown)


#: Instructions of SPIR-V: what is put in another's place, and what then is wrong first.
MUTANTS = {
    "sums for products": (133, 129, "a product and a sum"),
    "differences for sums": (129, 131, "a product and a sum"),
    "dots of unsigned bytes": (4450, 4451, "a dot of signed bytes"),
    "comparisons that NaN passes": (186, 187, "a comparison"),
    "rests for integer quotients": (134, 137, "a division by 127"),
    "shifts to the other side": (196, 194, "a comparison"),
    "bits that are not cleared": (240, 241, "changing half a word"),
    "bits that are not set": (241, 240, "changing half a word"),
}


def changed(module: bytes, old: int, new: int) -> bytes:
    words = np.frombuffer(module, np.uint32).copy()
    at = 5
    while at < len(words):
        length = words[at] >> 16
        if words[at] & 0xFFFF == old:
            words[at] = length << 16 | new
        at += int(length)
    return words.tobytes()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_device_that_computes_otherwise_is_refused(
    vulkan: VulkanBackend, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver would that translates an instruction wrongly."""
    old, new, name = MUTANTS[mutant]
    module = changed(spirv("probe"), old, new)
    assert module != spirv("probe")
    monkeypatch.setattr("hotcold.kernels.vulkan.probe.spirv", lambda name: module)
    monkeypatch.setattr("hotcold.kernels.vulkan.probe._probed", {})
    with pytest.raises(GPUError, match=f"^{re.escape(vulkan.info.name)} .*: {name} gives .* instead of "):
        VulkanBackend(vulkan.info.index)


def test_halves_by_integers_where_the_hardware_errs(
    vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shaders then have the same bits; a device whose hardware gives them all uses it."""
    assert vulkan.hardware_halves
    (case,) = [each for each in cases() if (each.op, each.name) == ("linear", "F16 33x256")]
    monkeypatch.setattr("hotcold.kernels.vulkan.probe._probed", {})
    check = CHECKS[HARDWARE_HALVES]
    right = check.expected.copy()
    check.expected[0x3C00] ^= 1
    try:
        other = VulkanBackend(vulkan.info.index)
    finally:
        check.expected[:] = right
    assert other.exact and not other.hardware_halves
    assert not wrong(case, case.run(MirroredBackend(other)), exact=True)
    assert not wrong(case, case.run(MirroredBackend(vulkan)), exact=True)


def test_a_device_is_probed_once_in_a_process(vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> Any:
        raise AssertionError("it was probed again")

    monkeypatch.setattr("hotcold.kernels.vulkan.probe.results", again)
    assert VulkanBackend(vulkan.info.index).exact


def test_the_probe_takes_hardly_any_of_the_budget(
    vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.kernels.vulkan.probe._probed", {})
    assert VulkanBackend(vulkan.info.index, 1 << 12).allocated_bytes == 0


# The checks see this: each has values on which another way of computing gives other results.


def floats(check: Check) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    return [np.ascontiguousarray(check.given[:, i]).view(f32) for i in range(3)]


def fused(check: Check) -> Any:
    a, b, c = (each.astype(np.float64) for each in floats(check))
    return (a * b + c).astype(f32)  # the product is exact in double


def reassociated(check: Check) -> Any:
    a, b, c = floats(check)
    return a + (b + c)


def unsigned_dots(check: Check) -> Any:
    a, b = (np.ascontiguousarray(check.given[:, i]).view(np.uint8).reshape(-1, 4).astype(int) for i in (0, 1))
    return (check.given[:, 2].view(np.int32) * (a * b.view(int)).sum(axis=1)).astype(f32)


def saturated_dots(check: Check) -> Any:
    a, b = (np.ascontiguousarray(check.given[:, i]).view(np.int8).reshape(-1, 4).astype(int) for i in (0, 1))
    return (check.given[:, 2].view(np.int32) * np.clip((a * b).sum(axis=1), -32768, 32767)).astype(f32)


def away_from_zero(check: Check) -> Any:
    x = floats(check)[0]
    return (np.sign(x) * np.floor(np.abs(x) + f32(0.5))).astype(np.int32)


def flushed_halves(check: Check) -> Any:
    values = check.expected.view(f32)
    return np.where(np.abs(values) < f32(2.0**-14), f32(0) * values, values)


def truncated_halves(check: Check) -> Any:
    wide = np.ascontiguousarray(check.given[:, 0])
    return (wide & 0xFFFFE000).view(f32).astype(np.float16).view(np.uint16).astype(np.uint32)


def by_a_reciprocal(check: Check) -> Any:
    x = floats(check)[0]
    return f32(127) * (f32(1) / x) if check.name == "a division of 127" else x * (f32(1) / f32(127))


def exact_exponential(check: Check) -> Any:
    return np.exp(floats(check)[0].astype(np.float64)).astype(f32)


def in_sequence(check: Check) -> Any:
    return np.repeat(np.cumsum(floats(check)[0].reshape(-1, 256), axis=1, dtype=f32)[:, -1], 256)


def of_all_steps(check: Check) -> Any:
    values = floats(check)[0].reshape(-1, 256).astype(np.float64).sum(axis=1) * (1 - 0.75**8) / 0.25
    return np.repeat(values, 256).astype(f32)


OTHERWISE: list[tuple[str, Callable[[Check], Any], int]] = [
    ("a product and a sum", fused, 1000), ("a sum of three", reassociated, 300),
    ("a dot of signed bytes", unsigned_dots, 900), ("a dot of signed bytes", saturated_dots, 3),
    ("rounding to an integer", away_from_zero, 100), ("a float16's value", flushed_halves, 2000),
    ("rounding to float16", truncated_halves, 1000), ("a division by 127", by_a_reciprocal, 90),
    ("a division of 127", by_a_reciprocal, 100), ("exp", exact_exponential, 100),
    ("a sum over a group", in_sequence, 500), ("a sum over a group", of_all_steps, 500),
]  # fmt: skip


@pytest.mark.parametrize(("name", "compute", "least"), OTHERWISE)
def test_checks_tell_ways_of_computing_apart(name: str, compute: Callable[[Check], Any], least: int) -> None:
    check = CHECKS[name]
    with np.errstate(all="ignore"):
        found = np.ascontiguousarray(compute(check))
    assert len(check.wrong(found.view(np.uint32))) >= least


def test_expected_values_are_those_of_arithmetic() -> None:
    """Independently: rounded fractions, the model's exponential."""
    check = CHECKS["a product and a sum"]
    for given, expected in list(zip(zip(*floats(check), strict=True), check.expected.view(f32), strict=True))[
        ::97
    ]:
        a, b, c = (Fraction(float(each)) for each in given)
        product = f32(float(a * b))  # exact in double, so rounded once
        assert expected == f32(float(Fraction(float(product)) + c))
    for name, value in (("a division by 127", lambda x: x / 127), ("a division of 127", lambda x: 127 / x)):
        check = CHECKS[name]
        for x, expected in list(zip(floats(check)[0], check.expected.view(f32), strict=True))[::97]:
            exact, own = value(Fraction(float(x))), Fraction(float(expected))
            step = Fraction(float(np.spacing(expected)))
            assert abs(exact - own) * 2 <= step
    curve = CHECKS["exp"]
    with np.errstate(all="ignore"):
        assert not len(curve.wrong(np.ascontiguousarray(exponential(floats(curve)[0])).view(np.uint32)))
        assert not len(curve.wrong(own_exponential(floats(curve)[0]).view(np.uint32)))


def test_every_check_fills_whole_groups() -> None:
    assert sorted(CHECKS) == sorted(OPERATIONS)
    for check in checks():
        assert check.given.shape == (len(check.expected), 3) and len(check.expected) % GROUP == 0


def test_a_driver_that_fails_in_the_probe_says_so(
    vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.kernels.vulkan.probe._probed", {})
    monkeypatch.setattr("hotcold.kernels.vulkan.probe.spirv", lambda name: b"")
    with pytest.raises((ValueError, _native.VulkanError)):
        VulkanBackend(vulkan.info.index)

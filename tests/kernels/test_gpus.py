"""The choice of a GPU from made-up lists, and the message without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.made_up_gpus import made_up

from hotcold.errors import UserError
from hotcold.kernels import gpus
from hotcold.kernels.gpu import GPU, GPUError
from hotcold.kernels.gpus import choose_gpu, choose_gpus

CARD, SECOND = made_up(0, "Radeon RX 7900 XTX"), made_up(1, "Radeon RX 7600")
INTEGRATED = made_up(2, "Intel(R) Graphics", kind="integrated", unified=True)
SOFTWARE = made_up(3, "llvmpipe (LLVM 15.0.6, 256 bits)", kind="software")
OLD = made_up(4, "GeForce GT 710", problem="its driver has Vulkan 1.2: update it")

See = Callable[..., None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    """Makes these the devices that are found."""
    monkeypatch.delenv("HOTCOLD_GPU")

    def set_devices(*devices: GPU, reason: str = "") -> None:
        monkeypatch.setattr(gpus, "find_gpus", lambda: ([*devices], reason))

    return set_devices


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((SOFTWARE, INTEGRATED, SECOND, CARD), SECOND),
        ((SOFTWARE, INTEGRATED), INTEGRATED),
        ((SOFTWARE,), None),
        ((OLD, CARD), CARD),
        ((), None),
        ((replace(CARD, kind="virtual"), replace(CARD, kind="other")), None),
    ],
)
def test_a_discrete_gpu_then_an_integrated_one_never_a_software_driver(
    devices: tuple[GPU, ...], expected: GPU | None, see: See
) -> None:
    see(*devices, reason="" if devices else "no driver")
    assert choose_gpu(None) == (expected, "")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("7900", CARD), ("rx 76", SECOND), ("2", INTEGRATED), ("LLVMPIPE", SOFTWARE), ("3", SOFTWARE)],
)
def test_a_part_of_the_name_or_a_number(asked: str, expected: GPU, see: See) -> None:
    see(CARD, SECOND, INTEGRATED, SOFTWARE, OLD)
    assert choose_gpu(asked) == (expected, "")


def test_a_whole_name_is_one_device_though_others_contain_it(see: See) -> None:
    see(longer := made_up(0, "RTX 4060 Ti"), made_up(1, "RTX 4060"))
    assert choose_gpu("rtx 4060")[0] == made_up(1, "RTX 4060")
    assert choose_gpu("4060 t")[0] == longer


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("radeon", "`gpu=radeon`: 2 devices match: give the number of 0 .Radeon RX 7900 XTX., 1 .Radeon"),
        ("arc", "`gpu=arc`: no such device: choose from 0 .Radeon.*4 .GeForce GT 710., or off"),
        ("9", "`gpu=9`: no such device"),
        ("710", "`gpu=710`: GeForce GT 710: its driver has Vulkan 1.2: update"),
    ],
)
def test_a_name_that_does_not_choose_one(asked: str, message: str, see: See) -> None:
    see(CARD, SECOND, INTEGRATED, SOFTWARE, OLD)
    with pytest.raises(GPUError, match=message) as caught:
        choose_gpu(asked)
    assert "\n" not in str(caught.value) and isinstance(caught.value, UserError)


def test_where_there_is_none(see: See) -> None:
    """The processor where nothing was asked for, else what to install."""
    see(reason="no GPU found: install a driver")
    assert choose_gpu(None) == (None, "")
    for ask in (lambda: choose_gpu("card"), lambda: choose_gpu(None, needed=True)):
        with pytest.raises(GPUError, match="no GPU found: install a driver"):
            ask()
    see(SOFTWARE)
    with pytest.raises(
        GPUError, match=r"only software drivers found, 3 \(llvmpipe.*: name one to use it \(`gpu`\)"
    ):
        choose_gpu(None, needed=True)


def test_one_that_cannot_be_used_is_not_passed_over_in_silence(see: See) -> None:
    see(SOFTWARE, OLD)
    gpu, note = choose_gpu(None)
    assert gpu is None and note == f"GPU 4 (GeForce GT 710) is not used: {OLD.problem}"
    with pytest.raises(GPUError, match=r"GPU 4 \(GeForce GT 710\) is not used: its driver has Vulkan 1.2"):
        choose_gpu(None, needed=True)


def test_several_with_commas(see: See) -> None:
    comma = made_up(5, "llvmpipe (LLVM 15.0.6, 256 bits)", kind="software")
    see(CARD, SECOND, INTEGRATED, OLD, comma)
    assert choose_gpus("1, 7900") == ((SECOND, CARD), "") and choose_gpus("5,0") == ((comma, CARD), "")
    assert choose_gpus(comma.name) == ((comma,), "")  # its name has a comma
    assert choose_gpus("2") == ((INTEGRATED,), "") and choose_gpus("off") == ((), "")
    assert choose_gpus(None) == ((CARD,), "")
    for asked, message in (("0,off", "no such device"), ("0,", "devices match"), ("0,4", OLD.problem)):
        with pytest.raises(GPUError, match=message):
            choose_gpus(asked)


def test_off_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise AssertionError("devices were listed")

    monkeypatch.setattr(gpus, "find_gpus", fail)
    monkeypatch.setenv("HOTCOLD_GPU", "card")
    assert choose_gpu("off") == (None, "")
    monkeypatch.setenv("HOTCOLD_GPU", "off")
    assert choose_gpu(None) == (None, "")


def test_the_environment_says_what_nobody_else_says(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    see(CARD, SECOND)
    monkeypatch.setenv("HOTCOLD_GPU", "7600")
    assert choose_gpu(None) == (SECOND, "") and choose_gpu("7900") == (CARD, "")
    monkeypatch.setenv("HOTCOLD_GPU", "")
    assert choose_gpu(None) == (CARD, "")


@pytest.mark.parametrize(
    ("memory", "free", "budget"),
    [(24, None, 23), (24, 20, 19), (8, 8, 7), (4, 4, 3.5), (4, 2, 1.75), (4, 9, 3.5)],
)
def test_the_usual_budget_is_what_is_free_but_a_margin(memory: int, free: int | None, budget: float) -> None:
    gib = 1 << 30
    gpu = replace(CARD, memory_bytes=memory * gib, free_bytes=None if free is None else free * gib)
    assert gpu.default_budget == int(budget * gib)

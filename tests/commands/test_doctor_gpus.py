"""``hotcold doctor`` where there are GPUs: what it lists, measures and keeps; with made-up devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_up_gpus import made_up

from hotcold.commands import cli
from hotcold.kernels import gpus
from hotcold.kernels.gpu import GPU, GPUError, LinkSpeed
from hotcold.placement.gpu_measuring import GPUSpeed
from hotcold.runtime.machine import measured_hardware
from hotcold.tasks import doctor

CARD = made_up(0, "Radeon RX 7900 XTX", free_bytes=7 << 30)
INTEGRATED = made_up(1, "Intel(R) Graphics", kind="integrated", unified=True)
SOFTWARE = made_up(2, "llvmpipe (LLVM 15.0.6, 256 bits)", kind="software", unified=True)
OLD = made_up(3, "GeForce GT 710", problem="its driver has Vulkan 1.2, and 1.3 is needed: update it")

LINK = LinkSpeed(
    to_gpu_gb_s=20.0,
    from_gpu_gb_s=18.0,
    pageable_gb_s=7.0,
    step_s=30e-6,
    handshake_submit_s=50e-6,
    handshake_spin_s=12e-6,
)
KERNELS_GB_S = {
    "matrix Q4_0": 700.0, "matrix F16": 600.0, "stream Q4_0": 690.0, "stream F16": 590.0, "rows Q4_0": 660.0,
    "rows F16": 560.0, "down Q4_0": 400.0, "down F16": 300.0, "attention": 250.0,
}  # fmt: skip
LAYERS_S = {
    "dense Q4_0": 40e-6, "dense F16": 35e-6, "exact Q4_0": 38e-6, "exact F16": 34e-6, "predicted Q4_0": 55e-6,
    "predicted F16": 50e-6, "experts Q4_0": 60e-6, "experts F16": 52e-6, "head Q4_0": 11e-6, "head F16": 9e-6,
}  # fmt: skip
SPEED = GPUSpeed(
    stream_gb_s=700.0, rows_gb_s=650.0, layer_s=40e-6, kernels_gb_s=KERNELS_GB_S, layers_s=LAYERS_S,
    link=LINK, prompt_gflops=52340.0,
)  # fmt: skip

Doctor = Callable[..., tuple[dict[str, Any], str, str]]


class Machine:
    devices: list[GPU]
    reason = ""
    speed: GPUSpeed | GPUError = SPEED
    measured: list[GPU]


@pytest.fixture
def has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOTCOLD_GPU")
    for seconds in ("_SECONDS", "_PROMPT_SECONDS"):
        monkeypatch.setattr(doctor, seconds, 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    made = Machine()
    made.devices, made.measured = [OLD, SOFTWARE, INTEGRATED, CARD], []

    def measure_gpu(gpu: GPU, nbytes: int, seconds: float, advance: object) -> GPUSpeed:
        made.measured.append(gpu)
        if isinstance(made.speed, GPUError):
            raise made.speed
        return made.speed

    for module in (gpus, doctor):
        monkeypatch.setattr(module, "find_gpus", lambda: (made.devices, made.reason))
    monkeypatch.setattr(doctor, "measure_gpu", measure_gpu)
    return made


@pytest.fixture
def run(has: Machine, capsys: pytest.CaptureFixture[str]) -> Doctor:
    def call(*arguments: str) -> tuple[dict[str, Any], str, str]:
        assert cli.main(["doctor", *arguments, "--json"]) == 0
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        assert max(map(len, lines)) <= 80
        return json.loads(last), "\n".join(lines), err

    return call


def test_devices_are_listed_and_the_usual_one_is_measured(has: Machine, run: Doctor) -> None:
    report, text, _ = run()
    assert [gpu["name"] for gpu in report["gpus"]] == [gpu.name for gpu in has.devices]
    assert has.measured == [CARD] and report["gpu"] == 0 and report["unmeasured"] == []
    for line in (
        "GPU 0  *    Radeon RX 7900 XTX",
        "discrete, 8.00 GiB, 7.00 GiB free",
        "GPU 2       llvmpipe (LLVM 15.0.6, 256 bits)",
        "software, 8.00 GiB, shared with the processor",
        "not usable: its driver has Vulkan 1.2, and 1.3 is needed: update it",
        "matrix            700 GB/s a matrix in Q4_0; in F16 600",
        "down              400 GB/s a tenth of its down rows; in F16 300",
        "attention         250 GB/s keys and values",
        "layer              40 us   kernels of a layer start and wait; in F16 35",
        "                   55 us   if it has a predictor; in F16 50",
        "head               11 us   kernels of the head; in F16 9",
        "handshake          50 us   there and back, by submits",
        "12 us   by a waiting shader",
        " GFLOPS on the CPU, 52340 on the GPU (an FFN in Q4_0)",
    ):
        assert line in text
    found = report["hardware"]
    assert (found["vram_bytes"], found["gpu_stream_gb_s"], found["gpu_rows_gb_s"]) == (8 << 30, 700, 650)
    assert (found["link_pinned_gb_s"], found["link_pageable_gb_s"]) == (18, 7)
    assert (found["handshake_s"], found["spins"], found["step_s"]) == (12e-6, True, 30e-6)
    assert found["layer_s"] == 40e-6
    assert found["cpu_prompt_gflops"] > 0 and found["gpu_prompt_gflops"] == 52340
    assert (found["kernels_gb_s"], found["layers_s"]) == (KERNELS_GB_S, LAYERS_S)


def test_figures_are_kept_by_device_driver_and_version(has: Machine, run: Doctor) -> None:
    first, *_ = run()
    assert run()[0]["from_cache"] and has.measured == [CARD]
    other, *_ = run("--gpu", "intel")
    assert not other["from_cache"] and other["cache"] != first["cache"] and has.measured == [CARD, INTEGRATED]
    assert run()[0]["from_cache"] and run("--gpu", "1")[0]["from_cache"]
    loaded = measured_hardware(CARD)
    assert loaded is not None and loaded.gpu_stream_gb_s == 700
    has.devices[-1] = updated = replace(CARD, driver="driver 2.0")
    assert measured_hardware(updated) is None
    report, _, err = run()
    assert not report["from_cache"] and "they are from " in err and "driver 1.0" in err


def test_plan_takes_what_was_measured(run: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    cache = run()[0]["cache"]
    assert cli.main(["plan", "--hardware", cache, "--vram-budget", "6MiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "measured by hotcold doctor" in plan["hardware_source"] and plan["budget_bytes"] == 6 << 20


def test_a_form_of_the_handshake_that_does_not_work(has: Machine, run: Doctor) -> None:
    has.speed = replace(SPEED, link=replace(LINK, handshake_spin_s=None))
    report, text, _ = run()
    assert "- us   by a waiting shader: does not work with this driver" in text
    assert (report["hardware"]["handshake_s"], report["hardware"]["spins"]) == (50e-6, False)
    has.speed = replace(SPEED, link=replace(LINK, handshake_spin_s=60e-6))
    report, *_ = run("--again")
    assert (report["hardware"]["handshake_s"], report["hardware"]["spins"]) == (50e-6, False)


def test_a_gpu_that_fails_is_a_note(has: Machine, run: Doctor) -> None:
    has.speed = GPUError("the device was lost")
    report, _, err = run()
    assert "note: GPU 0 (Radeon RX 7900 XTX) was not measured: the device was lost" in err
    assert report["hardware"]["vram_bytes"] == 0 and report["hardware"]["cpu_stream_gb_s"] > 0


def test_prompts_that_cannot_be_measured_on_the_cpu(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> float:
        raise MemoryError("no memory")

    monkeypatch.setattr(doctor, "measure_prompts", fail)
    report, text, err = run()
    assert "note: prompts were not measured on the CPU: no memory" in err and "GFLOPS" not in text
    assert report["hardware"]["cpu_prompt_gflops"] == 0 and report["hardware"]["vram_bytes"] > 0


def test_figures_from_before_prompts_were_measured(run: Doctor) -> None:
    first, text, _ = run()
    assert "GFLOPS" in text and "GFLOPS" in run()[1]
    older = {name: value for name, value in first["hardware"].items() if "prompt" not in name}
    del older["machine"]["gpu"]["prompt_gflops"]
    Path(first["cache"]).write_text(json.dumps(older), encoding="utf-8")
    report, text, _ = run()
    assert report["from_cache"] and "GFLOPS" not in text


def test_off_and_none(has: Machine, run: Doctor) -> None:
    report, text, _ = run("--gpu", "off")
    assert "GPU         not looked for (--gpu off)" in text and report["gpus"] == [] and not has.measured
    assert "not measured: GPU stream and masked rows, link, handshake" in text
    has.devices = [SOFTWARE]
    assert "GPU         no GPU found, only a software driver: --gpu NAME measures it" in run()[1]
    has.devices, has.reason = [], "no GPU found: no Vulkan loader (libvulkan.so.1): " + 9 * "install it, "
    report, text, _ = run()
    assert "GPU         no GPU found: no Vulkan loader" in text and report["gpu_reason"] == has.reason
    assert cli.main(["doctor", "--gpu", "card"]) == 2

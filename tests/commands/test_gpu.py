"""Commands on a GPU, whose part a software driver plays: what they write, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.sidecars import with_sidecar
from support.vulkan import faults
from support.vulkan.devices import DRIVERS, FULL, device_index

from hotcold.commands.cli import main
from hotcold.placement.hardware import find_hardware
from hotcold.runtime import placing
from hotcold.tasks import doctor

DEVICE_LOST = -4  # VK_ERROR_DEVICE_LOST


@pytest.fixture
def gpu() -> str:
    return str(device_index(DRIVERS[0]))


def report(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    assert main([*args, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_generate_says_what_ran_where(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's command, and the text of the CPU."""
    args = ("generate", "-p", "Once upon a time", "-n", "20", "--temp", "0")
    on_gpu, err = report(capsys, *args, "--gpu", gpu, "--vram-budget", "4MiB")
    assert on_gpu["ids"] == report(capsys, *args, "--gpu", "off")[0]["ids"]
    (facts,) = on_gpu["gpus"]
    first, *_ = err.splitlines()
    assert first.startswith(f"note: GPU {facts['name']} ({facts['driver']}): {facts['layers']} of 6 layers")
    assert "of 4MiB; synchronised by submits" in first and 0 < facts["layers"] < 6
    assert facts["planned_bytes"] <= facts["budget_bytes"] == 4 << 20 and facts["kind"] == "software"


@pytest.mark.parametrize("driver", DRIVERS if FULL else DRIVERS[:1])
def test_the_form_of_the_handshake_that_was_measured_to_be_faster(
    driver: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shader waits for answers, or gives up and the step is repeated: the text is the same."""
    fast = replace(find_hardware("rtx4090-i9"), machine={}, spins=True)
    monkeypatch.setattr(placing, "measured_hardware", lambda gpu: fast)
    args = ("generate", "-p", "Once upon a time", "-n", "3", "--temp", "0", "-c", "16")
    gpu = str(device_index(driver))
    found, err = report(capsys, *args, "--gpu", gpu, "--vram-budget", "3MiB")
    assert found["ids"] == report(capsys, *args, "--gpu", "off")[0]["ids"]
    assert found["gpus"][0]["handshake"] == "spin" and "synchronised by a waiting shader" in err


def test_doctor_measures_a_device(
    gpu: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("_SECONDS", 0.0), ("_GPU_SECONDS", 0.0), ("_SOFTWARE_BUFFER", 1 << 20)):
        monkeypatch.setattr(doctor, name, value)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    found, _ = report(capsys, "doctor", "--gpu", gpu)
    assert found["gpu"] == int(gpu) and found["hardware"]["vram_bytes"] > 0
    speed = found["hardware"]["machine"]["gpu"]
    for name in ("stream_gb_s", "rows_gb_s", "layer_s"):
        assert 0 < speed[name] < 1e4
    link = speed["link"]
    spin = link.pop("handshake_spin_s")
    assert all(value > 0 for value in link.values()) and (spin is None or spin > 0)


def test_the_timeline_has_both_sides_at_work(
    gpu: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    args = ("-p", "4", "-n", "4", "-r", "1", "--timeline", str(path), "--gpu", gpu, "--vram-budget", "6MiB")
    found, _ = report(capsys, "bench", *args)
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    names = {(event["tid"], event["name"]) for event in events}
    assert names >= {(0, "attention"), (0, "hot ffn"), (0, "wait"), (1, "cold ffn")}
    sides = [[(e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == side] for side in (0, 1)]
    for own in sides:  # never two things at a time
        ordered = sorted(own)
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(ordered))
    hot, cold = sides
    assert any(a[0] < b[1] and b[0] < a[1] for a in hot for b in cold)
    assert 0 < found["overlap"] <= 1 and found["post_to_take_us"] > 0


def test_a_device_that_is_lost(
    gpu: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a token: one line, and the same process continues with the same device."""
    from hotcold.runtime.session import Session

    args = ["generate", "--gpu", gpu, "--vram-budget", "4MiB", "-n", "2", "-p", "Once"]
    inner = Session.run

    def run(session: Session) -> None:
        faults.fail("vkQueueSubmit", 4, DEVICE_LOST)
        inner(session)

    monkeypatch.setattr(Session, "run", run)
    assert main(args) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("hotcold: error: ") and "load the model again" in last
    faults.fail("vkQueueSubmit", 0, 0)
    monkeypatch.setattr(Session, "run", inner)
    assert main(args) == 0


def test_a_name_that_no_device_has(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "-p", "A"], ["bench"], ["doctor"], ["perplexity", "-f", "text"]):
        assert main([*command, "--gpu", "no such card"]) == 2
        err = capsys.readouterr().err
        if command[0] != "perplexity":  # that has read the text before
            assert "--gpu no such card: no such device: choose from 0 (" in err and err.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the loader's name is Linux's")
@pytest.mark.parametrize("what", ["no loader", "no driver"])
def test_without_a_loader_or_a_driver(what: str, tmp_path: Path) -> None:
    """A GPU that was not asked for is not missed; otherwise a message says what to install."""
    environment = {**os.environ, "HOTCOLD_GPU": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    if what == "no loader":
        (tmp_path / "libvulkan.so.1").write_bytes(b"")  # is found first, and cannot be loaded
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    else:
        environment |= dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(tmp_path / "none.json"))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hotcold", "generate", "-p", "A", "-n", "1", *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0 and "note" not in done.stderr
    done = run(*(["--gpu", "card"] if what == "no loader" else ["--vram-budget", "4MiB"]))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no GPU found: " in done.stderr and "mesa-vulkan-drivers" in done.stderr


def test_two_modes_at_the_same_time(gpu: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The memory of two sessions, each with keys and values of its own, is planned together."""
    path = with_sidecar(tmp_path, rank=64)
    (tmp_path / "text").write_text("Once upon a time there was a fox.\n" * 9)
    args = ("-m", str(path), "-f", str(tmp_path / "text"), "-c", "32", "--chunks", "1", "--gpu", gpu)
    found, _ = report(capsys, "perplexity", *args, "--sparsity", "exact", "--compare", "predicted")
    assert found["gpus"][0]["layers"] == 6 and found["compare"]["kl_mean"] < 1e-6

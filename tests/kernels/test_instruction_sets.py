"""The instruction set that a backend uses: the best one, or the one that HOTCOLD_ISA names. A build without
the best one of the processor says so."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import hotcold
from hotcold.commands import cli
from hotcold.errors import UserError
from hotcold.kernels import _native, open_backend
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.instruction_sets import (
    built_isas,
    default_isa,
    left_out_isas,
    slow_kernels,
    supported_isas,
)

#: The instruction set that every processor of this kind has.
LEAST = "neon" if platform.machine().lower() in ("aarch64", "arm64") else "scalar"
PIP = "run 'pip install .' in Hotcold's source folder to build for this processor"


def use_isas(monkeypatch: pytest.MonkeyPatch, *isas: tuple[str, bool, bool]) -> None:
    """Makes the extension give these instruction sets: name, whether the processor runs it, whether the
    build has it."""
    monkeypatch.delenv("HOTCOLD_ISA", raising=False)
    monkeypatch.setattr(_native, "isas", lambda: list(isas))


def test_the_best_one_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for unset in (None, ""):
        if unset is None:
            monkeypatch.delenv("HOTCOLD_ISA", raising=False)
        else:
            monkeypatch.setenv("HOTCOLD_ISA", unset)
        assert default_isa() == CPUBackend(1).isa == supported_isas()[0]
    assert supported_isas()[-1] == LEAST
    assert set(supported_isas()) <= set(built_isas())
    assert not {*built_isas()} & {*left_out_isas()}


@pytest.mark.parametrize("isa", supported_isas())
def test_the_environment_names_another(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTCOLD_ISA", isa)
    backend = open_backend("cpu", threads=1)
    assert isinstance(backend, CPUBackend) and backend.isa == default_isa() == isa
    # What code asks for comes before what the environment says.
    assert CPUBackend(1, LEAST).isa == LEAST


def test_a_name_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTCOLD_ISA", "sse2")
    assert cli.main(["generate", "-p", "Once", "-n", "1"]) == 2
    allowed = ", ".join(supported_isas())
    assert capsys.readouterr().err == f"hotcold: error: HOTCOLD_ISA is 'sse2': this machine has {allowed}\n"


def test_a_name_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_isas(monkeypatch, ("avx512", False, True), ("avx2", True, True), ("scalar", True, True))
    monkeypatch.setenv("HOTCOLD_ISA", "avx512")
    with pytest.raises(UserError, match=r"^HOTCOLD_ISA is 'avx512': this machine has avx2, scalar$"):
        open_backend("cpu")


def test_a_name_that_the_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_isas(monkeypatch, ("avx512", True, True), ("avx2", True, False), ("scalar", True, True))
    reason = (
        r"Hotcold was built without it; choose from avx512, scalar, "
        r"or run 'HOTCOLD_ISAS=all pip install \.' in Hotcold's source folder to build all"
    )
    with pytest.raises(UserError, match=f"^ISA 'avx2': {reason}$"):
        CPUBackend(1, "avx2")
    monkeypatch.setenv("HOTCOLD_ISA", "avx2")
    with pytest.raises(UserError, match=f"^HOTCOLD_ISA is 'avx2': {reason}$"):
        open_backend("cpu")


@pytest.mark.parametrize(
    ("isas", "line"),
    [
        ([("avx512", True, True), ("avx2", True, False), ("scalar", True, True)], ""),
        ([("avx512", False, False), ("avx2", True, True), ("scalar", True, True)], ""),
        ([("scalar", True, True)], ""),
        (
            [("avx512", False, True), ("avx2", True, False), ("scalar", True, True)],
            f"this processor runs avx2, but Hotcold was built for avx512, scalar, so scalar is used: {PIP}",
        ),
        (
            [("avx512", True, False), ("avx2", True, True), ("scalar", True, True)],
            f"this processor runs avx512, but Hotcold was built for avx2, scalar, so avx2 is used: {PIP}",
        ),
        (
            [("i8mm", True, False), ("dotprod", True, False), ("neon", True, True)],
            f"this processor runs i8mm, but Hotcold was built for neon, so neon is used: {PIP}",
        ),
    ],
)
def test_a_build_without_the_best_one(
    isas: list[tuple[str, bool, bool]], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_isas(monkeypatch, *isas)
    assert slow_kernels() == line
    monkeypatch.setenv("HOTCOLD_ISA", supported_isas()[0])  # chosen, so nothing to tell
    assert slow_kernels() == ""


def test_a_build_that_the_processor_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    use_isas(monkeypatch, ("avx512", False, True), ("avx2", True, False), ("scalar", True, False))
    with pytest.raises(UserError, match=f"^Hotcold was built for avx512, which this processor lacks: {PIP}$"):
        open_backend("cpu")


def test_loading_and_doctor_say_that_the_build_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real kernels compute; the extension says that the processor has one more instruction set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_isas(monkeypatch, ("best", True, False), (LEAST, True, True))
    line = f"this processor runs best, but Hotcold was built for {LEAST}, so {LEAST} is used: {PIP}"
    assert cli.main(["generate", "-p", "Once", "-n", "1", "--gpu", "off"]) == 0
    assert capsys.readouterr().err.count(f"note: {line}\n") == 1
    with hotcold.LLM(backend="reference", context=64) as llm:
        assert line not in llm.session.notes
    hardware = tmp_path / "hotcold" / "hardware.json"
    assert not hardware.exists()
    monkeypatch.setattr("hotcold.tasks.doctor._measure", lambda *_: (None, False))
    assert line in hotcold.doctor(gpu="off").notes

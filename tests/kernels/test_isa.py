"""The instruction set that a backend uses: the best one, or the one that HOTCOLD_ISA names."""

from __future__ import annotations

import platform

import pytest

from hotcold.commands import cli
from hotcold.kernels import open_backend
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.processor import ISAS, default_isa, supported_isas

#: The instruction set that every processor of this kind has.
LEAST = "neon" if platform.machine().lower() in ("aarch64", "arm64") else "scalar"


def test_the_best_one_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for unset in (None, ""):
        if unset is None:
            monkeypatch.delenv("HOTCOLD_ISA", raising=False)
        else:
            monkeypatch.setenv("HOTCOLD_ISA", unset)
        assert default_isa() == CPUBackend(1).isa == supported_isas()[0]
    assert supported_isas()[-1] == LEAST


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_names_another(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTCOLD_ISA", isa)
    if isa not in supported_isas():
        with pytest.raises(ValueError, match=f"HOTCOLD_ISA is '{isa}': this machine has .*{LEAST}"):
            open_backend("cpu")
        return
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

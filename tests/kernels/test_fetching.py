"""How far ahead weights are fetched: chosen by processor, or by the environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hotcold.commands.cli import main
from hotcold.errors import UserError
from hotcold.kernels import _native
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.fetching import VARIABLE, Fetching, default_fetching, use_fetching


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    monkeypatch.delenv(VARIABLE, raising=False)
    use_fetching(default_fetching())


def test_the_environment_says_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    own = default_fetching()
    assert own.level in (1, 2) and 64 <= own.ahead <= 64 << 10
    monkeypatch.setenv(VARIABLE, "5K:2")
    assert default_fetching() == (5120, 2)
    CPUBackend(1)
    assert _native.fetching() == (5120, 2)
    monkeypatch.setenv(VARIABLE, "")
    CPUBackend(1)
    assert _native.fetching() == own


@pytest.mark.parametrize("text", ["3K:1", "16K:2", "100:1", "0K:2", "1024K:2"])
def test_settings_are_read_as_they_are_written(text: str) -> None:
    assert str(Fetching.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["8K", "8K:3", "8M:1", "-1:1", "1025K:1", "1048577:1", "٣K:1", "8K:2\n", ":1"]
)
def test_a_setting_without_sense_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"give bytes ahead .* as in 8K:2"):
        Fetching.parse(text)
    monkeypatch.setenv(VARIABLE, text)
    assert main(["generate", "-p", "x", "-n", "1"]) != 0
    assert capsys.readouterr().err.startswith(f"hotcold: error: {VARIABLE} is {text!r}: give bytes")


@pytest.mark.parametrize("bad", [(-1, 1), ((1 << 20) + 1, 1), (64, 0), (64, 3)])
def test_the_kernels_refuse_them_too(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="fetching: 0 to 1048576 bytes"):
        _native.set_fetching(*bad)

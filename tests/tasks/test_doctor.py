"""``hotcold.doctor()``: what ``hotcold doctor`` does, from Python; from tiny buffers."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotcold
from hotcold.errors import UserError
from hotcold.placement.hardware import find_hardware
from hotcold.tasks import doctor


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    told: list[tuple[str, int, int]] = []
    first = hotcold.doctor(gpu="off", output=tmp_path / "a.json", progress=lambda *each: told.append(each))
    assert {phase for phase, _, _ in told} == {"measuring"} and told[-1][1] == told[-1][2]
    assert not first.from_cache and find_hardware(str(tmp_path / "a.json")) == first.hardware
    assert "GPU         not looked for (`gpu=off`)" in str(first)
    second = hotcold.doctor(gpu="off")
    assert second.from_cache and second.hardware == first.hardware
    assert f"figures from {second.cache}; `again` measures" in second.notes
    assert not hotcold.doctor(gpu="off", again=True).from_cache
    with pytest.raises(UserError, match="a new file in a folder that exists is needed"):
        hotcold.doctor(output=tmp_path / "a.json")

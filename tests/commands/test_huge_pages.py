"""``hotcold doctor`` on huge pages: as the system has them, and a hint where it never gives any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotcold.commands import cli
from hotcold.tasks import doctor


@pytest.mark.parametrize(
    ("setting", "said"),
    [("always [madvise] never", "madvise"), ("always madvise [never]", "never"), ("", "unknown")],
)
def test_huge_pages(
    setting: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    monkeypatch.setattr(doctor, "read_text", lambda path: setting)
    assert cli.main(["doctor", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["huge_pages"] == said
    (line,) = (line for line in lines if line.startswith("huge pages"))
    assert line.split()[2].rstrip(",") == said
    assert ("slow" in line) == (said == "never")

"""``hotcold fit-predictor`` compares both modes' speeds by medians of rounds, and by each round's ratio."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.commands import cli
from hotcold.engine.engine import Engine
from hotcold.tasks import fitting

#: Tokens a second of ``exact`` and of the predictor, in the warming and three counted rounds.
ROUNDS = ((1, 99), (10, 30), (40, 50), (20, 22))


def test_medians_over_the_rounds_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def measure(engine: Engine, *_: Any, seed: int, **__: Any) -> SimpleNamespace:
        calls.append(engine.session.sparsity)
        return SimpleNamespace(tok_s=ROUNDS[seed][engine.session.sparsity != "exact"])

    monkeypatch.setattr(fitting, "_ROUNDS", 3)
    monkeypatch.setattr(fitting, "measure", measure)
    (tmp_path / "text").write_text("The goats had come down from the mountain, and Peter called them. " * 12)
    files = ["-f", str(tmp_path / "text"), "-o", str(tmp_path / "x.predictor.gguf")]
    assert cli.main(["fit-predictor", *files, "-c", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert calls == ["exact", "predicted"] * 4, "in turns"
    assert (report["exact_tok_s"], report["predicted_tok_s"]) == (20, 30)
    assert report["ratio"] == report["measured"]["speed_ratio"] == 1.5
    assert (report["measured"]["speed_low"], report["measured"]["speed_high"]) == (22 / 20, 30 / 10)

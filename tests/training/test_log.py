"""The log of a training run: its lines, and TensorBoard's events if TensorBoard is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotcold.errors import UserError

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

from hotcold.training.sparsify_run import Log


class Writer:
    """Keeps what torch's writer of TensorBoard's events would write."""

    made: list[Writer]

    def __init__(self, folder: Path, purge_step: int) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.written: list[tuple[str, float, int]] = []
        self.flushed = 0
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.written)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter, Writer.made = Writer, []
    monkeypatch.setitem(sys.modules, module.__name__, module)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("tensorboard")
def test_events_have_the_figures_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, 0)
    log.write(1, loss=2.5, tokens=64)
    log.write(1, perplexity=9.0, zeros_by_layer=[0.25, 0.75])
    log.close()
    (writer,) = Writer.made
    assert writer.folder == tmp_path / "log.tensorboard" and writer.purge_step == 1
    assert writer.written == [
        ("loss", 2.5, 1), ("tokens", 64, 1), ("perplexity", 9.0, 1),
        ("zeros_by_layer/0", 0.25, 1), ("zeros_by_layer/1", 0.75, 1),
    ]  # fmt: skip
    assert writer.flushed == 5 and writer.closed
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1])["zeros_by_layer"] == [0.25, 0.75]


@pytest.mark.usefixtures("tensorboard")
def test_a_run_that_continues_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st', encoding="utf-8")
    log = Log(path, 2)
    log.write(3, loss=1.0)
    assert steps(path) == [1, 2, 3]
    assert Writer.made[0].purge_step == 3  # TensorBoard drops events from this step on


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = Log(tmp_path / "log.jsonl", 0)
    log.write(1, loss=1.0)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    nothing = Log(None, 0)
    nothing.write(1, loss=1.0)
    nothing.close()


def test_other_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("notes\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"log\.jsonl cannot be the log \(it has lines of another kind\)"):
        Log(path, 2)
    assert path.read_text(encoding="utf-8") == "notes\n"

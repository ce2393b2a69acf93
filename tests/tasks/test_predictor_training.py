"""`hotcold fit-predictor --method train`: a killed run continues, and ends with the same weights."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.expert_models import expert_golden

pytest.importorskip("torch", reason="training needs torch")

import hotcold
from hotcold.commands import cli
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.session import Session
from hotcold.tasks import ffn_inputs, fitting, predictor_training
from hotcold.training import predictor
from hotcold.training.options import TrainOptions

pytestmark = pytest.mark.long  # no instruction set or backend changes it

TEXT = (
    "The goats had come down from the mountain, and Peter called them with his pipe. The grandfather sat "
    "before the hut and carved a spoon, and Heidi told him everything that she had seen: the great bird, the "
    "fire on the snow, and the flowers that stood so thick that one could not see the grass between them. "
)
LINE = "fit-predictor --method train -f text.txt -c 32 -t 1 --tokens 320 --recall 0.95 --epochs 2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the text is; both methods are as fast, so that files depend on the weights alone."""
    (tmp_path / "text.txt").write_text("".join(TEXT[i:] for i in range(0, 240, 30)))
    monkeypatch.setattr(fitting, "_speed", lambda *sessions: fitting.Speed(100.0, 110.0, 1.05, 1.2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Unbroken:
    """The file of a run that nothing broke, made when a test first asks for it, and how long that took."""

    file = b""
    seconds = 0.0


@pytest.fixture(scope="module")
def unbroken() -> Unbroken:
    return Unbroken()


def whole(unbroken: Unbroken) -> bytes:
    if not unbroken.file:
        began = time.monotonic()
        assert ran("whole.gguf") == 0
        unbroken.seconds = time.monotonic() - began
        unbroken.file = Path("whole.gguf").read_bytes()
    return unbroken.file


def ran(output: str, *more: str) -> int:
    return cli.main([*LINE.split(), "-o", output, *more])


def test_a_run_and_its_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sidecar that the engine takes, beside figures of `svd`; another run may not use the folder."""
    assert ran("one.gguf", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert lines[-1] == "one.gguf.work: the state of the training, which may be deleted"
    assert "for comparison, svd of the same text:" in lines and report["method"] == "train"
    assert report["weighted"] and report["input"] == "normed" and report["target"] == 0.95
    for fit, ladder, svd in zip(report["layers"], report["frontier"], report["svd"]["layers"], strict=True):
        assert fit in ladder and fit["weighted_recall"] > 0.9 and fit["candidates"] < 0.6
        assert fit["size_ratio"] <= 0.15 >= svd["size_ratio"]
    line = "perplexity -f text.txt -c 32 --sparsity predicted --predictor one.gguf --json"
    assert cli.main(line.split()) == 0
    judged = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert judged["sparsity"] == "predicted"
    shares = zip(judged["active_share_by_layer"], report["layers"], strict=True)
    assert all(share <= fit["candidates"] + 0.05 for share, fit in shares)
    for more, message in (
        (["--work", "one.gguf.work", "--recall", "0.9"], "holds a run with recall 0.95, not 0.9"),
        (["--tokens", "64"], "the text is less than three windows"),
        (["--rate", "0"], "--rate is 0.0: a finite number above 0 is needed"),
        (["--max-marked", "-1"], "--max-marked is -1.0: a finite number above 0 is needed"),
        (["--method", "svd", "--work", "x"], "--work is for method=train, and the method is svd"),
        (["--max-share", "0.01"], "layer 0: no predictor fits in at most 1% of the FFN"),
    ):
        assert ran("two.gguf", *more) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
        assert not Path("two.gguf").exists()
    with pytest.raises(UserError, match="`work` is None: give a folder"):
        hotcold.fit_predictor(None, Path("text.txt"), method="train")


def test_a_break_anywhere_changes_nothing(
    folder: Path, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While inputs are collected, in the middle of an epoch, after a state and after a layer was saved."""
    expected = whole(unbroken)
    monkeypatch.setattr(ffn_inputs, "_SAVED_EVERY", 0.0)
    places = [
        (Session, "run", 1),
        (Session, "run", 9),
        (predictor._Run, "_loss", 3),
        (predictor._Run, "judge", 4),
        (predictor_training, "_save", 1),
        (predictor_training, "_saved", 3),
    ]
    for owner, name, after in places:
        inner, left = getattr(owner, name), after

        def broken(*args: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return inner(*args, **more)  # noqa: B023

        monkeypatch.setattr(owner, name, broken)
        assert ran("part.gguf") == 130 and not Path("part.gguf").exists()
        monkeypatch.setattr(owner, name, inner)
    assert ran("part.gguf") == 0
    assert Path("part.gguf").read_bytes() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_loses_nothing(
    folder: Path, unbroken: Unbroken, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files fails as a full disk does, at each place that a run writes to."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1000, 30_000, 400_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            assert ran("part.gguf") == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        error = capsys.readouterr().err
        assert "File too large" in error and error.count("\n") == 1 and "part.gguf.work" in error
    assert ran("part.gguf") == 0
    assert Path("part.gguf").read_bytes() == whole(unbroken)


def test_predictors_of_experts(folder: Path) -> None:
    path = expert_golden("tiny-turbosparse", folder).path
    options: dict[str, Any] = {"context": 64, "threads": 1, "max_share": 1.0, "type": "F32", "recall": 0.95}
    training = TrainOptions(epochs=3)
    found = hotcold.fit_predictor(
        path, Path("text.txt"), output="e.gguf", method="train", training=training, **options
    )
    assert found.svd is not None and len(found.layers) == len(found.svd.layers)
    for fit in found.layers:
        assert fit.weighted_recall > 0.85 and fit.candidates < 0.9
    with hotcold.LLM(path, sparsity="predicted", predictor="e.gguf", threads=1) as llm:
        assert llm.session.sparsity == "predicted"


@pytest.mark.full
def test_kills_at_random_moments_change_nothing(folder: Path, unbroken: Unbroken) -> None:
    """SIGKILL, and the same command again, until one comes to its end."""
    Path("whole.gguf").write_bytes(whole(unbroken))
    line = [sys.executable, "-P", "-m", "hotcold", *LINE.split(), "-o", "part.gguf"]
    longest, moments = 0.8 * unbroken.seconds, random.Random(29)
    kills, done, starts_s = 0, False, 0.0
    while not done:
        began = time.monotonic()
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while not starts_s and process.poll() is None:  # it imports torch, and loads the model
                time.sleep(0.02)
                starts_s = Path("part.gguf.work", "run.json").exists() * (time.monotonic() - began)
            moment = began + starts_s + longest * moments.uniform(0, 1) - time.monotonic()
            try:
                process.communicate(timeout=max(0.0, moment) if kills < 2 else None)
                done = kills > 1
                assert process.returncode == 0
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
        if not done and process.returncode == 0:  # a machine that has become faster: kill it sooner
            Path("part.gguf").unlink()
            shutil.rmtree("part.gguf.work")
            longest, kills = longest / 2, 0
    with open_gguf(Path("whole.gguf")) as one, open_gguf(Path("part.gguf")) as other:
        assert one.tensors.keys() == other.tensors.keys()
        for name in one.tensors:
            np.testing.assert_array_equal(one.load(name).data, other.load(name).data)

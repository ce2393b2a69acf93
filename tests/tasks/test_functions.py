"""The functions of the package: what they take, what they give, and that they write only what was asked for.

What their figures mean is tested where the commands are."""

from __future__ import annotations

import asyncio
import doctest
import json
import shutil
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draft_blocks import knowing_block
from support.hybrid_models import write_hybrid

import hotcold
from hotcold import LLM, AsyncLLM
from hotcold.commands import cli
from hotcold.commands.flags import in_flags
from hotcold.demo import model_path
from hotcold.engine.speculation import StepCosts
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cpu import CPUBackend
from hotcold.placement.hardware import find_hardware
from hotcold.placement.placement import read_placement
from hotcold.placement.profiles import read_profile
from hotcold.tasks import bench, fitting
from hotcold.tasks.scoring import Divergence

TEXT = (
    "The goats had come down from the mountain, and Peter called them with his pipe. The grandfather sat "
    "before the hut and carved a spoon, and Heidi told him everything that she had seen: the great bird, the "
    "fire on the snow, and the flowers that stood so thick that one could not see the grass between them. "
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test is, so that what is written without a question is seen. Benchmarks fill and read little
    memory: their figures are not looked at here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CPUBackend.read_probe, "__defaults__", (1 << 20,))
    monkeypatch.setattr(bench, "_PROBE_S", 0.0)
    return tmp_path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context=64) as llm:
        yield llm


def printed(capsys: pytest.CaptureFixture[str], line: str) -> tuple[str, dict[str, Any]]:
    """The lines that a command prints, and its report."""
    assert cli.main([*line.split(), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def as_json(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(report))
    return found


def test_names_are_found_when_they_are_asked_for() -> None:
    assert {"LLM", "bench", "fit_predictor", "plan", "profile"} <= set(dir(hotcold)) & set(hotcold.__all__)
    assert all(callable(getattr(hotcold, name)) for name in hotcold.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="module 'hotcold' has no attribute 'plans'"):
        hotcold.plans  # type: ignore[attr-defined]  # noqa: B018


def examples() -> list[Any]:
    """Returns the examples of the docstrings, one a function; two take seconds."""
    found = []
    for name in hotcold.__all__:
        documented = getattr(hotcold, name)
        for part in doctest.DocTestParser().get_examples(getattr(documented, "__doc__", "") or ""):
            long = part.source.startswith(("fitted = ", "print(hotcold.bench("))
            found.append(pytest.param(part.source, marks=pytest.mark.full) if long else part.source)
    return found


@pytest.mark.parametrize("source", examples())
def test_examples_of_the_docstrings_run(
    source: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(model_path(), "model.gguf")
    (folder / "text.txt").write_text(TEXT * 12)
    names = {"hotcold": hotcold, "LLM": LLM, "AsyncLLM": AsyncLLM, "Path": Path}
    if "async " in source:
        exec("async def example():\n" + textwrap.indent(source, "    "), names)
        asyncio.run(names["example"]())
    else:
        exec(source, names)
    capsys.readouterr()


# --- plan ---


def test_a_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    lines, report = printed(capsys, "plan --vram-budget 6MiB -c 64")
    for model in (None, model_path(), str(model_path()), llm, llm.model):
        plan = hotcold.plan(model, vram_budget=6 << 20, context=None if model in (llm, llm.model) else 64)
        assert (str(plan), as_json(plan.report())) == (lines, report)
    assert plan.gpu_bytes <= plan.budget_bytes == 6 << 20
    shape = hotcold.plan(shape="opt-30b", type="q8_0", hardware="rtx2080ti-i7", objective="paper")
    line = "plan --shape opt-30b --type q8_0 --hardware rtx2080ti-i7 --objective paper"
    assert as_json(shape.report()) == printed(capsys, line)[1]


def test_a_plan_takes_measured_hardware_and_a_profile(folder: Path) -> None:
    machine = replace(find_hardware("rtx4060"), name="mine", vram_bytes=4 << 30)
    assert hotcold.plan(hardware=machine).budget_bytes == 7 << 29
    profile = hotcold.profile(None, TEXT, context=64)
    first = replace(profile, firing=[np.full_like(each, i == 2) for i, each in enumerate(profile.firing)])
    plan = hotcold.plan(profile=first, vram_budget=3 << 20, context=32)  # less than the last layers
    shares = [part["hot_share"] for part in plan.parts if part["kind"] == "neurons"]
    assert shares[2] == max(shares) > 0 and plan.profile == profile.source
    with pytest.raises(UserError, match="the profile has 5 layers"):
        hotcold.plan(profile=replace(profile, firing=profile.firing[1:]))
    with pytest.raises(UserError, match="the profile belongs to the model 'another': one of this model"):
        hotcold.plan(profile=replace(profile, fingerprint="another"))
    with pytest.raises(UserError, match="the profile belongs to the model"):
        hotcold.plan(shape="opt-30b", profile=profile)
    assert not list(folder.iterdir())


def test_a_placement_is_written_where_asked(folder: Path) -> None:
    plan = hotcold.plan(vram_budget=6 << 20, context=32, output="x.gpuidx")
    again = hotcold.plan(vram_budget=6 << 20, context=32, placement="x.gpuidx")
    assert again.objective == "given" and replace(again, objective="time").report() == plan.report()
    read = read_placement(folder / "x.gpuidx", plan.sizes)
    assert read.where == plan.placement.where
    with pytest.raises(
        UserError, match=r"x\.gpuidx: the file exists: give another name, or `force` to replace it"
    ):
        hotcold.plan(output="x.gpuidx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective 'speed': choose from time, paper"),
        ({"shape": "gpt-5"}, "shape 'gpt-5': choose from llama2-13b"),
        ({"shape": "opt-30b", "model": "x.gguf"}, "a model and the shape 'opt-30b': give one of them"),
        ({"vram_budget": 10**12}, "at most the GPU's 24GiB is needed"),
        ({"hardware": "x"}, "presets: rtx4090-i9"),
        ({"cache_type": "q4_0"}, "cache type 'q4_0': choose from f16, q8_0, f32"),
        ({"context": 1}, "context is 1: allowed are the whole numbers 2 to"),
        ({"vram_budget": 1.5}, "vram_budget is 1.5: a whole number is needed"),
    ],
)
def test_mistakes_in_a_plan(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hotcold.plan(**options)


# --- profile ---


def test_a_profile_is_what_the_command_prints(
    folder: Path, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    (folder / "text.txt").write_text(TEXT)
    lines, report = printed(capsys, "profile -f text.txt -o one -c 64")
    assert Path(report.pop("output")) == Path("one")
    phases: list[str] = []
    for i, model in enumerate((None, llm, llm.model)):
        found = hotcold.profile(
            model,
            Path("text.txt"),
            context=64,
            output=f"{i}.gguf" if i else None,
            progress=lambda phase, done, total: phases.append(phase),
        )
        assert (str(found), as_json(found.report())) == (lines, report)
    assert set(phases) == {"loading", "windows"} and found.tokens == report["tokens"]
    sizes = hotcold.plan(context=64).sizes
    one, two = (read_profile(folder / name, sizes) for name in ("one", "2.gguf"))
    np.testing.assert_array_equal(one.firing, two.firing)
    assert sorted(path.name for path in folder.iterdir()) == ["1.gguf", "2.gguf", "one", "text.txt"]
    assert found.picture().startswith("<svg")
    by_text = hotcold.profile(llm, TEXT)
    np.testing.assert_array_equal(by_text.firing, found.firing)
    assert by_text.source == f"a text, {found.tokens} tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a text or counts are needed: give one of them"),
        ({"text": TEXT, "counts": "."}, "a text or counts are needed: give one of them"),
        ({"text": ""}, "the text has 0 tokens"),
        ({"text": 3}, "text is of type int: a str, or a Path to a UTF-8 file, is needed"),
        ({"text": "here.txt"}, r"text is 'here.txt', the name of a file: give Path\('here.txt'\) to read it"),
        ({"text": TEXT, "tokens": 0}, "tokens is 0: allowed are the whole numbers 1 to"),
        ({"text": TEXT, "context": 65}, "context of 65 positions: this model allows 2 to 64"),
        ({"text": TEXT, "threads": 1}, "threads is an option of loading, and the model is loaded already"),
    ],
)
def test_mistakes_in_a_profile(options: dict[str, Any], message: str, llm: LLM, folder: Path) -> None:
    (folder / "here.txt").write_text(TEXT)
    with pytest.raises(UserError, match=message):
        hotcold.profile(llm, **options)


def test_what_runs_on_two_backends(folder: Path) -> None:
    half = hotcold.plan(vram_budget=6 << 20, context=64, output="half.gpuidx")
    with LLM(placement="half.gpuidx", hot_backend="cpu", context=64) as hybrid:
        with pytest.raises(
            UserError, match="loaded on several backends, and a profile counts on one: load it"
        ):
            hotcold.profile(hybrid, TEXT)
        found = hotcold.bench(hybrid, n_prompt=8, n_gen=4, repetitions=1, timeline="trace.json")
        assert hotcold.plan(hybrid, vram_budget=6 << 20).report() == half.report()
    report = found.report()
    assert report["hot_backend"] == "cpu" and report["overlap"] == found.overlap
    assert "post_to_take_us" in report
    assert json.loads((folder / "trace.json").read_text())[0]["args"] == {"name": "hot"}


# --- predictors ---


def test_predictors_are_what_the_command_prints(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    monkeypatch.setattr(fitting, "_speed", lambda *sessions: fitting.Speed(100.0, 110.0, 1.05, 1.2))
    (folder / "text.txt").write_text(TEXT * 8)
    lines, report = printed(capsys, "fit-predictor -f text.txt -o one.gguf -c 64 --recall 0.95")
    assert Path(report.pop("output")) == Path("one.gguf")
    found = hotcold.fit_predictor(llm, Path("text.txt"), recall=0.95)
    assert lines.startswith(in_flags(str(found))) and as_json(found.report()) == report
    assert sorted(path.name for path in folder.iterdir()) == ["one.gguf", "text.txt"]
    found.write("two.gguf")
    assert Path("two.gguf").read_bytes() == Path("one.gguf").read_bytes()
    with LLM(sparsity="predicted", predictor="two.gguf", context=64) as predicting:
        assert predicting.session.sparsity == "predicted"
        assert predicting.generate("Once upon a time", max_tokens=3).text
    for wrong, message in (
        ({"method": "svm"}, "method 'svm': choose from svd, train, trained"),
        ({"tokens": 1}, "tokens is 1: allowed are the whole numbers 2 to"),
        ({"output": "two.gguf"}, r"two\.gguf: the file exists: give another name, or `force` to replace it"),
        ({"method": "trained"}, "this file has no predictor"),
    ):
        with pytest.raises(UserError, match=message):
            hotcold.fit_predictor(llm, TEXT * 8, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("slowest", "sparsity"), [(0.99, "exact"), (1.01, "predicted")])
def test_the_clock_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slowest: float, sparsity: str
) -> None:
    """A gain in the median that not every round shows is noise."""
    monkeypatch.setattr(fitting, "_speed", lambda *sessions: fitting.Speed(100.0, 130.0, slowest, 1.5))
    even = np.zeros(700)
    monkeypatch.setattr(fitting, "compare", lambda *_: Divergence(even, even == 0, even, even))
    found = hotcold.fit_predictor(None, TEXT * 8, context=64, tokens=128)
    found.write("x.gguf")
    with LLM(predictor="x.gguf", context=64) as llm:
        assert llm.session.sparsity == sparsity


# --- bench ---


def test_a_benchmark(llm: LLM) -> None:
    reports = []
    found = hotcold.bench(
        llm, n_prompt=9, n_gen=3, parallel=2, repetitions=3, progress=lambda *state: reports.append(state)
    )
    assert reports == [("rounds", done, 3) for done in (1, 2, 3)] and len(found.rounds) == 3
    speeds = [each.tok_s for each in found.rounds if each.tok_s is not None]
    assert found.median("tok_s") == found.report()["tok_s"] == statistics.median(speeds)
    assert found.report()["tok_s_range"] == [min(speeds), max(speeds)]
    assert {each.rows_per_step for each in found.rounds} == {1}, "this one was loaded for one sequence"
    assert (found.setup.context, found.setup.sparsity, found.overlap) == (64, "exact", None)
    together = hotcold.bench(n_prompt=9, n_gen=3, parallel=2, repetitions=1, threads=1, sparsity="off")
    assert together.rounds[0].rows_per_step == 2
    assert (together.setup.threads, together.setup.sparsity) == (1, "off")
    assert "generation of 3 in 2 sequences, 2 at a time" in str(together)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"thread": 3}, TypeError, "unknown option 'thread': allowed are sparsity"),
        ({"sequences": 3}, TypeError, "unknown option 'sequences'"),
        ({"n_gen": 1}, UserError, "n_gen is 1: allowed are the whole numbers 2 to"),
        ({"parallel": 5000}, UserError, "parallel is 5000: allowed are the whole numbers 1 to 4096"),
        ({"repetitions": 0}, UserError, "repetitions is 0"),
        (
            {"n_prompt": 60, "n_gen": 30},
            UserError,
            "`n_prompt=60` and `n_gen=30` need 90 positions: the context holds 64",
        ),
        ({"timeline": "x"}, UserError, "`timeline` shows a GPU and the CPU"),
        ({"sparsity": "off"}, UserError, "sparsity is an option of loading, and the model is loaded already"),
    ],
)
def test_mistakes_in_a_benchmark(
    options: dict[str, Any], error: type[Exception], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=message):
        hotcold.bench(llm, **options)


# --- guesses ---


def test_a_benchmark_guesses_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "measured", lambda self, rows: True)
    monkeypatch.setattr(StepCosts, "of", lambda self, rows: 1.0)
    with LLM(context=100) as llm:
        looked_up = hotcold.bench(llm, n_prompt=60, n_gen=32, repetitions=1, draft="look-up", draft_max=2)
        none = hotcold.bench(llm, n_prompt=60, n_gen=32, repetitions=1)
    assert none.rounds[0].guessed == 0 and "draft tokens" not in str(none)
    assert 0 < looked_up.rounds[0].guessed >= looked_up.rounds[0].accepted
    assert "draft tokens were accepted" in str(looked_up)


def test_a_benchmark_of_a_file_with_a_block_that_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block guesses unless another word is given; its bytes are counted, the head for each guess."""
    path = knowing_block(write_hybrid(tmp_path / "plain.gguf", "qwen35"), tmp_path / "knows.gguf", 1)
    monkeypatch.setattr(StepCosts, "measured", lambda self, rows: True)
    monkeypatch.setattr(StepCosts, "of", lambda self, rows: 1.0)
    found, none = (
        hotcold.bench(path, n_prompt=8, n_gen=33, repetitions=1, threads=1, draft=draft)
        for draft in (None, "none")
    )
    own, plain = found.rounds[0], none.rounds[0]
    assert plain.guessed == plain.accepted == 0 and plain.tokens_per_step == 1
    assert own.accepted <= own.guessed > 20
    with open_gguf(path) as file:
        head, layer = file.tensors["token_embd.weight"].nbytes, file.tensors["blk.3.attn_q.weight"].nbytes
    assert own.bytes_per_token is not None and plain.bytes_per_token is not None
    assert own.tokens_per_step is not None
    steps = 32 / own.tokens_per_step
    assert own.bytes_per_token * 32 > own.guessed * (head + layer) + steps * (head + layer)
    assert own.bytes_per_token * 32 < (own.guessed + 2 * steps) * plain.bytes_per_token


@pytest.mark.parametrize("draft", ["replay:0.5", "x.gguf", ""])
def test_guesses_of_a_benchmark_that_are_not_known(draft: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match="allowed are look-up and none"):
        hotcold.bench(llm, draft=draft)

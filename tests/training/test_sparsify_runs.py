"""Runs of sparsify that are killed, or meet a mistake, a full disk or a loss that is not a number."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, golden_checkpoint
from support.wrappers import make_wrapper

from hotcold.errors import UserError

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

from hotcold.training import saving, sparsify_run  # noqa: E402
from hotcold.training.run_state import RunState  # noqa: E402
from hotcold.training.schedule import STAGES, penalty_share  # noqa: E402
from hotcold.training.sparsify_run import rate_share  # noqa: E402
from hotcold.training.sparsifying import SparsifyOptions, sparsify  # noqa: E402
from hotcold.training.token_data import Source  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
HEIDI = (DATA / "heidi.txt").read_text(encoding="utf-8")
OPTIONS = SparsifyOptions(tokens=40 * 128, learning_rate=1e-3, context=32, batch=4, distil=0.5)
LLAMA = golden_checkpoint("tiny-llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("texts") / "heidi.txt"
    path.write_text(HEIDI[:9000], encoding="utf-8")
    return Source(path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_ends_with_the_same_weights(text: Source, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sparsify(LLAMA, [text], whole, OPTIONS)
    random = np.random.default_rng(29)
    starts = []
    for steps in (9, 3, 14):
        near, far = multiprocessing.get_context("fork").Pipe(duplex=False)

        def go(far: Any = far, most: int = steps + 3) -> None:
            def tell(done: int, total: int) -> None:
                nonlocal most
                far.send(done)
                most -= 1
                while not most:  # the kill may be late
                    time.sleep(1)

            sparsify(LLAMA, [text], killed, OPTIONS, progress=tell, save_seconds=0)

        process = multiprocessing.get_context("fork").Process(target=go)
        process.start()
        steps_done = [near.recv() for _ in range(steps)]
        starts.append(steps_done[0])
        process.join(float(random.uniform(0, 0.01)))  # in a step, or while its state is saved
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not killed.exists()
    assert starts[0] == 128 < starts[1] < starts[2]  # each continued where the one before was killed
    reports: list[Any] = []
    found = sparsify(LLAMA, [text], killed, OPTIONS, report=reports.append)
    assert weights(whole) == weights(killed)
    assert reports == found.reports and len(reports) == sparsify_run.REPORTS


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.full)])
def test_sigterm_at_any_moment(moments: int, text: Source, tmp_path: Path) -> None:
    """A signal stops a run a few steps after its start, again and again; the last call ends it. States are
    saved at signals alone, and the weights are those of a run without a signal."""
    steps, log, stopped = 8 * moments, tmp_path / "log.jsonl", tmp_path / "stopped"
    options = replace(OPTIONS, tokens=steps * 128, accumulate=2, batch=2)
    sparsify(LLAMA, [text], tmp_path / "whole", options)
    random = np.random.default_rng(moments)
    codes = []
    for _ in range(moments):
        reached = int(random.integers(4))  # messages before the signal, the first at the start
        near, far = multiprocessing.get_context("fork").Pipe(duplex=False)

        def go(far: Any = far, most: int = reached + 3) -> None:
            def tell(done: int, total: int) -> None:
                nonlocal most
                far.send(done)
                most -= 1
                # The signal may be late. Its handler puts the default action back.
                while most <= 0 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    time.sleep(0.005)

            far.send(0)
            sparsify(LLAMA, [text], stopped, options, save_seconds=1e9, progress=tell, log=log)

        process = multiprocessing.get_context("fork").Process(target=go)
        process.start()
        for _ in range(1 + reached):
            near.recv()
        process.join(float(random.uniform(0, 0.05)))
        process.terminate()
        process.join()
        codes.append(process.exitcode)
    assert codes == [-signal.SIGTERM] * moments and not stopped.exists()
    starts: list[int] = []
    done = {"progress": lambda done, total: starts.append(done)}
    sparsify(LLAMA, [text], stopped, options, log=log, **done)
    assert starts[0] > 128
    assert weights(stopped) == weights(tmp_path / "whole")
    logged = [line["step"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
    assert logged == list(range(1, steps + 1))


class Stopped(Exception):
    """The effect of SIGTERM in these tests."""


def test_sigterm_while_the_last_state_is_saved(
    text: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has ended, so the next call only writes the output."""
    short, save = replace(OPTIONS, tokens=256, distil=0.0), RunState.save

    def stop(*args: Any) -> None:
        raise Stopped

    def save_and_stop(self: RunState, state: Any) -> None:
        save(self, state)
        if state["step"] == state["steps"]:
            signal.raise_signal(signal.SIGTERM)

    usual = signal.signal(signal.SIGTERM, stop)
    try:
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(RunState, "save", save_and_stop)
            sparsify(LLAMA, [text], tmp_path / "sparse", short)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert not (tmp_path / "sparse").exists()
    steps: list[int] = []
    sparsify(LLAMA, [text], tmp_path / "sparse", short, progress=lambda done, total: steps.append(done))
    assert not steps and (tmp_path / "sparse").exists()


def test_the_log_of_another_run_is_kept_without_force(text: Source, tmp_path: Path) -> None:
    log, short = tmp_path / "log.jsonl", replace(OPTIONS, tokens=128, distil=0.0)
    for old in ("notes", '{"step": 0}\n{"step": 1}\n'):
        log.write_text(old, encoding="utf-8")
        with pytest.raises(UserError, match=r"log\.jsonl: the file exists: give another name, or `force`"):
            sparsify(LLAMA, [text], tmp_path / "new", short, log=log)
        assert log.read_text(encoding="utf-8") == old and os.listdir(tmp_path) == ["log.jsonl"]
    with pytest.raises(UserError, match="would replace the one that is read"):
        sparsify(LLAMA, [text], tmp_path / "new", short, log=text.path, force=True)
    sparsify(LLAMA, [text], tmp_path / "new", short, log=log, force=True)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert {line["step"] for line in lines} == {1}


def test_more_tokens_continue_an_ended_run(text: Source, tmp_path: Path) -> None:
    short, work = replace(OPTIONS, tokens=512, distil=0.0), tmp_path / "work"
    log = tmp_path / "log.jsonl"
    sparsify(LLAMA, [text], tmp_path / "one", short, work=work, log=log)
    steps: list[int] = []
    more = replace(short, tokens=1024, threshold="none")
    (tmp_path / "other.txt").write_text(HEIDI[-3000:], encoding="utf-8")
    given = {
        "work": work,
        "log": log,
        "held_out": tmp_path / "other.txt",
    }
    found = sparsify(
        LLAMA, [text], tmp_path / "two", more, progress=lambda done, total: steps.append(done), **given
    )
    assert steps == [640, 768, 896, 1024] and found.reports[-1].tokens == 1024
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates[:4] == rates[4:] and len(set(rates)) == 4  # rises and falls once more
    assert len(found.reports) == 8 and found.reports[-1].loss < found.reports[3].loss
    with pytest.raises(UserError, match=r"holds a run of 1024 tokens, 1024 done: finish it with these"):
        sparsify(LLAMA, [text], tmp_path / "three", short, work=work)


def test_a_copy_of_the_inputs_continues_a_run(text: Source, tmp_path: Path) -> None:
    """Inputs are known by their content, and states by their inputs."""
    output, work = tmp_path / "sparse", tmp_path / "sparse.work"

    def end_early(done: int, total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparsify(LLAMA, [text], output, OPTIONS, progress=end_early, save_seconds=0)
    state = (work / "state.pt").read_bytes()
    with pytest.raises(UserError, match=r"sparse.work holds a run with l1 0.3, not 0.5: give the same"):
        sparsify(LLAMA, [text], output, replace(OPTIONS, l1=0.5))
    (tmp_path / "other.txt").write_text(HEIDI[:9001], encoding="utf-8")
    with pytest.raises(UserError, match=r"holds a run with texts"):
        sparsify(LLAMA, [Source(tmp_path / "other.txt")], output, OPTIONS)
    checkpoint = copy_checkpoint(tmp_path / "copy")
    change_tensors(checkpoint, model__norm__weight=np.ones(64, np.float32))
    with pytest.raises(UserError, match=r"holds a run with weights"):
        sparsify(checkpoint, [text], output, OPTIONS)
    assert (work / "state.pt").read_bytes() == state
    shutil.copytree(LLAMA, tmp_path / "again")
    shutil.copyfile(text.path, tmp_path / "again.txt")
    starts: list[int] = []
    done = {"progress": lambda done, total: starts.append(done)}
    sparsify(tmp_path / "again", [Source(tmp_path / "again.txt")], output, OPTIONS, **done)
    assert starts[0] == 384
    (work / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(UserError, match=r"state.pt is damaged"):
        sparsify(LLAMA, [text], tmp_path / "new", OPTIONS, work=work)


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Files cannot grow beyond a size: writing fails as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_is_full(text: Source, tmp_path: Path) -> None:
    """Neither the state nor the output is lost: the next call only writes it."""
    output, work = tmp_path / "sparse", tmp_path / "sparse.work"
    short = replace(OPTIONS, tokens=512, distil=0.0)
    with (
        largest_file(100_000),
        pytest.raises(UserError, match=r"state.pt cannot be saved .*: the state before"),
    ):
        sparsify(LLAMA, [text], output, short)
    assert not output.exists() and [path.name for path in work.iterdir()] == ["tokens"]
    steps: list[int] = []

    def count(done: int, total: int) -> None:
        steps.append(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_write", limited(saving._write))
        with pytest.raises(UserError, match=r"sparse cannot be written: "):
            sparsify(LLAMA, [text], output, short, progress=count)
    assert [*tmp_path.iterdir()] == [work] and len(steps) == 4
    sparsify(LLAMA, [text], output, short, progress=count)
    assert len(steps) == 4 and (output / "model.safetensors").is_file()


def limited(write: Any) -> Any:
    def write_little(*args: Any) -> None:
        with largest_file(100_000):
            write(*args)

    return write_little


def test_a_small_disk_is_refused_before_training(
    text: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsify_run.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(UserError, match=r"needs \d+ bytes in all, and 5000 are free"):
        sparsify(LLAMA, [text], tmp_path / "sparse", OPTIONS)
    assert not [*tmp_path.rglob("*.pt")]


def test_a_loss_that_is_not_a_number(text: Source, tmp_path: Path) -> None:
    """The state that stays is one from which a run could go on."""
    got, fix = (
        "the loss|the gradient|a weight",
        "start again with a lower `learning_rate` and another `work`",
    )
    with pytest.raises(UserError, match=rf"({got}) is (nan|inf) at step \d+ of 40: {fix}"):
        sparsify(LLAMA, [text], tmp_path / "sparse", replace(OPTIONS, learning_rate=1e30), save_seconds=0)
    state = torch.load(tmp_path / "sparse.work" / "state.pt", weights_only=True)
    assert all(bool(torch.isfinite(weights).all()) for weights in state["model"].values())


def refused(text: Source, tmp_path: Path, checkpoint: Path = LLAMA, *texts: Source, **changes: Any) -> str:
    """The one line that says why. No output and no state is left behind."""
    output = changes.pop("output", tmp_path / "sparse")
    more = {name: changes.pop(name) for name in ("device", "held_out") if name in changes}
    with pytest.raises(UserError) as caught:
        sparsify(checkpoint, texts or [text], output, replace(OPTIONS, **changes), **more)
    assert not [*tmp_path.rglob("state.pt")] and not (tmp_path / "sparse").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_are_refused_in_one_line(text: Source, tmp_path: Path) -> None:
    assert "is not a folder" in refused(text, tmp_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("Heidi", encoding="utf-8")
    short, share = Source(tmp_path / "short.txt"), replace(text, share=0.5)
    assert "has no config.json" in refused(text, tmp_path, tmp_path / "empty")
    assert "short.txt has " in refused(text, tmp_path, LLAMA, short)
    assert "give each a share, or none" in refused(text, tmp_path, LLAMA, text, share)
    assert "cannot be read: No such file" in refused(text, tmp_path, held_out=tmp_path / "no.txt")
    assert "the model has 128 positions" in refused(text, tmp_path, context=129)
    assert "a new folder" in refused(text, tmp_path, output=tmp_path / "empty")
    assert "a new folder" in refused(text, tmp_path, output=tmp_path / "nowhere" / "sparse")
    for device in ("cuda:99", "x"):
        assert "`device`" in refused(text, tmp_path, device=device)
    for share in (0.0, -1.0, math.inf, math.nan):
        message = refused(text, tmp_path, LLAMA, replace(text, share=share))
        assert f"the share {share} is not a number above 0" in message
    whole = dict.fromkeys(("tokens", "batch", "accumulate", "loss_chunk"), 0) | {"seed": -1}
    wrong = {"learning_rate": 0.0, "l1": -1.0, "distil": 1.5, "activation": "gelu", "threshold": "two"}
    for name, value in (whole | wrong).items():
        message = refused(text, tmp_path, **{name: value})
        assert f"{value}" in message or f"{value:g}" in message


def test_models_that_cannot_be_made_sparse(text: Source, tmp_path: Path) -> None:
    for name in ("tiny-opt", "tiny-falcon", "tiny-gpt-oss"):
        assert "is of an unknown form" in refused(text, tmp_path, golden_checkpoint(name))
    for name, kind, activation in (
        ("tiny-drelu", "bamboo", "drelu"),
        ("tiny-smallthinker", "smallthinker", "relu"),
        ("tiny-minicpm", "minicpm", "relu"),
    ):
        reason = f"has no class for model_type '{kind}', whose FFN computes {activation}: convert it as it is"
        assert reason in refused(text, tmp_path, golden_checkpoint(name))
    assert "has other parts" in refused(text, tmp_path, make_wrapper(tmp_path, "wrapped-gemma3"))
    change_config(folder := copy_checkpoint(tmp_path, "tiny-qwen3"), hidden_act=...)
    assert "names no activation: add hidden_act" in refused(text, tmp_path, folder)
    change_config(folder := copy_checkpoint(tmp_path / "odd"), num_attention_heads=3)
    assert "transformers cannot load it" in refused(text, tmp_path, folder)
    folder = copy_checkpoint(tmp_path)
    change_tensors(folder, model__layers__1__mlp__up_proj__weight=...)
    assert "has no tensor 'model.layers.1.mlp.up_proj.weight'" in refused(text, tmp_path, folder)
    change_config(folder, model_type="gpt_neox")
    assert "model_type 'gpt_neox' is not" in refused(text, tmp_path, folder)


def test_the_penalty_grows_along_sines() -> None:
    shares = [penalty_share(i / 1000) for i in range(1001)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    for end, share in STAGES:
        assert penalty_share(end) == pytest.approx(share)
    (begin, low), (end, high) = STAGES[1:3]
    sine = low + (high - low) / 2 * (math.sin(-math.pi / 2 + math.pi / 4) + 1)  # ProSparse, equation 5
    assert penalty_share(begin + (end - begin) / 4) == pytest.approx(sine)
    assert max(rate_share(i / 1000) for i in range(1001)) <= 1 and rate_share(1.0) == pytest.approx(0.1)

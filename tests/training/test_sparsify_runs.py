"""Runs of sparsify that are killed, or meet a mistake, a full disk or a loss that is not a number."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
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

from hotcold.training import sparsifying  # noqa: E402
from hotcold.training.mixture import Mixture, NamedText  # noqa: E402
from hotcold.training.sparse_checkpoint import open_original  # noqa: E402
from hotcold.training.sparsifying import STAGES, SparsifyOptions, penalty_share, rate_share, sparsify  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
TEXT = NamedText("heidi", (DATA / "heidi.txt").read_text(encoding="utf-8")[:9000])
OPTIONS = SparsifyOptions(tokens=40 * 128, learning_rate=1e-3, context=32, batch=4, distil=0.5)
LLAMA = golden_checkpoint("tiny-llama")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sparsify(LLAMA, [TEXT], whole, OPTIONS)
    random = np.random.default_rng(29)
    starts = []
    for steps in (9, 3, 14):
        near, far = multiprocessing.get_context("fork").Pipe(duplex=False)

        def go(far: Any = far, most: int = steps + 3) -> None:
            def tell(done: int, total: int) -> None:
                nonlocal most
                far.send(done)
                most -= 1
                while not most:  # whoever kills may be late
                    time.sleep(1)

            sparsify(LLAMA, [TEXT], killed, OPTIONS, progress=tell, save_seconds=0)

        process = multiprocessing.get_context("fork").Process(target=go)
        process.start()
        seen = [near.recv() for _ in range(steps)]
        starts.append(seen[0])
        process.join(float(random.uniform(0, 0.01)))  # in a step, or while its state is saved
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not killed.exists()
    assert starts[0] == 128 < starts[1] < starts[2]  # each went on where the one before was ended
    reports: list[Any] = []
    found = sparsify(LLAMA, [TEXT], killed, OPTIONS, told=reports.append)
    assert files(whole) == files(killed)
    assert reports == found.reports and len(reports) == sparsifying.REPORTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_a_state_belongs_to_its_options(tmp_path: Path) -> None:
    output, work = tmp_path / "sparse", tmp_path / "sparse.work"

    def end_early(done: int, total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparsify(LLAMA, [TEXT], output, OPTIONS, progress=end_early, save_seconds=0)
    state = (work / "state.pt").read_bytes()
    with pytest.raises(UserError, match=r"sparse.work holds a run with l1 0.3, not 0.5: give the same"):
        sparsify(LLAMA, [TEXT], output, replace(OPTIONS, l1=0.5))
    with pytest.raises(UserError, match=r"holds a run with texts"):
        sparsify(LLAMA, [NamedText("heidi", TEXT.text + "x")], output, OPTIONS)
    assert (work / "state.pt").read_bytes() == state
    (work / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(UserError, match=r"state.pt is damaged"):
        sparsify(LLAMA, [TEXT], output, OPTIONS)


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


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Neither the state nor the output is lost: the next call only writes it."""
    output = tmp_path / "sparse"
    short = replace(OPTIONS, tokens=512, distil=0.0)
    with (
        largest_file(100_000),
        pytest.raises(UserError, match=r"state.pt cannot be saved .*: the state before"),
    ):
        sparsify(LLAMA, [TEXT], output, short)
    assert [*tmp_path.rglob("*")] == [tmp_path / "sparse.work"]
    steps: list[int] = []

    def count(done: int, total: int) -> None:
        steps.append(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparsifying, "write_checkpoint", limited(sparsifying.write_checkpoint))
        with pytest.raises(UserError, match=r"sparse cannot be written: "):
            sparsify(LLAMA, [TEXT], output, short, progress=count)
    assert [*tmp_path.iterdir()] == [tmp_path / "sparse.work"] and len(steps) == 4
    sparsify(LLAMA, [TEXT], output, short, progress=count)
    assert len(steps) == 4 and (output / "model.safetensors").is_file()


def limited(write: Any) -> Any:
    def write_little(*args: Any) -> None:
        with largest_file(100_000):
            write(*args)

    return write_little


def test_no_room_is_told_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsifying.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(UserError, match=r"needs \d+ bytes in all, and 5000 are free"):
        sparsify(LLAMA, [TEXT], tmp_path / "sparse", OPTIONS)
    assert not [*tmp_path.iterdir()]


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    """The state that stays is one from which a run could go on."""
    seen, fix = (
        "the loss|the gradient|a weight",
        "start again with a lower `learning_rate` and another `work`",
    )
    with pytest.raises(UserError, match=rf"({seen}) is (nan|inf) at step \d+ of 40: {fix}"):
        sparsify(LLAMA, [TEXT], tmp_path / "sparse", replace(OPTIONS, learning_rate=1e30), save_seconds=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["sparse.work", "state.pt"]
    state = torch.load(tmp_path / "sparse.work" / "state.pt", weights_only=True)
    assert all(bool(torch.isfinite(weights).all()) for weights in state["model"].values())


def refused(tmp_path: Path, checkpoint: Path = LLAMA, *texts: NamedText, **changes: Any) -> str:
    """The one line that says why, after which nothing is left behind."""
    output = changes.pop("output", tmp_path / "sparse")
    device = changes.pop("device", None)
    before = {*tmp_path.rglob("*")}
    with pytest.raises(UserError) as caught:
        sparsify(checkpoint, texts or [TEXT], output, replace(OPTIONS, **changes), device=device)
    assert {*tmp_path.rglob("*")} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path, tmp_path / "empty")
    assert refused(tmp_path, LLAMA, NamedText("short", "Heidi")).startswith("short has ")
    assert "give all a share, or none" in refused(tmp_path, LLAMA, TEXT, replace(TEXT, share=0.5))
    assert "the model knows 128 positions" in refused(tmp_path, context=129)
    assert "a new folder" in refused(tmp_path, output=tmp_path / "empty")
    assert "a new folder" in refused(tmp_path, output=tmp_path / "nowhere" / "sparse")
    assert "`device`" in refused(tmp_path, device="cuda:99") and "`device`" in refused(tmp_path, device="x")
    for name, value in {"learning_rate": 0.0, "l1": -1.0, "distil": 1.5, "activation": "gelu"}.items():
        assert f"{value}" in refused(tmp_path, **{name: value}) or f"{value:g}" in refused(
            tmp_path, **{name: value}
        )


def test_models_that_cannot_be_made_sparse(tmp_path: Path) -> None:
    for name in ("tiny-opt", "tiny-falcon", "tiny-gpt-oss"):
        assert "is of an unknown form" in refused(tmp_path, golden_checkpoint(name))
    for name, kind, activation in (
        ("tiny-drelu", "bamboo", "drelu"),
        ("tiny-smallthinker", "smallthinker", "relu"),
        ("tiny-minicpm", "minicpm", "relu"),
    ):
        reason = f"has no class for model_type '{kind}', whose FFN computes {activation}: convert it as it is"
        assert reason in refused(tmp_path, golden_checkpoint(name))
    assert "has other parts" in refused(tmp_path, make_wrapper(tmp_path, "wrapped-gemma3"))
    change_config(folder := copy_checkpoint(tmp_path, "tiny-qwen3"), hidden_act=...)
    assert "names no activation: add hidden_act" in refused(tmp_path, folder)
    change_config(folder := copy_checkpoint(tmp_path / "odd"), num_attention_heads=3)
    assert "transformers cannot load it" in refused(tmp_path, folder)
    folder = copy_checkpoint(tmp_path)
    change_tensors(folder, model__layers__1__mlp__up_proj__weight=...)
    assert "has no tensor 'model.layers.1.mlp.up_proj.weight'" in refused(tmp_path, folder)
    change_config(folder, model_type="gpt_neox")
    assert "model_type 'gpt_neox' is not" in refused(tmp_path, folder)


def test_the_penalty_grows_along_sines() -> None:
    shares = [penalty_share(i / 1000) for i in range(1001)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    for end, share in STAGES:
        assert penalty_share(end) == pytest.approx(share)
    (begin, low), (end, high) = STAGES[1:3]
    sine = low + (high - low) / 2 * (math.sin(-math.pi / 2 + math.pi / 4) + 1)  # ProSparse, equation 5
    assert penalty_share(begin + (end - begin) / 4) == pytest.approx(sine)
    assert max(rate_share(i / 1000) for i in range(1001)) <= 1 and rate_share(1.0) == pytest.approx(0.1)


def test_texts_are_mixed_by_their_shares() -> None:
    tokenizer = open_original(LLAMA).tokenizer
    texts = [NamedText("a", "a" * 4000, 3.0), NamedText("b", "b" * 9000, 1.0)]
    mixture = Mixture(texts, tokenizer, 32, seed=1)
    rows = np.concatenate([mixture.batch(step, 16) for step in range(50)])
    assert rows.shape == (800, 32) and (rows[:, 0] == tokenizer.bos_id).all()
    of_b = np.array([b"b" in tokenizer.piece(int(row[5])) for row in rows])
    assert 0.20 < of_b.mean() < 0.30
    assert (mixture.batch(7, 16) == mixture.batch(7, 16)).all()
    assert (mixture.batch(7, 16) != mixture.batch(8, 16)).any()
    assert mixture.held_out.shape[1] == 32
    alone = Mixture([replace(texts[0], share=None)], tokenizer, 32, seed=1)
    assert mixture.tokens > alone.tokens + 31 * len(alone.held_out) - 31  # its end is not trained on

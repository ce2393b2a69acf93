"""Sparse models of experts under a budget of memory: cold neurons' rows are read when they are active, or
when a predictor names them."""

from __future__ import annotations

import _thread
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.many_experts import budget, many_experts
from support.sidecars import PASSING

from hotcold.commands import cli
from hotcold.commands.info import describe
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.files import FileError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.model.config import Config
from hotcold.placement import expert_cache, hot_neurons
from hotcold.placement.expert_cache import ExpertCachePlan
from hotcold.placement.hot_neurons import HotNeurons
from hotcold.placement.profiles import Profile, find_profile, write_profile
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.hot_first import HotFirstWorth, hot_first
from hotcold.tasks.ram_planning import plan_ram

COUNT = 20
OPTIONS: dict[str, Any] = {"sequences": 3, "context": 128, "chunk": 32}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back by the page on Linux")


@pytest.fixture(autouse=True)
def no_small_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are smaller than the buffers that they would be read with, and than a few pages."""
    for module in (expert_cache, hot_neurons):
        monkeypatch.setattr(module, "reading_bytes", lambda row_bytes: 0)
    monkeypatch.setattr(hot_neurons, "_PAGE", 0)


def texts(session: Session, tokens: int = 12) -> list[list[int]]:
    """Three prompts at the same time; one is longer than a chunk."""
    random = np.random.default_rng(5)
    prompts = [[1, *random.integers(3, 288, length).tolist()] for length in (4, 50, 9)]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


def opened(path: Path, share: float | None, threads: int = 2) -> Session:
    ram = {} if share is None else {"ram_budget": budget(path, share, **OPTIONS)}
    return load(path, LoadOptions(threads=threads, **OPTIONS, **ram)).session()


def made_up_profile(path: Path) -> Profile:
    """Neurons are active at random, and experts are chosen at random."""
    random = np.random.default_rng(3)
    with open_gguf(path) as file:
        sizes = file_sizes(file, Config.from_metadata(file.metadata, file.magic, file.tensors), 64, "f16")
    firing = [random.random(n).astype(np.float16).astype(np.float32) for n in sizes.neurons]
    routing = [random.random(COUNT).astype(np.float16).astype(np.float32) for _ in firing]
    profile = Profile(firing, "made up", routing=routing, counted=100)
    facts = {"model_fingerprint": sizes.fingerprint, "tokens": 100}
    write_profile(path.with_suffix(".profile.gguf"), profile, facts)
    return profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a profile beside it."""
    folder = tmp_path_factory.mktemp("model")
    path = many_experts("tiny-turbosparse", folder, type="Q8_0", down="by_neuron", count=COUNT)
    made_up_profile(path)
    return path


@pytest.fixture(scope="module")
def ordered(model: Path) -> Path:
    path = model.with_name("ordered.gguf")
    hot_first(model, path, model.with_suffix(".profile.gguf"))
    return path


def test_rows_change_places_and_nothing_else(model: Path, ordered: Path) -> None:
    with open_gguf(model) as old, open_gguf(ordered) as new:
        sizes = file_sizes(old, Config.from_metadata(old.metadata, old.magic, old.tensors), 64, "f16")
        own = file_sizes(new, Config.from_metadata(new.metadata, new.magic, new.tensors), 64, "f16")
        before = find_profile(sizes, None, model)
        after = find_profile(own, None, ordered)
        assert after.routing is not None and before.routing is not None and after.counted == 100
        assert new.metadata["hotcold.ffn.hot_first"]
        assert old.tensors.keys() == new.tensors.keys()
        for name in old.tensors:
            a, b = old.load(name).data, new.load(name).data
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            if not any(f"ffn_{part}_exps" in name for part in ("gate", "up", "down")):
                assert a.tobytes() == b.tobytes()
                continue
            each = len(a) // COUNT
            for expert in range(COUNT):
                part = slice(expert * each, (expert + 1) * each)
                firing = before.firing[layer][part]
                by_heat = sorted(range(each), key=lambda i: (-firing[i], i))
                np.testing.assert_array_equal(b[part], a[part][by_heat])
                np.testing.assert_array_equal(after.firing[layer][part], firing[by_heat])
            np.testing.assert_array_equal(after.routing[layer], before.routing[layer])


def test_text_and_bits_are_the_same_at_every_budget(ordered: Path) -> None:
    whole = opened(ordered, None)
    expected, rows = texts(whole), whole.counters.rows.copy()
    logits = whole.transformer.read_logits(0, 1).copy()
    assert len({*map(tuple, expected)}) == 3
    shares = []
    for share, threads in ((1.0, 2), (0.95, 1), (0.6, 3), (0.42, 2), (0.25, 2)):
        session = opened(ordered, share, threads)
        own = session.model.plan.experts
        assert own is not None and own.all_fit == (share == 1)
        assert isinstance(own, HotNeurons if 0.3 < share < 1 else ExpertCachePlan)
        assert sum(own.bill.values()) + own.expert_bytes <= own.budget_bytes
        assert texts(session) == expected
        np.testing.assert_array_equal(session.transformer.read_logits(0, 1), logits)
        np.testing.assert_array_equal(session.counters.rows, rows)
        counts = session.model.disk_counts()
        assert (counts is None) == (share == 1)
        if isinstance(own, HotNeurons):
            assert counts is not None and counts.hits > 0 and counts.misses > 0
            shares.append(counts.hits / (counts.hits + counts.misses))
            assert "and up and down of" in "\n".join(session.notes)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("sparsity", ["off", "exact"])
def test_every_way_to_compute(sparsity: str, ordered: Path) -> None:
    expected = texts(load(ordered, LoadOptions(threads=2, **OPTIONS)).session(sparsity))
    assert texts(opened(ordered, 0.6).model.session(sparsity)) == expected


def test_what_is_read_depends_on_tokens_alone(ordered: Path) -> None:
    found = []
    for threads in (1, 3):
        session = opened(ordered, 0.5, threads)
        texts(session)
        counts = session.model.disk_counts()
        assert counts is not None
        found.append((counts.hits, counts.misses, counts.nbytes))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def predicted(ordered: Path) -> Path:
    """The same with a predictor of made-up factors."""
    path = ordered.with_name("predicted.gguf")
    path.write_bytes(ordered.read_bytes())
    profile = path.with_suffix(".profile.gguf")
    profile.write_bytes(ordered.with_suffix(".profile.gguf").read_bytes())
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        random, layers = np.random.default_rng(9), []
        for n in config.neurons:
            factors = [random.standard_normal(shape) for shape in ((32, config.dim), (n, 32))]
            packed = (quantise(each.astype(np.float32) / 6, "F32") for each in factors)
            layers.append(PredictorTensors(*packed, np.full(n, 0.1, np.float32), relu=False))
        facts = {"input": "normed", "candidates": np.full(config.layers, 0.4, np.float32)}
        facts |= PASSING.metadata()
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), layers, facts)
    return path


def test_predicted_neurons_are_the_same_at_every_budget(predicted: Path, ordered: Path) -> None:
    whole = opened(predicted, None)
    expected, rows = texts(whole), whole.counters.rows.copy()
    assert whole.sparsity == "predicted" and expected != texts(opened(ordered, None))
    nbytes = predicted.with_suffix(".predictor.gguf").stat().st_size
    shares = []
    for share, threads in ((0.8, 2), (0.45, 1), (0.25, 3), (0.1, 2)):
        session = opened(predicted, share, threads)
        own = session.model.plan.experts
        assert isinstance(own, HotNeurons) and not any(own.gate_bytes) and all(own.named)
        assert sum(own.bill.values()) + own.expert_bytes <= own.budget_bytes
        assert own.share == pytest.approx(share, abs=0.05)
        assert texts(session) == expected
        np.testing.assert_array_equal(session.counters.rows, rows)  # no gate is read that is not named
        counts = session.model.disk_counts()
        assert counts is not None and counts.misses > 0
        shares.append(counts.hits / (counts.hits + counts.misses))
        assert "gate, up and down of" in "\n".join(session.notes)
        without = load(predicted, LoadOptions(threads=1, ram_budget=1 << 30, sparsity="exact", **OPTIONS))
        assert without.plan.experts is not None
        more = own.bill["weights"] - without.plan.experts.bill["weights"]
        assert 0.8 * nbytes < more <= nbytes  # what the predictor takes
    assert shares == sorted(shares, reverse=True)


def test_without_the_predictor_such_a_budget_is_refused(predicted: Path) -> None:
    """It has no room for two experts of each layer, nor for all gates."""
    ram = budget(predicted, 0.1, **OPTIONS) - 1
    assert isinstance(
        load(predicted, LoadOptions(threads=1, ram_budget=ram, **OPTIONS)).plan.experts, HotNeurons
    )
    ram = budget(predicted, 0.1, sparsity="exact", **OPTIONS) - 1
    with pytest.raises(UserError, match=r"2 experts of each layer.*with a predictor .* less is enough"):
        load(predicted, LoadOptions(threads=1, ram_budget=ram, sparsity="exact", **OPTIONS))


@pytest.mark.parametrize("sparsity", ["exact", "off"])
def test_other_sessions_of_a_model_that_predicts(sparsity: str, predicted: Path, ordered: Path) -> None:
    """Nothing names neurons there, so whole experts are read."""
    assert texts(opened(predicted, 0.3).model.session(sparsity)) == texts(opened(ordered, None))


def test_a_cut_file_and_an_interrupt_of_named_rows(predicted: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    for suffix in (".gguf", ".profile.gguf", ".predictor.gguf"):
        path.with_suffix(suffix).write_bytes(predicted.with_suffix(suffix).read_bytes())
    session = opened(path, 0.2)
    expected, data, times = texts(session), path.read_bytes(), os.stat(path)
    os.truncate(path, len(data) // 3)
    # Which of its threads comes first decides: rows that are left have changed, others are beyond the end.
    cut = r"the file (is shorter|has changed since)"
    with pytest.raises(FileError, match=rf"neurons of expert [0-9]+ cannot be read: {cut}"):
        texts(session)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts(session) == expected
    backend: Any = session.model.backend
    backend._packer.disk.native.hold(True)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        texts(session)
    timer.join()
    backend._packer.disk.native.hold(False)
    assert texts(session) == expected


def test_the_plan_knows_predictors(predicted: Path) -> None:
    ram = budget(predicted, 0.25, context=128)
    plan = plan_ram(predicted, ram, context=128)
    assert (
        plan.expert_cache == load(predicted, LoadOptions(threads=1, ram_budget=ram, context=128)).plan.experts
    )
    assert isinstance(plan.expert_cache, HotNeurons)
    assert "neurons that predictors choose for a token are in memory" in str(plan) and json.dumps(
        plan.report()
    )
    with open_gguf(predicted) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        profile = find_profile(file_sizes(file, config, 64, "f16"), None, predicted)
    assert config.experts is not None
    for named, firing, n in zip(
        plan.expert_cache.named, profile.firing, plan.expert_cache.neurons, strict=True
    ):
        assert named is not None
        chosen = n * config.experts.chosen
        assert named * float(np.sum(firing)) == pytest.approx(
            max(0.4 * chosen, float(np.sum(firing))), rel=1e-4
        )


def test_the_plan_has_the_mode_of_the_run(predicted: Path) -> None:
    """All gates stay where neurons are not predicted."""
    for sparsity in ("exact", "predicted"):
        ram = budget(predicted, 0.6, context=128, sparsity=sparsity)
        own = LoadOptions(threads=1, ram_budget=ram, context=128, sparsity=sparsity)
        plan = plan_ram(predicted, ram, context=128, sparsity=sparsity)
        assert plan.expert_cache == load(predicted, own).plan.experts and isinstance(
            plan.expert_cache, HotNeurons
        )
        assert any(plan.expert_cache.gate_bytes) == (sparsity == "exact")
        with open_gguf(predicted) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            profile = find_profile(file_sizes(file, config, 64, "f16"), None, predicted)
        cold = plan.expert_cache.cold_per_token(profile)
        assert plan.missed_per_token == pytest.approx(sum(cold)) and plan.missed_per_token > 0
        read = sum(plan.expert_cache.disk_bytes(layer, n) for layer, n in enumerate(cold))
        assert plan.disk_bytes_per_token == pytest.approx(read)


def test_the_most_active_neurons_are_hot(ordered: Path) -> None:
    own = opened(ordered, 0.6).model.plan.experts
    assert isinstance(own, HotNeurons)
    with open_gguf(ordered) as file:
        sizes = file_sizes(file, Config.from_metadata(file.metadata, file.magic, file.tensors), 64, "f16")
    profile = find_profile(sizes, None, ordered)
    hot, cold = [], []
    for counts, firing in zip(own.hot, profile.firing, strict=True):
        for count, one in zip(counts, firing.reshape(COUNT, -1), strict=True):
            hot += one[:count].tolist()
            cold += one[count:].tolist()
    assert min(hot) >= max(cold)
    assert sum(own.cold_per_token(profile)) == pytest.approx(sum(cold), rel=1e-5)
    left = own.budget_bytes - sum(own.bill.values()) - own.expert_bytes
    assert 0 <= left < max(own.row_bytes)


def test_a_file_that_is_cut_ends_the_request_alone(ordered: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(ordered.read_bytes())
    session = opened(path, 0.45)
    expected = texts(session)
    data, times = path.read_bytes(), os.stat(path)
    os.truncate(path, len(data) // 3)
    needed = "layer [01]: neurons of expert [0-9]+ cannot be read: the file is shorter than it was"
    with pytest.raises(FileError, match=needed):
        texts(session)
    path.write_bytes(data)
    with pytest.raises(FileError, match="the file has changed since it was opened"):
        texts(session)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts(session) == expected


def test_an_interrupt_ends_a_wait_for_the_disk(ordered: Path) -> None:
    session = opened(ordered, 0.45)
    backend: Any = session.model.backend
    disk = backend._packer.disk
    assert disk is not None
    disk.native.hold(True)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        texts(session)
    timer.join()
    disk.native.hold(False)
    assert texts(session) == texts(opened(ordered, None))


def test_the_plan_is_what_loading_does(ordered: Path) -> None:
    found = []
    for share in (0.45, 0.7):
        ram = budget(ordered, share, context=128)
        plan = plan_ram(ordered, ram, context=128)
        assert (
            plan.expert_cache
            == load(ordered, LoadOptions(threads=1, ram_budget=ram, context=128)).plan.experts
        )
        assert 0 < plan.hit_share < 1 and plan.disk_bytes_per_token > 0
        assert "neurons that are active for a token" in str(plan) and json.dumps(plan.report())
        found.append(plan)
    assert found[0].hit_share < found[1].hit_share
    assert found[0].missed_per_token > found[1].missed_per_token


def test_convert_says_what_it_is_worth(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, profile = tmp_path / "new.gguf", str(model.with_suffix(".profile.gguf"))
    args = ["convert", str(model), str(output), "--hot-first", profile]
    assert cli.main([*args, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("with ") and lines[0].endswith("with hot neurons first")
    worth = json.loads(lines[-1])["worth"]
    assert worth["row_bytes_per_token"] > 0 and worth["rows_per_token"] > 0
    assert output.with_suffix(".profile.gguf").exists()
    for more, needed in (
        (["--force", "--type", "q8_0"], "--hot-first only changes the order of neurons: leave out --type"),
        (["--force", "-f", str(profile)], "--hot-first does not change results: leave out -f"),
        ([], "new.gguf: the file exists: give another name, or --force to replace it"),
    ):
        assert cli.main([*args, *more]) == 2
        assert needed in capsys.readouterr().err


def test_convert_takes_a_predictor_along(predicted: Path, tmp_path: Path) -> None:
    """Its neurons change places as the model's do, and the text is the same."""
    own, output = tmp_path / "own.gguf", tmp_path / "new.gguf"
    for suffix in (".gguf", ".profile.gguf"):
        own.with_suffix(suffix).write_bytes(predicted.with_suffix(suffix).read_bytes())
    with open_gguf(own) as file:  # less active neurons first
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        profile = find_profile(file_sizes(file, config, 64, "f16"), None, own)
        firing = [(1 - each).astype(np.float16).astype(np.float32) for each in profile.firing]
        turned = replace(profile, firing=firing)
        facts = {"model_fingerprint": file.fingerprint(), "tokens": 100}
    write_profile(tmp_path / "turned.gguf", turned, facts)
    own.with_suffix(".predictor.gguf").write_bytes(predicted.with_suffix(".predictor.gguf").read_bytes())
    _, worth = hot_first(own, output, tmp_path / "turned.gguf")
    assert "neurons that predictors choose for a token" in str(worth)
    with open_gguf(own) as old, open_gguf(output) as new:
        assert old.tensors.keys() == new.tensors.keys() and new.count < old.count and new.side_by_side
        for name in new.side_by_side:
            each = len(old.load(name).data) // COUNT
            for expert in range(0, COUNT, 7):
                part = slice(expert * each, (expert + 1) * each)
                order = np.argsort(-turned.firing[int(name.split(".")[1])][part], kind="stable")
                np.testing.assert_array_equal(new.load(name).data[part], old.load(name).data[part][order])
                np.testing.assert_array_equal(
                    new.read_rows(name, part.start, part.stop), new.load(name).data[part]
                )
                np.testing.assert_array_equal(new.stored(name).load().data[part], new.load(name).data[part])
        found = describe(old)["neuron_order"], describe(new)["neuron_order"]
        assert found == (
            "hot first, the rows of a neuron in separate tensors",
            "hot first, the rows of a neuron together",
        )
    whole = opened(output, None)
    expected = texts(whole)
    assert whole.sparsity == "predicted"
    for share in (0.5, 0.2):
        session = opened(output, share)
        experts = session.model.plan.experts
        assert isinstance(experts, HotNeurons) and experts.reads == (1, 1)
        assert texts(session) == expected
    exact = LoadOptions(threads=2, sparsity="exact", **OPTIONS)
    bounded = LoadOptions(ram_budget=budget(output, 0.7, sparsity="exact", **OPTIONS), **exact)
    assert texts(load(output, exact).session()) == texts(load(output, bounded).session())
    output.unlink()
    with pytest.raises(UserError, match=r"new\.profile\.gguf"):
        hot_first(own, output, tmp_path / "turned.gguf")


def test_worth_says_what_does_not_fit() -> None:
    text = str(HotFirstWorth(1 << 20, None, None, None))
    assert "two experts of each layer do not fit" in text and "gates do not fit" in text


def test_neurons_that_cannot_change_places_are_refused(model: Path, tmp_path: Path) -> None:
    profile = model.with_suffix(".profile.gguf")
    by_output = many_experts("tiny-turbosparse", tmp_path, type="Q8_0", down="by_output", count=COUNT)
    made_up_profile(by_output)
    with pytest.raises(UserError, match=r"down is stored by_output.*convert the model with `down=by_neuron`"):
        hot_first(by_output, tmp_path / "a.gguf", by_output.with_suffix(".profile.gguf"))
    with pytest.raises(UserError, match="a file for this model"):
        hot_first(by_output, tmp_path / "a.gguf", profile)
    silu = many_experts("tiny-qwen3moe", tmp_path, type="Q8_0", down="by_neuron", count=COUNT)
    with pytest.raises(UserError, match="MoE models whose gates give zeros"):
        hot_first(silu, tmp_path / "a.gguf", profile)
    assert not (tmp_path / "a.gguf").exists()

"""Plans for a budget of RAM: the bill is that of loading, and hits are those of a simulation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.file_sizes import file_sizes
from support.many_experts import budget, many_experts

import hotcold
from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement import expert_cache
from hotcold.placement import routes as ram_routes
from hotcold.placement.expert_cache import ExpertCachePlan
from hotcold.placement.profiles import Profile, write_profile
from hotcold.placement.routes import how_many, mean, missed_by_token
from hotcold.runtime import memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks import ram_planning
from hotcold.tasks.ram_planning import plan_ram
from hotcold.values import exact_size, read_size

COUNT = 20

Floats = npt.NDArray[np.float64]
Routes = npt.NDArray[Any]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(expert_cache, "reading_bytes", lambda row_bytes: 0)
    return many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)


def test_the_plan_is_what_loading_does(model: Path) -> None:
    ram = budget(model, 0.4, context=128)
    plan = plan_ram(model, ram, context=128)
    loaded = load(model, LoadOptions(threads=1, ram_budget=ram, context=128)).plan.experts
    assert plan.expert_cache == loaded and loaded is not None and not loaded.all_fit
    read = plan.missed_per_token * loaded.unit_bytes[0]  # all layers are alike
    assert 0 < plan.hit_share < 1 and plan.disk_bytes_per_token == pytest.approx(read)
    for line in (
        "of 20 experts of each layer",
        f"predicted   {plan.hit_share:.1%} of the experts that a token chooses are in memory",
        f"{plan.missed_per_token:.2f} per token are not, which reads ",
        f"hotcold bench with `ram_budget={exact_size(ram)}` measures it",
    ):
        assert line in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 80
    assert json.loads(json.dumps(plan.report()))["shelves"]["places"] == list(loaded.slots)


@given(seed=st.integers(0, 99), slots=st.integers(3, 19), pinned=st.integers(0, 10))
@settings(max_examples=10, deadline=None)
def test_hits_are_those_of_a_simulation(seed: int, slots: int, pinned: int) -> None:
    """Tokens that choose each expert independently of the last one, and of each other expert."""
    random = np.random.default_rng(seed)
    shares, pinned = random.dirichlet(np.full(COUNT, 2.0)) * 3, min(pinned, slots - 2)
    shares = np.minimum(shares, 0.9)
    hot = tuple(np.argsort(-shares)[:slots].tolist())
    own = ExpertCachePlan(0, {}, COUNT, (64,), (slots,), (hot,), (pinned,))
    missed = ram_planning.missing_shares(own, 0, shares).sum()
    tokens = [np.flatnonzero(random.random(COUNT) < shares) for _ in range(3000)]
    simulated_mean = mean(simulated(tokens, slots, {*hot[:pinned]}))
    assert missed == pytest.approx(simulated_mean, abs=0.12 + 0.1 * missed)


def drawn(shares: Floats, count: int, stays: float, random: np.random.Generator) -> Routes:
    """Experts of some tokens, ``[T, 3]``: each is one of the last token's, or is drawn anew."""
    last = random.choice(COUNT, 3, replace=False, p=shares)
    found = []
    for _ in range(count):
        others = [e for e in random.permutation(last) if random.random() < stays]
        anew = [e for e in random.choice(COUNT, COUNT, replace=False, p=shares) if e not in others]
        last = np.array([*others, *anew][:3])
        found.append(last)
    return np.array(found)


def simulated(routes: Iterable[Routes], slots: int, stay: set[int]) -> Floats:
    """The number of tokens that miss 0, 1, 2, ... experts after the first 200, with the cache as a list."""
    named: dict[int, int] = {}
    counts = np.zeros(COUNT + 1)
    for number, token in enumerate(routes):
        chosen = sorted(set(token.tolist()) - stay)
        for expert in (e for e in chosen if e in named):
            named[expert] = number
        missed = [e for e in chosen if e not in named]
        for expert in missed:
            if len(named) == slots - len(stay):
                del named[min(named, key=lambda e: (named[e], e))]
            named[expert] = number
        counts[len(missed)] += number >= 200
    return counts / counts.sum()


@pytest.mark.parametrize("pinned", [0, 4])
@pytest.mark.parametrize("slots", [7, 14])
@pytest.mark.parametrize("stays", [0.0, 0.6])
def test_misses_of_a_replayed_text_are_those_of_a_longer_one(stays: float, slots: int, pinned: int) -> None:
    """A short text, in which many experts are named for the first time, beside many times as many tokens."""
    random = np.random.default_rng(7)
    shares = random.dirichlet(np.full(COUNT, 2.0))
    long = drawn(shares, 3000, stays, random).astype(np.int16)  # as in a file
    if not pinned:  # nothing is estimated but first uses: exactly the simulation's
        whole = missed_by_token(long, COUNT, slots)
        np.testing.assert_allclose(whole, simulated(long, slots, set())[:4], atol=0.02)
    short = [missed_by_token(each, COUNT, slots, pinned) for each in np.array_split(long, 30)]
    often = np.bincount(long.ravel(), minlength=COUNT)
    true = simulated(long, slots, {*np.argsort(-often)[:pinned].tolist()})
    assert mean(np.mean(short, 0)) == pytest.approx(mean(true), rel=0.12, abs=0.02)
    for each in short:
        assert each.sum() == pytest.approx(1) and (each >= 0).all()


def test_an_estimate_of_first_uses() -> None:
    """Two places, one expert a token. How deep the three first uses are is not known; the third is 2 at
    least."""
    routes = np.array([[0], [1], [2], [0], [2]])
    depths, first = ram_routes._depths(routes, 4, np.zeros(4, bool))
    assert depths.ravel().tolist() == [0, 1, 2, 2, 1] and first.ravel().tolist() == [True] * 3 + [False] * 2
    # Of three that are 1 or more for certain one ends at 1; of the one that says something of 2, all.
    np.testing.assert_allclose(ram_routes._survival(depths, first, 4), [1, 1, 2 / 3, 0, 0])
    # So the first two miss with 2/3 each, and two surely.
    np.testing.assert_allclose(missed_by_token(routes, 4, 2), [1 / 3, 2 / 3])


def test_a_text_of_no_tokens_or_room_for_all_misses_nothing() -> None:
    assert missed_by_token(np.zeros((0, 2), np.int16), 4, 2).tolist() == [1, 0, 0]
    assert missed_by_token(np.array([[0, 1]]), 4, 4).tolist() == [1, 0, 0]


def test_a_plan_replays_the_routes_of_a_profile(model: Path, tmp_path: Path) -> None:
    """Tokens that always choose the same experts miss none of them; tokens that choose in turns miss all."""
    ram = budget(model, 0.4, context=128)
    found = {}
    for name in ("alike", "in turns"):
        with open_gguf(model) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            sizes = file_sizes(file, config, 128, "f16")
        assert config.experts is not None
        k = config.experts.chosen
        ids = np.arange(60 * k).reshape(60, k) % COUNT if name != "alike" else np.tile(np.arange(k), (60, 1))
        routing = [np.full(COUNT, k / COUNT)] * config.layers
        firing = [np.full(n, k / COUNT) for n in sizes.neurons.tolist()]
        profile = Profile(firing, name, routing=routing, routes=[ids] * config.layers)
        path = tmp_path / "text.profile.gguf"
        write_profile(path, profile, {"model_fingerprint": sizes.fingerprint})
        found[name] = plan_ram(model, ram, context=128, profile=path)
    assert found["alike"].hit_share == pytest.approx(1) and found["in turns"].hit_share < 0.001
    assert found["alike"].missed_per_token == pytest.approx(0)
    assert found["in turns"].missed_per_token == pytest.approx(k * config.layers, rel=0.001)
    assert found["alike"].disk_bytes_per_token == pytest.approx(0)
    assert found["in turns"].disk_bytes_per_token == pytest.approx(
        k * sum(found["alike"].expert_cache.unit_bytes), rel=0.001
    )


def test_shares_of_a_short_text_are_nearer_to_their_mean() -> None:
    """As near as leaves the error of 400 such texts smallest."""
    random = np.random.default_rng(3)
    shares = np.clip(random.dirichlet(np.full(COUNT, 4.0)) * 3, 0, 1)
    texts = [random.binomial(60, shares) / 60 for _ in range(400)]
    plain = np.mean([((each - shares) ** 2).sum() for each in texts])
    steadied = [ram_planning._steadied(each, 60) for each in texts]
    assert np.mean([((each - shares) ** 2).sum() for each in steadied]) < plain
    for each, before in zip(steadied, texts, strict=True):
        assert each.sum() == pytest.approx(before.sum())
    np.testing.assert_array_equal(ram_planning._steadied(shares, None), shares)


def test_how_many_experts_a_token_misses() -> None:
    """Beside all cases of four experts."""
    missing = np.array([0.5, 0.0, 0.25, 0.9])
    cases: dict[int, float] = dict.fromkeys(range(4), 0.0)
    for case in itertools.product((0, 1), repeat=4):
        cases[sum(case)] = cases.get(sum(case), 0) + np.prod(np.where(case, missing, 1 - missing))
    found = how_many(missing)
    np.testing.assert_allclose(found, [cases[n] for n in range(len(found))])


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "-m", str(model), "-c", "128"]
    args = [*plan, "--ram-budget", exact_size(budget(model, 0.4, context=128))]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert (
        "per token are not, which reads" in out
        and f"hotcold bench with --ram-budget {args[-1]} measures it" in out
    )
    for more in (["--vram-budget", "1GiB"], ["--hardware", "rtx4090-i9"]):
        line = refused(capsys, *args, *more)
        assert f"--ram-budget plans only for the CPU: leave out {more[0]}" in line
    assert "this model has no experts" in refused(
        capsys, "plan", "-m", str(model_path()), "--ram-budget", "1GiB"
    )
    for_gpu = [*plan, "--sparsity", "off", "--vram-budget", "1GiB"]
    assert "--sparsity needs --ram-budget" in refused(capsys, *for_gpu)


@pytest.mark.parametrize("size", ["0", "0B", "1B", "1KiB"])
def test_budgets_that_hold_nothing_are_refused_by_name(
    size: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "plan", "-m", str(model), "--ram-budget", size)
    got = exact_size(read_size(size))
    assert f"--ram-budget is {got}:" in line or f"--ram-budget of {got}: this model needs" in line


def test_one_expert_is_too_few_and_what_the_error_suggests_is_enough(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of one expert of each layer, and the size that the error names."""
    two = budget(model, 0, context=128)
    expert_cache = plan_ram(model, two, context=128).expert_cache
    assert isinstance(expert_cache, ExpertCachePlan)
    assert (
        set(expert_cache.slots) == {2} and sum(expert_cache.bill.values()) + expert_cache.expert_bytes == two
    )
    one = two - sum(expert_cache.unit_bytes)
    plan = ["plan", "-m", str(model), "-c", "128", "--ram-budget"]
    line = refused(capsys, *plan, exact_size(one))
    assert f"--ram-budget of {exact_size(one)}: this model needs " in line
    assert cli.main([*plan, line.split(" needs ")[1].split()[0]]) == 0


def test_a_profile_of_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.profile.gguf"
    with open_gguf(model) as file:
        sizes = file_sizes(file, Config.from_metadata(file.metadata, file.magic, file.tensors), 128, "f16")
    firing = [np.full(n, 0.1) for n in sizes.neurons.tolist()]
    write_profile(other, Profile(firing, "made up"), {"model_fingerprint": "another"})
    size = exact_size(budget(model, 0.4, context=128))
    line = refused(capsys, "plan", "-m", str(model), "--ram-budget", size, "--profile", str(other))
    assert "other.profile.gguf" in line and "a file for this model" in line


def test_a_budget_above_this_machine_s_memory_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each command, and where bytes were copied without a unit; the size that is allowed is."""
    monkeypatch.setattr(memory, "machine_memory", lambda: (8 << 30) + 5)
    for command in (["plan"], ["generate", "-p", "a"], ["bench"]):
        for size in ("8193MiB", "884552704"):
            line = refused(capsys, *command, "-m", str(model), "--ram-budget", size)
            got = f"--ram-budget is {exact_size(read_size(size))}, and this machine has 8.00 GiB"
            assert f"{got}: at most 8GiB are allowed" in line
    assert cli.main(["plan", "-m", str(model), "--ram-budget", "8GiB"]) == 0
    with pytest.raises(UserError, match="`ram_budget` is 9GiB"):
        hotcold.LLM(model, ram_budget="9GiB")


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.full((5, 2), COUNT), r"tensor blk\.0\.routes holds 20: experts from 0 to 19 are needed"),
        (np.full((5, 2), -1), r"tensor blk\.0\.routes holds -1: experts from 0 to 19 are needed"),
        (
            np.zeros((5, COUNT + 1)),
            r"tensor blk\.0\.routes has shape \(5, 21\): \(tokens, 1 to 20\) is needed",
        ),
        (np.zeros((0, 0)), r"tensor blk\.0\.routes is missing: every layer of experts needs one"),
    ],
)
def test_routes_that_cannot_be(routes: Routes, message: str, model: Path, tmp_path: Path) -> None:
    with open_gguf(model) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 128, "f16")
    firing = [np.full(n, 0.1) for n in sizes.neurons.tolist()]
    routing = [np.full(COUNT, 0.1)] * config.layers
    own = [routes.astype(np.int64), *[np.zeros((5, 2), np.int64)] * (config.layers - 1)]
    path = tmp_path / "text.profile.gguf"
    profile = Profile(firing, "made up", routing=routing, routes=own)
    write_profile(path, profile, {"model_fingerprint": sizes.fingerprint})
    with pytest.raises(UserError, match=message):
        plan_ram(model, budget(model, 0.4, context=128), context=128, profile=path)

"""Plans for a budget of RAM: the bill is that of loading, hits are those of a simulation, and rates lie
between those that were measured."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.many_experts import budget, many_experts

import hotcold
from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import _native
from hotcold.model.config import Config
from hotcold.placement import disk_speed, expert_speed, shelves
from hotcold.placement import routes as ram_routes
from hotcold.placement.disk_speed import DEPTHS, SIZES, DiskSpeed, Reads, measure_disk
from hotcold.placement.expert_speed import measure_experts
from hotcold.placement.hardware import find_hardware
from hotcold.placement.profiles import Profile, write_profile
from hotcold.placement.routes import how_many, mean, missed_by_token
from hotcold.placement.shelves import Shelves
from hotcold.placement.sizes import sizes_of_file
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks import doctor, ram_planning
from hotcold.tasks.first_layers import TokenTime
from hotcold.tasks.missed_experts import Between, MissTime
from hotcold.tasks.ram_planning import plan_ram

COUNT = 20

Floats = npt.NDArray[np.float64]
Routes = npt.NDArray[Any]
MACHINE = find_hardware("rtx4090-i9")


def disk(gb_s: float = 1.0) -> DiskSpeed:
    """A disk whose rate grows with reads under way, up to 8, and halves for small reads."""
    reads = [Reads(n, d, False, gb_s * d / 8 * (1 if n > 4096 else 0.5)) for n in SIZES for d in DEPTHS]
    return DiskSpeed("a disk", True, (Reads(SIZES[-1], 8, True, gb_s), *reads))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shelves, "reading_bytes", lambda row_bytes: 0)
    return many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)


def test_the_plan_is_what_loading_does(model: Path) -> None:
    ram = budget(model, 0.4, context=128)
    plan = plan_ram(model, ram, context=128, hardware=MACHINE, disk=disk())
    loaded = load(model, LoadOptions(threads=1, ram_budget=ram, context=128)).shelves
    assert plan.shelves == loaded and loaded is not None and not loaded.all_fit
    assert 0 < plan.hit_share < 1 and 0 < plan.predicted_tok_s < plan.resident_tok_s
    assert "of 20 experts of each layer" in str(plan) and "past the system's cache" in str(plan)
    assert json.loads(json.dumps(plan.report()))["shelves"]["places"] == list(loaded.places)


def test_more_memory_and_faster_disks_are_faster(model: Path) -> None:
    def speed(share: float, gb_s: float) -> float:
        ram = budget(model, share, context=128)
        return plan_ram(model, ram, context=128, hardware=MACHINE, disk=disk(gb_s)).predicted_tok_s

    found = [speed(share, 1.0) for share in (0.2, 0.5, 0.9, 1.0)]
    assert found == sorted(found) and found[0] < found[-1]
    assert speed(0.3, 0.1) < speed(0.3, 1.0)
    assert speed(1.0, 0.1) == speed(1.0, 1.0)  # nothing is read


@given(seed=st.integers(0, 99), places=st.integers(3, 19), kept=st.integers(0, 10))
@settings(max_examples=10, deadline=None)
def test_hits_are_those_of_a_simulation(seed: int, places: int, kept: int) -> None:
    """Tokens that choose each expert independently of the last one, and of each other expert."""
    random = np.random.default_rng(seed)
    shares, kept = random.dirichlet(np.full(COUNT, 2.0)) * 3, min(kept, places - 2)
    shares = np.minimum(shares, 0.9)
    hot = tuple(np.argsort(-shares)[:places].tolist())
    own = Shelves(0, {}, COUNT, (64,), (places,), (hot,), (kept,))
    missed = ram_planning.missing_shares(own, 0, shares).sum()
    tokens = [np.flatnonzero(random.random(COUNT) < shares) for _ in range(3000)]
    seen = mean(simulated(tokens, places, {*hot[:kept]}))
    assert missed == pytest.approx(seen, abs=0.12 + 0.1 * missed)


def drawn(shares: Floats, count: int, stays: float, random: np.random.Generator) -> Routes:
    """Experts of so many tokens, ``[T, 3]``: each is one of the last token's, or else is drawn anew."""
    last = random.choice(COUNT, 3, replace=False, p=shares)
    found = []
    for _ in range(count):
        others = [e for e in random.permutation(last) if random.random() < stays]
        anew = [e for e in random.choice(COUNT, COUNT, replace=False, p=shares) if e not in others]
        last = np.array([*others, *anew][:3])
        found.append(last)
    return np.array(found)


def simulated(routes: Iterable[Routes], places: int, stay: set[int]) -> Floats:
    """How often tokens miss 0, 1, 2, ... experts after the first 200: with what lies in memory as a list."""
    named: dict[int, int] = {}
    counts = np.zeros(COUNT + 1)
    for number, token in enumerate(routes):
        chosen = sorted(set(token.tolist()) - stay)
        for expert in (e for e in chosen if e in named):
            named[expert] = number
        missed = [e for e in chosen if e not in named]
        for expert in missed:
            if len(named) == places - len(stay):
                del named[min(named, key=lambda e: (named[e], e))]
            named[expert] = number
        counts[len(missed)] += number >= 200
    return counts / counts.sum()


@pytest.mark.parametrize("kept", [0, 4])
@pytest.mark.parametrize("places", [7, 14])
@pytest.mark.parametrize("stays", [0.0, 0.6])
def test_misses_of_a_replayed_text_are_those_of_a_longer_one(stays: float, places: int, kept: int) -> None:
    """A short text, in which many experts are named for the first time, beside many times as many tokens."""
    random = np.random.default_rng(7)
    shares = random.dirichlet(np.full(COUNT, 2.0))
    long = drawn(shares, 3000, stays, random).astype(np.int16)  # as in a file
    if not kept:  # nothing is estimated but first uses: exactly the simulation's
        whole = missed_by_token(long, COUNT, places)
        np.testing.assert_allclose(whole, simulated(long, places, set())[:4], atol=0.02)
    short = [missed_by_token(each, COUNT, places, kept) for each in np.array_split(long, 30)]
    often = np.bincount(long.ravel(), minlength=COUNT)
    true = simulated(long, places, {*np.argsort(-often)[:kept].tolist()})
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
            sizes = sizes_of_file(file, config, 128, "f16")
        assert config.experts is not None
        k = config.experts.chosen
        ids = np.arange(60 * k).reshape(60, k) % COUNT if name != "alike" else np.tile(np.arange(k), (60, 1))
        routing = [np.full(COUNT, k / COUNT)] * config.layers
        firing = [np.full(n, k / COUNT) for n in sizes.neurons.tolist()]
        profile = Profile(firing, name, routing=routing, routes=[ids] * config.layers)
        path = tmp_path / "text.profile.gguf"
        write_profile(path, profile, {"model_fingerprint": sizes.fingerprint})
        found[name] = plan_ram(model, ram, context=128, hardware=MACHINE, disk=disk(), profile=path)
    assert found["alike"].hit_share == pytest.approx(1) and found["in turns"].hit_share < 0.001
    assert found["alike"].predicted_tok_s > found["in turns"].predicted_tok_s
    assert found["alike"].disk_bytes_per_token == pytest.approx(0)
    assert found["in turns"].disk_bytes_per_token == pytest.approx(
        k * sum(found["alike"].shelves.unit_bytes), rel=0.001
    )


@pytest.mark.parametrize("name", ["tiny-qwen3moe", "tiny-turbosparse", "tiny-gpt-oss"])
def test_computing_is_measured_with_experts_of_the_shape(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_speed, "_SECONDS", 0.0)
    monkeypatch.setattr(expert_speed, "_BYTES", 1 << 20)
    path = many_experts(name, tmp_path, type="Q8_0", down="by_output", count=COUNT)
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        assert config.experts is not None
        odd = replace(config.experts, chosen=1, neurons=20, latent=32)  # no whole block of down, in the file
        for experts in (config.experts, odd):
            found = measure_experts(file, replace(config, experts=experts), 1)
            assert found.gb_s > 0 and found.packing_gb_s > 0


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


def test_rates_between_those_that_were_measured() -> None:
    known = disk(8.0)
    for n in SIZES[1:]:
        for depth in DEPTHS:
            assert known.gb_s(n, depth) == pytest.approx(depth)
    assert known.gb_s(1 << 20, 2) == pytest.approx(2)  # the geometric mean of 1 and 4
    assert known.gb_s(1 << 30, 100) == pytest.approx(8) and known.gb_s(1, 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("way", ["io_uring", "threads"])
def test_a_disk_is_measured(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the way in which experts are read: by io_uring with as many small reads at once as then."""
    if way == "io_uring" and _native.why_no_rings():
        pytest.skip("needs Linux with io_uring")
    monkeypatch.setenv("HOTCOLD_READS", way)
    monkeypatch.setattr(disk_speed, "_SECONDS", 0.0)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    told: list[tuple[int, int]] = []
    found = measure_disk(path, lambda *each: told.append(each))
    more = {4 << 10: 64, 64 << 10: 64, 512 << 10: 24} if way == "io_uring" else {}
    kinds = {(n, d) for n in SIZES for d in DEPTHS} | {*more.items()}
    assert {(each.nbytes, each.depth) for each in found.reads if not each.sequential} == kinds
    count = 1 + len(kinds)
    assert len(found.reads) == count and all(each.gb_s > 0 for each in found.reads)
    assert told[0] == (0, count) and told[-1] == (count, count)
    assert found.sequential_gb_s == found.reads[0].gb_s
    assert "8 at once" in str(found) and ("64 at once" in str(found)) == (way == "io_uring")
    assert found.way == ("by 8 threads" if way == "threads" else "by io_uring") and found.way in str(found)
    rates = iter([*[(1e9, True)] * 5, (1e9, False), *[(1e9, True)] * (count - 6)])
    monkeypatch.setattr(_native, "probe_disk", lambda *probe, rings: next(rates))
    assert not measure_disk(path).direct  # one came through the system's cache
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"large has 5 B: a file of 16\.00 MiB at least is needed"):
        measure_disk(path)


def test_a_plan_measures_tokens_and_misses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the two layers takes 13 ms, and a missed expert adds 2."""
    asked: list[Between] = []

    def misses(file: Any, config: Any, own: Any, missing: Any, between: Between) -> MissTime:
        asked.append(between)
        missed = sum(mean(each) for each in missing)
        return MissTime(0.013, 0.013 + 0.004 * missed, 2 * missed)  # twice as many as are expected

    monkeypatch.setattr(ram_planning, "sizes_to_time", lambda file, config: (1, 3))
    time_tokens = lambda file, sizes, options: TokenTime(1, 3, 0.01, 0.003, 128)  # noqa: E731
    monkeypatch.setattr(ram_planning, "time_tokens", time_tokens)
    monkeypatch.setattr(ram_planning, "time_misses", misses)
    monkeypatch.setattr(
        ram_planning, "measure_experts", lambda file, config: expert_speed.ExpertSpeed(10.0, 5.0)
    )
    ram = budget(model, 0.4, context=128)
    told: list[str] = []
    plan = plan_ram(model, ram, context=128, progress=lambda phase, done, total: told.append(phase))
    missed = plan.disk_bytes_per_token / max(plan.shelves.unit_bytes)
    assert 1 / plan.resident_tok_s == pytest.approx(0.013)
    assert 1 / plan.predicted_tok_s == pytest.approx(0.013 + 0.002 * missed)
    assert asked[0].layer_s == 0.003 and asked[0].besides_s == pytest.approx(0.007)
    assert told == ["timing tokens"] * 2 + ["reading experts"] * 2 and plan.disk is None
    assert "3.00 ms a layer" in str(plan) and "missed experts a token add" in str(plan)
    assert json.loads(json.dumps(plan.report()))["misses"]["hits_s"] == 0.013
    whole = plan_ram(model, budget(model, 1.0, context=128), context=128)
    assert whole.misses is None and whole.disk is None and whole.predicted_tok_s == whole.resident_tok_s
    # At position 128 there are no more keys and values to come; at 0 all of the context's.
    monkeypatch.setattr(ram_planning, "time_tokens", lambda *given: TokenTime(1, 3, 0.01, 0.003, 0))
    with open_gguf(model) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        kv = float(sizes_of_file(file, config, 128, "f16").kv.sum())
    again = plan_ram(model, ram, context=128)
    assert 1 / again.resident_tok_s == pytest.approx(0.013 + kv / 10e9)


def test_a_plan_says_what_it_could_not_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise UserError("there is no room")

    ram = budget(model, 0.4, context=128)
    assert "too few layers to time some" in plan_ram(model, ram, context=128, disk=disk()).memory
    monkeypatch.setattr(ram_planning, "sizes_to_time", lambda file, config: (1, 3))
    monkeypatch.setattr(ram_planning, "time_tokens", fails)
    plan = plan_ram(model, ram, context=128, disk=disk())
    assert "experts alone: its first layers cannot be loaded (there is no room)" in plan.memory
    assert plan.token is None and plan.predicted_tok_s > 0


def test_processor_seconds_of_reads() -> None:
    """They are those of the nearest measurement."""
    reads = [Reads(n, d, False, 1.0, n + d) for n in SIZES for d in DEPTHS]
    known = DiskSpeed("a disk", True, (Reads(SIZES[-1], 8, True, 1.0, 1e9), *reads))
    assert known.cpu_s_gb(5000, 1) == 4097 and known.cpu_s_gb(3 << 20, 64) == (2 << 20) + DEPTHS[-1]


@pytest.mark.parametrize(
    ("nbytes", "depth", "needed"),
    [
        (4097, 1, "whole blocks"),
        (0, 1, "whole blocks"),
        (1 << 30, 1, "whole blocks"),
        (4096, 0, "1 to 64"),
        (4096, 65, "1 to 64"),
        (1 << 20, 1, "shorter"),
    ],
)
def test_a_probe_that_cannot_be(nbytes: int, depth: int, needed: str, tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, pytest.raises(ValueError, match=needed):
        _native.probe_disk(file.fileno(), nbytes, depth, 0.0, False)


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    """As a folder, which cannot be read."""
    if tmp_path.stat().st_size < 4096:
        pytest.skip("folders have no size in this file system")
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(_native.DiskError, match="the file cannot be read"):
            _native.probe_disk(number, 4096, 2, 0.0, False)
    finally:
        os.close(number)


def test_the_command(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ram_planning, "time_misses", lambda *given: MissTime(0.01, 0.02, 1.5))
    size = f"{-(-budget(model, 0.4, context=128) // 1024)}KiB"
    args = ["plan", "-m", str(model), "-c", "128", "--ram-budget", size, "--hardware", "rtx4090-i9"]
    assert cli.main(args) == 0
    assert "tok/s" in capsys.readouterr().out
    assert cli.main([*args, "--vram-budget", "1GiB"]) == 2
    assert "--ram-budget plans for the CPU alone: leave out --vram-budget" in capsys.readouterr().err
    assert cli.main(["plan", "-m", str(model_path()), "--ram-budget", "1GiB"]) == 2
    assert "this model has none" in capsys.readouterr().err
    assert cli.main(["plan", "-m", str(model), "--sparsity", "exact"]) == 2
    assert "--sparsity is for a plan with --ram-budget" in capsys.readouterr().err


def test_doctor_measures_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    monkeypatch.setattr(doctor, "measure_disk", lambda path, advance: disk())
    found = hotcold.doctor(gpu="off", disk=tmp_path / "model")
    assert found.report()["disk"]["direct"] is True and "one after another: 1.00 GB/s" in str(found)
    assert hotcold.doctor(gpu="off").report()["disk"] is None


def test_a_disk_that_cannot_be_measured_leaves_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "small").write_bytes(b"short")
    for name, told in (("small", "small has 5 B"), ("missing", "No such file")):
        with pytest.raises(UserError, match=told):
            hotcold.doctor(gpu="off", disk=tmp_path / name, output=tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists() and not (tmp_path / "cache").exists()


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
        sizes = sizes_of_file(file, config, 128, "f16")
    firing = [np.full(n, 0.1) for n in sizes.neurons.tolist()]
    routing = [np.full(COUNT, 0.1)] * config.layers
    own = [routes.astype(np.int64), *[np.zeros((5, 2), np.int64)] * (config.layers - 1)]
    path = tmp_path / "text.profile.gguf"
    profile = Profile(firing, "made up", routing=routing, routes=own)
    write_profile(path, profile, {"model_fingerprint": sizes.fingerprint})
    with pytest.raises(UserError, match=message):
        plan_ram(
            model, budget(model, 0.4, context=128), context=128, hardware=MACHINE, disk=disk(), profile=path
        )

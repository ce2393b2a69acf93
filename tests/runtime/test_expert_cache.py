"""Models larger than their budget of memory: experts are read of the file when they are named."""

from __future__ import annotations

import _thread
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draft_blocks import with_block
from support.drafting import Reckless, eager
from support.file_sizes import file_sizes
from support.golden import golden
from support.many_experts import budget, many_experts

from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.generation import stream
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.errors import UserError
from hotcold.formats.files import FileError
from hotcold.formats.gguf import open_gguf
from hotcold.hosting.state import ProcessStats
from hotcold.kernels import cpu_disk
from hotcold.model.config import Config
from hotcold.placement import expert_cache
from hotcold.placement.expert_cache import ExpertCachePlan
from hotcold.placement.profiles import Profile, write_profile
from hotcold.processes.plain_data import from_plain, to_plain
from hotcold.runtime import memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.server.metrics import Metrics
from hotcold.values import read_size

COUNT = 20
#: Each layout of experts' weights in memory, and both ways to divide the work.
MODELS = [
    ("tiny-qwen3moe", "Q4_0", "by_output"),  # down is a dot
    ("tiny-turbosparse", "Q4_0", "by_output"),  # panels
    ("tiny-turbosparse", "Q8_0", "by_neuron"),  # pairs of rows
    ("tiny-smallthinker", "F32", "by_output"),  # transposed; the router is early
    ("tiny-gpt-oss", "Q8_0", "by_output"),  # biases
]
OPTIONS: dict[str, Any] = {"sequences": 3, "context": 128, "chunk": 32}


@pytest.fixture(autouse=True)
def no_reading_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are smaller than the buffers that they would be read with."""
    monkeypatch.setattr(expert_cache, "reading_bytes", lambda row_bytes: 0)


def texts(session: Session, tokens: int = 12, speculation: Speculation | None = None) -> list[list[int]]:
    """Three prompts at the same time; one is longer than a chunk."""
    random = np.random.default_rng(5)
    prompts = [[1, *random.integers(3, 288, length).tolist()] for length in (4, 50, 9)]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session, speculation=speculation).run(requests)
    return [request.output for request in requests]


def last_logits(session: Session) -> np.ndarray:
    rows = session.transformer.read_logits(0, 1)
    return rows.copy()


def opened(path: Path, share: float | None, threads: int = 2, **more: Any) -> Session:
    given = OPTIONS | more
    ram = {} if share is None else {"ram_budget": budget(path, share, **given)}
    return load(path, LoadOptions(threads=threads, **given, **ram)).session()


@pytest.mark.parametrize(("name", "type", "down"), MODELS)
def test_text_and_bits_are_the_same_at_every_budget(name: str, type: str, down: str, tmp_path: Path) -> None:
    path = many_experts(name, tmp_path, type=type, down=down, count=COUNT)
    whole = opened(path, None)
    expected, logits, rows = texts(whole), last_logits(whole), whole.counters.rows.copy()
    assert len({*map(tuple, expected)}) == 3
    assert whole.model.disk_counts() is None
    for share, threads in ((1.0, 2), (0.5, 1), (0.3, 3), (0.0, 2)):
        session = opened(path, share, threads)
        own = session.model.plan.experts
        assert own is not None and own.all_fit == (share == 1)
        assert sum(own.bill.values()) + own.expert_bytes <= own.budget_bytes
        assert texts(session) == expected
        np.testing.assert_array_equal(last_logits(session), logits)
        np.testing.assert_array_equal(session.counters.rows, rows)
        counts = session.model.disk_counts()
        if share == 1:
            assert counts is None
            continue
        assert counts is not None and counts.misses > 0
        assert counts.nbytes >= counts.misses * min(own.unit_bytes)
        assert (counts.hits > 0) or share < 0.5


def test_one_sequence_alone(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    whole = opened(path, None, sequences=1)
    expected = texts(whole, 40)
    for share, threads in ((0.5, 2), (0.0, 1)):
        session = opened(path, share, threads, sequences=1)
        assert texts(session, 40) == expected
        np.testing.assert_array_equal(last_logits(session), last_logits(whole))


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    model: dict[str, Any] = {"type": "Q8_0", "down": "by_output", "count": COUNT, "fused": True}
    path = many_experts("tiny-qwen3moe", tmp_path, **model)
    assert texts(opened(path, 0.3)) == texts(opened(path, None))


def test_what_is_read_depends_on_tokens_alone(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    found = []
    for threads in (1, 3):
        session = opened(path, 0.5, threads)
        texts(session)
        counts = session.model.disk_counts()
        assert counts is not None
        found.append((counts.hits, counts.misses, counts.nbytes))
        assert counts.nbytes >= counts.misses * min(session.model.plan.experts.unit_bytes)  # type: ignore[union-attr]
        counters = session.counters
        assert 0 < counters.disk.misses < counts.misses  # prompts are not counted there
    assert found[0] == found[1]


def test_a_file_that_is_cut_ends_the_request_alone(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
    expected = texts(session)
    data, times = path.read_bytes(), os.stat(path)
    os.truncate(path, len(data) // 3)
    needed = "layer [01]: expert [0-9]+ cannot be read: the file is shorter than it was"
    with pytest.raises(FileError, match=needed) as error:
        texts(session)
    assert path.name in str(error.value)
    path.write_bytes(data)
    with pytest.raises(FileError, match="the file has changed since it was opened"):
        texts(session)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts(session) == expected


def with_bad_expert(path: Path, expert: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Session:
    """A session for which this expert of layer 1 lies behind the end of the file."""
    calls = []
    plain = cpu_disk.Disk._experts

    def placed(self: cpu_disk.Disk, tensor: Any, experts: int) -> Any:
        lying = plain(self, tensor, experts)
        calls.append(tensor)
        if len(calls) > 3:  # gate, up and down of layer 0 come first
            lying.offsets[expert] = 1 << 40
        return lying

    with monkeypatch.context() as patch:
        patch.setattr(cpu_disk.Disk, "_experts", placed)
        return opened(path, 0.5, **more)


def ends(engine: Engine, prompts: list[list[int]], tokens: int = 4) -> list[Request]:
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while not all(request.finished for request in requests):
        engine.step()
    return requests


PROMPTS = [[1, 40, 77], [1, 9, 200], [1, 150, 30]]


def test_an_expert_that_cannot_be_read_ends_the_request_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    expected = [each.output for each in ends(Engine(opened(path, None)), PROMPTS)]
    failed_counts = set()
    for expert in range(COUNT):
        alone = [ends(Engine(with_bad_expert(path, expert, monkeypatch)), [each])[0] for each in PROMPTS]
        bad = [each.error is not None for each in alone]
        if sum(bad) in (0, 3) or sum(bad) in failed_counts:
            continue
        failed_counts.add(sum(bad))
        engine = Engine(with_bad_expert(path, expert, monkeypatch))
        for _ in range(2):  # the engine continues
            together = ends(engine, PROMPTS)
            assert [each.error is not None for each in together] == bad
            for request, output, own in zip(together, expected, alone, strict=True):
                assert request.output == (own.output if own.error else output)
                if request.error is not None:
                    assert request.finish_reason == "error" and isinstance(request.error, FileError)
                    assert f"layer 1: expert {expert} cannot be read" in str(request.error)
        if failed_counts == {1, 2}:
            return
    assert 1 in failed_counts


def test_a_guess_that_needs_a_bad_expert_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses need nothing that is not needed without them."""
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    failed = 0
    for expert in range(0, COUNT, 4):
        plain = ends(Engine(with_bad_expert(path, expert, monkeypatch)), PROMPTS[:1], tokens=8)[0]
        reckless = Reckless(lambda request: (), 0.0, 288)
        engine = Engine(with_bad_expert(path, expert, monkeypatch), speculation=reckless)
        found = ends(engine, PROMPTS[:1], tokens=8)[0]
        assert found.output == plain.output and (found.error is None) == (plain.error is None)
        failed += plain.error is None
    assert failed


def test_a_file_that_is_replaced_under_its_name_is_read_on(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
    other = tmp_path / "other"
    other.write_bytes(b"another file")
    os.replace(other, path)
    again = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    assert texts(session) == texts(opened(again, None))


def test_an_interrupt_ends_a_wait_for_the_disk(tmp_path: Path) -> None:
    path = many_experts("tiny-turbosparse", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
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
    assert texts(session) == texts(opened(path, None))


def test_a_session_beside_another_shares_the_places(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    first = opened(path, 0.3)
    second = first.model.session("off")
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda i=i, each=each: found.update({i: texts(each)}))
        for i, each in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == texts(opened(path, None))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"gpu": "0"}, "leave out `gpu`"),
        ({"vram_budget": 1 << 30}, "leave out `vram_budget`"),
        ({"hot_backend": "cpu"}, "leave out `hot_backend`"),
        ({"backend": "reference"}, "needs the backend cpu"),
    ],
)
def test_a_budget_is_for_the_cpu_alone(options: dict[str, Any], needed: str, tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    with pytest.raises(UserError, match=needed):
        load(path, LoadOptions(ram_budget=1 << 30, **options))


def test_a_budget_is_for_experts() -> None:
    with pytest.raises(UserError, match="`ram_budget` is for MoE models: this model has no experts"):
        load(model_path(), LoadOptions(ram_budget=1 << 30))


def write_routing(path: Path, hot: list[int]) -> None:
    """A profile beside a model, by which these experts are chosen much more often than others."""
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 64, "f16")
    shares = np.full(COUNT, 0.1)
    shares[hot] = 0.9 - 0.01 * np.arange(len(hot))
    firing = [np.full(n, 0.5) for n in sizes.neurons]
    profile = Profile(firing, "made up", routing=[shares] * len(firing))
    write_profile(path.with_suffix(".profile.gguf"), profile, {"model_fingerprint": sizes.fingerprint})


def test_hot_experts_of_a_profile_are_read_at_loading(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    expected = texts(opened(path, None))
    without = opened(path, 0.5)
    assert texts(without) == expected
    cold = without.model.disk_counts()
    hot = [7, 3, 12, 0, 19, 5, 8, 2, 14, 11, 1, 4]
    write_routing(path, hot)
    session = opened(path, 0.5)
    expert_cache = session.model.plan.experts
    assert (
        expert_cache is not None and expert_cache.hot == ((*hot[:10],),) * 2 and expert_cache.pinned == (7, 7)
    )
    note = f"10 of {COUNT} experts of each layer (50% of their bytes), of them 7 pinned"
    assert any(note in each and "profile.gguf: made up" in each for each in session.notes)
    loaded = session.model.disk_counts()
    assert cold is not None and loaded is not None
    assert loaded.misses == 0 and loaded.nbytes >= 2 * 10 * min(expert_cache.unit_bytes)
    assert texts(session) == expected
    assert session.model.plan.experts.report()["kept"] == [7, 7]


def test_a_profile_of_another_model_is_read_only_where_a_budget_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"type": "Q4_0", "down": "by_output", "count": COUNT}
    path = many_experts("tiny-qwen3moe", tmp_path, **given)
    write_routing(many_experts("tiny-gpt-oss", tmp_path, **given), [7, 3])
    expected = texts(opened(path, None))
    other = tmp_path / f"tiny-gpt-oss-Q4_0-by_output-{COUNT}.profile.gguf"
    other.rename(path.with_suffix(".profile.gguf"))
    assert texts(opened(path, None)) == expected
    assert texts(opened(path, 1.0)) == expected  # all fit
    with pytest.raises(UserError, match=r"profile\.gguf.*: a file for this model"):
        opened(path, 0.4)
    alone = OPTIONS | {"sequences": 1}
    free_memory(monkeypatch, budget(path, 0.4, **alone) * 101 // 100)
    session = opened(path, None, sequences=1)
    assert session.model.plan.experts is not None and not session.model.plan.experts.all_fit
    assert any(note.startswith("no profile is used: ") for note in session.notes)
    assert texts(session) == expected


def test_a_draft_model_is_within_the_budget(tmp_path: Path) -> None:
    """Its bill is that of the same file with a budget that holds all of it."""
    given: dict[str, Any] = {"type": "Q4_0", "down": "by_output"}
    path = many_experts("tiny-qwen3moe", tmp_path, count=COUNT, **given)
    draft = many_experts("tiny-qwen3moe", tmp_path, count=4, **given)
    alone = load(draft, LoadOptions(threads=1, ram_budget=1 << 30, **OPTIONS)).plan.experts
    whole = load(path, LoadOptions(threads=1, ram_budget=1 << 30, **OPTIONS, draft=draft)).plan.experts
    assert alone is not None and alone.all_fit and whole is not None
    assert whole.bill["draft"] == sum(alone.bill.values()) + alone.expert_bytes
    ram = budget(path, 0.5, **OPTIONS) + whole.bill["draft"]
    options = LoadOptions(threads=1, ram_budget=ram, **OPTIONS, draft=draft)
    half = load(path, options)
    assert half.plan.experts is not None and half.plan.experts.slots == (10, 10)
    assert texts(half.session()) == texts(opened(path, None))


def test_a_draft_block_is_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has no room beside two experts of each layer, or beside all of them, it is left out."""
    path = with_block(golden("tiny-glm4moe", tmp_path).path, tmp_path / "block.gguf", 2)
    expected = texts(opened(path, None, draft_max=0))
    half = opened(path, 0.5)
    own = half.model.plan.experts
    assert own is not None and not own.all_fit and half.draft_block is not None
    speculation = eager(half)
    assert texts(half, speculation=speculation) == expected and speculation.guessed > 0
    assert not any("draft block" in note for note in half.notes)
    tight = load(
        path, LoadOptions(threads=2, ram_budget=budget(path, 0.0, **OPTIONS, draft_max=0), **OPTIONS)
    )
    assert tight.config.draft is None and texts(tight.session()) == expected
    assert any(note.endswith("is not used: it does not fit in `ram_budget`") for note in tight.notes)
    free_memory(monkeypatch, budget(path, 1.0, **OPTIONS, draft_max=0) + 100)
    without = load(path, LoadOptions(threads=2, **OPTIONS))
    assert without.config.draft is None and without.plan.experts is None
    assert any(note.endswith("is not used: it does not fit in memory") for note in without.notes)


def test_a_profile_without_routing_changes_nothing(tmp_path: Path) -> None:
    expert_cache = ExpertCachePlan(1 << 20, {}, COUNT, (64,), (10,))
    assert expert_cache.by_profile(Profile([np.ones(4)], "firing alone"), 3) is expert_cache


def free_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: nbytes)
    monkeypatch.setattr(memory, "_RESERVE", 100)


def test_a_model_that_does_not_fit_gets_a_budget_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    expected = texts(opened(path, None))
    alone = OPTIONS | {"sequences": 1}  # several share a smaller KV cache first
    free = budget(path, 0.4, **alone) * 101 // 100
    free_memory(monkeypatch, free)
    session = opened(path, None, sequences=1)
    expert_cache = session.model.plan.experts
    assert expert_cache is not None and not expert_cache.all_fit
    assert 0 <= free - free // 100 - expert_cache.budget_bytes < 1024
    (note,) = [each for each in session.notes if each.startswith("the model does not fit in memory: ")]
    chosen = note.split("`ram_budget=")[1].split("`")[0]
    assert "of the free memory to other programs" in note and read_size(chosen) == expert_cache.budget_bytes
    again = load(path, LoadOptions(threads=1, ram_budget=chosen, **alone)).plan.experts
    assert again == expert_cache
    assert texts(session) == expected


@pytest.mark.parametrize(
    "options", [{"hot_backend": "cpu", "vram_budget": 1 << 30}, {"backend": "reference"}]
)
def test_no_budget_by_itself_where_others_compute(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    free_memory(monkeypatch, budget(path, 0, **OPTIONS) // 2)
    with pytest.raises(LoadError, match="not enough memory: the model needs"):
        load(path, LoadOptions(**OPTIONS, **options))  # type: ignore[typeddict-item]


def test_without_room_for_two_experts_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    free_memory(monkeypatch, budget(path, 0, **OPTIONS) // 2)
    with pytest.raises(LoadError, match="not enough memory: the model needs"):
        load(path, LoadOptions(**OPTIONS))


def test_statistics_have_what_was_read(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.5)
    texts(session)
    engine, counts = Engine(session), session.model.disk_counts()
    stats = engine.stats()
    assert counts is not None and counts.misses > 0
    found = (stats.expert_hits, stats.expert_misses, stats.disk_bytes, stats.stalls, stats.stall_s)
    assert found == (counts.hits, counts.misses, counts.nbytes, counts.stalls, counts.stall_s)
    process = from_plain(ProcessStats, to_plain(ProcessStats(**asdict(stats))))
    lines = [line.split() for line in Metrics().text(1.0, process).decode().splitlines()]
    metrics = {line[0]: float(line[1]) for line in lines if line[0] != "#"}
    names = ["expert_hits", "expert_misses", "disk_read_bytes", "disk_waits", "disk_wait_seconds"]
    assert tuple(metrics[f"hotcold_{name}_total"] for name in names) == found


def test_a_watched_answer_has_what_was_read(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    job = Job([1, 5, 9, 40], SamplingParams(temperature=0), max_tokens=12, ignore_eos=True, picture=True)
    pieces = list(stream(Engine(opened(path, 0.3)), Request(job)))
    rates = [each.frame.rates for each in pieces if each.frame is not None][-1]
    assert rates is not None and rates.expert_hit_share is not None and 0 < rates.expert_hit_share < 1
    assert rates.disk_bytes_per_token and rates.stalls_per_token is not None


def test_generate_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    ram = budget(path, 0.3, context=128)
    size = f"{-(-ram // 1024)}KiB"
    args = ["generate", "-m", str(path), "-p", "the hen", "-n", "8", "-c", "128", "-t", "2"]
    args += ["--verbose", "--ram-budget", size]
    assert cli.main(args) == 0
    figures = capsys.readouterr().err
    assert "6 of 20 experts of each layer (30% of their bytes) fit in" in figures
    assert "expert cache hit rate " in figures and "from disk per token" in figures
    assert cli.main([*args[:-1], "64KiB"]) == 2
    assert "--ram-budget of 64KiB: this model needs" in capsys.readouterr().err

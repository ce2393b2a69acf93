"""The built-in model on two backends: its text, what it counts and allocates, and what is refused."""

from __future__ import annotations

import gc
import itertools
import shutil
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buffers import cache_bytes
from support.file_sizes import file_sizes
from support.opaque_backend import OpaqueBackend
from support.sidecars import with_sidecar
from support.threads import begun_threads

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import GGUFError, open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels._native import LinkError
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, read_placement, write_placement
from hotcold.placement.profiles import Profile, write_profile
from hotcold.placement.sizes import Sizes
from hotcold.runtime import placing
from hotcold.runtime.loading import load
from hotcold.runtime.options import AllOptions, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse.ffn import SplitWeights
from hotcold.sparse.sidecar import SidecarError
from hotcold.sparse.timeline import Timeline
from hotcold.tasks.scoring import Scorer, compare

TEXT = "The old man sat down by the fire and told the children a story about the sea and the white ship."


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        return file_sizes(file, config, 256, "f16")


def write(path: Path, sizes: Sizes, share: float, layers: range = range(6), head: bool = True) -> Path:
    random = np.random.default_rng(1)
    hot = [(random.random(n) < share) & (i in layers) for i, n in enumerate(sizes.neurons)]
    write_placement(path, sizes, Placement.on_one(hot, layers, head))
    return path


@pytest.fixture
def half(tmp_path: Path, sizes: Sizes) -> Path:
    return write(tmp_path / "half.gpuidx", sizes, 0.5)


def on_two(path: Path, **more: Any) -> Session:
    options = {"placement": path, "hot_backend": "cpu", "threads": 1} | more
    return load(None, LoadOptions(**options)).session()


def random_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(259, 4096, length).tolist() for length in lengths]


def greedy(session: Session, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """All prompts at the same time."""
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


@pytest.mark.parametrize(("share", "sparsity"), [(0.1, "exact"), (0.5, "off")])
def test_greedy_text_of_several_sequences(tmp_path: Path, sizes: Sizes, share: float, sparsity: str) -> None:
    """The same except for near ties: a sum's last bit now and then turns an int8 code, worth up to 0.1."""
    prompts, whole = (
        random_prompts(1, 40, 7),
        load(None, LoadOptions(sparsity=sparsity, sequences=3)).session(),
    )
    expected, same = greedy(whole, prompts, 120), 0
    for layers in (range(6), range(2, 5)):
        path = write(tmp_path / f"{layers.start}.gpuidx", sizes, share, layers, layers.start == 0)
        texts = greedy(on_two(path, sparsity=sparsity, sequences=3), prompts, 120)
        for prompt, text, other in zip(prompts, texts, expected, strict=True):
            first = next((i for i in range(120) if text[i] != other[i]), None)
            same += 120 if first is None else first
            if first is not None:
                *_, logits = Scorer(whole).logits(prompt + other[: first + 1])
                assert logits[-1][other[first]] - logits[-1][text[first]] < 0.1
    assert same > 400


def test_the_bits_do_not_depend_on_time_or_threads_or_mode(half: Path) -> None:
    def logits(session: Session) -> np.ndarray:
        return np.concatenate(
            [r.copy() for r in Scorer(session).logits(session.model.tokenizer.encode(TEXT))]
        )

    first = on_two(half, sparsity="exact")
    expected = logits(first)
    for other in (
        first,
        on_two(half, sparsity="exact", threads=2, hot_threads=1),
        first.model.session("off"),
    ):
        np.testing.assert_array_equal(logits(other), expected)


@pytest.mark.parametrize("backends", [("cpu", "reference"), ("reference", "cpu")])
def test_two_kinds_of_backend(half: Path, backends: tuple[str, str]) -> None:
    """Not bit by bit: as in test_exactness, another order of sums now and then turns an int8 code."""
    cold, hot = backends
    threads = 1 if cold == "cpu" else None
    split, whole = (
        on_two(half, backend=cold, hot_backend=hot, threads=threads),
        load(None, LoadOptions()).session(),
    )
    both = compare(Scorer(split), Scorer(whole), whole.model.tokenizer.encode(TEXT))
    assert both.kl.max() < 1e-3 and both.same_top.all()


@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
def test_a_hot_side_whose_buffers_nobody_can_see(
    tmp_path: Path, sizes: Sizes, sparsity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: layers 0 and 5 are cold, so the residual moves twice, and the head is hot."""
    path, model = write(tmp_path / "x.gpuidx", sizes, 0.5, range(1, 5)), with_sidecar(tmp_path)
    opened: list[OpaqueBackend] = []

    def open_opaque(name: str, *options: Any) -> Any:
        inner = open_backend(name, *options)
        if name == "cpu":
            return inner
        opened.append(OpaqueBackend(inner))
        return opened[-1]

    options = AllOptions(
        placement=path, hot_backend="reference", backend="cpu", threads=1, sparsity=sparsity, sequences=2
    )
    texts = []
    for _ in range(2):
        session = load(model, options).session()
        texts.append(greedy(session, random_prompts(5, 40), 20))
        assert (session.counters.rows[:, 3] > 0).all()
        monkeypatch.setattr(placing, "open_backend", open_opaque)
    assert len(opened) == 1 and texts[0] == texts[1]


def test_figures_are_those_of_both_halves(half: Path) -> None:
    split, whole = on_two(half, sparsity="exact"), load(None, LoadOptions(sparsity="exact")).session()
    for session in (split, whole):
        greedy(session, random_prompts(5), 30)
    assert split.footprint == whole.footprint
    assert split.counters.rows == pytest.approx(whole.counters.rows, rel=0.01)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_bytes_are_those_of_the_bill(tmp_path: Path, sizes: Sizes, share: float) -> None:
    path = write(tmp_path / "x.gpuidx", sizes, share)
    session, placement = on_two(path), read_placement(path, sizes)
    kinds = {row["kind"]: np.zeros(2) for row in placement.bill(sizes)}
    for row in placement.bill(sizes):
        kinds[row["kind"]] += (row["gpu_bytes"], row["cpu_bytes"])
    taken = np.zeros(2)
    for layer in session.model.weights.layers:
        parts = (layer.ffn.hot, layer.ffn.cold) if isinstance(layer.ffn, SplitWeights) else (layer.ffn, None)
        taken += [part.nbytes if part else 0 for part in parts]
    np.testing.assert_allclose(taken, kinds["neurons"], rtol=0.02)
    attention = [part.nbytes for part in session.model.weights.layers[0].matrices]
    assert 6 * sum(attention) == pytest.approx(kinds["attention"][0], rel=0.02)
    assert cache_bytes(session) == kinds["kv"][0]
    assert session.model.weights.head.nbytes == pytest.approx(kinds["head"][0], rel=0.02)


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit])
def test_a_cold_side_that_fails(
    half: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("a reason")

    with LLM(placement=half, hot_backend="cpu", backend="reference") as llm:
        llm.generate("Once", max_tokens=1)
        monkeypatch.setattr(llm.model.backend, "ffn", fail)
        for _ in range(2):
            with pytest.raises(LinkError, match=r"the cold side has ended.*a reason"):
                llm.generate("Once", max_tokens=1)


@pytest.mark.parametrize("hot", ["cpu", "reference"])
def test_ctrl_c_in_a_step(half: Path, hot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cold side is at work on a layer; the next request gets the same tokens."""
    backends = {"backend": "reference", "hot_backend": hot, "threads": None}
    [prompt], [expected] = random_prompts(5), greedy(on_two(half, **backends), random_prompts(5), 8)
    session = on_two(half, **backends)
    go, calls, inner = threading.Event(), itertools.count(), session.model.backend.ffn

    def slow(*args: Any, **more: Any) -> None:
        if next(calls) == 15:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert go.wait(120)
        inner(*args, **more)

    monkeypatch.setattr(session.model.backend, "ffn", slow)
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=8, ignore_eos=True)) for _ in range(2)]
    engine = Engine(session)
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests[:1])
    assert requests[0].output == expected[:2] and requests[0].finish_reason == "cancelled"
    go.set()
    engine.run(requests[1:])
    assert requests[1].output == expected


def test_no_thread_outlives_its_model(half: Path) -> None:
    gc.collect()
    begun = begun_threads()
    with LLM(placement=half, hot_backend="cpu", threads=1) as llm:
        assert len(begun()) == 1
        llm.generate("Once upon a time", max_tokens=3)
    assert not begun()
    session = on_two(half)
    del session
    gc.collect()
    assert not begun()


def test_a_budget() -> None:
    """The least is nothing, which is the cold side alone; the most is everything."""
    expected = LLM(threads=1).generate("Once upon a time", max_tokens=20, temperature=0).ids
    for budget in (0, 3 << 20, 5 << 20, 1 << 30):
        with LLM(vram_budget=budget, hot_backend="cpu", threads=1) as llm:
            assert llm.generate("Once upon a time", max_tokens=20, temperature=0).ids == expected


def test_the_timeline_of_two_sides(half: Path) -> None:
    session = on_two(half)
    session.trace(timeline := Timeline(session.model.backend))
    greedy(session, random_prompts(5), 4)
    spans = timeline.spans()
    for side in ("hot", "cold"):  # never two things at a time
        own = [span for span in spans if span.side == side]
        assert all(one.start <= one.end <= other.start for one, other in pairwise(own))
    for what in ("attention", "hot ffn", "wait", "cold ffn"):
        found = [(span.step, span.layer) for span in spans if span.name == what]
        assert found == [(step, layer) for step in range(4) for layer in range(6)], what
    overlap = timeline.overlap()
    assert overlap is not None and 0 <= overlap <= 1
    session.trace(None)
    greedy(session, random_prompts(5), 4)
    assert timeline.spans() == spans


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hot_backend": None}, "`placement` and `vram_budget` are for a GPU, and HOTCOLD_GPU is off"),
        ({"hot_backend": None, "gpu": "off"}, "are for a GPU: leave them out, or leave out `gpu=off`"),
        ({"gpu": "card"}, "`gpu=card` and `hot_backend=cpu`: give one of them"),
        ({"hot_backend": None, "hot_threads": 2}, "`hot_threads` needs `hot_backend=cpu or reference`"),
        ({"hot_backend": "gpu"}, "backend 'gpu' does not exist: choose from cpu, reference"),
        ({"vram_budget": 1 << 20}, "`placement` and `vram_budget`: give one of them"),
        ({"placement": None}, "`hot_backend` and `hot_threads` need `placement` or `vram_budget`"),
        ({"hot_backend": "reference", "hot_threads": 2}, "'reference' has no thread pool"),
    ],
)
def test_mistakes(half: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_two(half, **options)


def test_a_placement_of_another_model(tmp_path: Path, sizes: Sizes) -> None:
    path = write(tmp_path / "x.gpuidx", replace(sizes, fingerprint="another"), 0.5)
    with pytest.raises(SidecarError, match="belongs to the model 'another'"):
        on_two(path)


class Counting:
    """A backend that adds up what it is asked to hold."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.nbytes, self.programs = inner, 0, []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in ("zeros", "matrix", "ffn_weights", "predictor_weights", "record", "mailboxes"):
            return value

        def counted(*args: Any, **more: Any) -> Any:
            made = value(*args, **more)
            if name == "record":
                self.programs.append(made)
            elif name == "mailboxes":
                shared = {id(each): each for box in made.values() for each in (box.x, box.y, box.mask)}
                self.nbytes += sum(each.nbytes for each in shared.values() if each is not None)
            else:
                self.nbytes += made.nbytes
            return made

        return counted

    @property
    def total(self) -> int:
        return self.nbytes + sum(program.native.scratch_bytes for program in self.programs)


@pytest.mark.parametrize("sparsity", ["off", "exact", "predicted"])
@pytest.mark.parametrize("chunk", [16, 128, 240])
def test_a_budget_is_kept(tmp_path: Path, sparsity: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With predictors that are named, and not only with those beside the model."""
    path = with_sidecar(tmp_path, rank=256)
    named = tmp_path / "elsewhere.gguf"
    (tmp_path / "model.predictor.gguf").rename(named)
    opened: list[Any] = []

    def open_backend(*_: Any) -> Any:
        opened.append(Counting(CPUBackend(1)))
        return opened[-1]

    monkeypatch.setattr(placing, "open_backend", open_backend)
    held = []
    for budget in (4 << 20, 6 << 20, 8 << 20, 12 << 20):
        options = {"sparsity": sparsity, "chunk": chunk, "hot_backend": "cpu", "vram_budget": budget}
        session = load(
            path, LoadOptions(predictor=named if sparsity == "predicted" else None, **options)
        ).session()
        assert session.sparsity == sparsity
        assert any("is planned for the preset rtx4090-i9" in note for note in session.notes)
        hot = opened[-1].total
        held.append(hot)
        assert hot <= budget, f"{hot - budget} bytes more than the budget"
    assert held[-1] > held[0]


def test_a_damaged_sidecar_does_not_matter_without_prediction(half: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    (tmp_path / "model.predictor.gguf").write_bytes(b"GGUF but damaged")
    for sparsity in ("off", "exact"):
        options = AllOptions(placement=half, hot_backend="cpu", threads=1, sparsity=sparsity)
        assert load(path, options).session().sparsity == sparsity
    with pytest.raises(GGUFError):
        load(path, AllOptions(placement=half, hot_backend="cpu", sparsity="predicted")).session()


def test_a_profile_beside_the_model_is_used(
    tmp_path: Path, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    given: list[Profile] = []

    class Watched(placing.Solver):
        def __init__(self, sizes: Sizes, profile: Profile, costs: Any) -> None:
            given.append(profile)
            super().__init__(sizes, profile, costs)

    monkeypatch.setattr(placing, "Solver", Watched)
    options = AllOptions(vram_budget=6 << 20, hot_backend="cpu", threads=1)
    assert "a power law" in load(path, options).session().notes[0]
    firing = [np.where(np.arange(n) >= n // 2, 0.75, 0.0625) for n in sizes.neurons]
    facts = {"model_fingerprint": sizes.fingerprint}
    write_profile(tmp_path / "model.profile.gguf", Profile(firing, "a test"), facts)
    assert "model.profile.gguf: a test" in load(path, options).session().notes[0]
    for found, expected in zip(given[1].firing, firing, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_preset_is_the_one_that_is_told(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    inner = placing.find_hardware

    def find(name: str) -> Any:
        asked.append(name)
        return inner(name)

    monkeypatch.setattr(placing, "find_hardware", find)
    session = load(None, AllOptions(vram_budget=6 << 20, hot_backend="cpu", threads=1)).session()
    assert asked == ["rtx4090-i9"] and "the preset rtx4090-i9" in session.notes[0]
    assert "preset" not in " ".join(on_two(half).notes) and asked == ["rtx4090-i9"]


@pytest.mark.parametrize(("asked", "given"), [((2, 1), (2, 1)), ((1, 2), (1, 2)), ((2, None), (2, 2))])
def test_threads_of_both_sides(half: Path, asked: tuple[int, int | None], given: tuple[int, int]) -> None:
    session = on_two(half, threads=asked[0], hot_threads=asked[1])
    assert (session.model.threads, session.model.gpus[0].threads) == given

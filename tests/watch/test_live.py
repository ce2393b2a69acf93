"""A viewer gets the active neurons; the truth are masks that the FFN op reports elsewhere."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.expert_models import expert_golden
from support.file_sizes import file_sizes
from support.golden import golden
from support.placed import on_two
from support.sidecars import with_sidecar
from support.stories260k import write_stories260k
from support.vulkan.devices import DRIVERS

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.generation import joined, stream
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.gpu import GPUMemoryError
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, write_placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import AllOptions, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.scoring import Scorer
from hotcold.watch import neuron_map
from hotcold.watch.live import Frame, Live, Picture, Viewer
from hotcold.watch.neuron_map import MapLayout, NeuronMap

PROMPT = "Once upon a time there was a little fox who"
TOKENS = 40

Bools = npt.NDArray[np.bool_]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(None, LoadOptions(threads=1, sequences=2, sparsity="exact"))


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Layers 0 and 5 wholly on the CPU, layer 1 wholly hot, a part of 3 and 4; layer 2 has no hot neuron."""
    path = tmp_path_factory.mktemp("placed") / "some.gpuidx"
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    random = np.random.default_rng(3)
    hot = [random.random(1024) < share for share in (0, 1, 0, 0.3, 0.7, 0)]
    write_placement(path, sizes, Placement.on_one(hot, range(1, 5), True))
    options = AllOptions(placement=path, hot_backend="cpu", threads=1, hot_threads=1, sparsity="exact")
    return load(None, options)


def run(session: Session, *, watched: bool = True) -> tuple[Request, list[Frame]]:
    engine = Engine(session)
    ids = session.model.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0)
    request = Request(Job(ids, params, max_tokens=TOKENS, ignore_eos=True, picture=watched))
    pieces = list(stream(engine, request))
    assert joined(pieces).ids == tuple(request.output)
    return request, [piece.frame for piece in pieces if piece.frame is not None]


def unpacked(layout: MapLayout, frame: Frame) -> dict[int, Bools]:
    """By token, which cells are active, where each is one neuron."""
    assert layout.bits == 1
    if not frame.of:
        return {}
    bits = np.frombuffer(base64.b64decode(frame.cells), np.uint8).reshape(len(frame.of), -1)
    found = np.unpackbits(bits, axis=1, bitorder="little")[:, : sum(layout.cells)].astype(bool)
    return dict(zip(frame.of, found, strict=True))


def truth(model: LoadedModel, request: Request, mask_name: str = "active") -> dict[int, Bools]:
    """By token, which of all neurons were active to choose it, in the order of the file: every token of the
    text once more by the decode rule, on one backend, with masks that the test itself gives to the FFNs."""
    found: list[Bools] = []
    masks: list[Any] = []

    def watch(ffns: list[Any]) -> list[Any]:
        for ffn, n in zip(ffns, model.config.neurons, strict=True):
            masks.append(model.backend.zeros((model.limits.tokens, -(-n // 64)), np.uint64))
            setattr(ffn, mask_name, masks[-1])
        return ffns

    session = model.session(wrap=watch)
    for logits in Scorer(session).logits([*request.job.prompt, *request.output]):
        words = np.hstack([model.backend.read(mask, 0, len(logits)) for mask in masks])
        found += [*np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)]
    first = len(request.job.prompt) - 1
    return {token: found[first + token] for token in range(len(request.output))}


def shown_order(model: LoadedModel) -> npt.NDArray[np.int64]:
    """Returns the file's neuron of each cell: by layer first hot ones, each part with the most active
    first."""
    profile = model_path().with_suffix(".profile.gguf")
    masks = getattr(model.devices, "masks", None)
    order = []
    with open_gguf(profile) as file:
        for i, n in enumerate(model.config.neurons):
            firing = file.load(f"blk.{i}.profile").dequantise().reshape(-1)
            ranked = sorted(range(n), key=lambda neuron: (-firing[neuron], neuron))
            if masks is not None:
                ranked.sort(key=lambda neuron: not masks[i][neuron])
            order.append(1024 * i + np.array(ranked))
    return np.concatenate(order)


def agrees(shown: dict[int, Bools], expected: dict[int, Bools], order: npt.NDArray[np.int64]) -> float:
    """The share of expected neurons among the neurons that are active in either."""
    same = every = 0
    for token, cells in shown.items():
        active = expected[token][order]
        same += int((active & cells).sum())
        every += int((active | cells).sum())
    return same / every


@pytest.mark.parametrize("sparsity", ["exact", "off"])
def test_cells_are_the_active_neurons(model: LoadedModel, sparsity: str) -> None:
    session = model.session(sparsity)
    layout = NeuronMap(model).layout
    request, frames = run(session)
    shown = {token: cells for frame in frames for token, cells in unpacked(layout, frame).items()}
    assert [*shown] == [*range(1, TOKENS)]  # the first comes from the prompt
    assert frames[-1].tokens == TOKENS and [f.tokens for f in frames] == sorted(f.tokens for f in frames)
    assert agrees(shown, truth(model, request), shown_order(model)) == 1
    hot = np.concatenate([np.arange(1024) < count for count in layout.hot])
    for frame in frames:
        cells = unpacked(layout, frame)
        assert frame.fired == tuple((int(c[hot].sum()), int(c[~hot].sum())) for c in cells.values())


def test_cells_of_a_model_on_two_backends(model: LoadedModel, placed: LoadedModel) -> None:
    """Sums of two parts have another last bit now and then, so a neuron at its threshold may differ."""
    layout = NeuronMap(placed).layout
    assert layout.hot_by == "placement" and layout.hot[:3] == (0, 1024, 0)
    request, frames = run(placed.session())
    shown = {token: cells for frame in frames for token, cells in unpacked(layout, frame).items()}
    assert shown and agrees(shown, truth(model, request), shown_order(placed)) > 0.999


@pytest.mark.parametrize("vulkan", DRIVERS[:1], indirect=True)
def test_cells_of_a_model_on_a_device(model: LoadedModel, vulkan: Any) -> None:
    """Half of each layer's neurons are its own; the same text as unwatched. Its sums are not the CPU's bit
    for bit, and a code of a norm's output that turns moves what is near a threshold."""
    session = on_two(vulkan, 0.5, sparsity="exact")
    request, frames = run(session)
    layout = NeuronMap(session.model).layout
    shown = {token: cells for frame in frames for token, cells in unpacked(layout, frame).items()}
    assert shown and agrees(shown, truth(model, request), shown_order(session.model)) > 0.97
    assert run(session, watched=False)[0].output == request.output
    rates = frames[-1].rates
    assert rates is not None and rates.gpu_share is not None and 0.2 < rates.gpu_share < 0.9
    session.close()


def test_predicted_neurons_that_are_active(tmp_path: Path) -> None:
    """No more neurons are shown than the FFNs counted; and the same text as unwatched."""
    model = load(with_sidecar(tmp_path), LoadOptions(threads=1, sparsity="predicted"))
    session = model.session()
    request, frames = run(session)
    assert run(session, watched=False)[0].output == request.output
    shown = unpacked(NeuronMap(model).layout, frames[-1])
    pairs = session.watched().counts().sum(0)[:, 3].sum()
    assert 0 < sum(cells.sum() for cells in shown.values()) <= pairs


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"no profile"])
def test_a_damaged_profile_beside_the_model_shows_nothing(tmp_path: Path, damage: bytes) -> None:
    """It is only a picture: a server makes one whenever it starts."""
    path = Path(shutil.copy(model_path(), tmp_path / "fable.gguf"))
    path.with_suffix(".profile.gguf").write_bytes(damage)
    layout = Picture.from_session(load(path, LoadOptions(threads=1)).session()).layout
    assert (layout.hot_by, layout.firing) == ("", "") and sum(layout.neurons) == sum(layout.cells)


def test_without_a_viewer_nothing_is_made(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("somebody watches")

    monkeypatch.setattr("hotcold.engine.engine.Live", refuse)
    monkeypatch.setattr(Session, "watched", refuse)
    request, frames = run(model.session(), watched=False)
    assert len(request.output) == TOKENS and frames == []


def test_a_viewer_changes_no_token_and_counts_go_on(model: LoadedModel) -> None:
    alone, watched = model.session(), model.session()
    assert run(alone, watched=False)[0].output == run(watched)[0].output
    np.testing.assert_array_equal(alone.counters.rows, watched.counters.rows)
    assert watched.watched().steps > 0


def test_a_viewer_sees_only_its_own_request(model: LoadedModel) -> None:
    session = model.session()
    expected, alone = run(session)
    engine, layout = Engine(session), NeuronMap(model).layout
    params = SamplingParams(temperature=0)
    own = Request(Job(expected.job.prompt, params, max_tokens=TOKENS, ignore_eos=True, picture=True))
    other = Request(Job(expected.job.prompt[::-1], params, max_tokens=TOKENS, ignore_eos=True))
    engine.add(other)
    frames = [piece.frame for piece in stream(engine, own) if piece.frame is not None]
    assert own.output == expected.output and len(other.output) > 10
    after, before = ({t: c for f in each for t, c in unpacked(layout, f).items()} for each in (frames, alone))
    assert after.keys() == before.keys()
    for token, cells in after.items():
        np.testing.assert_array_equal(cells, before[token])


def test_frames_are_bounded_and_not_more_often_than_they_should_be(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that ticks 10 ms a look, a frame has cells every ten pieces; a full one takes no more."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("hotcold.watch.live.time.perf_counter", lambda: next(ticks) / 100)
    live = Live(model.session())
    viewer = Viewer()
    viewer.live = live
    with_cells = 0
    for token in range(100):
        viewer.note(token, np.zeros(6 * 16, np.uint64))
        with_cells += bool(viewer.frame(token + 1, last=False).cells)
    assert 9 <= with_cells <= 10
    for token in range(100, 100 + live.most + 5):
        if not viewer.is_full(live.most):
            viewer.note(token, np.zeros(6 * 16, np.uint64))
    assert len(viewer.frame(10**6, last=True).of) == live.most


def test_rates_are_of_bytes_that_were_read(model: LoadedModel, placed: LoadedModel) -> None:
    _, frames = run(model.session())
    rates = frames[-1].rates
    assert rates is not None and rates.gpu_share == 0
    assert rates.tok_s is not None and rates.tok_s > 0 and rates.gb_s is not None and rates.gb_s > 0
    rates = run(placed.session())[1][-1].rates
    assert rates is not None and rates.gpu_share is not None and 0.2 < rates.gpu_share < 0.9


def test_a_gpu_without_room_gives_figures_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Session, *, strongest: bool) -> None:
        raise GPUMemoryError("full", 0)

    monkeypatch.setattr(Session, "watched", full)
    request, frames = run(model.session())
    assert len(request.output) == TOKENS
    assert frames[-1].cells == "" and frames[-1].rates is not None and frames[-1].rates.tok_s
    assert "cannot be shown" in frames[0].note and "full" in frames[0].plain()["note"]
    assert not any(each.note for each in frames[1:])


def test_cells_of_several_neurons(placed: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted one by one, from masks made at random."""
    fine = NeuronMap(placed)
    monkeypatch.setattr(neuron_map, "MOST_CELLS", 300)
    coarse = NeuronMap(placed)
    layout = coarse.layout
    assert layout.bits == 4 and 200 < sum(layout.cells) <= 300
    words = sum(layer.ffn.words for layer in placed.weights.layers)
    random = np.random.default_rng(0)
    masks = random.integers(0, 1 << 63, (3, words), np.uint64) & random.integers(
        0, 1 << 63, (3, words), np.uint64
    )
    single, both = fine.cells(masks)
    text, again = coarse.cells(masks)
    assert both == again
    neurons = unpacked(fine.layout, Frame(3, (0, 1, 2), single))
    nibbles = np.frombuffer(base64.b64decode(text), np.uint8).reshape(3, -1)
    for token in range(3):
        values = [value for byte in nibbles[token].tolist() for value in (byte & 15, byte >> 4)]
        at = cell = 0
        for layer, n in enumerate(layout.neurons):
            hot, hot_cells = layout.hot[layer], layout.hot_cells[layer]
            for count, cells in ((hot, hot_cells), (n - hot, layout.cells[layer] - hot_cells)):
                assert cells == -(-count // 21)  # the fewest neurons with which 6 * (49 + 1) cells do
                for i in range(cells):
                    part = neurons[token][at + 21 * i : min(at + 21 * (i + 1), at + count)]
                    assert 0 <= values[cell] - 15 * np.sqrt(part.mean()) < 1
                    cell += 1
                at += count


def test_memory_is_that_of_the_file_and_the_cache(model: LoadedModel, placed: LoadedModel) -> None:
    with open_gguf(model_path()) as file:
        tensors = {name: info.nbytes for name, info in file.tensors.items()}
    neurons = sum(nbytes for name, nbytes in tensors.items() if ".ffn_" in name and "norm" not in name)
    for each in (model, placed):
        session = each.session()
        picture = Picture.from_session(session)
        uses = {use.kind: use for use in picture.memory}
        assert uses["neurons"].gpu_bytes + uses["neurons"].cpu_bytes == pytest.approx(neurons, rel=0.02)
        assert uses["embedding"].cpu_bytes == tensors["token_embd.weight"]
        cache = uses["kv"].gpu_bytes + uses["kv"].cpu_bytes
        assert cache == session.cache.pages * 32 * 6 * 2 * 256 * 2  # 6 layers, K and V of 256 float16
    assert sum(use.gpu_bytes for use in Picture.from_session(model.session()).memory) == 0
    assert uses["attention"].gpu_bytes == pytest.approx(2 * uses["attention"].cpu_bytes, rel=0.01)


def test_a_model_without_zeros_has_figures_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_map, "gives_zeros", lambda model: False)
    _, frames = run(model.session("off"))
    assert frames[-1].cells == "" and frames[-1].rates is not None and frames[-1].rates.tok_s


def test_a_model_without_ffns_has_figures_alone(tmp_path: Path) -> None:
    session = load(golden("tiny-mamba2", tmp_path, down="by_output").path, LoadOptions(threads=1)).session()
    live = Live(session)
    assert (live.map.layout.unit, live.map.layout.cells, live.watched) == ("neuron", (0, 0), None)
    assert live.most > 0 and live.note == ""


def test_without_zeros_the_tenth_that_works_hardest_is_shown(tmp_path: Path) -> None:
    """And the text is the same as without a viewer, with the usual programs."""
    write_stories260k(path := tmp_path / "stories.gguf")
    model = load(path, LoadOptions(threads=1))
    session, alone = model.session(), model.session()
    layout = Picture.from_session(session).layout
    assert (layout.unit, layout.zeros, layout.hot_by, layout.bits) == ("strongest", False, "", 1)
    request, frames = run(session)
    assert run(alone, watched=False)[0].output == request.output and alone._watched is None
    shown = {token: cells for frame in frames for token, cells in unpacked(layout, frame).items()}
    assert [*shown] == [*range(1, TOKENS)]
    words = 64 * -(-layout.neurons[0] // 64)
    file_order = np.concatenate([words * i + np.arange(n) for i, n in enumerate(layout.neurons)])
    assert agrees(shown, truth(model, request, "strongest"), file_order) == 1
    tenth = sum(-(-n // 10) for n in layout.neurons)
    assert {counts for frame in frames for counts in frame.fired} == {(0, tenth)}


@pytest.mark.parametrize("down", ["by_output", "by_neuron"])
def test_experts_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: str) -> None:
    """Each token chooses as many as the model says, and these are the ones that have neurons at work."""
    path = expert_golden("tiny-qwen3moe", tmp_path, down=down).path
    session = load(path, LoadOptions(threads=1, sparsity="off")).session()
    config = session.model.config
    assert config.experts is not None
    layout = Picture.from_session(session).layout
    count, chosen, neurons = config.experts.count, config.experts.chosen, config.experts.neurons
    assert (layout.unit, layout.zeros, layout.bits) == ("expert", False, 1)
    assert layout.neurons == layout.cells == (count,) * config.layers
    live, noted = Live(session), []
    take = live.map.token_masks

    def noted_masks(masks: Any, row: int) -> Any:
        noted.append(np.concatenate([mask[row] for mask in masks]))
        return take(masks, row)

    monkeypatch.setattr(live.map, "token_masks", noted_masks)
    monkeypatch.setattr("hotcold.engine.engine.Live", lambda _: live)
    engine, ids = Engine(session), [1, 2, 3, 4, 5]
    request = Request(Job(ids, SamplingParams(temperature=0), max_tokens=8, ignore_eos=True, picture=True))
    frames = [piece.frame for piece in stream(engine, request) if piece.frame is not None]
    shown = {token: cells for frame in frames for token, cells in unpacked(layout, frame).items()}
    bits = NeuronMap(session.model)._bits
    assert len(shown) == len(noted) > 4
    for cells, masks in zip(shown.values(), noted, strict=True):
        active = np.unpackbits(masks.view(np.uint8), bitorder="little")[bits]
        at_work = active.reshape(config.layers, count, neurons).any(2)
        np.testing.assert_array_equal(cells.reshape(config.layers, count), at_work)
        assert (at_work.sum(1) == chosen).all()
    assert {n for frame in frames for n in frame.fired} == {(0, chosen * config.layers)}

"""The built-in model on a Vulkan device and the CPU: bit for bit what the model of its numerics gives with
the same placement and the same cold side, whatever the handshake."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import Golden, golden
from support.placed import on_two, random_placement
from support.sidecars import with_sidecar
from support.vulkan.devices import DRIVERS, FULL, open_vulkan
from support.vulkan.model import OrderedReference

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import quantise
from hotcold.kernels.backend import PredictorTensors
from hotcold.placement.placement import Placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer

TEXT = "The old man sat down by the fire and told the children a story about the sea and the white ship."
one_driver = pytest.mark.one_driver
SHARES = [pytest.param(share, marks=one_driver) for share in (0.5, 1.0)]
#: The handshakes of a device, and the shares of the neurons there: what is waited for changes no sum.
WAYS = [("submit", 0.5), ("submit", 1.0), ("spin", 0.5), ("spin", 0.0), ("spin", 0.1)]
#: Along the CPU's 200 greedy tokens after these, the best logit is at least 0.1 above the next one: so much
#: that another order of sums, which may turn an int8 code now and then, chooses the same ones.
FAR_FROM_TIES = (
    "In the morning, A small dog went to the",
    "In the morning, Lily lived in a",
    "The white ship lost a",
    "In the morning, A little bird lost a",
    "Anna found a",
)


@pytest.fixture(params=["submit", pytest.param("spin", marks=one_driver)])
def device(vulkan: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device, with each form of the handshake."""
    usual, vulkan.spin = vulkan.spin, request.param == "spin"
    yield vulkan
    vulkan.spin = usual


def logits(session: Session, text: str = TEXT) -> np.ndarray:
    tokens = session.model.tokenizer.encode(text)
    return np.concatenate([rows.copy() for rows in Scorer(session).logits(tokens)])


def generated(session: Session, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], np.ndarray]:
    """Greedy texts of all prompts at the same time, and logits along a text."""
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests], logits(session)


def random_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(259, 4096, length).tolist() for length in lengths]


@cache
def expected(share: float, sparsity: str, path: Path | None = None) -> tuple[list[list[int]], np.ndarray]:
    session = on_two(OrderedReference(), share, path, sparsity=sparsity, sequences=3)
    return generated(session, random_prompts(1, 40, 7), 12)


def same(actual: tuple[list[list[int]], np.ndarray], wanted: tuple[list[list[int]], np.ndarray]) -> None:
    assert actual[0] == wanted[0]
    np.testing.assert_array_equal(actual[1].view(np.uint32), wanted[1].view(np.uint32))


@one_driver
@pytest.mark.parametrize(("device", "share"), WAYS, indirect=["device"])
def test_every_bit_of_a_hybrid(device: Any, share: float) -> None:
    """Prompts, batches of decode rows, and logits; leaving out what is zero changes no bit."""
    for sparsity in ("exact", "off"):
        session = on_two(device, share, sparsity=sparsity, sequences=3)
        same(generated(session, random_prompts(1, 40, 7), 12), expected(share, "exact"))
        session.close()


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the built-in model with predictors that name about half of the neurons, by what they see."""
    path = with_sidecar(tmp_path_factory.mktemp("predicted"), tensors=_random_predictor)
    return path


def _random_predictor(neurons: int, dim: int, rank: int) -> PredictorTensors:
    random = np.random.default_rng(neurons)
    first = quantise(random.standard_normal((rank, dim)) * dim**-0.5, "Q8_0")
    second = quantise(random.standard_normal((neurons, rank)) * rank**-0.5, "Q8_0")
    return PredictorTensors(first, second, np.zeros(neurons, np.float32), relu=False)


@one_driver
@pytest.mark.parametrize(("device", "share"), [("submit", 0.1), ("spin", 1.0)], indirect=["device"])
def test_every_bit_with_predictors(device: Any, share: float, predicted: Path) -> None:
    session = on_two(device, share, predicted, sparsity="predicted", sequences=3)
    same(generated(session, random_prompts(1, 40, 7), 12), expected(share, "predicted", predicted))
    assert session.sparsity == "predicted"
    session.close()


@one_driver
@pytest.mark.parametrize("device", ["spin"], indirect=True)
def test_parts_of_a_hybrid_on_the_cpu(device: Any) -> None:
    """Layers 0 and 5 are cold, and the head: the residual moves twice."""
    model = load(None, LoadOptions(gpu="off", threads=1))
    placement = random_placement(model.config, 0.5, range(1, 5), head=False)
    prompts = random_prompts(5, 40)
    wanted = generated(on_two(OrderedReference(), placement, sequences=2), prompts, 10)
    session = on_two(device, placement, sequences=2)
    same(generated(session, prompts, 10), wanted)
    session.close()


def on_three(placement: Placement) -> Placement:
    """The same neurons, in layers of two GPUs by turns, with a layer of the CPU between them."""
    hot = [mask & (i != 3) for i, mask in enumerate(placement.hot)]
    return Placement(hot, (0, 1, 1, None, 1, 0), 1)


@pytest.mark.full
def test_every_bit_on_two_devices() -> None:
    """Two drivers, whose sums have one order: the residual moves between them, and to the CPU and back."""
    if len(DRIVERS) < 2:
        pytest.skip("one named GPU is tested")
    placement = on_three(random_placement(load(None, LoadOptions(gpu="off", threads=1)).config, 0.5))
    prompts = random_prompts(1, 9)
    model = {gpu: OrderedReference() for gpu in (0, 1)}
    wanted = generated(on_two(model, placement, sequences=2), prompts, 4)
    session = on_two({gpu: open_vulkan(driver) for gpu, driver in enumerate(DRIVERS)}, placement, sequences=2)
    assert len(session.model.gpus) == 2
    same(generated(session, prompts, 4), wanted)
    session.close()


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> list[Golden]:
    """In float32, in which no code can turn: smooth and sparse, with grouped heads and with LayerNorm."""
    folder = tmp_path_factory.mktemp("golden")
    return [golden(name, folder) for name in ("tiny-llama", "tiny-drelu", "tiny-falcon")]


@pytest.mark.parametrize("share", SHARES)
def test_logits_of_the_unsplit_model(vulkan: Any, share: float, goldens: list[Golden]) -> None:
    """The logits equal those of transformers and of the CPU."""
    for each in goldens:
        whole = load(each.path, LoadOptions(gpu="off", threads=1, cache_type="f32")).session()
        session, tokens = on_two(vulkan, share, each.path, cache_type="f32"), each.prompt.tolist()
        split, unsplit = (
            np.concatenate([r.copy() for r in Scorer(s).logits(tokens)]) for s in (session, whole)
        )
        np.testing.assert_allclose(split, each.prompt_logits[:-1], atol=1e-4, rtol=0)
        np.testing.assert_allclose(split, unsplit, atol=1e-4, rtol=0)
        session.close()


@one_driver
def test_greedy_texts_are_those_of_the_cpu(vulkan: Any) -> None:
    """Many tokens each, with half of the model on the device and with all of it."""
    whole = load(None, LoadOptions(gpu="off", threads=1, sequences=5)).session()
    prompts = [whole.model.tokenizer.encode(text) for text in (FAR_FROM_TIES if FULL else FAR_FROM_TIES[:2])]
    tokens = 200 if FULL else 60
    wanted = generated(whole, prompts, tokens)[0]
    for prompt, text in zip(prompts, wanted, strict=True):
        *_, last = Scorer(whole).logits(prompt + text)
        rows = np.sort(last[-tokens:], axis=1)
        assert (rows[:, -1] - rows[:, -2]).min() > 0.1
    for share in (0.5, 1.0):
        session = on_two(vulkan, share, sequences=5)
        assert generated(session, prompts, tokens)[0] == wanted
        session.close()


@one_driver
def test_a_spinning_session_sees_answers_or_gives_up(vulkan: Any) -> None:
    """Either, depending on the machine's load; test_vulkan_link.py causes each."""
    vulkan.spin = True
    try:
        session = on_two(vulkan, 0.5)
        generated(session, random_prompts(3), 6)
        counts = session._cold_sides[0].link.counts
        session.close()
    finally:
        vulkan.spin = False
    assert counts.steps >= 6 and counts.answered + counts.gave_up > 0

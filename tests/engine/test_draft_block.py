"""A block of the model's own file guesses: the text stays the same, and guesses that must be right are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draft_blocks import knowing_block, with_block
from support.drafting import eager
from support.file_sizes import file_sizes
from support.hybrid_models import write_hybrid
from support.placed import on_two, random_placement

from hotcold.demo import model_path
from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PAGE
from hotcold.kernels.cpu import CPUBackend
from hotcold.placement.placement import write_placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.watch.memory_use import memory_use

OPTIONS: dict[str, Any] = {"threads": 2, "context": 192, "sequences": 3, "chunk": 40, "state_copies": 4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("blocks")
    plain = write_hybrid(folder / "plain.gguf", "qwen35")
    knows = knowing_block(plain, folder / "knows.gguf", 1)
    return {"plain": plain, "any": with_block(plain, folder / "any.gguf", 1), "knows": knows}


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load(path, LoadOptions(**OPTIONS)) for name, path in paths.items()}


def some_requests(temperature: float, count: int = 3) -> list[Request]:
    random = np.random.default_rng(3)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(count)]
    prompts = [random.integers(300, 4000, n).tolist() for n in (70, 5, 33)[:count]]
    return [Request(Job(*each, max_tokens=40, ignore_eos=True)) for each in zip(prompts, params, strict=True)]


def without(model: LoadedModel, temperature: float) -> list[list[int]]:
    requests = some_requests(temperature)
    Engine(model.session(), reuse=False).run(requests)
    return [each.output for each in requests]


@pytest.mark.parametrize(("name", "temperature"), [("any", 0.0), ("any", 0.9), ("knows", 0.9)])
def test_the_text_is_the_same(models: dict[str, LoadedModel], name: str, temperature: float) -> None:
    """Three in a batch, then the next turn of one, without computing its beginning again."""
    model = models[name]
    session = model.session()
    speculation = eager(session)
    engine, requests = Engine(session, speculation=speculation), some_requests(temperature)
    engine.run(requests)
    assert [each.output for each in requests] == without(model, temperature)
    first = requests[0]
    turn = Job([*first.job.prompt, *first.output, 300], SamplingParams(temperature=0), max_tokens=9)
    again = [Request(turn) for _ in range(2)]
    engine.run(again[:1])
    Engine(model.session(), reuse=False).run(again[1:])
    assert again[0].reused and again[0].output == again[1].output
    assert speculation.guessed >= 60 and speculation.accepted == sum(
        each.accepted for each in [*requests, again[0]]
    )


def test_a_block_that_knows_is_always_right(models: dict[str, LoadedModel]) -> None:
    session = models["knows"].session()
    speculation = eager(session)
    engine, requests = Engine(session, speculation=speculation), some_requests(0)
    engine.run(requests)
    assert [each.output for each in requests] == without(models["knows"], 0)
    assert speculation.accepted == speculation.guessed > 60
    assert engine.stats().steps < 40


def test_guesses_end_where_a_request_has_no_page(models: dict[str, LoadedModel]) -> None:
    """It has one for its last token, whose row gives the second guess."""
    session = models["knows"].session()
    drafts = BlockDrafts(session.draft_block, session.transformer.batch)  # type: ignore[arg-type]
    request = Request(Job([5] * PAGE, max_tokens=9))
    request.pages, request.row = session.cache.allocate(request, 1), 0
    request.output.append(7)
    batch = session.transformer.batch
    rows = batch.put(0, 0, 0, request.job.prompt, request.pages, state_to=0)
    batch.counts[:] = (rows, 0, 0, 1)
    session.run()
    drafts.read([(request, rows)])
    drafts.begin([request, Request(Job([1]))])
    first = drafts(request, 4)
    assert first is not None and len(first.tokens) == 1
    assert session.cache.extend(request)
    drafts.read([(request, rows)])
    drafts.begin([request])
    more = drafts(request, 4)
    assert more is not None and len(more.tokens) == 4 and more.tokens[0] == first.tokens[0]
    request.output.append(9)  # what was guessed for another text
    drafts.begin([request])
    assert drafts(request, 4) is None


def first_drafts(session: Session) -> tuple[np.ndarray, list[int]]:
    """The block's logits after a prompt and a token, and what it guesses then."""
    assert session.draft_block is not None
    drafts = BlockDrafts(session.draft_block, session.transformer.batch)
    request = Request(Job([*range(300, 320)], max_tokens=9))
    request.pages, request.row = session.cache.allocate(request, 2), 0
    request.output.append(7)
    batch = session.transformer.batch
    rows = batch.put(0, 0, 0, request.job.prompt, request.pages, state_to=0)
    batch.counts[:] = (rows, 0, 0, 1)
    session.run()
    drafts.read([(request, rows)])
    drafts.begin([request])
    logits = session.draft_block.logits()[0].copy()
    draft = drafts(request, 3)
    assert draft is not None
    return logits, list(draft.tokens)


def assert_beside(hot: Any, models: dict[str, LoadedModel], *, head: bool) -> None:
    """The block runs on the CPU beside a backend that has the rest, and reads its rows."""
    options = {key: value for key, value in OPTIONS.items() if key != "threads"}
    placement = random_placement(models["any"].config, 0.5, head=head)
    session = on_two(hot, placement, models["any"].path, **options)
    found, expected = first_drafts(session), first_drafts(models["any"].session())
    np.testing.assert_allclose(found[0], expected[0], atol=2e-3, rtol=1e-3)
    assert found[1] == expected[1]
    session.close()
    session = on_two(hot, placement, models["any"].path, **options)
    own, again = some_requests(0.9, 2), some_requests(0.9, 2)
    Engine(session, reuse=False).run(own)
    speculation = eager(session)
    Engine(session, reuse=False, speculation=speculation).run(again)
    assert [each.output for each in again] == [each.output for each in own]
    assert speculation.guessed > 0
    session.close()


@pytest.mark.parametrize("head", [True, False])
def test_the_block_runs_beside_two_backends(models: dict[str, LoadedModel], head: bool) -> None:
    assert_beside(CPUBackend(1), models, head=head)


@pytest.mark.one_driver
def test_the_block_runs_beside_a_gpu(vulkan: Any, models: dict[str, LoadedModel]) -> None:
    assert_beside(vulkan, models, head=True)


def test_an_exception_in_the_block_leaves_an_engine_that_works(models: dict[str, LoadedModel]) -> None:
    session = models["any"].session()
    engine = Engine(session, speculation=eager(session))
    block: Any = session.draft_block
    for name in ("read", "logits"):
        own = getattr(block, name)
        setattr(block, name, lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.run(some_requests(0))
        setattr(block, name, own)
    requests = some_requests(0)
    engine.run(requests)
    assert [each.output for each in requests] == without(models["any"], 0)


def test_the_block_is_there_where_it_is_used(paths: dict[str, Path], models: dict[str, LoadedModel]) -> None:
    def loaded(**more: Any) -> Session:
        return load(paths["any"], LoadOptions(**{**OPTIONS, **more})).session()

    used, none = models["any"].session(), loaded(draft_max=0)
    assert used.draft_block is not None and none.draft_block is None
    assert models["plain"].session().draft_block is None
    assert loaded(draft=model_path()).draft_block is None
    split = loaded(hot_backend="cpu", gpu=None, vram_budget=1 << 20)
    assert split.draft_block is not None and not any("draft block" in each for each in split.notes)
    everything = random_placement(used.model.config, 1.0)
    with open_gguf(paths["any"]) as file:
        sizes = file_sizes(file, used.model.config, PAGE, "f16", gpu=False)
    index = paths["any"].with_name("everything.gpuidx")
    write_placement(index, sizes, everything)
    whole = loaded(hot_backend="cpu", gpu=None, placement=index)
    assert whole.draft_block is None
    assert any("it runs on the CPU, and GPUs compute all layers" in each for each in whole.notes)
    kinds = {each.kind: each.cpu_bytes for each in memory_use(used)}
    others = {each.kind: each.cpu_bytes for each in memory_use(none)}
    assert kinds["draft"] > 0 and "draft" not in others and kinds["kv"] == others["kv"]
    assert kinds["buffers"] > others["buffers"]

"""A smaller model guesses: the text stays the same, and only models of one vocabulary go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import golden
from support.hybrid_models import write_hybrid

from hotcold.demo import model_path
from hotcold.engine.draft_model import DraftModel
from hotcold.engine.drafts import Kind
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation, speculation_of
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import write_gguf
from hotcold.runtime import memory
from hotcold.runtime.counters import Figures
from hotcold.runtime.loading import load
from hotcold.runtime.memory import MemoryShortError
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The built-in model, which guesses for itself: always right where the likeliest token is chosen."""
    return load(None, LoadOptions(threads=1, sequences=3, context=128, draft=model_path()))


def some_requests(model: LoadedModel, temperature: float, tokens: int = 40) -> list[Request]:
    texts = ["Once upon a time", "The king said to his son that", "A fox"]
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    prompts = [model.tokenizer.encode(text) for text in texts]
    return [Request(Job(*each, max_tokens=tokens)) for each in zip(prompts, params, strict=True)]


def eager(model: LoadedModel) -> Speculation:
    """All guesses pay."""
    found = speculation_of(model.session())
    assert found is not None
    costs: Any = found.costs
    costs.measured, costs.of = lambda rows: True, lambda rows: 1.0
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same(model: LoadedModel, temperature: float) -> None:
    own, again = some_requests(model, temperature), some_requests(model, temperature)
    Engine(model.session()).run(own)
    speculation = eager(model)
    Engine(model.session(), speculation=speculation).run(again[:1])
    Engine(model.session(), speculation=speculation).run(again[1:])
    assert [each.output for each in again] == [each.output for each in own]
    assert 0 < speculation.accepted <= speculation.guessed


def test_a_model_is_always_right_about_itself(model: LoadedModel) -> None:
    drafts = DraftModel(model.session(), model.config.vocab)
    (request, *_), (again, *_) = some_requests(model, 0), some_requests(model, 0)
    Engine(model.session()).run([request])
    for wrong in (False, True, False):
        draft = drafts(again, 5)
        n = len(again.output)
        assert draft is not None and draft.kind == Kind.MODEL
        assert list(draft.tokens) == request.output[n : n + 5]
        again.output += request.output[n : n + (2 if wrong else 5)]  # as if the others were wrong
    assert drafts(again, 3).tokens == request.output[len(again.output) :][:3]  # type: ignore[union-attr]


def test_texts_without_room_are_not_guessed(model: LoadedModel) -> None:
    drafts = DraftModel(model.session(), model.config.vocab)
    requests = [Request(Job([1, 300 + i], max_tokens=9)) for i in range(5)]
    assert [drafts(each, 2) is not None for each in requests] == [True] * 3 + [False] * 2
    requests[1].finish("stop")
    assert drafts(requests[4], 2) is not None and drafts(requests[3], 2) is None
    assert drafts(Request(Job([1] * 128, max_tokens=1)), 2) is None


def test_padding_of_a_vocabulary_is_neither_guessed_nor_read(model: LoadedModel) -> None:
    """Each of the two models has an embedding of all that it is given."""
    first = DraftModel(model.session(), model.config.vocab)(Request(Job([1, 300])), 1)
    assert first is not None and first.tokens[0] > 299
    fewer = DraftModel(model.session(), first.tokens[0])
    found = fewer(Request(Job([1, 5])), 4)
    assert found is not None and max(found.tokens) < first.tokens[0]
    assert fewer(Request(Job([1, first.tokens[0]])), 4) is None


def test_pages_of_texts_that_ended_are_taken_where_none_is_left(model: LoadedModel) -> None:
    session = model.session()
    drafts = DraftModel(session, model.config.vocab)
    ended, own = (Request(Job([1, 300 + i], max_tokens=9)) for i in range(2))
    assert drafts(ended, 2) is not None and drafts(own, 2) is not None
    while session.cache.extend(ended):
        pass
    ended.finish("stop")
    own.output += [9] * 40
    assert drafts(own, 2) is not None


def test_after_an_exception_texts_are_read_anew(model: LoadedModel) -> None:
    speculation = eager(model)
    own, again = some_requests(model, 0), some_requests(model, 0)
    Engine(model.session()).run(own)
    engine = Engine(model.session(), speculation=speculation)
    drafts = next(each for each in speculation._drafters if isinstance(each, DraftModel))
    run = drafts._session.run
    try:
        drafts._session.run = lambda *_: 1 // 0  # type: ignore[assignment,method-assign]
        with pytest.raises(ZeroDivisionError):
            engine.run(some_requests(model, 0))
    finally:
        drafts._session.run = run  # type: ignore[method-assign]
    assert drafts._session.cache.free_pages == drafts._session.cache.pages
    engine.run(again)
    assert [each.output for each in again] == [each.output for each in own]


def test_a_draft_that_does_not_pay_is_hardly_asked(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = speculation_of(model.session())
    assert speculation is not None
    (request, *_) = some_requests(model, 0)
    for _ in range(5):
        speculation.costs.note(1, 0.01)
    drafts = next(each for each in speculation._drafters if isinstance(each, DraftModel))
    drafts.seconds = 1.0
    asked: list[int] = []
    monkeypatch.setattr(DraftModel, "__call__", lambda self, request, most: asked.append(most))
    for _ in range(80):
        speculation._draft(request, drafts, 1, 7)
    assert asked == [1, 1]
    drafts.seconds = 1e-6
    speculation._draft(request, drafts, 1, 7)
    assert asked.pop() > 1


def test_figures_count_what_drafting_costs(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are those of its own session, and its time is no part of Python's share."""
    session = model.session()
    drafting: list[float] = []
    count = session.count_drafting
    monkeypatch.setattr(session, "count_drafting", lambda seconds: (drafting.append(seconds), count(seconds)))
    engine = Engine(session, speculation=speculation_of(session))
    engine.run(some_requests(model, 0))
    counters, drafts = session.counters, session.draft_session
    assert drafts is not None and drafts.counters.decode_steps > 0
    own = Figures.from_counters(drafts.counters, drafts.footprint)
    assert own.bytes_per_token is not None
    assert counters.draft_bytes == pytest.approx(own.bytes_per_token * drafts.counters.decode_tokens)
    assert 0 < sum(drafting) < counters.run_s <= counters.decode_s


def test_the_vocabularies_must_agree(tmp_path: Path) -> None:
    other = golden("tiny-opt", tmp_path).path
    with pytest.raises(ValueError, match=r"`draft=.*gguf` and .* have different vocabularies"):
        load(None, LoadOptions(draft=other))
    with pytest.raises(ValueError, match="No such file"):
        load(None, LoadOptions(draft=tmp_path / "missing.gguf"))


def test_a_draft_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    def read(phase: str, done: int, total: int) -> None:
        pytest.fail("the model was read")

    for draft, message in (
        (golden("tiny-opt", tmp_path).path, "have different vocabularies"),
        (
            write_hybrid(tmp_path / "h.gguf", "lfm2"),
            r"^`draft=h\.gguf` has recurrent layers",
        ),
        (write_gguf_alone(tmp_path / "no.gguf"), r"^`draft=no\.gguf`: "),
    ):
        with pytest.raises(LoadError, match=message):
            load(None, LoadOptions(draft=draft), read)
    with pytest.raises(LoadError, match=r"^`draft` has no effect with `draft_max=0`: leave out one"):
        load(None, LoadOptions(draft=model_path(), draft_max=0), read)


def test_a_draft_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for experts of the larger model is no way out."""
    loads, check = [], memory.check_memory

    def short(*args: Any, **more: Any) -> None:
        loads.append(args)
        if len(loads) == 2:
            raise MemoryShortError("not enough memory: the model needs more")
        check(*args, **more)

    monkeypatch.setattr(memory, "check_memory", short)
    message = r"^`draft`: .*gguf cannot be loaded: not enough memory: the model"
    with pytest.raises(LoadError, match=message) as caught:
        load(None, LoadOptions(threads=1, context=128, draft=model_path()))
    assert len(loads) == 2 and not isinstance(caught.value, MemoryShortError)


def write_gguf_alone(path: Path) -> Path:
    """A file without a model."""
    write_gguf(path, {"general.type": "profile"}, {"x": quantise(np.zeros(4, np.float32), "F32")})
    return path

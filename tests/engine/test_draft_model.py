"""A smaller model guesses: the text stays the same, and only models of one vocabulary go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.golden import golden

from hotcold.demo import model_path
from hotcold.engine.draft_model import DraftModel
from hotcold.engine.engine import Engine
from hotcold.engine.guesses import Kind
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation, speculation_of
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
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
    costs.is_fresh, costs.of = lambda rows: True, lambda rows: 1.0
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
    drafts = DraftModel(model.session())
    (request, *_), (again, *_) = some_requests(model, 0), some_requests(model, 0)
    Engine(model.session()).run([request])
    for wrong in (False, True, False):
        guess = drafts(again, 5)
        n = len(again.output)
        assert guess is not None and guess.kind == Kind.MODEL
        assert list(guess.tokens) == request.output[n : n + 5]
        again.output += request.output[n : n + (2 if wrong else 5)]  # as if the others were wrong
    assert drafts(again, 3).tokens == request.output[len(again.output) :][:3]  # type: ignore[union-attr]


def test_texts_without_room_are_not_guessed(model: LoadedModel) -> None:
    drafts = DraftModel(model.session())
    requests = [Request(Job([1, 300 + i], max_tokens=9)) for i in range(5)]
    assert [drafts(each, 2) is not None for each in requests] == [True] * 3 + [False] * 2
    requests[1].finish("stop")
    assert drafts(requests[4], 2) is not None and drafts(requests[3], 2) is None
    assert drafts(Request(Job([1] * 128, max_tokens=1)), 2) is None


def test_a_draft_that_does_not_pay_is_hardly_asked(model: LoadedModel) -> None:
    speculation = speculation_of(model.session())
    assert speculation is not None
    (request, *_) = some_requests(model, 0)
    for _ in range(5):
        speculation.costs.note(1, 0.01)
    drafts = next(each for each in speculation._guessers if isinstance(each, DraftModel))
    drafts.seconds = 1.0
    asked = [speculation._worth_drafting(request, drafts, 1, 7) for _ in range(80)]
    assert sorted(set(asked)) == [0, 1] and sum(asked) == 2
    drafts.seconds = 1e-6
    assert speculation._worth_drafting(request, drafts, 1, 7) >= 1


def test_the_vocabularies_must_agree(tmp_path: Path) -> None:
    other = golden("tiny-opt", tmp_path).path
    with pytest.raises(ValueError, match=r"`draft=.*gguf` and .* have different vocabularies"):
        load(None, LoadOptions(draft=other))
    with pytest.raises(ValueError, match="No such file"):
        load(None, LoadOptions(draft=tmp_path / "missing.gguf"))

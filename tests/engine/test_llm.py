"""The Python interface, on the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hotcold import LLM
from hotcold.engine.engine import Engine
from hotcold.engine.scoring import Scorer
from hotcold.errors import UserError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sequences=3) as llm:
        yield llm


def test_a_stream_is_the_generated_text(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPT, max_tokens=40, seed=5))
    generation = llm.generate(PROMPT, max_tokens=40, seed=5)
    assert len(pieces) > 20 and "".join(pieces) == generation.text == str(generation)
    assert generation.text == llm.tokenizer.decode(
        [*llm.tokenizer.encode(PROMPT), *generation.ids]
    ).removeprefix(PROMPT)
    assert (generation.prompt_tokens, generation.seed) == (5, 5)
    assert generation.finish_reason == "length" and len(generation.ids) == 40
    assert generation.timings.ttft_s is not None


def test_a_continuation_keeps_its_first_space(llm: LLM) -> None:
    assert llm.generate("Once upon", max_tokens=2, temperature=0).text == " a time"


def test_each_of_several_prompts_gets_what_it_gets_alone(llm: LLM) -> None:
    prompts = [PROMPT, "The king", "", "Peter and Heidi went up the mountain, and there they found", "I"]
    together = llm.generate(prompts, max_tokens=30, seed=3)
    alone = [llm.generate(prompt, max_tokens=30, seed=3) for prompt in prompts]
    assert [g.ids for g in together] == [g.ids for g in alone]
    assert llm.generate([], max_tokens=3) == []


def test_ten_runs_with_one_seed_are_one_text_and_other_seeds_are_others(llm: LLM) -> None:
    assert len({llm.generate(PROMPT, max_tokens=60, seed=11).ids for _ in range(10)}) == 1
    assert len({llm.generate(PROMPT, max_tokens=60, seed=seed).ids for seed in range(10)}) == 10


def test_a_drawn_seed_gives_the_text_again(llm: LLM) -> None:
    first = llm.generate(PROMPT, max_tokens=30)
    assert llm.generate(PROMPT, max_tokens=30, seed=first.seed).ids == first.ids


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    from_ids = "".join(llm.stream(ids, max_tokens=8, temperature=0))
    assert from_ids == llm.generate(PROMPT, max_tokens=8, temperature=0).text


def test_an_abandoned_stream_gives_its_pages_back(llm: LLM) -> None:
    free = llm.session.cache.free_pages
    stream = llm.stream(PROMPT, max_tokens=100)
    next(stream)
    assert llm.session.cache.free_pages < free
    stream.close()  # what leaving a for loop does as soon as nothing refers to the generator
    assert llm.session.cache.free_pages == free
    del stream
    never_started = llm.stream(PROMPT)
    del never_started
    assert llm.session.cache.free_pages == free and not llm.engine.scheduler.waiting


def test_two_streams_at_once(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=20, seed=1).text
    first, second = (llm.stream(PROMPT, max_tokens=20, seed=1) for _ in range(2))
    texts = ["", ""]
    for piece in first:
        texts[0] += piece
        texts[1] += next(second, "")
    texts[1] += "".join(second)
    assert texts == [expected, expected]


def test_the_end_of_the_context(llm: LLM) -> None:
    generation = llm.generate(PROMPT, max_tokens=1000, ignore_eos=True, seed=1)
    assert (generation.finish_reason, generation.context_full) == ("length", True)
    assert generation.prompt_tokens + len(generation.ids) == 256


def test_a_prompt_that_is_too_long_is_refused_before_the_first_piece(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt has 301 tokens and the context holds 256"):
        llm.stream([5] * 301)
    with pytest.raises(ValueError, match="the context holds 256"):
        llm.generate([PROMPT, "goat " * 400])
    assert not llm.engine.scheduler.waiting and not llm.engine.scheduler.running


def test_wrong_options_are_refused(llm: LLM) -> None:
    with pytest.raises(
        TypeError, match=r"unknown option 'temprature': allowed are max_tokens, .*temperature"
    ):
        llm.generate(PROMPT, temprature=0.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="temperature is -1"):
        llm.generate(PROMPT, temperature=-1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        llm.generate(PROMPT, max_tokens=0)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(backend="reference", context=32)
    assert llm.model.context == 32
    llm.close()
    with pytest.raises(ValueError, match="this LLM is closed"):
        llm.generate(PROMPT)


def test_a_text_that_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the text before it, and others' texts are as they are."""
    with LLM(sequences=2) as llm:
        expected = llm.generate(PROMPT, max_tokens=12, seed=1).text
        inner = llm.engine.sampler.sample

        def sample(logits: Any, row: int, params: Any, position: int, recent: Any = ()) -> int:
            if params.seed == 13 and position == 9:
                head = llm.engine.session.transformer.head
                head.write(logits, np.full_like(head.read(logits, row, row + 1), np.nan), row)
            return inner(logits, row, params, position, recent)

        monkeypatch.setattr(llm.engine.sampler, "sample", sample)
        pieces = []
        other = llm.stream(PROMPT, max_tokens=12, seed=1)
        others = [next(other)]
        with pytest.raises(ValueError, match="logits contain nan"):
            for piece in llm.stream(PROMPT, max_tokens=12, seed=13):
                pieces.append(piece)
        assert len(pieces) == 4
        assert "".join([*others, *other]) == expected
        with pytest.raises(ValueError, match="logits contain nan"):
            llm.generate([PROMPT, "The king"], seed=13)
        assert llm.session.cache.free_pages == llm.session.cache.pages
        assert llm.generate(PROMPT, max_tokens=12, seed=1).text == expected


def test_two_users_of_one_model() -> None:
    """The second is refused while the first is not done; another session of the same weights is not."""
    with LLM() as llm:
        expected = llm.generate(PROMPT, max_tokens=12, temperature=0).ids
        window = llm.tokenizer.encode(PROMPT)
        request = llm.request(PROMPT, max_tokens=12, temperature=0)
        llm.engine.add(request)
        for _ in range(4):
            llm.engine.step()
        other = Engine(llm.session)
        refused = r"in use by an engine with 1 unfinished requests: finish or abort .* model.session\(\)"
        with pytest.raises(UserError, match=refused):
            other.add(llm.request(PROMPT))
        with pytest.raises(UserError, match=refused):
            next(Scorer(llm.session).logits(window))
        apart = Engine(llm.model.session("off"))
        apart.run([twin := llm.request(PROMPT, max_tokens=12, temperature=0)])
        while not request.finished:
            llm.engine.step()
        assert tuple(request.output) == tuple(twin.output) == expected
        other.run([again := llm.request(PROMPT, max_tokens=12, temperature=0)])
        assert tuple(again.output) == expected

        rows = Scorer(llm.session).logits(window)
        next(rows)
        for busy in (lambda: llm.generate(PROMPT), lambda: next(Scorer(llm.session).logits(window))):
            with pytest.raises(UserError, match="in use by a scoring that has not come to the end"):
                busy()
        rows.close()
        assert llm.generate(PROMPT, max_tokens=12, temperature=0).ids == expected
        llm.engine.add(llm.request(PROMPT))
        llm.engine.step()
        del other  # an engine that is gone owns nothing
        forgotten = Engine(llm.session)
        with pytest.raises(UserError):
            forgotten.add(llm.request(PROMPT))
        llm._engine = forgotten
        assert llm.generate(PROMPT, max_tokens=12, temperature=0).ids == expected
        assert llm.session.cache.free_pages == llm.session.cache.pages

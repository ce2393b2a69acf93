"""Replies made of what the engine really says, with the built-in model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.api_pieces import facts

from hotcold import LLM
from hotcold.engine.generation import Piece, stream
from hotcold.engine.request import Job, Request
from hotcold.server.protocol import completion, native
from hotcold.tasks import scoring

TEXT = "Once upon a time there was a little goat on a € mountain."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sparsity="exact", threads=1, context=256) as llm:
        yield llm


def pieces(llm: LLM, job: Job) -> Iterator[Piece]:
    return stream(llm.engine, Request(job))


def answered(llm: LLM, **fields: Any) -> dict[str, Any]:
    """The whole reply; the events of a stream give the same texts and log-probabilities."""
    body = {"prompt": TEXT, **fields}
    whole = completion.parse(body, facts())
    streamed = completion.parse({**body, "stream": True}, facts())
    prompts = whole.encode()
    replies = whole.reply(prompts), streamed.reply(prompts)
    events = replies[1].first()
    for i, job in enumerate(whole.jobs(prompts)):
        for piece in pieces(llm, job):
            replies[0].add(i, piece)
            events += replies[1].add(i, piece)
    reply = replies[0].whole()
    for choice in reply["choices"]:
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        if choice["logprobs"] is not None:
            for name, column in choice["logprobs"].items():
                assert [value for each in own for value in each["logprobs"][name]] == column
        assert [each["finish_reason"] for each in own][-1] == choice["finish_reason"]
    return reply


def test_echoed_log_probabilities_are_those_of_a_scorer(llm: LLM) -> None:
    """An evaluation harness asks for a score of the given tokens, by the decode rule."""
    (choice,) = answered(llm, echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"]
    ids = llm.tokenizer.encode(TEXT)
    session = llm.model.session("exact")
    expected = -scoring.score(scoring.Scorer(session), ids)
    session.close()
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None and len(found) == len(ids) + 1
    np.testing.assert_allclose(found[1:-1], expected, atol=2e-5)
    assert choice["text"].startswith(TEXT) and len(choice["text"]) > len(TEXT)
    # Greedy: the token after the prompt is the likeliest.
    assert found[-1] == max(choice["logprobs"]["top_logprobs"][-1].values())


def test_an_echo_alone_generates_nothing(llm: LLM) -> None:
    reply = answered(llm, echo=True, logprobs=0, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(llm.tokenizer.encode(TEXT))
    assert reply["usage"]["completion_tokens"] == 0


def test_texts_of_several_prompts(llm: LLM) -> None:
    """The same as the library gives, with the same seeds."""
    prompts = ["Once upon a time", "The goat"]
    reply = answered(llm, prompt=prompts, n=2, seed=4, max_tokens=20)
    expected = llm.generate(
        [each for each in prompts for _ in range(2)],
        seed=4,
        max_tokens=20,
    )
    assert [each["text"] for each in reply["choices"]] == [each.text for each in expected]
    assert reply["usage"]["prompt_tokens"] == sum(each.prompt_tokens for each in expected[::2])
    assert reply["usage"]["completion_tokens"] == sum(len(each.ids) for each in expected)


def test_a_stop_string_is_no_part_of_the_text(llm: LLM) -> None:
    plain = answered(llm, seed=1, max_tokens=60)["choices"][0]["text"]
    stop = plain[20:23]
    (choice,) = answered(llm, seed=1, max_tokens=60, stop=stop)["choices"]
    assert choice["text"] == plain[: plain.index(stop)] and choice["finish_reason"] == "stop"


def test_the_native_route(llm: LLM) -> None:
    call = native.parse(
        {"prompt": TEXT, "n_predict": 12, "seed": 2, "n_probs": 3, "ignore_eos": True}, facts()
    )
    (job,) = call.jobs(call.encode())
    reply = call.reply(call.encode())
    for piece in pieces(llm, job):
        reply.add(0, piece)
    whole = reply.whole()
    expected = llm.generate(TEXT, max_tokens=12, seed=2, ignore_eos=True)
    assert whole["content"] == expected.text and whole["stop_type"] == "limit"
    assert [each["id"] for each in whole["completion_probabilities"]] == list(expected.ids)
    assert all(math.exp(each["logprob"]) <= 1 for each in whole["completion_probabilities"])
    assert whole["tokens_evaluated"] == len(job.prompt) and whole["timings"]["predicted_per_second"] > 0

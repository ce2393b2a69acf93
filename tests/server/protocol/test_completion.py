"""``/v1/completions``: what a request means, and the shapes of the answer."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_pieces import facts, likely, piece, pieces_of
from support.built_in import tokenizer

from hotcold.engine.request import Job
from hotcold.engine.sampler import splitmix64
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import completion
from hotcold.server.protocol.errors import APIError
from hotcold.values import LARGEST


def parse(prompt: Any = "Once", **fields: Any) -> completion.CompletionCall:
    return completion.parse({"model": "fable", "prompt": prompt, **fields}, facts())


def refused(prompt: Any = "Once", **fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(prompt, **fields)
    return caught.value


def test_a_request_without_options_has_the_length_of_openai() -> None:
    call = parse()
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert call.jobs(call.encode()) == [Job(tokenizer().encode("Once"), params, max_tokens=16)]


def test_no_bound_by_the_name_of_llama_cpp() -> None:
    for call in (parse(n_predict=-1), parse(max_tokens=-1)):
        assert call.jobs(call.encode())[0].max_tokens == LARGEST
    assert refused(n_predict=-2).param == "n_predict" and refused(max_tokens=-2).param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any, expected: list[Any]) -> None:
    call = parse(prompt)
    encode = tokenizer().encode
    assert call.encode() == [encode(each) if isinstance(each, str) else each for each in expected]


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [["a"]], [1, "a"], ["a", 1], [1.5], [True], 5, {}, [[1], "a"], [-1], [1 << 40]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = refused(prompt)
    assert error.status == 400 and error.param is not None and error.param.startswith("prompt")


def test_an_id_outside_the_vocabulary_is_named() -> None:
    last = tokenizer().vocab_size - 1
    assert parse([last]).jobs([[last]])
    message = f"prompt has token {last + 1}: allowed are the ids 0 to {last}"
    assert refused([last + 1]).message == message
    assert refused([[1], [last + 1]]).param == "prompt[1]"


def test_what_cannot_fit_is_refused_before_it_is_read() -> None:
    context = facts().context
    for prompt in ([5] * (context + 1), "a" * 1_000_000):
        with pytest.raises(APIError, match="context") as caught:
            parse(prompt).encode()
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert len(parse([5] * context).encode()[0]) == context  # whether there is room is the engine's to say


def test_names_of_control_tokens_are_these_tokens_and_bos_comes_once() -> None:
    bos = tokenizer().bos_id
    assert bos is not None
    name = tokenizer().piece(bos).decode()
    assert parse(f"{name}Once").encode() == [[bos, *tokenizer().encode("Once", add_bos=False)]]


def test_choices_are_n_of_each_prompt_in_order() -> None:
    call = parse([[5], [6]], n=2, seed=9)
    jobs = call.jobs(call.encode())
    assert [each.prompt for each in jobs] == [[5], [5], [6], [6]]
    assert [each.params.seed for each in jobs] == [9, *(splitmix64(9, i) >> 1 for i in (1, 2, 3))]
    reply = call.reply(call.encode())
    for i in range(4):
        reply.add(i, piece(str(i), [50, 51], "length", prompt_tokens=1))
    whole = reply.whole()
    assert [(each["index"], each["text"]) for each in whole["choices"]] == [(i, str(i)) for i in range(4)]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (2, 8)


def test_too_many_texts_are_refused() -> None:
    assert refused(["a"] * 5, n=16).param == "n"
    assert refused(["a"] * 65).param == "prompt"


@pytest.mark.parametrize(("best_of", "n", "fine"), [(1, 1, True), (3, 3, True), (1, 2, True), (2, 1, False)])
def test_best_of_may_not_ask_for_more_than_is_returned(best_of: int, n: int, fine: bool) -> None:
    if fine:
        assert parse(best_of=best_of, n=n).n == n
    else:
        assert refused(best_of=best_of, n=n).param == "best_of"


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"mirostat": 2}, {"logprobs": 21}, {"logprobs": True}])
def test_what_is_not_supported_is_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).param == next(iter(fields))


def answer(call: completion.CompletionCall, pieces: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    ids = call.encode()
    reply = call.reply(ids)
    events = reply.first()
    for each in pieces:
        events += reply.add(0, each)
    return events + reply.end(), reply.whole()


def test_a_stream_and_the_whole() -> None:
    events, _ = answer(parse(stream=True, stream_options={"include_usage": True}), pieces_of("abcd"))
    _, whole = answer(parse(), pieces_of("abcd"))
    texts = [c["text"] for e in events for c in e["choices"]]
    assert texts == ["abc", "d", ""] and whole["choices"][0]["text"] == "abcd"
    assert whole["choices"][0] == {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "stop"}
    assert {each["object"] for each in [*events, whole]} == {"text_completion"}
    assert [each["usage"] for each in events[:-1]] == [None] * 3
    assert events[-1]["usage"]["completion_tokens"] == 2 and whole["usage"]["total_tokens"] == 11


TEXT = "Once upon a € time"


def echoed(call: completion.CompletionCall, last: list[int], reason: str = "length") -> dict[str, Any]:
    (ids,) = call.encode()
    found = (None, *(likely(id) for id in ids[1:]))
    text = tokenizer().decode([*ids, *last])[len(tokenizer().decode(ids)) :]
    end = piece(text, last, reason, logprobs=tuple(map(likely, last)), prompt_logprobs=found)
    _, whole = answer(call, [end])
    choice: dict[str, Any] = whole["choices"][0]
    return choice


def test_echo_gives_the_prompt_with_its_log_probabilities() -> None:
    call = parse(TEXT, echo=True, logprobs=1, max_tokens=1)
    (ids,) = call.encode()
    (job,) = call.jobs([ids])
    assert job.echo and job.logprobs == 1 and job.max_tokens == 1
    choice = echoed(call, ids[1:2])
    columns = choice["logprobs"]
    assert choice["text"] == TEXT + tokenizer().piece(ids[1]).decode()
    assert {len(column) for column in columns.values()} == {len(ids) + 1}
    assert columns["token_logprobs"] == [None] + [-0.25] * len(ids)
    assert columns["top_logprobs"][0] is None and columns["tokens"][0] == "<s>"
    for token, top in zip(columns["tokens"][1:], columns["top_logprobs"][1:], strict=True):
        assert top[token] == -0.25 == max(top.values())  # how lm-eval finds that it was the likeliest
    for token, offset in zip(columns["tokens"][1:], columns["text_offset"][1:], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token.strip(), offset + (offset > 0 and token[0] == " "))
    assert "bytes:\\xe2" in columns["tokens"]
    assert columns["text_offset"][:2] == [0, 0]


def test_scores_of_a_long_prompt_come_in_several_pieces() -> None:
    def answer_of(stream: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        call = parse(TEXT, echo=True, logprobs=1, max_tokens=1, stream=stream)
        (ids,) = call.encode()
        found = (None, *(likely(id) for id in ids[1:]))
        last = piece("x", [300], "length", logprobs=(likely(300),), prompt_logprobs=found[5:])
        parts = [piece("", [], None, prompt_logprobs=each) for each in (found[:3], found[3:5])]
        return answer(call, [*parts, last])

    events = [each["choices"][0] for each in answer_of(True)[0]]
    assert [each["text"] for each in events] == [TEXT, "", "x"]
    assert [len(each["logprobs"]["tokens"]) for each in events[:2]] == [3, 2]
    whole = answer_of(False)[1]["choices"][0]
    one = echoed(parse(TEXT, echo=True, logprobs=1, max_tokens=1), [300])
    assert whole["logprobs"] == one["logprobs"]
    for key, values in whole["logprobs"].items():
        assert [value for each in events for value in each["logprobs"][key]] == values
    assert whole["text"] == TEXT + "x"


def test_offsets_count_control_tokens_that_the_prompt_names() -> None:
    choice = echoed(parse("<s>Once</s>Once", echo=True, logprobs=0), [])
    offsets = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert offsets["</s>"] == len("<s>Once")


def test_the_end_of_the_text_after_an_echo_has_an_entry() -> None:
    """lm-eval takes the last entry off, whatever it is."""
    call = parse(TEXT, echo=True, logprobs=1, max_tokens=1)
    columns = echoed(call, [], "stop")["logprobs"]
    assert len(columns["tokens"]) == len(call.encode()[0]) + 1
    assert (columns["tokens"][-1], columns["token_logprobs"][-1]) == ("", None)


def test_an_echo_of_ids_is_their_text() -> None:
    ids = tokenizer().encode(TEXT)
    call = parse([ids], echo=True)
    (job,) = call.jobs([ids])
    assert not job.echo  # it is expensive, and was not requested
    _, whole = answer(call, pieces_of("!"))
    assert whole["choices"][0]["text"] == TEXT + "!" and whole["choices"][0]["logprobs"] is None


def test_no_tokens_may_be_asked_for() -> None:
    call = parse(TEXT, echo=True, logprobs=1, max_tokens=0)
    (ids,) = call.encode()
    assert call.jobs([ids])[0].max_tokens == 0
    choice = echoed(call, [ids[1]], "stop")
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    _, whole = answer(parse(max_tokens=0), pieces_of("abc"))
    assert whole["choices"][0]["text"] == "" and whole["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_the_answer_alone_begin_at_its_start() -> None:
    ids = tokenizer().encode("big dog", add_bos=False)
    end = piece(" big dog", ids, "length", logprobs=tuple(map(likely, ids)))
    _, whole = answer(parse(logprobs=0), [end])
    columns = whole["choices"][0]["logprobs"]
    assert columns["text_offset"][0] == 0 and "".join(columns["tokens"]) == " big dog"
    for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True):
        assert top[token] == -0.25

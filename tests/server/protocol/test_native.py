"""llama.cpp's ``/completion``, and ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_pieces import facts, likely, piece, pieces_of
from support.built_in import tokenizer

from hotcold.engine.request import Job
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import models, native, props, tokens
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.json_parts import json_parts
from hotcold.values import LARGEST


def parse(**fields: Any) -> native.NativeCall:
    return native.parse({"prompt": "Once", **fields}, facts())


def params(**fields: Any) -> SamplingParams:
    return parse(**fields).job.params


def test_a_request_without_options_has_the_defaults_of_llama_cpp() -> None:
    call = parse()
    expected = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1)
    assert call.jobs(call.encode()) == [Job(tokenizer().encode("Once"), expected, max_tokens=2048)]


@pytest.mark.parametrize(("n_predict", "expected"), [(5, 5), (-1, LARGEST), (0, 1)])
def test_lengths(n_predict: int, expected: int) -> None:
    call = parse(n_predict=n_predict)
    assert call.jobs(call.encode())[0].max_tokens == expected


def test_samplers_that_are_left_out_do_nothing() -> None:
    assert params(samplers=["top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]) == params()
    assert params(samplers=["top_k"], repeat_penalty=1.3) == SamplingParams(1.0, 40, 1.0, 0.0, 1.0)


def test_samplers_run_in_one_order_whatever_order_is_asked_for() -> None:
    assert params(samplers=["temperature", "top_k"]) == params(samplers=["top_k", "temperature"])
    everything = ["min_p", "temperature", "penalties", "top_p", "top_k", "top_k"]
    assert params(samplers=everything, top_k=3) == params(top_k=3)
    with pytest.raises(APIError, match="samplers has 'magic'"):
        parse(samplers=["magic"])


def run(call: native.NativeCall, pieces: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    reply = call.reply(call.encode())
    events = reply.first()
    for each in pieces:
        events += reply.add(0, each)
    return events + reply.end(), reply.whole()


def test_a_stream_ends_with_stop_and_no_other_sign() -> None:
    events, _ = run(parse(stream=True), pieces_of("abcd"))
    assert [(each["content"], each["tokens"], each["stop"]) for each in events] == [
        ("abc", [100], False), ("d", [101], False), ("", [], True),
    ]  # fmt: skip
    assert events[0]["tokens_predicted"] == 1 and events[-1]["tokens_predicted"] == 2


def test_the_whole_reply() -> None:
    _, whole = run(parse(return_tokens=True, seed=3), pieces_of("a\nbcd"))
    assert (whole["content"], whole["tokens"], whole["prompt"]) == ("a\nbcd", [100, 101], "Once")
    assert (whole["stop"], whole["stop_type"], whole["stopping_word"]) == (True, "eos", "")
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["truncated"]) == (9, 2, False)
    assert whole["generation_settings"]["seed"] == 5  # of the piece: what gives the text again
    assert whole["has_new_line"] and whole["model"] == "fable"
    assert run(parse(), pieces_of("abcd"))[1]["tokens"] == []


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"finish_reason": "stop"}, ("eos", "")),
        ({"finish_reason": "stop", "stop": "END"}, ("word", "END")),
        ({"finish_reason": "length"}, ("limit", "")),
    ],
)
def test_why_it_stopped(last: dict[str, Any], expected: tuple[str, str]) -> None:
    _, whole = run(parse(), [piece("a", [5], **last)])
    assert (whole["stop_type"], whole["stopping_word"]) == expected


def test_a_prompt_may_only_be_read() -> None:
    _, whole = run(parse(n_predict=0), [piece("a", [5], "length")])
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")


def test_probabilities() -> None:
    _, whole = run(parse(n_probs=2), [piece("ab", [300, 301], "stop", logprobs=(likely(300), likely(301)))])
    first, second = whole["completion_probabilities"]
    assert (first["id"], first["logprob"], second["id"]) == (300, -0.25, 301)
    assert first["token"].encode() == bytes(first["bytes"]) == tokenizer().piece(300)
    assert [each["id"] for each in first["top_logprobs"]] == [300, 301]


@pytest.mark.parametrize(
    "fields",
    [
        {"n_predict": -2}, {"n_discard": -1}, {"n_probs": 21}, {"prompt": None}, {"prompt": ["a"]},
        {"mirostat": 1}, {"image_data": [{"id": 1}]}, {"post_sampling_probs": True}, {"samplers": ["magic"]},
        {"samplers": "kp"}, {"n_cmpl": 2}, {"xtc_probability": 0.5}, {"prompt": [-1]},
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith(next(iter(fields)))


def written(call: tokens.TokenizeCall | tokens.DetokenizeCall) -> Any:
    return json.loads(b"".join(json_parts(call.answer())))


def tokenize(**fields: Any) -> Any:
    return written(tokens.parse_tokenize({"content": "a € <s>", **fields}, facts()))["tokens"]


def test_tokens_of_a_text() -> None:
    encode = tokenizer().encode
    assert tokenize() == encode("a € <s>", add_bos=False, parse_special=True)
    assert tokenize(parse_special=False) == encode("a € <s>", add_bos=False)
    assert tokenize(add_special=True)[0] == tokenizer().bos_id
    pieces = tokenize(with_pieces=True)
    assert [each["id"] for each in pieces] == tokenize()
    joined = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces
    )
    assert joined == b" a \xe2\x82\xac <s>" and [0xE2] in [each["piece"] for each in pieces]


def test_the_text_of_tokens() -> None:
    ids = tokenizer().encode("Once upon a €")
    assert written(tokens.parse_detokenize({"tokens": ids}, facts())) == {"content": "Once upon a €"}
    assert written(tokens.parse_detokenize({"tokens": []}, facts())) == {"content": ""}


@pytest.mark.parametrize(
    "value", [None, "a", [-1], [1.5], [True], ["a"], [1 << 40], {}, [[1]], [4096 * 1024]]
)
def test_tokens_that_are_none(value: Any) -> None:
    with pytest.raises(APIError, match="token") as caught:
        tokens.parse_detokenize({"tokens": value}, facts())
    assert caught.value.status == 400


def test_the_list_of_models() -> None:
    (entry,) = models.listing(facts())["data"]
    assert entry == models.one(facts(), "fable") == models.one(facts(), "gpt-4o")
    assert (entry["id"], entry["object"], entry["created"]) == ("fable", "model", 1_700_000_000)
    assert entry["meta"]["n_vocab"] == tokenizer().vocab_size
    with pytest.raises(APIError, match="this server has fable, gpt-4o") as caught:
        models.one(facts(), "other\nmodel")
    assert caught.value.status == 404 and "\n" not in caught.value.message


def test_properties_name_no_path() -> None:
    found = props.props(facts(), props.TemplateFacts("{{ x }}", "", {"supports_tools": False}))
    assert found["chat_template_caps"] == {"supports_tools": False} and found["eos_token"] == "</s>"
    assert found["total_slots"] == 4 and found["chat_template"] == "{{ x }}"
    assert found["default_generation_settings"]["params"]["top_k"] == 40
    assert "/" not in found["model_path"]

"""``/v1/chat/completions``: what a request means, and the shapes of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_pieces import Marked, facts, likely, piece, pieces_of
from support.built_in import tokenizer

from hotcold.chat.stream import ChatStream
from hotcold.chat.thinking import Thinking
from hotcold.chat.tool_formats import HERMES
from hotcold.chat.tool_grammar import tools_grammar, without_calls
from hotcold.engine.request import Grammar, Job
from hotcold.engine.sampler import splitmix64
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import chat
from hotcold.server.protocol.errors import APIError
from hotcold.values import LARGEST
from hotcold.watch.live import Frame

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> chat.ChatCall:
    return chat.parse({"model": "fable", "messages": HELLO, **fields}, facts())


def job(**fields: Any) -> Job:
    (found,) = parse(**fields).jobs([1, 2, 3])
    return found


def refused(**fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    return caught.value


def test_a_request_without_options_has_the_defaults_of_llama_cpp() -> None:
    """OpenAI's defaults, temperature 1 and nothing cut off, are for models a thousand times as large."""
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert job() == Job([1, 2, 3], params, max_tokens=2048)
    call = parse()
    assert (call.stream, call.n, call.tools, call.continue_last, call.messages[0]["role"]) == (
        False,
        1,
        [],
        False,
        "user",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {"max_tokens": LARGEST}),
        ({"max_tokens": -1}, {"max_tokens": LARGEST}),
        ({"max_completion_tokens": -1, "max_tokens": 5}, {"max_tokens": LARGEST}),
        ({"max_tokens": "5", "ignore_eos": "true"}, {"max_tokens": 5, "ignore_eos": True}),
        ({"stop": [""]}, {"stop": ()}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop": ["", "a", ""]}, {"stop": ("a",)}),
        ({"stop": [str(i) for i in range(256)]}, {"stop": tuple(str(i) for i in range(256))}),
        ({"stop": "\n"}, {"stop": ("\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"cache_prompt": False}, {"cache": False}),
        ({"hotcold": {"picture": True}}, {"picture": True}),
        ({"response_format": {"type": "text"}}, {"grammar": None}),
        ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json_object")}),
        ({"regex": "a+"}, {"grammar": Grammar("regex", "a+")}),
        ({"grammar": 'root ::= "a"'}, {"grammar": Grammar("gbnf", 'root ::= "a"')}),
        ({"unknown": {"anything": [1]}, "user": "me", "store": True}, {}),
        ({"temperature": None, "stop": None, "tools": None, "stream_options": None}, {}),
    ],
)  # fmt: skip
def test_fields_of_the_request_reach_the_job(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found, plain = job(**fields), job()
    for name in Job.__dataclass_fields__:
        assert getattr(found, name) == expected.get(name, getattr(plain, name)), name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5, "min_p": 0.1}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),  # vLLM's and llama.cpp's word for all
        ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"samplers": ["penalties", "top_k"], "temperature": 2, "top_k": 5, "top_p": 0.5}, {"top_k": 5}),
        ({"samplers": ["temperature"], "temperature": 2, "repetition_penalty": 2}, {"temperature": 2}),
        ({"temperature": "0.7", "top_k": "5", "seed": "3"}, {"temperature": 0.7, "top_k": 5, "seed": 3}),
        ({"top_p": "5e-1", "frequency_penalty": "-1"}, {"top_p": 0.5, "frequency_penalty": -1}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {"seed": None}),  # llama.cpp's word for a random one
        ({"seed": -3}, {"seed": 2**64 - 3}),  # OpenAI allows negative ones
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {5: -100, 7: 1.5}}),
        ({"logit_bias": [[5, False], [7, 2]]}, {"logit_bias": {5: float("-inf"), 7: 2}}),
    ],
)
def test_sampling_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = job(**fields).params
    plain = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repeat_penalty": 1}
    if "samplers" in fields:
        plain = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repeat_penalty": 1}
    for name, value in {**plain, **expected}.items():
        assert getattr(found, name) == value, name


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}, "strict": True}},
        {"type": "json_schema", "schema": {"type": "string"}},
        {"type": "json_object", "schema": {"type": "string"}},
    ],
)
def test_a_schema_may_stand_in_several_places(format: dict[str, Any]) -> None:
    for fields in ({"response_format": format}, {"json_schema": {"type": "string"}}):
        grammar = job(**fields).grammar
        assert grammar is not None and grammar.kind == "json_schema"
        assert json.loads(grammar.source) == {"type": "string"}


def test_every_choice_has_a_seed_as_several_prompts_of_the_library() -> None:
    jobs = parse(n=3, seed=11).jobs([1])
    assert [each.params.seed for each in jobs] == [11, splitmix64(11, 1) >> 1, splitmix64(11, 2) >> 1]
    assert [each.params.seed for each in parse(n=2).jobs([1])] == [None, None]


def test_messages_as_a_template_sees_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{**each, "cache_control": {}} for each in parts]},
        {"role": "assistant", "content": None, "tool_calls": [call], "unknown": 1},
        {"role": "tool", "tool_call_id": "c1", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant"},
        {"role": "assistant", "content": "It is"},
    ]
    found = parse(messages=messages)
    assert found.messages == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "It is"},
    ]
    assert found.continue_last and not found.add_generation_prompt
    assert parse(messages=messages[:-1]).continue_last  # of nothing
    assert not parse(messages=messages[:4]).continue_last


def test_tools_and_what_must_be_done_with_them() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert parse(tools=[TOOL]).tool_choice == "auto"
    assert parse(tools=[TOOL], tool_choice="required").tools[0]["function"]["name"] == "weather"
    assert parse(tools=[TOOL], tool_choice=named).tool_choice == named
    assert parse(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls is False
    none = parse(tools=[TOOL], tool_choice="none")
    assert (none.tools, none.callable, none.tool_choice) == ([TOOL], [], "none")
    assert parse(tools=[], tool_choice="auto").tool_choice == "none"


def test_what_a_tool_does_not_say_is_not_in_its_prompt() -> None:
    """Templates print a tool's fields, whatever they are; models know no `"strict": null`."""
    given = {"type": "function", "function": {"name": "look", "parameters": {"default": None}}}
    assert parse(tools=[given]).tools == [given]
    more = {"name": "look", "description": None, "parameters": None, "strict": None, "unknown": 1}
    assert parse(tools=[{**given, "function": more}]).tools[0]["function"] == {"name": "look"}
    assert parse(tools=[{**given, "function": {"name": "look", "strict": True}}]).callable[0]["function"] == {
        "name": "look",
        "strict": True,
    }


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(mode: str) -> None:
    """The model sees all tools, as before, and may call these."""
    time, wind = ({**TOOL, "function": {"name": name}} for name in ("time", "wind"))
    chosen = {"mode": mode, "tools": [{"type": "function", "function": {"name": "time"}}]}
    call = parse(tools=[TOOL, time, wind], tool_choice={"type": "allowed_tools", "allowed_tools": chosen})
    assert [each["function"]["name"] for each in call.tools] == ["weather", "time", "wind"]
    assert [each["function"]["name"] for each in call.callable] == ["time"]
    assert call.tool_choice == mode and call.job.grammar == parse(tools=[time], tool_choice=mode).job.grammar
    assert parse(tools=[TOOL, time]).callable == parse(tools=[TOOL, time]).tools


@pytest.mark.parametrize(
    "format",
    [
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "string"}},
        {"regex": "[0-9]+"},
    ],
)
def test_calls_or_content_of_a_format(format: dict[str, Any]) -> None:
    ids = {name: id for id, name in tokenizer().control_names.items()}
    content = parse(**format).job.grammar
    for choice, may in (("auto", content), ("required", content)):
        found = parse(tools=[TOOL], tool_choice=choice, **format)
        assert found.job.grammar == tools_grammar([TOOL], choice, True, HERMES, ids, may)
    assert parse(tools=[TOOL], tool_choice="none", **format).job.grammar == content
    assert parse(tools=[TOOL], **format).job.grammar != parse(tools=[TOOL]).job.grammar


def test_calls_match_a_grammar_of_their_own() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ids = {name: id for id, name in tokenizer().control_names.items()}
    for choice in ("auto", "required"):
        found = parse(tools=tools, tool_choice=choice)
        (job,) = found.jobs([1])
        assert job.grammar == tools_grammar(tools, choice, True, HERMES, ids)
    assert parse(tools=tools, tool_choice="none").job.grammar == without_calls(None, HERMES, ids)
    assert parse(tool_choice="none").job.grammar is None
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": 5}}}
    assert refused(tools=[broken]).param == "tools"
    assert refused(tools=[broken]).code == "invalid_grammar"


_FORBIDDEN = {"enable_thinking": False}
_WANTED = {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "kwargs", "budget"),
    [
        ({}, {}, None),
        ({"response_format": {"type": "json_object"}}, {}, None),  # the template's default
        ({"regex": "a", "chat_template_kwargs": _WANTED}, _WANTED, None),
        ({"reasoning_effort": "none"}, _FORBIDDEN | {"reasoning_effort": "none"}, None),
        ({"reasoning": {"effort": "none"}}, _FORBIDDEN | {"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
        ({"reasoning_effort": "none", "chat_template_kwargs": _WANTED},
         _WANTED | {"reasoning_effort": "none"}, None),
        ({"enable_thinking": False}, _FORBIDDEN, None),
        ({"thinking": False}, _FORBIDDEN, None),
        ({"thinking": {"type": "disabled"}}, _FORBIDDEN, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, _WANTED | {"thinking_budget": 7}, 7),
        ({"reasoning": {"max_tokens": 7, "enabled": True}}, _WANTED | {"thinking_budget": 7}, 7),
        ({"thinking_token_budget": 0}, _FORBIDDEN | {"thinking_budget": 0}, 0),
        ({"thinking_token_budget": 9, "thinking_budget": 8}, {"thinking_budget": 9}, 9),
        ({"thinking_budget_tokens": 8}, {"thinking_budget": 8}, 8),
        ({"thinking_budget": "8"}, {"thinking_budget": 8}, 8),
        ({"reasoning_budget": -1}, {}, None),
        ({"chat_template_kwargs": {"thinking_budget": 8}}, {"thinking_budget": 8}, 8),
        ({"chat_template_kwargs": {"thinking_budget": 0}}, _FORBIDDEN | {"thinking_budget": 0}, 0),
        ({"chat_template_kwargs": {"thinking_budget": -1}}, {"thinking_budget": -1}, None),
        ({"chat_template_kwargs": {"thinking_budget": "x"}}, {"thinking_budget": "x"}, None),
    ],
)  # fmt: skip
def test_names_of_thinking(fields: dict[str, Any], kwargs: dict[str, Any], budget: int | None) -> None:
    call = parse(**fields)
    assert call.template_kwargs == kwargs and call.thinking_budget == budget


def test_the_servers_budget_of_thinking() -> None:
    known = facts(thinking_budget=5)
    assert chat.parse({"messages": HELLO}, known).thinking_budget == 5
    assert chat.parse({"messages": HELLO, "thinking_budget": 9}, known).thinking_budget == 9
    assert chat.parse({"messages": HELLO, "thinking_budget": -1}, known).thinking_budget is None
    values = {"thinking_budget": 9}
    assert chat.parse({"messages": HELLO, "chat_template_kwargs": values}, known).thinking_budget == 9


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        ("nine", "[a-zA-Z0-9]{9}"),
        ("openai", "call_[0-9a-f]{24}"),
        ("kimi", r"functions\.weather:[01]"),
    ],
)
def test_ids_have_the_form_that_the_template_wants(form: Any, ids: str) -> None:
    call = chat.parse({"messages": HELLO, "tools": [TOOL]}, facts(call_ids=form))
    reply = call.reply(Marked)
    for each in pieces_of("[weather {1}][weather {2}]"):
        reply.add(0, each)
    found = [each["id"] for each in reply.whole()["choices"][0]["message"]["tool_calls"]]
    assert all(re.fullmatch(ids, each) for each in found) and len(set(found)) == 2


def test_values_for_the_template() -> None:
    call = parse(chat_template_kwargs={"enable_thinking": False, "n": 2.5}, reasoning_effort="low")
    assert call.template_kwargs == {"enable_thinking": False, "n": 2.5, "reasoning_effort": "low"}


@pytest.mark.parametrize("name", ["fable", "gpt-4o", "", None, "gpt-5", "fable.gguf", "./models/fable.gguf"])
def test_the_model_may_be_called_anything_and_the_answer_says_which_it_is(name: str | None) -> None:
    reply = parse(model=name).reply(Marked)
    for each in pieces_of("well"):
        reply.add(0, each)
    assert reply.whole()["model"] == "fable"


def test_the_servers_own_sampling_is_for_what_a_request_leaves_out() -> None:
    own = facts(sampling=SamplingParams(temperature=0.2, top_k=7, logit_bias={5: 1.0}, seed=9), max_tokens=3)
    body = {"model": "fable", "messages": [{"role": "user", "content": "Hello"}]}
    (plain,) = chat.parse(body, own).jobs([1])
    assert plain.params == own.sampling and plain.max_tokens == 3
    stated = {"temperature": 0, "logit_bias": {}, "seed": -1, "max_tokens": 5}
    (asked,) = chat.parse({**body, **stated}, own).jobs([1])
    assert asked.params == SamplingParams(temperature=0, top_k=7) and asked.max_tokens == 5


def replies(text: str, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream and the whole reply, of the same pieces."""
    reply = parse(**fields).reply(Marked)
    events = reply.first()
    for each in pieces_of(text):
        events += reply.add(0, each)
    return events + reply.end(), reply.whole()


def test_a_stream_has_the_documented_events() -> None:
    events, _ = replies("abc")
    head = {name: events[0][name] for name in ("id", "object", "created", "model", "system_fingerprint")}
    assert head["object"] == "chat.completion.chunk" and head["id"].startswith("chatcmpl-")
    deltas = [{"role": "assistant", "content": ""}, *({"content": c} for c in "abc"), {}]
    reasons = [None, None, None, None, "stop"]
    for event, delta, reason in zip(events, deltas, reasons, strict=True):
        assert {name: event[name] for name in head} == head
        assert event["choices"] == [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        assert "usage" not in event
    assert events[-1]["timings"]["predicted_n"] == 1


def test_usage_is_the_last_event_and_null_before() -> None:
    reply = parse(stream=True, stream_options={"include_usage": True}).reply(Marked)
    events = reply.first()
    for each in pieces_of("abcd"):
        events += reply.add(0, each)
    events += reply.end()
    assert [each["usage"] for each in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_thoughts_and_calls_are_told_apart() -> None:
    events, whole = replies("<hm>well[weather {1}][time {2}]", tools=[TOOL])
    (choice,) = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    assert (message["content"], message["reasoning_content"], message["refusal"]) == ("well", "hm", None)
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "weather", "arguments": "{1}"},
        {"name": "time", "arguments": "{2}"},
    ]
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    starts = [each for each in calls if "id" in each]
    assert [(each["index"], each["function"]) for each in starts] == [
        (0, {"name": "weather", "arguments": ""}),
        (1, {"name": "time", "arguments": ""}),
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_message_with_calls_alone_has_no_content() -> None:
    _, whole = replies("[weather {}]", tools=[TOOL])
    assert whole["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_what_the_models_own_marks_say(size: int) -> None:
    """With what divides answers in the server, however the text is cut."""
    call = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
    written = "<think>\nno.</think>\n\nIt is " + call % '{"a": [1, "x"]}' + "\n" + call % "{}"
    streamed, whole = (
        parse(tools=[TOOL], stream=stream).reply(lambda: ChatStream(Thinking("<think>", "</think>"), HERMES))
        for stream in (True, False)
    )
    events = streamed.first()
    for each in pieces_of(written, size):
        events += streamed.add(0, each)
        whole.add(0, each)
    (choice,) = whole.whole()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("no.", "It is")
    arguments = [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]]
    assert arguments == [{"a": [1, "x"]}, {}] and choice["finish_reason"] == "tool_calls"
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    for index, whole_call in enumerate(message["tool_calls"]):
        own = [each for each in calls if each["index"] == index]
        assert [each["function"]["name"] for each in own if "id" in each] == ["weather"] and "id" in own[0]
        assert "".join(each["function"]["arguments"] for each in own) == whole_call["function"]["arguments"]
    if size == 1:  # a token is a character
        counted = whole.whole()["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted == pytest.approx(len("<think>\nno."), abs=2)


def test_an_answer_cut_at_its_length_stays_so_though_it_has_calls() -> None:
    reply = parse(tools=[TOOL]).reply(Marked)
    for each in pieces_of("[weather {", reason="length"):
        reply.add(0, each)
    assert reply.whole()["choices"][0]["finish_reason"] == "length"


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="<>[] ab{}é", max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_the_deltas_together_are_the_whole_reply(text: str, size: int, n: int) -> None:
    streamed, whole = parse(stream=True, n=n).reply(Marked), parse(n=n).reply(Marked)
    events = streamed.first()
    for each in pieces_of(text, size):
        for i in range(n):
            events += streamed.add(i, each)
            whole.add(i, each)
    for i, choice in enumerate(whole.whole()["choices"]):
        own = [c["delta"] for e in events for c in e["choices"] if c["index"] == i]
        message = choice["message"]
        assert own[0]["role"] == message["role"]
        assert "".join(d.get("content") or "" for d in own) == (message["content"] or "")
        assert "".join(d.get("reasoning_content", "") for d in own) == message.get("reasoning_content", "")
        arguments: dict[int, str] = {}
        for delta in own:
            for call in delta.get("tool_calls", ()):
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        calls = message.get("tool_calls", [])
        assert [arguments[k] for k in sorted(arguments)] == [c["function"]["arguments"] for c in calls]


def test_active_neurons_come_with_the_text_or_alone() -> None:
    frame = Frame(tokens=1, of=(0,), cells="AA==", fired=((1, 2),))
    reply = parse(stream=True, hotcold={"picture": True}).reply(Marked)
    event_lists = [reply.add(0, piece(text, [5], frame=frame)) for text in ("ab", "")]
    assert [["hotcold" in each for each in events] for events in event_lists] == [[True, False], [True]]
    assert event_lists[0][0]["hotcold"] == event_lists[1][0]["hotcold"] == frame.plain()
    assert event_lists[1][0]["choices"][0]["delta"] == {}


def test_log_probabilities_of_every_token_come_once() -> None:
    ids = tokenizer().encode("Once upon a €", add_bos=False)
    streamed = parse(stream=True, logprobs=True, top_logprobs=2).reply(Marked)
    whole = parse(logprobs=True, top_logprobs=2).reply(Marked)
    events = streamed.first()
    for id in ids:
        # The text of some comes later: their entries must not be lost.
        text = tokenizer().piece(id).decode(errors="ignore")
        each = piece(text, [id], logprobs=(likely(id),))
        events += streamed.add(0, each)
        whole.add(0, each)
    end = piece("", [], "length")
    events += streamed.add(0, end)
    whole.add(0, end)
    entries = [x for e in events for c in e["choices"] if c["logprobs"] for x in c["logprobs"]["content"]]
    assert entries == whole.whole()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in entries) == b" Once upon a \xe2\x82\xac"
    assert len(entries) == len(ids) and any(each["token"] == "\ufffd" for each in entries)
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] == -0.25 for each in entries)


def test_an_impossible_token_has_a_number_that_json_knows() -> None:
    reply = parse(logprobs=True).reply(Marked)
    reply.add(0, piece("a", [5], "length", logprobs=(likely(5, float("-inf"), 0),)))
    assert reply.whole()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_times_are_those_of_the_pieces() -> None:
    reply = parse(n=2).reply(Marked)
    for i in range(2):
        reply.add(i, piece("a", [5, 6, 7, 8, 9], "length"))
    found = reply.whole()["timings"]
    assert (found["prompt_n"], found["prompt_ms"], found["prompt_per_second"]) == (9, 500, 18)
    assert (found["predicted_n"], found["predicted_ms"]) == (10, 2000)
    assert found["predicted_per_second"] == 4  # the first of each came with its prompt
    assert found["sparsity"] == "exact" and "draft_n" not in found


def test_guesses_are_counted_as_llama_cpp_counts_them() -> None:
    reply = parse(n=2).reply(Marked)
    for i in range(2):
        reply.add(i, piece("a", [5, 6, 7], "length", guessed=10 * i, accepted=7 * i))
    found = reply.whole()["timings"]
    assert (found["draft_n"], found["draft_n_accepted"]) == (10, 7)

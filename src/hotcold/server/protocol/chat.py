"""OpenAI's ``/v1/chat/completions``: the request."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hotcold.chat.stream import AnswerStream
from hotcold.chat.tool_formats import GENERAL, HARMONY
from hotcold.chat.tool_grammar import tools_grammar, without_calls
from hotcold.engine.request import Grammar, Job
from hotcold.grammar.error import GrammarError
from hotcold.server.protocol import constraints, sampling, thinking
from hotcold.server.protocol.chat_reply import ChatReply
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Field,
    Fields,
    Flag,
    Neutral,
    Shape,
    Text,
    Whole,
    check_depth,
    shown_value,
)
from hotcold.server.protocol.limits import MAX_CHOICES, MAX_LOGPROBS
from hotcold.server.protocol.messages import MESSAGES, TOOL_CHOICE, TOOLS, TemplateKwargs
from hotcold.server.protocol.replies import Reply

Value: TypeAlias = bool | int | float | str
ToolChoice: TypeAlias = str | dict[str, Any]

_STREAM_OPTIONS = Shape(
    {
        "include_usage": Field(Flag(), False, "Adds an event with token counts at the end of the stream."),
        "include_obfuscation": Field(Flag(), None, "Has no effect."),
    }
)
MODEL = Field(Text(0, 512), note="Any name: the server has one model, and the answer names it.")
#: Fields that both of OpenAI's routes have.
STREAMING: Fields = {
    "stream": Field(Flag(), False, "Streams the answer as server-sent events."),
    "stream_options": Field(_STREAM_OPTIONS, None, "Only with stream."),
}
EXTENSIONS: Fields = {
    "ignore_eos": Field(Flag(), False, "Chooses no token that ends the text, unless a grammar requires it."),
    "cache_prompt": Field(Flag(), True, "Whether later requests may reuse the computed prompt."),
    "timings_per_token": Field(Flag(), False, "Adds timings to each event of a stream."),
    "hotcold": Field(
        Shape({"picture": Field(Flag(), False, "Events of the stream show which neurons were active.")}),
        None,
        "Fields that only this server has.",
    ),
}

FIELDS: Fields = {
    "model": MODEL,
    "messages": Field(MESSAGES, None, "A last message of the assistant is continued.", required=True),
    "max_completion_tokens": Field(
        sampling.LENGTH, None, "Limit of tokens in the answer; -1: until the context is full."
    ),
    "max_tokens": Field(sampling.LENGTH, None, "Another name for max_completion_tokens."),
    "n_predict": Field(sampling.LENGTH, None, "Another name for max_completion_tokens."),
    "n": Field(Whole(1, MAX_CHOICES), 1, "Number of answers."),
    **STREAMING,
    "logprobs": Field(Flag(), False, "Whether to return log-probabilities of tokens."),
    "top_logprobs": Field(Whole(0, MAX_LOGPROBS), None, "Number of likeliest tokens for each token; needs "
                                                        "logprobs."),
    "n_probs": Field(Whole(0, MAX_LOGPROBS), 0, "llama.cpp's name for logprobs and top_logprobs."),
    **sampling.FIELDS,
    **constraints.FIELDS,
    "tools": Field(TOOLS, None, "Functions that the model may call."),
    "tool_choice": Field(TOOL_CHOICE, None, "auto if there are tools."),
    "parallel_tool_calls": Field(
        Flag(),
        None,
        "Whether an answer may have several calls (default: true if the template has calls and no tool is "
        "named).",
    ),
    "chat_template_kwargs": Field(TemplateKwargs(), None, "Values for the model's chat template."),
    **thinking.FIELDS,
    "add_generation_prompt": Field(Flag(), True, "False leaves out the start of the answer."),
    **EXTENSIONS,
    **sampling.UNSUPPORTED,
    **constraints.UNSUPPORTED,
    "functions": Field(Neutral(([],)), note="Use tools."),
    "function_call": Field(Neutral(("none",)), note="Use tool_choice."),
    "modalities": Field(Neutral((["text"],))),
    "audio": Field(Neutral()),
    "web_search_options": Field(Neutral()),
    "moderation": Field(Neutral()),
    "chat_template": Field(Neutral(), note="The template of the model is used."),
    "documents": Field(Neutral(([],))),
    "reasoning_format": Field(Neutral(("auto", "deepseek"))),
    "echo": Field(Neutral((False,))),
    "best_of": Field(Neutral((1,))),
}  # fmt: skip
BODY = Shape(FIELDS)
_LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")


@dataclass(frozen=True)
class ChatCall:
    """The jobs and options of one request."""

    facts: Facts
    messages: list[dict[str, Any]]  #: role, content (a text, parts or None), and other fields of the role
    tools: list[dict[str, Any]]  #: tools that the prompt describes
    callable: list[dict[str, Any]]  #: tools that the model may call now
    tool_choice: ToolChoice  #: none, auto, required, or OpenAI's object that names a function
    parallel_tool_calls: bool
    template_kwargs: dict[str, Value]
    add_generation_prompt: bool
    continue_last: bool  #: whether the last message is the beginning of the answer
    thinking_budget: int | None  #: limit of the thinking, in tokens; None: only the effort limits it
    form: bool  #: whether text outside of calls must match a format
    job: Job  #: the job of each answer, without its prompt
    n: int
    stream: bool
    include_usage: bool
    timings_per_token: bool
    left_out: str = ""  #: tools that the prompt does not describe

    def jobs(self, ids: Sequence[int]) -> list[Job]:
        """Returns ``n`` jobs that continue these tokens."""
        if not ids:
            raise invalid("messages have no tokens: add a text", "messages")
        job = replace(self.job, prompt=ids)
        return [job.nth(i) for i in range(self.n)]

    def reply(self, parts: Callable[[], AnswerStream]) -> Reply:
        """Makes the reply. ``parts`` makes the splitter of one answer by ``Chat.stream``."""
        return ChatReply(
            self.facts,
            [parts() for _ in range(self.n)],
            include_usage=self.include_usage,
            logprobs=self.job.logprobs is not None,
            every_timings=self.timings_per_token,
        )


def parse(body: object, facts: Facts) -> ChatCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = BODY.read(body, "")
    content = constraints.grammar(values, facts)
    tools, callable, choice = _tools(values)
    if content is not None and content.kind == "gbnf" and callable:
        message = "tools and a grammar of the answer are both given: give one of them, or tool_choice none"
        raise invalid(message, "tools")
    last = values["messages"][-1]
    continue_last = last["role"] == "assistant"
    if continue_last and last["tool_calls"]:
        message = "messages ends with calls of the assistant: add the result of each, with role tool"
        raise invalid(message, "messages")
    if continue_last and facts.tool_format is HARMONY and choice == "auto":
        callable = []  # the beginning of the answer has chosen its channel
    grammar = _grammar(values, facts, callable, choice, content, continue_last)
    if grammar is not None:
        grammar = replace(grammar, param="tools" if callable or content is None else content.param)
    return ChatCall(
        facts=facts,
        messages=[_without_absent(each) for each in values["messages"]],
        tools=tools,
        callable=callable,
        tool_choice=choice,
        parallel_tool_calls=_parallel(values, facts, choice),
        template_kwargs=thinking.template_kwargs(values, facts),
        add_generation_prompt=values["add_generation_prompt"] and not continue_last,
        continue_last=continue_last,
        thinking_budget=thinking.budget(values, facts),
        form=content is not None,
        job=sampling.job(
            values,
            facts,
            max_tokens=sampling.length(values, _LENGTHS, facts.default_max_tokens),
            logprobs=_logprobs(values),
            grammar=grammar,
            picture=picture(values),
        ),
        n=values["n"],
        stream=values["stream"],
        include_usage=include_usage(values),
        timings_per_token=values["timings_per_token"],
    )


def _grammar(
    values: Mapping[str, Any],
    facts: Facts,
    callable: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    content: Grammar | None,
    continue_last: bool,
) -> Grammar | None:
    """Returns the grammar of calls, of content, or of either. Raises APIError for an invalid tool's
    schema."""
    format = facts.tool_format
    token_ids = {name: id for id, name in facts.tokenizer.control_names.items()}
    if not callable:
        free = content is None and not values["tools"]
        # the beginning of the answer has chosen its channel
        if free or (continue_last and format is HARMONY):
            return content
        return without_calls(content, format, token_ids)
    parallel = _parallel(values, facts, choice)
    try:
        return tools_grammar(callable, choice, parallel, format, token_ids, content, open=facts.open_schemas)
    except GrammarError as error:
        raise invalid(str(error), "tools", "invalid_grammar") from None


def _parallel(values: Mapping[str, Any], facts: Facts, choice: ToolChoice) -> bool:
    """Returns whether several calls are allowed. Clients that name a tool read one call (Instructor). A model
    without a format for calls repeats one until its answer is cut off."""
    given: bool | None = values["parallel_tool_calls"]
    return facts.tool_format is not GENERAL and not isinstance(choice, dict) if given is None else given


def _without_absent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Removes absent fields, since templates test whether a field is defined."""
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def picture(values: Mapping[str, Any]) -> bool:
    """Returns whether events have the picture of active neurons."""
    return bool((values["hotcold"] or {}).get("picture"))


def include_usage(values: Mapping[str, Any]) -> bool:
    """Reads ``stream_options``. Raises APIError if nothing is streamed."""
    options = values["stream_options"]
    if options is not None and not values["stream"]:
        message = "stream_options are given without stream: leave them out, or set stream to true"
        raise invalid(message, "stream_options")
    return options is not None and options["include_usage"]


def _logprobs(values: Mapping[str, Any]) -> int | None:
    top = values["top_logprobs"]
    if top and not values["logprobs"]:
        message = f"top_logprobs is {top} and logprobs is not true: also set logprobs to true"
        raise invalid(message, "top_logprobs")
    if values["logprobs"]:
        return int(max(top or 0, values["n_probs"]))
    n_probs: int = values["n_probs"]
    return n_probs or None


def _tools(
    values: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], ToolChoice]:
    """Returns the tools that the prompt describes, the tools that the model may call, and the choice. Tools
    that it may not call stay in the prompt: earlier calls keep their meaning, and its prefix can be
    reused."""
    tools = [_as_given(each) for each in values["tools"] or []]
    choice: ToolChoice = values["tool_choice"] or ("auto" if tools else "none")
    names = [each["function"]["name"] for each in tools]
    for name, count in Counter(names).items():
        if count > 1:
            raise invalid(f"tools has {count} functions named {name!r}: give each its own name", "tools")
    allowed: Collection[str] = set(names)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = {each["function"]["name"] for each in choice["allowed_tools"]["tools"]}
        choice = choice["allowed_tools"]["mode"]
        _check_chosen(allowed, names)
    elif isinstance(choice, dict):
        allowed = {choice["function"]["name"]}
        _check_chosen(allowed, names)
    elif choice != "none" and not tools:
        if choice == "required":
            raise invalid("tool_choice is required, but there are no tools: add tools", "tool_choice")
        choice = "none"
    if choice == "none":
        allowed = ()
    return tools, [each for each in tools if each["function"]["name"] in allowed], choice


def _as_given(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the fields that the client left out, which templates would print as null."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**tool, "function": function}


def _check_chosen(chosen: Collection[str], names: Sequence[str]) -> None:
    if unknown := sorted(set(chosen).difference(names)):
        known = f"the tools are {', '.join(names)}"[:200] if names else "there are no tools"
        raise invalid(f"tool_choice has the tool {shown_value(unknown[0])}: {known}", "tool_choice")

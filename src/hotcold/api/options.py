"""Defines the keyword arguments that callers may give, and makes a job of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from hotcold.chat.chat import ANSWER_TOKENS, AnswerStream, Chat
from hotcold.chat.messages import TemplateValue, check_messages, check_tools, check_values, content_text
from hotcold.engine.generation import Generation
from hotcold.engine.request import Constraint, Grammar, Job, Timings
from hotcold.errors import UserError
from hotcold.runtime.options import check_names
from hotcold.runtime.sampling import SamplingParams
from hotcold.values import whole


class Options(TypedDict, total=False):
    """Keyword arguments of the methods of :class:`LLM` and :class:`AsyncLLM` besides a prompt or messages;
    all are optional. NumPy's numbers are taken, too. The defaults of sampling are those that the model's file
    recommends (``llm.model.sampling``), else those stated here."""

    max_tokens: int  #: the most tokens to generate (200; 512 in a chat)
    ignore_eos: bool  #: never choose a token that ends the text; a complete form ends it (False)
    temperature: float  #: 0 is greedy (0.8)
    top_k: int  #: keep the k likeliest tokens; 0 keeps all (40)
    top_p: float  #: keep the likeliest tokens that together have this probability (0.95)
    min_p: float  #: drop tokens less likely than this times the likeliest (0.05)
    repeat_penalty: float  #: above 1 makes recent tokens less likely (1.0)
    repeat_last_n: int  #: how many tokens are recent; 0 is none, -1 all (64)
    frequency_penalty: float  #: taken from a logit for each time its token was generated, -2 to 2 (0)
    presence_penalty: float  #: taken once from logits of tokens that were generated, -2 to 2 (0)
    logit_bias: Mapping[int, float]  #: token id -> number added to its logit; minus infinity forbids it
    seed: int | None  #: 0 or more; the same seed gives the same text. None draws one
    #: one string or several, which end the text where they come up in it, and are no part of it; the last
    #: token is the one that completed such a string
    stop: str | Sequence[str] | None
    #: states each token's log-probability and those of the likeliest, so many (0 to 20); None states nothing
    logprobs: int | None
    echo: bool  #: with ``logprobs``: the prompt's tokens get them, too (False)
    grammar: Grammar | None  #: what the text must match
    constraint: Constraint | None  #: asked before each token which may come next; for :class:`LLM` alone
    cache: bool  #: whether pages of the KV cache are shared with other requests (True)
    deadline_s: float | None  #: the request ends with an error after so many seconds, waiting included (None)
    #: the request ends with an error after so many seconds in the queue, or without a new token (None)
    timeout_s: float | None


class ChatOptions(Options, total=False):
    """Keyword arguments of the methods that answer messages."""

    #: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`` each
    tools: Sequence[Mapping[str, Any]]
    #: what the model's chat template may ask for, such as ``{"enable_thinking": False}``
    template_values: Mapping[str, TemplateValue] | None
    thinking_budget: int | None  #: the most tokens of thinking; then the answer follows (None: no limit)
    continue_last: bool  #: the last message, an assistant's, is the beginning of the answer (False)


def job_of(options: Mapping[str, Any], base: SamplingParams) -> Job:
    """The job of :class:`Options`, without its prompt; how tokens are chosen is ``base`` where they do not
    say. UserError: a value that is not allowed; TypeError: an unknown option."""
    check_names(options, Options)
    own = {name: value for name, value in options.items() if name != "constraint"}
    params = {name: own.pop(name) for name in SamplingParams.__dataclass_fields__ if name in own}
    return Job(params=replace(base, **params), **own)


def chat_job(
    chat: Chat, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], base: SamplingParams
) -> tuple[Job, AnswerStream]:
    """The job of the next answer in a conversation, of :class:`ChatOptions`, and what divides the answer's
    text. Takes as long as the chat template does. Errors are those of :func:`job_of`, and a UserError for
    messages that are no conversation."""
    check_names(options, ChatOptions)
    rest = {"max_tokens": ANSWER_TOKENS, **options}
    tools = check_tools(rest.pop("tools", ()))
    values = check_values(rest.pop("template_values", None) or {})
    go_on, budget = rest.pop("continue_last", False), rest.pop("thinking_budget", None)
    if budget is not None:  # checked where the model does not think, too
        budget = whole("thinking_budget", budget, 0)
        if rest.get("constraint") is not None:
            raise UserError("thinking_budget and a constraint are both given: give one of them")
    job = job_of(rest, base)
    checked = check_messages(messages)
    ids = chat.ids(checked, tools, kwargs=values, continue_last=go_on)
    beginning = content_text(checked[-1]["content"]) if go_on else None
    thought = chat.thought(ids, tools, kwargs=values, beginning=beginning, budget=budget)
    opened = thought is not None and thought.opened
    parts = chat.stream(opened, tools, form=job.grammar is not None, begun=bool(go_on))
    borders = chat.borders(ids, checked)
    return replace(job, prompt=ids, shown=chat.shown, thought=thought, borders=borders), parts


def refused(job: Job, error: UserError) -> Generation:
    """Returns the result of a job that cannot run, where others of the same call can."""
    seed = job.params.with_seed().seed
    assert seed is not None
    return Generation("", (), (), "error", None, False, 0, seed, Timings(), error)

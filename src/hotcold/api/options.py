"""The keyword arguments of generation, and the job that they describe."""

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
    """Optional keyword arguments of the methods of :class:`LLM` and :class:`AsyncLLM`. NumPy's numbers are
    also allowed.

    Defaults of sampling are the recommendations of the model's file (``llm.model.sampling``), or the values
    stated here."""

    max_tokens: int  #: limit of the tokens to generate (200; 512 in a chat)
    ignore_eos: bool  #: never sample a token that ends the text; the end of a grammar still ends it (False)
    temperature: float  #: 0 is greedy (0.8)
    top_k: int  #: keep the k likeliest tokens; 0 keeps all (40)
    top_p: float  #: keep the likeliest tokens that together have this probability (0.95)
    min_p: float  #: drop tokens less likely than this times the likeliest (0.05)
    repeat_penalty: float  #: above 1: lowers the logits of recent tokens (1.0)
    repeat_last_n: int  #: number of recent tokens; 0 is none, -1 all (64)
    frequency_penalty: float  #: subtracted from a token's logit for each time it was generated, -2 to 2 (0)
    presence_penalty: float  #: subtracted once from the logits of generated tokens, -2 to 2 (0)
    logit_bias: Mapping[int, float]  #: token id -> number added to its logit; minus infinity forbids it
    seed: int | None  #: 0 or more; the same seed gives the same text. None: a random seed
    #: one string or several; the text ends before the first of them, and the last token completes it
    stop: str | Sequence[str] | None
    #: adds log-probabilities of each token and of the 0 to 20 likeliest tokens; None: no log-probabilities
    logprobs: int | None
    echo: bool  #: with ``logprobs``: also the prompt's tokens (False)
    grammar: Grammar | None  #: the grammar that the text must match
    #: called before each token for the tokens that may come next; only for :class:`LLM`
    constraint: Constraint | None
    cache: bool  #: whether to share pages of the KV cache with other requests (True)
    deadline_s: float | None  #: limit of the whole request, queue included; then it ends with an error (None)
    #: limit of the time in the queue, and without a new token; then the request ends with an error (None)
    timeout_s: float | None


class ChatOptions(Options, total=False):
    """Keyword arguments of the methods that answer messages."""

    #: each: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": schema}}``
    tools: Sequence[Mapping[str, Any]]
    #: values for the model's chat template, such as ``{"enable_thinking": False}``
    template_values: Mapping[str, TemplateValue] | None
    thinking_budget: int | None  #: limit of the tokens of thinking; then the answer follows (None: no limit)
    continue_last: bool  #: the last message, an assistant's, is the beginning of the answer (False)


def job_of(options: Mapping[str, Any], base: SamplingParams) -> Job:
    """Returns the job of :class:`Options`, without its prompt. ``base`` has the default sampling parameters.
    Raises UserError for an invalid value, and TypeError for an unknown option."""
    check_names(options, Options)
    fields = {name: value for name, value in options.items() if name != "constraint"}
    params = {name: fields.pop(name) for name in SamplingParams.__dataclass_fields__ if name in fields}
    return Job(params=replace(base, **params), **fields)


def chat_job(
    chat: Chat, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], base: SamplingParams
) -> tuple[Job, AnswerStream]:
    """Returns the job of the next answer in a conversation, and the splitter of its text. Rendering the chat
    template makes it slow. Errors are the same as of :func:`job_of`; also UserError for invalid messages."""
    check_names(options, ChatOptions)
    remaining = {"max_tokens": ANSWER_TOKENS, **options}
    tools = check_tools(remaining.pop("tools", ()))
    values = check_values(remaining.pop("template_values", None) or {})
    go_on, budget = remaining.pop("continue_last", False), remaining.pop("thinking_budget", None)
    if budget is not None:  # also checked for models that do not think
        budget = whole("thinking_budget", budget, 0)
        if remaining.get("constraint") is not None:
            raise UserError("thinking_budget and a constraint are both given: give one of them")
    job = job_of(remaining, base)
    checked = check_messages(messages)
    ids = chat.ids(checked, tools, kwargs=values, continue_last=go_on)
    beginning = content_text(checked[-1]["content"]) if go_on else None
    thought = chat.thought(ids, tools, kwargs=values, beginning=beginning, budget=budget)
    thinking_begun = thought is not None and thought.opened
    parts = chat.stream(thinking_begun, tools, form=job.grammar is not None, begun=bool(go_on))
    borders = chat.borders(ids, checked)
    return replace(job, prompt=ids, shown=chat.shown, thought=thought, borders=borders), parts


def refused(job: Job, error: UserError) -> Generation:
    """Returns the result of a job that cannot run, for a call with several jobs."""
    seed = job.params.with_seed().seed
    assert seed is not None
    return Generation("", (), (), "error", None, False, 0, seed, Timings(), error)

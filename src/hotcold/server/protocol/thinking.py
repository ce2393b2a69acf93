"""True if and how long a model thinks before it answers, with the field names of different programs."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Choice, Either, Field, Fields, Flag, Shape, Tagged, Whole
from hotcold.server.protocol.limits import LARGEST

Value: TypeAlias = bool | int | float | str

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGET = Whole(-1, LARGEST, "-1 is no limit")
_NOTE = "Limit of thinking tokens; then the answer follows. -1: no limit."
_EFFORT = "A value for the chat template; none turns thinking off. For a template without efforts: a budget."
_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens", "thinking_budget", "reasoning_budget")
#: Anthropic's field.
THINKING = Tagged(
    "type",
    {
        "enabled": Shape({"budget_tokens": Field(BUDGET, None, "Limit of thinking tokens; -1: no limit.")}),
        "adaptive": Shape({}),
        "disabled": Shape({}),
    },
)

FIELDS: Fields = {
    "reasoning_effort": Field(Choice(EFFORTS), None, _EFFORT),
    "reasoning": Field(
        Shape(
            {
                "effort": Field(Choice(EFFORTS), None, "Like reasoning_effort."),
                "max_tokens": Field(BUDGET, None, "Like thinking_token_budget."),
                "enabled": Field(Flag(), None, "Like enable_thinking."),
            }
        ),
        None,
        "OpenRouter's form of these fields.",
    ),
    "thinking": Field(
        Either({bool: Flag(), dict: THINKING}, "a boolean, or an object with a type"),
        None,
        "Anthropic's form of these fields.",
    ),
    "enable_thinking": Field(Flag(), None, "Like the value in chat_template_kwargs."),
    "thinking_token_budget": Field(BUDGET, None, _NOTE),
    **{name: Field(BUDGET, None, "Another name for thinking_token_budget.") for name in _BUDGETS[1:]},
}


def template_kwargs(values: Mapping[str, Any], facts: Facts) -> dict[str, Value]:
    """Returns values for the model's chat template. Values that the request names itself take precedence."""
    kwargs: dict[str, Value] = dict(values["chat_template_kwargs"] or {})
    reasoning, thinking, limit = values["reasoning"] or {}, values["thinking"], budget(values, facts)
    effort = values["reasoning_effort"] or reasoning.get("effort")
    if isinstance(thinking, Mapping):
        thinking = thinking["type"] != "disabled"
    forbidden = False if effort == "none" or limit == 0 else None
    named = (values["enable_thinking"], reasoning.get("enabled"), thinking, forbidden)
    allowed = next((each for each in named if each is not None), None)
    derived = {"reasoning_effort": effort, "enable_thinking": allowed, "thinking_budget": limit}
    return {**{name: each for name, each in derived.items() if each is not None}, **kwargs}


def budget(values: Mapping[str, Any], facts: Facts) -> int | None:
    """Returns the limit of thinking, in tokens: the first of its names that has a value, or the server's
    default. None: only the effort limits it."""
    reasoning, thinking = values["reasoning"] or {}, values["thinking"]
    limits = [*map(values.get, _BUDGETS), reasoning.get("max_tokens")]
    if isinstance(thinking, Mapping):
        limits.append(thinking.get("budget_tokens"))
    of_template = (values["chat_template_kwargs"] or {}).get("thinking_budget")
    if isinstance(of_template, int) and not isinstance(of_template, bool) and of_template >= -1:
        limits.append(of_template)
    limit: int | None = next((each for each in limits if each is not None), facts.thinking_budget)
    return None if limit == -1 else limit

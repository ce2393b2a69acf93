"""How many calls an answer may have, where the request says so and where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_pieces import facts
from support.vocabulary_of_bytes import matches

from hotcold.chat.tool_formats import GENERAL, HERMES, ToolFormat
from hotcold.grammar.notations import lark_of
from hotcold.server.protocol import chat

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("format", "fields", "several"),
    [
        (HERMES, {"tool_choice": "required"}, True),
        (HERMES, {"tool_choice": "auto"}, True),
        (HERMES, {"tool_choice": NAMED}, False),
        (HERMES, {"tool_choice": NAMED, "parallel_tool_calls": True}, True),
        (HERMES, {"tool_choice": "required", "parallel_tool_calls": False}, False),
        (GENERAL, {"tool_choice": "required"}, False),
        (GENERAL, {"tool_choice": "auto"}, False),
        (GENERAL, {"parallel_tool_calls": None}, False),
        (GENERAL, {"tool_choice": NAMED}, False),
        (GENERAL, {"tool_choice": "required", "parallel_tool_calls": True}, True),
        (GENERAL, {"tool_choice": "auto", "parallel_tool_calls": True}, True),
    ],
)
def test_several_calls(format: ToolFormat, fields: dict[str, Any], several: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Go"}], "tools": [TOOL], **fields}
    call = chat.parse(body, facts(tool_format=format))
    assert call.parallel_tool_calls is several and call.job.grammar is not None
    grammar = lark_of(call.job.grammar, {})
    assert matches(grammar, f"{format.before}{CALL}{format.after}")
    assert matches(grammar, f"{format.before}{CALL}{format.between}{CALL}{format.after}") is several

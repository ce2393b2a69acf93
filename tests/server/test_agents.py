"""Agents on a model that keeps states: a new user message, whose prompt drops the thoughts of 14 tool steps,
reuses the whole pages that are equal, though few states are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hybrid_models import with_chat, write_hybrid
from support.served import served

import hotcold
from hotcold.chat.chat import Chat
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PAGE
from hotcold.tokenizer.tokenizer import Tokenizer

TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "qwen3.5.jinja"
PROPERTIES = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"name": "look", "description": "Looks at something.", "parameters": PROPERTIES}
TOOLS = [{"type": "function", "function": TOOL}]
TEXT = "the fox went into a dark forest and looked for an old house with many doors"
WORDS = TEXT.split()

SYSTEM = {"role": "system", "content": " ".join(WORDS * 20)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    bare = write_hybrid(folder / "bare.gguf", "qwen35", context=8192)
    return with_chat(bare, folder / "agent.gguf", TEMPLATE.read_text("utf-8"))


def conversations(steps: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """The messages of each request: of the steps, and then of two more messages of the user."""
    random = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(random.choice(WORDS, random.integers(5, 40)))

    messages = [{"role": "user", "content": text()}]
    yield messages
    for i in range(steps):
        call = {"name": "look", "arguments": {"at": text()}}
        calls = [{"id": f"call{i}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": "", "reasoning_content": text(), "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call{i}", "content": text()},
        ]
        yield messages
    for _ in range(2):
        messages += [
            {"role": "assistant", "content": text(), "reasoning_content": text()},
            {"role": "user", "content": text()},
        ]
        yield messages


def equal_pages(prompt: list[int], earlier: list[list[int]]) -> int:
    """Whole pages that the prompt has in common with an earlier one."""
    equal = [0]
    for each in earlier:
        n = min(len(prompt), len(each))
        different = np.flatnonzero(np.array(prompt[:n]) != np.array(each[:n]))
        equal.append(min(int(different[0]) if len(different) else n, len(prompt) - 1))
    return max(equal) // PAGE


def anthropic(message: dict[str, Any]) -> dict[str, Any]:
    """The same message in Anthropic's form."""
    if message["role"] == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": message["content"],
        }
        return {"role": "user", "content": [result]}
    if message["role"] == "user":
        return message
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    ]
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        input = function["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": input})
    return {"role": "assistant", "content": blocks}


class Truth:
    """Prompts so far, and how many tokens of the next one are reused."""

    def __init__(self, path: Path) -> None:
        with open_gguf(path) as file:
            self._chat = Chat(Tokenizer.from_metadata(file.metadata), dict(file.metadata))
        self._prompts: list[list[int]] = []

    def reused(self, messages: list[dict[str, Any]]) -> int:
        prompt = self._chat.ids(messages, TOOLS)
        pages = equal_pages(prompt, self._prompts)
        self._prompts.append(prompt)
        return pages * PAGE

    def close(self) -> None:
        self._chat.close()


@pytest.fixture
def truth(path: Path) -> Iterator[Truth]:
    truth = Truth(path)
    yield truth
    truth.close()


def test_in_python(path: Path, truth: Truth) -> None:
    with hotcold.LLM(path, context=8192, state_copies=4, gpu="off", sparsity="off") as llm:
        for messages in conversations(14, seed=1):
            answer = llm.chat([SYSTEM, *messages], tools=TOOLS, max_tokens=1)
            assert answer.reused == truth.reused([SYSTEM, *messages])
        assert answer.reused > 10 * PAGE


def test_claude_code_on_a_server(path: Path, truth: Truth) -> None:
    """With a line before the system prompt that changes with each request."""
    tool = {"name": "look", "description": TOOL["description"], "input_schema": PROPERTIES}
    with (
        served("-m", str(path), "-c", "8192", "-np", "1", "--state-copies", "4") as server,
        server.client() as client,
    ):
        for i, messages in enumerate(conversations(14, seed=2)):
            line = f"x-anthropic-billing-header: cc_version=2.1.{i}; cc_entrypoint=cli; cch={i:05x};"
            body = {
                "max_tokens": 1,
                "system": [{"type": "text", "text": line}, {"type": "text", "text": SYSTEM["content"]}],
                "tools": [tool],
                "messages": [*map(anthropic, messages)],
                "thinking": {"type": "adaptive"},
            }
            usage = client.post("/v1/messages", json=body).raise_for_status().json()["usage"]
            assert usage["cache_read_input_tokens"] == truth.reused([SYSTEM, *messages])
        assert usage["cache_read_input_tokens"] > 10 * PAGE

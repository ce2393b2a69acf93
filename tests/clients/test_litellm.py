"""LiteLLM against SmolLM2: by each dialect that it speaks, it knows a prompt that is too long as such."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks another server
litellm = pytest.importorskip("litellm")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the library's, about itself
LONG = "word " * 5000


def options(provider: str, url: str) -> dict[str, Any]:
    base = url if provider in ("openai", "hosted_vllm") else url.removesuffix("/v1")
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_conversation_that_is_too_long(url: str, provider: str, stream: bool) -> None:
    """For Ollama's dialect LiteLLM has no such error."""
    messages = [{"role": "user", "content": LONG}]
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 4096 tokens"):
        for _ in litellm.completion(**options(provider, url), messages=messages, max_tokens=5, stream=stream):
            pass


def test_a_text_that_is_too_long(url: str) -> None:
    """By OpenAI's other routes."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.text_completion(**options("openai", url), prompt=LONG, max_tokens=5)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.responses(**options("openai", url), input=LONG)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
def test_an_answer(url: str, provider: str) -> None:
    messages = [{"role": "user", "content": ABOUT}]
    reply = litellm.completion(**options(provider, url), messages=messages, max_tokens=5)
    assert reply.choices[0].message.content

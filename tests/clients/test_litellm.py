"""LiteLLM against SmolLM2: by each dialect that it speaks, it knows a prompt that is too long as such."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.clients.conftest import MODEL

if importlib.util.find_spec("litellm") is None:
    pytest.skip("could not import 'litellm'", allow_module_level=True)

#: A program of its own, since the library leaves event loops and connections open.
PROGRAM = """
import json, sys
import litellm

url, model = sys.argv[1:]
texts = {"long": "word " * 5000, "short": "Hello"}


def outcome(call, provider, **given):
    base = url if provider in ("openai", "hosted_vllm") else url.removesuffix("/v1")
    options = {"api_base": base, "api_key": "none", "num_retries": 0, **given}
    try:
        reply = call(model=f"{provider}/{model}", **options)
        return f"{len([*reply])} chunks" if given.get("stream") else type(reply).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"


found = {}
for size, text in texts.items():
    messages = [{"role": "user", "content": text}]
    given = {"messages": messages, "max_tokens": 5}
    for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        found[f"{provider} {size}"] = outcome(litellm.completion, provider, **given)
    found[f"stream {size}"] = outcome(litellm.completion, "openai", stream=True, **given)
    found[f"text {size}"] = outcome(litellm.text_completion, "openai", prompt=text, max_tokens=5)
    found[f"responses {size}"] = outcome(litellm.responses, "openai", input=text, max_output_tokens=5)
print(json.dumps(found))
"""


def test_a_prompt_that_is_too_long(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, MODEL],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # else importing it asks another server
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 14
    for name, outcome in found.items():
        if name.endswith("short"):
            assert "Error" not in outcome, (name, outcome)
        elif not name.startswith("ollama"):  # LiteLLM has no such error for this dialect
            assert outcome.startswith("ContextWindowExceededError"), (name, outcome)
            assert "maximum context length is 4096 tokens" in outcome

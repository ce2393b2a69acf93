"""The README's example with the published model that the documentation uses."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.served import served


def test_the_readmes_request_is_answered_sensibly() -> None:
    """With OpenAI's defaults, 7 of the first 24 seeds give no greeting."""
    model = os.environ.get("HOTCOLD_SMOLLM2")
    if not model:
        pytest.skip("HOTCOLD_SMOLLM2 does not name the file of the published model")
    body = {"model": "", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    with served("-m", model, "-np", "8") as server, server.client() as client, ThreadPoolExecutor(8) as pool:

        def answer(seed: int) -> str:
            reply = client.post("/v1/chat/completions", json={**body, "seed": seed}).json()
            return str(reply["choices"][0]["message"]["content"])

        for seed, text in enumerate(pool.map(answer, range(24))):
            assert re.match(r"(Hello|Hi|Hey|Welcome|Good|Greetings)\b", text), (seed, text)

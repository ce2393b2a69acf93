"""Text that no token of a model can spell is left out of a prompt, and the answer's header and the log say
so."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.made_up_llm import MadeUpLLM
from support.vocabularies import bpe

from hotcold.server.app import make_app
from hotcold.server.request_log import RequestLog
from hotcold.server.service import Service
from hotcold.server.settings import Settings
from hotcold.tokenizer.tokenizer import Tokenizer

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\x04b"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\x04b"}], "stream": True}),
    ("/v1/completions", {"prompt": ["hi", "a\x04b"]}),
    ("/v1/completions", {"prompt": "a\x04b", "stream": True}),
    ("/completion", {"prompt": "a\x04b"}),
    ("/tokenize", {"content": "a\x04b"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_character_without_a_token_is_left_out_with_a_note(path: str, body: dict[str, Any]) -> None:
    llm, lines = MadeUpLLM(), io.StringIO()
    llm.tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab", absent=b"\x04\x06"))
    service, log = Service(llm, Settings()), RequestLog(lines)  # type: ignore[arg-type]
    asyncio.run(service.load())
    with TestClient(make_app(service, log), base_url="http://localhost") as client:
        reply = client.post(path, json=body)
        whole = client.post("/tokenize", json={"content": "ab"})
    log.close()
    service.close()
    assert reply.status_code == 200
    assert reply.headers["x-hotcold-left-out"] == "0x04"
    first, second = lines.getvalue().splitlines()
    assert "left_out=0x04" in first
    assert "left_out" not in second and "x-hotcold-left-out" not in whole.headers
    for job in llm.jobs:
        assert "\x04" not in llm.tokenizer.decode(job.prompt)

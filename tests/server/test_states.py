"""The server's state before the model is loaded, and after its engine has died; and the figures of
/metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.made_up_llm import MadeUpLLM

from hotcold.server.app import make_app
from hotcold.server.service import Service
from hotcold.server.settings import Settings
from tests.server.conftest import Application
from tests.server.test_security import check_error

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/made-up"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/completion"),
    ("POST", "/infill"),
    ("POST", "/apply-template"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.mark.parametrize(
    ("status", "code"),
    [("loading", "model_loading"), ("failed", "engine_failed"), ("closed", "engine_failed")],
)
def test_without_a_model(status: str, code: str) -> None:
    llm = MadeUpLLM()
    llm.status, llm.loaded = status, 0.25
    service = Service(llm, Settings())  # type: ignore[arg-type]
    with TestClient(make_app(service), base_url="http://localhost") as client:
        for method, path in ROUTES:
            reply = client.request(method, path, content=b"not even JSON")
            check_error(reply, 503, code)
            assert int(reply.headers["retry-after"]) > 0
        reply = client.get("/health")
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
        body = reply.json()
        assert body["status"] == ("loading" if status == "loading" else "failed")
        assert body.get("loaded") == (0.25 if status == "loading" else None)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert client.get("/metrics").status_code == 200
        assert client.get("/openapi.json").status_code == 200
    service.close()


def test_figures(app_with: Callable[..., Any]) -> None:
    made = app_with()
    for _ in range(2):
        made.client.post("/v1/completions", json={"prompt": "Once", "n": 2})
    made.client.post("/v1/completions", json={"prompt": 5})
    made.client.get("/no/such/path/a")
    made.client.get("/no/such/path/b")
    reply = made.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    figures = dict(re.findall(r"^(\S+(?:\{.*\})?) (\S+)$", reply.text, re.MULTILINE))
    assert float(figures['hotcold_requests_total{route="/v1/completions",status="200"}']) == 2
    assert float(figures['hotcold_requests_total{route="/v1/completions",status="400"}']) == 1
    assert float(figures['hotcold_requests_total{route="other",status="404"}']) == 2
    assert float(figures['hotcold_generations_total{reason="stop"}']) == 4
    assert float(figures["hotcold_time_to_first_token_seconds_count"]) == 4
    assert float(figures["hotcold_inter_token_seconds_count"]) == 8
    assert float(figures["hotcold_generations_running"]) == 0
    assert all(name.startswith("hotcold_") for name in figures)


def test_statistics_that_do_not_come_are_left_out() -> None:
    llm = MadeUpLLM()
    service = Service(llm, Settings())  # type: ignore[arg-type]
    assert asyncio.run(service.stats()) is None
    service.close()


def test_the_list_of_models_says_what_the_file_says(app: Application) -> None:
    meta = app.client.get("/v1/models").json()["data"][0]["meta"]
    assert (meta["n_ctx_train"], meta["n_embd"]) == (256, 256)  # of the built-in model
    assert meta["n_vocab"] == app.llm.tokenizer.vocab_size

"""The example of docs/embedding.md for Flask, as it is written there, asked by several clients at once."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.threads import Running

from hotcold import LLM
from hotcold.demo import model_path

pytest.importorskip("flask", reason="pip install flask")
from werkzeug.serving import make_server

PROMPTS = ["Once upon a time", "The king", "I", "There was a fox"] * 2


def example(repository: Path) -> str:
    text = (repository / "docs" / "embedding.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"^```py\n(.*?)^```", text, re.M | re.S) if "Flask" in block)
    assert "app.run(threaded=True)" in code
    return code.replace('"model.gguf"', repr(str(model_path())))


def post(url: str, text: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, text.encode()), timeout=60) as reply:
        found: str = reply.read().decode()
        return found


def test_the_example_for_flask(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "documented"}
    exec(example(repository), names)
    llm: LLM = names["llm"]
    # Shorter texts, which are the same each time.
    for method in ("generate", "stream"):
        call = getattr(llm, method)
        monkeypatch.setattr(llm, method, lambda text, call=call, **_: call(text, seed=1, max_tokens=40))
    expected = [llm.generate(prompt).text for prompt in PROMPTS]
    server = make_server("127.0.0.1", 0, names["app"], threaded=True)
    serving = Running(server.serve_forever)
    url = f"http://127.0.0.1:{server.server_port}"
    asking = [
        Running(lambda prompt=prompt, route=route: post(f"{url}/{route}", prompt))
        for route in ("story", "stream")
        for prompt in PROMPTS
    ]
    assert [each.result() for each in asking] == expected * 2
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{url}/stream", "goat " * 400)
    assert caught.value.code == 400 and b"shorten the prompt" in caught.value.read()
    server.shutdown()
    serving.result()
    server.server_close()
    llm.close()

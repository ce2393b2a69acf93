"""The Python of docs/clients.md, as it is written there, with the address of this server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8080"
BLOCKS = [
    (section.splitlines()[0], block)
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    for block in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]
#: The name of each library where it is imported.
PACKAGES = {
    "OpenAI": "openai",
    "Pydantic AI": "pydantic_ai",
    "LangChain": "langchain_openai",
    "Instructor": "instructor",
    "Anthropic": "anthropic",
    "Ollama": "ollama",
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("block", [block for _, block in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_a_block(
    block: str, url: str, loop: asyncio.AbstractEventLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    section = next(name for name, other in BLOCKS if other == block)
    pytest.importorskip(PACKAGES[section])
    assert ADDRESS in block
    names: dict[str, Any] = {"__name__": "documented"}
    exec(block.replace(ADDRESS, url.removesuffix("/v1")), names)
    if "Person" in names:
        assert "name=" in capsys.readouterr().out
    else:
        assert capsys.readouterr().out.strip()
    if "provider" in names:
        loop.run_until_complete(names["provider"].client.close())
    elif hasattr(names.get("client"), "close"):
        names["client"].close()


def test_every_client_has_a_block() -> None:
    assert {name for name, _ in BLOCKS} == set(PACKAGES)

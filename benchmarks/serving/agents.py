"""Agents end to end: each mends a program by way of a server whose model's answers are written beforehand.

    pip install aider-chat                                         # in an environment of its own
    npm install -g @openai/codex @anthropic-ai/claude-code @qwen-code/qwen-code opencode-ai
    python benchmarks/serving/agents.py -m SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/serving/agents.py -m FILE --only codex --record FOLDER
    python benchmarks/serving/agents.py -m qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --real

Small models cannot work for agents, and large ones take long: here HTTP, dialects, chat template, tools and
grammars are those of `hotcold serve`, and the script is what a good model would have answered. An agent gets
a folder with a wrong program, and passes if the program is right afterwards and every request was answered.
Agents that are not on the path are left out. `--record` keeps requests and answers. The file gives the
vocabulary alone.

With `--real` the file's model answers, and agents leave out what they can do without. The output shows the
tokens and the time of each answer. An agent must also have shown what the program prints.

The last line of stdout is a JSON object: what each asked, and whether it passed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.scripted import Exchange, noted_server, scripted_server

TEMPLATE = Path(__file__).resolve().parents[2] / "tests" / "data" / "templates" / "qwen2.5.jinja"
TASK = "greet.py must print: hello, world. Mend it, then say what you did."
WRONG, RIGHT = 'print("hullo, world")\n', 'print("hello, world")\n'
SAID = "Done: greet.py prints hello, world."
#: The task of a real model: three steps, and a small model can do each.
STEPS = "Read greet.py, replace hullo by hello in it, and run python3 greet.py. Then say what it printed."
_PATIENCE_S, _REAL_PATIENCE_S = 300, 3600
_CONTEXT = 32768  # tokens of a real model's context
_EDIT = f"""greet.py has a typo.

greet.py
```python
{RIGHT}```
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
        "models": {"scripted": {"limit": limit}, "model": {"limit": {**limit, "context": _CONTEXT}}},
    }
    unneeded = ("task", "todowrite", "webfetch", "skill", "glob", "grep")
    return {
        "provider": {"hotcold": provider},
        "agent": {"lean": {"mode": "primary", "tools": dict.fromkeys(unneeded, False)}},
    }


@dataclass(frozen=True)
class Agent:
    command: Callable[[str, str, str], list[str]]  #: by the server's address, the model and the task
    environment: Callable[[str, str], dict[str, str]]  #: by the server's address and the model
    answer: Callable[[str], str]
    lean: tuple[str, ...] = ()  #: arguments that leave out what the task does not need


AGENTS = {
    "aider": Agent(
        lambda url, model, task: [
            *("aider", "--model", f"openai/{model}", "--edit-format", "diff", "--no-git", "--yes-always"),
            *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty"),
            *("--message", task, "greet.py"),
        ],
        lambda url, model: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
        aider,
        # The format that aider chooses for models that it does not know.
        ("--edit-format", "whole", "--map-tokens", "0", "--auto-test", "--test-cmd", "python3 greet.py"),
    ),
    "codex": Agent(
        lambda url, model, task: [
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            # A name for which Codex has settings of its own: it then offers its custom tool.
            *("-m", "gpt-5.5" if model == "scripted" else model, "-c", "model_provider=hotcold"),
            *("-c", "model_providers.hotcold.name=Hotcold"),
            *("-c", f"model_providers.hotcold.base_url={url}/v1"),
            *("-c", "model_providers.hotcold.wire_api=responses", task),
        ],
        lambda url, model: {},
        codex,
        (
            *("-c", 'web_search="disabled"', "-c", f"model_context_window={_CONTEXT}"),
            *("--disable", "goals", "--disable", "multi_agent", "--disable", "tool_suggest"),
            *("--disable", "view_image", "--disable", "apps", "--disable", "plugins"),
        ),
    ),
    "claude": Agent(
        lambda url, model, task: ["claude", "-p", task, "--allowedTools", "Read,Write,Edit,Bash"],
        lambda url, model: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        claude,
        ("--bare", "--tools", "Read,Edit,Bash", "--disable-slash-commands"),
    ),
    "qwen": Agent(
        lambda url, model, task: ["qwen", "--yolo", "--auth-type", "openai", "-m", model, "-p", task],
        lambda url, model: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": model,
        },
        qwen,
        ("--bare", "--core-tools", "read_file", "edit", "run_shell_command"),
    ),
    "opencode": Agent(
        lambda url, model, task: ["opencode", "run", "-m", f"hotcold/{model}", task],
        lambda url, model: {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode_settings(url))},
        opencode,
        ("--agent", "lean", "--title", "greet"),
    ),
}


def run(agent: Agent, url: str, home: Path, real: bool) -> tuple[str, int, bool]:
    """Runs an agent; returns all that it showed, its exit code, and whether the program is right."""
    model, task, patience_s = ("model", STEPS, _REAL_PATIENCE_S) if real else ("scripted", TASK, _PATIENCE_S)
    work = home / "work"
    work.mkdir()
    (work / "greet.py").write_text(WRONG)
    # Nothing of this user's settings or keys comes along, and none of theirs stays.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environment |= {
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "TERM": "dumb",
        **agent.environment(url, model),
    }
    done = subprocess.run(
        [*agent.command(url, model, task), *(agent.lean if real else ())],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=patience_s,
    )
    right = (work / "greet.py").read_text() == RIGHT and (not real or "hello, world" in done.stdout)
    return done.stdout.replace(str(home), "~"), done.returncode, right


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
    add("--real", action="store_true", help="the file's model answers; it should call tools")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    template = TEMPLATE.read_text(encoding="utf-8")
    for name in options.only:
        if shutil.which(name) is None:
            print(f"{name} is not on the path, and is left out", flush=True)
            continue
        agent = AGENTS[name]
        serving = (
            noted_server(options.model, _CONTEXT)
            if options.real
            else scripted_server(options.model, template, agent.answer)
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as home, serving as server:
            output, code, right = run(agent, server.url, Path(home), options.real)
        asked = Counter(f"{each.method} {each.path} {each.status}" for each in server.exchanges)
        results[name] = {
            "passed": right and code == 0 and all(each.status < 400 for each in server.exchanges),
            "code": code,
            "right": right,
            "asked": dict(asked),
            "minutes": round((time.perf_counter() - start) / 60, 1),
            "answers": [asdict(each) for each in server.readings],
        }
        print(f"--- {name}\n{output}\n{json.dumps(results[name])}", flush=True)
        if options.record:
            kept(server.exchanges, options.record / name)
    print(json.dumps(results))
    return 0 if results and all(each["passed"] for each in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

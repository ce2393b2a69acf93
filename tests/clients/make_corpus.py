"""Makes the seeds of tests/corpus/client_requests, and headers.json, of what clients sent.

    HOTCOLD_RECORD_CLIENTS=FOLDER pytest tests/clients
    python tests/clients/make_corpus.py FOLDER
    python benchmarks/serving/agents.py -m FILE --record AGENTS
    python tests/clients/make_corpus.py --agents AGENTS

A seed is the body of a request, a field a line. It is named after its client and says what it is. Texts of
agents, which are others', are cut: what counts is the form."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parent / "corpus" / "client_requests"
#: The seed, the test that recorded it, and which of its requests it is.
SEEDS = {
    "openai_parse": ("openai-a_parsed_answer", 0),
    "openai_parse_stream": ("openai-a_parsed_stream", 0),
    "openai_tools": ("openai-tools_in_two_requests", 0),
    "openai_result": ("openai-tools_in_two_requests", 1),
    "openai_tools_stream": ("openai-streamed_calls", 0),
    "openai_chosen_tool": ("openai-a_chosen_tool", 0),
    "langchain_schema": ("langchain-structured_output_by_default", 0),
    "langchain_open_schema": ("langchain-structured_output_without_a_class", 1),
    "langchain_function": ("langchain-structured_output_function_calling_", 0),
    "langchain_tools": ("langchain-bound_tools", 0),
    "langchain_result": ("langchain-bound_tools_in_two_requests_any_", 1),
    "langchain_strict": ("langchain-tools_that_are_classes", 0),
    "pydantic-ai_output": ("pydantic_ai-an_output_of_a_class", 0),
    "pydantic-ai_native": ("pydantic_ai-an_output_by_response_format", 0),
    "pydantic-ai_tools": ("pydantic_ai-tools", 0),
    "pydantic-ai_result": ("pydantic_ai-a_tool_and_then_the_output_Person-then1_", 1),
    "pydantic-ai_retry": ("pydantic_ai-another_try", 1),
    "pydantic-ai_stream": ("pydantic_ai-a_streamed_output", 0),
    "instructor_tools": ("instructor-a_model", 0),
    "instructor_schema": ("instructor-modes_JSON_SCHEMA_", 0),
    "instructor_list": ("instructor-a_list", 0),
    "instructor_partial": ("instructor-a_partial_model", 0),
    "instructor_retry": ("instructor-another_try", 1),
}


#: The agent that sent it, and which of its requests it is.
AGENTS = {
    "aider_task": ("aider", 0),
    "codex_task": ("codex", 0),
    "codex_result": ("codex", 3),
    "claude-code_task": ("claude", 1),
    "claude-code_result": ("claude", 2),
}
#: Headers of a connection.
CONNECTION = ("host", "connection", "content-length", "accept-encoding")
#: Names of tools that are kept; tools without a name are kept, too.
TOOLS = ("Bash", "Read", "Edit", "apply_patch", "exec_command", "view_image", "multi_agent_v1", None)
MOST = 40  # characters of a text


def main(folder: Path) -> None:
    headers: dict[str, dict[str, str]] = {}
    for seed, (name, number) in SEEDS.items():
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        request = json.loads(lines[number])
        headers.setdefault(seed.partition("_")[0], request["headers"])
        write(seed, request["body"])
    write_headers(headers)


def agents(folder: Path) -> None:
    headers = {}
    for seed, (name, number) in AGENTS.items():
        text = (folder / name / f"{number:02}-request.json").read_text(encoding="utf-8")
        request = json.loads(text)
        kept = {key: value for key, value in request["headers"].items() if key not in CONNECTION}
        headers[seed.partition("_")[0]] = without_ids(kept)
        body = request["body"]
        if "tools" in body:
            body["tools"] = [each for each in body["tools"] if each.get("name") in TOOLS]
        write(seed, cut(without_ids(body)))
    write_headers(headers)


def cut(value: Any) -> Any:
    """The value with the beginnings of its texts."""
    if isinstance(value, dict):
        return {name: cut(each) for name, each in value.items()}
    if isinstance(value, list):
        return [cut(each) for each in value]
    return f"{value[:MOST]} ..." if isinstance(value, str) and len(value) > MOST else value


def without_ids(value: Any) -> Any:
    """The value without what identifies an installation or a session."""
    text = re.sub(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", "0", json.dumps(value))
    return json.loads(re.sub(r"[0-9a-f]{20,}", "0", text))


def write(seed: str, body: dict[str, Any]) -> None:
    fields = [json.dumps({field: value}) for field, value in body.items()]
    text = re.sub(r"(call_)[0-9A-Za-z]{8,}", r"\g<1>0", "\n".join(fields) + "\n")
    (CORPUS / f"{seed}.jsonl").write_text(text, encoding="utf-8")


def write_headers(headers: dict[str, dict[str, str]]) -> None:
    """Puts headers of clients in the place of their old ones."""
    path = HERE / "headers.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(old | headers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--agents":
        agents(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))

"""Counts the tool calls that a real model writes under ``tool_choice: auto``, and how many a server reports.

    python benchmarks/quality/tool_call_forms.py -m qwen2.5-coder-1.5b.gguf -o results.json

Each request is made twice with one seed: as a plain continuation of the same prompt, which shows the form in
which the model itself writes, and as a chat with tools. Where the plain text begins with a call of a known
tool, by a rule of this script, the chat must report ``tool_calls``; all arguments must match their schemas.
No plain question may become a call. Then ten other tools are asked for one by one, with ``auto`` and with
``required``, and ten schemas with ``response_format``. The last line of stdout is a JSON object with the
counts; -o writes all texts."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema_rs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.server import serving


def tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": [*required], "additionalProperties": False,
    }  # fmt: skip
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT, WHOLE, NUMBER = ({"type": type} for type in ("string", "integer", "number"))
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
FOUR = [
    tool("get_weather", "Current weather of a city.", ("city",), city=TEXT, unit=UNIT),
    tool("read_file", "Reads a text file.", ("path",), path=TEXT, first_line=WHOLE, last_line=WHOLE),
    tool("add_numbers", "Adds two numbers.", ("a", "b"), a=NUMBER, b=NUMBER),
    tool("send_mail", "Sends a mail.", ("to", "subject", "body"), to=TEXT, subject=TEXT, body=TEXT),
]
ASKED = (
    "What is the weather in Paris right now?",
    "How warm is it in Tokyo, in fahrenheit?",
    "Is it raining in Cape Town?",
    "Please look up the weather in Reykjavik in celsius.",
    "Weather in São Paulo?",
    "Read the file src/main.py.",
    "Show me lines 10 to 20 of README.md.",
    "Open notes/todo.txt and tell me what it says.",
    "What is in /etc/hostname?",
    "Read config.yaml so that we can mend it.",
    "Add 17.5 and 24.25 with the tool.",
    "Use add_numbers for 123456 and 654321.",
    "What is 3 plus 4? Use your tool.",
    "Sum up -12 and 7.25, please use the tool.",
    "Send a mail to anna@example.com with the subject Lunch that asks whether she is free at noon.",
    "Mail bob@example.org that the build is green; the subject is Build.",
    "Write to team@example.com: the meeting moves to 3 pm. Subject: Meeting.",
    "Send carla@example.net a mail with the subject Thanks that thanks her for the slides.",
)
PLAIN = (
    "What is a fox?",
    "Write a haiku about the sea.",
    "Explain recursion in one sentence.",
    "Write a Python function that reverses a string.",
    "Give me an example of a JSON object that describes a book.",
    "Write a package.json for a project that is named demo.",
    "Who wrote Faust?",
    "What is the difference between a list and a tuple in Python?",
    "Write a bash script that counts the lines of all Python files.",
    "Name three colours.",
    "How do I undo the last commit in git?",
    "Write an SQL query that counts users by country.",
    "What does the word ephemeral mean?",
    "Write a regular expression for an ISO date.",
    "Show me a YAML file with a list of three fruits.",
    "Write a HTML page with a heading.",
    "Thanks, that was all.",
    "Write JSON with the name and the age of a person called Mary.",
)
TEN = (
    (tool("set_alarm", "Sets an alarm.", ("hour", "minute"), hour={**WHOLE, "minimum": 0, "maximum": 23},
          minute={**WHOLE, "minimum": 0, "maximum": 59}), "Set an alarm for 6:45."),
    (tool("search_flights", "Searches flights.", ("origin", "target", "seats"), origin=TEXT, target=TEXT,
          seats=WHOLE), "Find flights from Rome to Oslo for 2 people."),
    (tool("convert_money", "Converts money.", ("amount", "source", "target"), amount=NUMBER, source=TEXT,
          target=TEXT), "Convert 50 dollars to euros."),
    (tool("create_task", "Creates a task.", ("title",), title=TEXT, tags={"type": "array", "items": TEXT},
          priority={"enum": ["low", "high"]}), "Create a task Buy milk with the tags shop and home."),
    (tool("run_sql", "Runs a query.", ("query",), query=TEXT), "Count the rows of the table users."),
    (tool("list_files", "Lists a folder.", (), path=TEXT, hidden={"type": "boolean"}),
     "List the files in src."),
    (tool("now", "The current time."), "What time is it?"),
    (tool("plot", "Draws points.", ("points",), points={"type": "array", "items": {"type": "array",
          "items": NUMBER}}), "Plot the points (1, 2) and (3, 4)."),
    (tool("add_contact", "Adds a contact.", ("person",), person={
          "type": "object", "required": ["name", "mail"], "properties": {"name": TEXT, "mail": TEXT},
          "additionalProperties": False}),
     "Add Eva, eva@example.com, to my contacts."),
    (tool("play_song", "Plays a song.", ("title", "artist"), title=TEXT, artist=TEXT),
     "Play Blackbird by the Beatles."),
)  # fmt: skip
#: So that the model answers plain questions itself.
ANSWER = "Answer in plain text. Call a tool only if the user asks for weather, a file, a sum or a mail."
_NAMES = "|".join(each["function"]["name"] for each in FOUR)
#: Wrappers in which calls were seen, braces and brackets, and then a known name.
_CALL = re.compile(
    r'\s*(?:(?:```\w*|</?[\w|]+>|\[/?\w+\])\s*)*[\[{\s]*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'(?:"function"\s*:\s*\{{?\s*)?"(?:name|function)"\s*:\s*"(?:{_NAMES})"'
)


KINDS = {"four_tools": (ASKED, ""), "plain": (PLAIN, ""), "plain_with_system": (PLAIN, ANSWER)}
MOST_SHOWN = 240  #: characters of a text in the results
TEN_KINDS = ("ten_auto", "ten_required", "ten_schemas")
HEATS = (0.0, 0.8)


class Client:
    def __init__(self, url: str, most: int) -> None:
        self.url, self.most = url, most

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=900) as answer:
            return json.load(answer)

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **body: Any
    ) -> dict[str, Any]:
        """The chat's message, and the reason of its end."""
        tool_fields = {"tools": tools} if tools else {}
        sent = {"messages": messages, "max_tokens": self.most, **tool_fields, **body}
        choice = self.post("/v1/chat/completions", sent)["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}

    def plain(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **body: Any) -> str:
        """Returns the text that the model writes after the same prompt without a grammar."""
        prompt = self.post("/apply-template", {"messages": messages, "tools": tools})["prompt"]
        content: str = self.post("/completion", {"prompt": prompt, "n_predict": self.most, **body})["content"]
        return content


def asking(question: str, system: str = "") -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


def calls(message: dict[str, Any]) -> list[list[str]]:
    functions = (call["function"] for call in message.get("tool_calls") or ())
    return [[each["name"], each["arguments"]] for each in functions]


def wrong_calls(calls: list[list[str]], tools: list[dict[str, Any]]) -> list[str]:
    """Why calls do not match their schemas."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    reasons = []
    for name, arguments in calls:
        try:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))
        except (ValueError, KeyError, jsonschema_rs.ValidationError) as error:
            reasons.append(f"{name}({arguments}): {str(error)[:100]}")
    return reasons


def asked(
    client: Client, questions: tuple[str, ...], temperature: float, system: str
) -> list[dict[str, Any]]:
    entries = []
    for seed, question in enumerate(questions):
        sampling = {"temperature": temperature, "seed": seed}
        written = client.plain(asking(question, system), FOUR, **sampling)
        message = client.chat(asking(question, system), FOUR, **sampling)
        entry = {
            "question": question,
            "temperature": temperature,
            "written": written[:MOST_SHOWN],
            "begins_with_call": _CALL.match(written) is not None,
            "calls": calls(message),
            "finish_reason": message["finish_reason"],
            "wrong": wrong_calls(calls(message), FOUR) if message["finish_reason"] != "length" else [],
            **({"text": message["content"][:MOST_SHOWN]} if not calls(message) else {}),
        }
        print(json.dumps(entry, ensure_ascii=False), file=sys.stderr, flush=True)
        entries.append(entry)
    return entries


def ten(client: Client) -> dict[str, Any]:
    """Tools with ``auto`` and ``required``, and their schemas as formats of an answer."""
    tools = [tool for tool, _ in TEN]
    by_kind: dict[str, Any] = {kind: [] for kind in TEN_KINDS}
    for tool, question in TEN:
        for choice in ("auto", "required"):
            message = client.chat(asking(question), tools, tool_choice=choice, temperature=0)
            by_kind[f"ten_{choice}"].append(
                {
                    "question": question,
                    "calls": calls(message),
                    "text": message["content"],
                    "wrong": wrong_calls(calls(message), tools),
                }
            )
        schema = tool["function"]["parameters"]
        format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        messages = asking(f"{question} Answer as JSON.")
        message = client.chat(messages, [], response_format=format, temperature=0)
        name = tool["function"]["name"]
        wrong = wrong_calls([[name, message["content"]]], tools)
        by_kind["ten_schemas"].append({"question": question, "text": message["content"], "wrong": wrong})
    return by_kind


def counts(by_kind: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for kind in KINDS:
        entries = by_kind.get(kind, [])
        begun = [each for each in entries if each["begins_with_call"]]
        summary[kind] = {
            "requests": len(entries),
            "begin_with_call": len(begun),
            "of_them_reported": sum(bool(each["calls"]) for each in begun),
            "others_reported": sum(bool(each["calls"]) for each in entries if not each["begins_with_call"]),
            "arguments_wrong": sum(bool(each["wrong"]) for each in entries),
        }
    for kind in TEN_KINDS:
        entries = by_kind.get(kind, [])
        summary[kind] = {
            "requests": len(entries),
            "called": sum(bool(each.get("calls")) for each in entries),
            "wrong": sum(bool(each["wrong"]) for each in entries),
        }
    return summary


def as_lines(values: dict[str, Any]) -> str:
    """JSON with a line for each value and each entry of a list."""
    lines = []
    for name, value in values.items():
        entries = value if isinstance(value, list) else []
        inner = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
        text = f"[\n{inner}\n ]" if entries else json.dumps(value, ensure_ascii=False)
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-n", "--tokens", type=int, default=120, help="the most tokens of an answer")
    parser.add_argument("-o", "--output", type=Path, help="a file for all texts")
    parser.add_argument("--only", choices=[*KINDS, "ten"], help="one kind of requests")
    options = parser.parse_args()
    by_kind: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(["-m", options.model, "-c", "4096"], Path(folder) / "log") as server,
    ):
        server.wait_until_ready()
        client = Client(server.url, options.tokens)
        for kind, (questions, system) in KINDS.items():
            if options.only in (None, kind):
                by_kind[kind] = [entry for heat in HEATS for entry in asked(client, questions, heat, system)]
        if options.only in (None, "ten"):
            by_kind |= ten(client)
    summary = {"model": Path(options.model).name, "counts": counts(by_kind)}
    if options.output is not None:
        # Models write paths, and the repository's rules allow none of one machine.
        text = as_lines({**summary, **by_kind}).replace("/home/", "\\u002fhome/")
        options.output.write_text(text, encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

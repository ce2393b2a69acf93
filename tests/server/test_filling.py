"""Filling in between two texts by each route: the prompt is that of the model's own template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import vocabularies
from support.api_pieces import facts, filling
from support.vocabularies import CONTROL

from hotcold.server.protocol import completion, infill, ollama
from hotcold.server.protocol.errors import APIError
from hotcold.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import Application

#: As Qwen2.5-Coder's publishers write it (arXiv 2409.12186, figure 6), and Ollama's template of it.
TEMPLATE = "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
MARKS = ("fim_prefix", "fim_suffix", "fim_middle", "repo_name", "file_sep")
QWEN = Tokenizer.from_metadata(
    vocabularies.bpe("qwen2", "return print const func", [(f"<|{name}|>", CONTROL) for name in MARKS])
)
SNIPPETS = [
    ("def add(a, b):\n    return ", "\n\n\nprint(add(1, 2))\n"),
    ("import math\n\n\ndef area(r):\n", "\n\nprint(area(2.0))\n"),
    ("for i in range(10):\n    if i % 2:\n        ", "\n    print(i)\n"),
    ("const sum = (xs) => xs.reduce(", ", 0);\nconsole.log(sum([1, 2]));\n"),
    ("function greet(name) {\n  return `", "`;\n}\n"),
    ("const names = users.filter(", ").map((u) => u.name);\n"),
    ("package main\n\nfunc max(a, b int) int {\n\t", "\n\treturn b\n}\n"),
    ('func main() {\n\tfmt.Println("', '")\n}\n'),
    ("int main(void) {\n  int n = ", ";\n  return n;\n}\n"),
    ("/* é, 你好, 🙂 */\nstatic int square(int x) { return ", "; }\n"),
]


@pytest.mark.parametrize(("prefix", "suffix"), SNIPPETS, ids=range(len(SNIPPETS)))
def test_each_route_makes_the_prompt_of_the_template(prefix: str, suffix: str) -> None:
    known = facts(tokenizer=QWEN)
    expected = QWEN.encode(TEMPLATE.format(prefix=prefix, suffix=suffix), parse_special=True)
    calls = [
        completion.parse({"prompt": prefix, "suffix": suffix}, known),
        completion.parse({"prompt": QWEN.encode(prefix), "suffix": suffix}, known),
        ollama.parse_generate({"prompt": prefix, "suffix": suffix}, known),
        ollama.parse_generate({"prompt": prefix, "suffix": suffix, "raw": True}, known),
        infill.parse({"input_prefix": prefix, "input_suffix": suffix}, known),
        infill.parse({"input_prefix": prefix, "input_suffix": suffix, "input_extra": []}, known),
    ]
    for call in calls:
        assert not isinstance(call, ollama.LoadCall | ollama.OllamaChat)
        assert call.encode() == [expected]
        assert suffix in call.texts  # a note names its characters without a token


@pytest.mark.parametrize(
    ("suffix", "stop"),
    [
        ("\n\n\nprint(add(1, 2))\n", ["\nprint(add(1, 2))\n"]),
        (", 0);\nconsole.log(sum([1, 2]));\n", [", 0);\n"]),
        ("`;\n}\nmain()\n", ["\nmain()\n"]),
        ("\n\t}\n\treturn é\n}\n", ["\n\treturn é\n"]),
        ("; }\n", []),
        ("a line without an end", []),
        ("x" * 1024 + "\n", []),
        ("", []),
    ],
)
def test_a_middle_ends_where_the_suffix_begins(suffix: str, stop: list[str]) -> None:
    """At its first whole line that has a word: a line of brackets may belong to the middle."""
    body = {"input_prefix": "a", "input_suffix": suffix, "stop": ["end"]}
    assert infill.parse(body, facts(tokenizer=QWEN)).job.stop == ("end", *stop)
    many = body | {"stop": [str(i) for i in range(256)]}
    assert len(infill.parse(many, facts(tokenizer=QWEN)).job.stop) == 256


def test_names_of_control_tokens_in_a_file_stay_text() -> None:
    known = facts(tokenizer=QWEN)
    (ids,) = completion.parse({"prompt": "<|fim_middle|>", "suffix": "<|fim_suffix|>"}, known).encode()
    assert [ids.count(QWEN.filling[kind]) for kind in ("fim_pre", "fim_suf", "fim_mid")] == [1, 1, 1]


def test_several_prompts_and_a_vocabulary_with_bos() -> None:
    marks = [("<A>", CONTROL), ("<B>", CONTROL), ("<C>", CONTROL)]
    metadata = vocabularies.spm(marks)
    first = len(metadata["tokenizer.ggml.tokens"]) - 3
    for i, name in enumerate(("prefix", "suffix", "middle")):
        metadata[f"tokenizer.ggml.{name}_token_id"] = first + i
    tokenizer = Tokenizer.from_metadata(metadata)
    call = completion.parse({"prompt": ["a", "b"], "suffix": "c"}, facts(tokenizer=tokenizer))
    parts = [tokenizer.encode(text, add_bos=False) for text in "abc"]
    expected = [[1, first, *part, first + 1, *parts[2], first + 2] for part in parts[:2]]
    assert call.encode() == expected and len(call.jobs(expected)) == 2


def test_an_empty_suffix_continues_the_prompt() -> None:
    known = facts(tokenizer=QWEN)
    assert completion.parse({"prompt": "a", "suffix": ""}, known).encode() == [QWEN.encode("a")]
    assert isinstance(ollama.parse_generate({"prompt": "a", "suffix": ""}, known), ollama.OllamaChat)
    assert isinstance(ollama.parse_generate({"prompt": "", "suffix": ""}, known), ollama.LoadCall)
    assert isinstance(ollama.parse_generate({"prompt": "", "suffix": "b"}, known), ollama.RawCall)


def test_the_routes(app_with: Any) -> None:
    app = app_with()
    app.service._facts = replace(app.service.facts, tokenizer=filling())
    reply = app.client.post("/v1/completions", json={"prompt": "Once", "suffix": "time", "max_tokens": 5})
    assert reply.json()["choices"][0]["text"] == "a b c"
    body = {"prompt": "Once", "suffix": "time", "stream": False}
    assert app.client.post("/api/generate", json=body).json()["response"] == "a b c"
    assert app.llm.jobs[0].prompt == app.llm.jobs[1].prompt
    assert "insert" in app.client.post("/api/show", json={}).json()["capabilities"]


def test_what_is_refused(app: Application, app_with: Any) -> None:
    """A model without marks; fields that contradict a suffix; a suffix that cannot fit."""
    for path in ("/v1/completions", "/api/generate"):
        reply = app.client.post(path, json={"prompt": "a", "suffix": "b"})
        assert reply.status_code == 400 and "cannot fill gaps" in reply.text
    assert "insert" not in app.client.post("/api/show", json={}).json()["capabilities"]
    known = facts(tokenizer=QWEN)
    with pytest.raises(APIError, match="suffix and echo are both given"):
        completion.parse({"prompt": "a", "suffix": "b", "echo": True}, known)
    with pytest.raises(APIError, match="system and suffix are both given"):
        ollama.parse_generate({"prompt": "a", "suffix": "b", "system": "c"}, known)
    with pytest.raises(APIError) as caught:
        completion.parse({"prompt": "a", "suffix": "b" * 100_000}, known).encode()
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "suffix")

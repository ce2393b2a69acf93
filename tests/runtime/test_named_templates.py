"""Chat templates that people name, and texts in the place of a file's own."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from support import chat_models
from support.served import served

from hotcold import LLM
from hotcold.chat.renderer import render
from hotcold.commands import cli
from hotcold.errors import UserError
from hotcold.runtime.named_templates import TEMPLATES, template_text

pytestmark = pytest.mark.long  # no instruction set or backend changes it

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
#: As the models' makers describe them, and llama.cpp's tests have them; a bar is a new line, BOS is the
#: program's.
EXPECTED = {
    "chatml": "<|im_start|>system|S<|im_end|>|<|im_start|>user|U<|im_end|>|<|im_start|>assistant|A<|im_end|>|"
    "<|im_start|>user|V<|im_end|>|<|im_start|>assistant|",
    "gemma": "<start_of_turn>user|S||U<end_of_turn>|<start_of_turn>model|A<end_of_turn>|<start_of_turn>user|V"
    "<end_of_turn>|<start_of_turn>model|",
    "llama2": "[INST] <<SYS>>|S|<</SYS>>||U [/INST] A </s><s>[INST] V [/INST]",
    "llama3": "<|start_header_id|>system<|end_header_id|>||S<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>||U<|eot_id|><|start_header_id|>assistant<|end_header_id|>||A<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>||V<|eot_id|><|start_header_id|>assistant<|end_header_id|>||",
    "mistral-v1": "[INST] S||U [/INST] A</s>[INST] V [/INST]",
    "phi3": "<|system|>|S<|end|>|<|user|>|U<|end|>|<|assistant|>|A<|end|>|<|user|>|V<|end|>|<|assistant|>|",
    "vicuna": "S||USER: U|ASSISTANT: A</s>|USER: V|ASSISTANT:",
    "zephyr": "<|system|>|S</s>|<|user|>|U</s>|<|assistant|>|A</s>|<|user|>|V</s>|<|assistant|>|",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_is_as_its_models_were_trained(name: str) -> None:
    values = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    plain = {"stand_ins": ["", ""], "messages": MESSAGES, "users": {}, "values": values}
    text = render({"template": template_text(name), **plain})
    expected = re.sub(r"(?<!<)\|(?!>)", "\n", EXPECTED[name])  # bars outside of tokens are ends of lines
    assert text.removeprefix("<s>") == expected


@pytest.mark.parametrize("wrong", ["", "chat-ml", "CHATML", "a text", "model.jinja"])
def test_what_is_no_template(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    for ask in (lambda: template_text(wrong), lambda: LLM(chat_template=wrong)):
        with pytest.raises(UserError, match=r"is not a template: .*chatml, gemma"):
            ask()
    assert cli.main(["chat", "--chat-template", wrong]) == 2
    assert "hotcold: error: chat template" in capsys.readouterr().err


def test_a_template_in_the_place_of_all_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_models.templated(tmp_path / "model.gguf", "{{ raise_exception('the file has it') }}")
    own = "{{ messages[0].content }} upon a time"
    jinja = tmp_path / "own.jinja"
    jinja.write_bytes(b"\xef\xbb\xbf" + own.encode())  # as some editors write files
    with LLM(model, chat_template=own) as llm:
        expected = llm.chat([{"role": "user", "content": "Once"}], temperature=0, max_tokens=5)
        assert expected.text == llm.generate("Once upon a time", temperature=0, max_tokens=5).text
    for given in (("--chat-template", own), ("--chat-template-file", str(jinja))):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Once\n"))
        assert cli.main(["chat", "-m", str(model), "-n", "5", "--temp", "0", *given]) == 0
        assert capsys.readouterr().out.strip() == expected.text.strip()
    options = ("-m", str(model), "--chat-template-file", str(jinja), "-t", "1", "--temp", "0")
    with served(*options) as server, server.client() as client:
        body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5}
        reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"] == expected.text
        assert client.get("/props").json()["chat_template"] == own


def test_an_empty_file_is_no_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jinja"
    empty.write_text("\n")
    assert cli.main(["serve", "--chat-template-file", str(empty)]) == 2
    assert "is not a template" in capsys.readouterr().err

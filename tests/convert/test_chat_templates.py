"""Chat templates: where checkpoints keep them, which of them counts, and llama.cpp's keys for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.checkpoints import copy_checkpoint

from hotcold.convert import ConvertError, convert

KEY = "tokenizer.chat_template"


def checkpoint(folder: Path, files: dict[str, Any]) -> Path:
    """A tiny checkpoint with these files: bytes and text as they are, anything else as JSON."""
    copy = copy_checkpoint(folder)
    for name, content in files.items():
        (copy / name).parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            (copy / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (copy / name).write_text(text, encoding="utf-8")
    return copy


def fields(path: Path) -> dict[str, Any]:
    """Returns what the gguf package reads of a file's keys about chat templates."""
    found = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    return {name: value for name, value in found.items() if name.startswith(KEY)}


def converted(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    convert(checkpoint(folder, files), folder / "out.gguf")
    return fields(folder / "out.gguf")


def config(template: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": {"chat_template": template}}


def entry(name: str, template: str) -> dict[str, str]:
    return {"name": name, "template": template}


NAMED = [entry("default", "d"), entry("tool_use", "t"), entry("rag-2", "r")]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        (config("{{ messages }}"), {KEY: "{{ messages }}"}),
        (config(None), {}),
        (config(""), {}),
        (config([]), {}),
        ({"chat_template.jinja": "{% é 🦙 %}\r\n"}, {KEY: "{% é 🦙 %}\n"}),
        ({"chat_template.json": {"chat_template": "older"}}, {KEY: "older"}),
        (
            {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"},
            {KEY: "d", f"{KEY}s": ["tool_use"], f"{KEY}.tool_use": "t"},
        ),
        (
            {"additional_chat_templates/a.b.jinja": "x", "additional_chat_templates/notes.txt": "y"},
            {f"{KEY}s": ["a_b"], f"{KEY}.a_b": "x"},
        ),
        (config([entry("tool_use", "t")]), {f"{KEY}s": ["tool_use"], f"{KEY}.tool_use": "t"}),
    ],
)
def test_where_templates_are_found(files: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert converted(tmp_path, files) == expected


def test_files_replace_all_that_json_says(tmp_path: Path) -> None:
    """As transformers loads them: not even another name of the JSON file is kept."""
    files = config(NAMED) | {"chat_template.jinja": "of the file"}
    assert converted(tmp_path, files) == {KEY: "of the file"}


def test_the_configuration_comes_before_the_older_file(tmp_path: Path) -> None:
    files = config("of the configuration") | {"chat_template.json": {"chat_template": "older"}}
    assert converted(tmp_path, files) == {KEY: "of the configuration"}


def test_a_list_is_written_as_the_gguf_package_writes_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_chat_template(NAMED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = fields(tmp_path / "theirs.gguf")
    ours = converted(tmp_path, config(NAMED))
    # The package writes the names in the order of a set.
    assert ours.pop(f"{KEY}s") == sorted(theirs.pop(f"{KEY}s")) == ["rag_2", "tool_use"]
    assert ours == theirs == {KEY: "d", f"{KEY}.tool_use": "t", f"{KEY}.rag_2": "r"}


MOST = 1 << 20


def test_the_largest_template(tmp_path: Path) -> None:
    assert converted(tmp_path, {"chat_template.jinja": "x" * MOST}) == {KEY: "x" * MOST}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"chat_template.jinja": "x" * (MOST + 1)},
            "chat_template.jinja: a chat template has 1048577 bytes: at most 1048576 are allowed",
        ),
        (config("é" * (MOST // 2 + 1)), "tokenizer_config.json: a chat template has 1048578 bytes: at most"),
        ({"chat_template.jinja": b"ab\xff"}, "chat_template.jinja is not UTF-8 text: byte 0xff at 2"),
        (config(7), "chat_template is 7: a string, or a list of objects with name and template is needed"),
        (config({"default": "x"}), "a string, or a list of objects with name and template is needed"),
        (config(["x"]), "a string, or a list of objects with name and template is needed"),
        (config([{"name": "x"}]), "a string, or a list of objects with name and template is needed"),
        (config([entry("", "x")]), "chat template with the name '': 1 to 64 characters are needed"),
        (config([entry("a" * 65, "x")]), "name 'a{10,80}.*: 1 to 64 characters are needed"),
        (config([entry("a-b", "x"), entry("a.b", "y")]), "two chat templates have the name 'a_b'"),
        (
            {"chat_template.jinja": "d", "additional_chat_templates/default.jinja": "e"},
            "two chat templates have the name 'default'",
        ),
        (config([entry(f"t{i}", "x") for i in range(65)]), "has 65 chat templates: at most 64 are converted"),
        (
            {f"additional_chat_templates/{i}.jinja": "x" for i in range(65)},
            "additional_chat_templates has 65 chat templates: at most 64 are converted",
        ),
    ],
)
def test_what_is_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(checkpoint(tmp_path, files), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()

"""Small vocabularies with chat templates, as the metadata of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import vocabularies
from support.vocabularies import CONTROL, USER_DEFINED

from hotcold.chat.chat import Chat
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.tokenizer.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<|user|>", CONTROL), ("<|assistant|>", CONTROL),
    ("[TOOL_CALLS]", CONTROL), ("<|python_tag|>", CONTROL), ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED), ("<tool_call>", USER_DEFINED), ("</tool_call>", USER_DEFINED),
]  # fmt: skip


def bpe(template: str | None, **keys: Any) -> dict[str, Any]:
    """A byte-level vocabulary with :data:`SPECIAL`."""
    metadata = vocabularies.bpe("gpt-2", "user assistant system", SPECIAL, **keys)
    return metadata if template is None else metadata | {"tokenizer.chat_template": template}


def spm(template: str | None, **keys: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with :data:`SPECIAL`, which puts a space before a text."""
    metadata = vocabularies.spm(SPECIAL, **keys)
    return metadata if template is None else metadata | {"tokenizer.chat_template": template}


def chat_of(metadata: dict[str, Any]) -> tuple[Chat, Tokenizer]:
    tokenizer = Tokenizer.from_metadata(metadata)
    return Chat(tokenizer, metadata), tokenizer


def names(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The tokens of a prompt side by side, control tokens by their names in double angle brackets."""
    return b"".join(
        f"«{tokenizer.control_names[id]}»".encode() if id in tokenizer.control_names else tokenizer.piece(id)
        for id in ids
    ).decode()


def templated(path: Path, template: str, **keys: Any) -> Path:
    """The built-in model with a chat template, and with keys of its vocabulary, as a file."""
    with open_gguf(model_path()) as file:
        metadata = {**file.metadata, "tokenizer.chat_template": template}
        metadata |= {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
        write_gguf(path, metadata, {name: file.load(name) for name in file.tensors})
    return path

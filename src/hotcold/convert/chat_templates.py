"""The chat templates of a checkpoint folder as GGUF's ``tokenizer.chat_template*`` metadata."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import ConvertError, Settings
from hotcold.formats.gguf_values import MAX_TEMPLATE_BYTES
from hotcold.values import not_utf8, shown

#: name -> Jinja source; ``default`` is used unless a caller asks for another
Templates: TypeAlias = dict[str, str]

MAX_TEMPLATES = 64
_MAX_NAME = 64  # characters


def chat_template_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Makes llama.cpp's keys: ``tokenizer.chat_template`` is the default, ``tokenizer.chat_template.NAME``
    another template, and ``tokenizer.chat_templates`` lists the names of the other templates.

    ConvertError: a template is too large or not text, or its name cannot be used."""
    templates = _find_templates(checkpoint)
    metadata: dict[str, Any] = {}
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        metadata["tokenizer.chat_templates"] = sorted(templates)
    for name in sorted(templates):
        metadata[f"tokenizer.chat_template.{name}"] = templates[name]
    return metadata


def _find_templates(checkpoint: Checkpoint) -> Templates:
    """Templates of the first place that has any; as in transformers, .jinja files replace those in JSON."""
    return (
        _from_files(checkpoint.folder)
        or _from_settings(checkpoint.settings("tokenizer_config.json"))
        or _from_settings(checkpoint.settings("chat_template.json"))
    )


def _from_files(folder: Path) -> Templates:
    """Templates in ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``."""
    default = folder / "chat_template.jinja"
    others = folder / "additional_chat_templates"
    named = [("default", default)] if default.is_file() else []
    if others.is_dir():
        named += [(path.stem, path) for path in sorted(others.glob("*.jinja")) if path.is_file()]
    _check_number(others, len(named))
    return _unique(others, [(name, _read(path)) for name, path in named])


def _from_settings(settings: Settings) -> Templates:
    """Templates in the key ``chat_template``: one, or a list of objects with ``name`` and ``template``."""
    if "chat_template" not in settings:
        return {}
    stated = settings.values["chat_template"]
    entries = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
    _check_number(settings.path, len(entries))
    named = []
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named.append((name, template))
            case _:
                raise settings.error("chat_template", "a string, or a list of objects with name and template")
    return _unique(settings.path, named)


def _read(path: Path) -> str:
    _check_size(path, path.stat().st_size)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} {not_utf8(error)}") from None


def _unique(source: Path, named: Iterable[tuple[str, str]]) -> Templates:
    """Templates under the names that GGUF allows; empty ones count as absent."""
    templates: Templates = {}
    for name, template in named:
        # llama.cpp, too, replaces characters other than letters and digits.
        key = re.sub("[^A-Za-z0-9_]", "_", name)
        if not 1 <= len(key) <= _MAX_NAME:
            needed = f"1 to {_MAX_NAME} characters are needed"
            raise ConvertError(f"{source}: chat template with the name {shown(name)}: {needed}")
        if key in templates:
            raise ConvertError(
                f"{source}: two chat templates have the name {shown(key)}: rename or delete one of them"
            )
        _check_size(source, len(template.encode("utf-8", "surrogatepass")))
        templates[key] = template
    return {key: template for key, template in templates.items() if template}


def _check_number(source: Path, number: int) -> None:
    if number > MAX_TEMPLATES:
        raise ConvertError(f"{source} has {number} chat templates: at most {MAX_TEMPLATES} are converted")


def _check_size(source: Path, size: int) -> None:
    if size > MAX_TEMPLATE_BYTES:
        allowed = f"at most {MAX_TEMPLATE_BYTES} are allowed"
        raise ConvertError(f"{source}: a chat template has {size} bytes: {allowed}")

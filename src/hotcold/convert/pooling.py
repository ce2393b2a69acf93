"""Reads the pooling of an embedding model, as the package sentence-transformers writes it."""

import re
from typing import Any

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import ConvertError, Settings, read_json

_MODULES, _FOLDER, _PREFIX = "modules.json", "1_Pooling", "pooling_mode"
_NAME = re.compile(r"\w[\w.-]*")  # of a folder
#: GGUF's numbers. Older files have a flag for each kind, newer files the name of one kind.
_KINDS = {"mean": 1, "mean_tokens": 1, "cls": 2, "cls_token": 2, "lasttoken": 3}
#: Modules of a model that a GGUF file can express; readers always normalise.
_EXPRESSED = ("Transformer", "Pooling", "Normalize")


def pooling_metadata(checkpoint: Checkpoint, architecture: str, notes: list[str]) -> dict[str, Any]:
    """The key of the pooling, if the folder names one. A kind without a number in GGUF is left out, with a
    note. ConvertError: its file cannot be read."""
    folder, others = _modules(checkpoint)
    settings = checkpoint.settings(f"{folder}/config.json")
    begin = f"{_PREFIX}_"
    chosen = [key for key, value in settings.values.items() if key.startswith(begin) and value is True]
    modes: list[Any] = [key.removeprefix(begin) for key in chosen]
    if _PREFIX in settings:
        mode = settings.values[_PREFIX]
        modes = mode if isinstance(mode, list) else [mode]
    if not modes and not others:
        return {}
    numbers = {_KINDS.get(mode) for mode in modes if isinstance(mode, str)}
    number = numbers.pop() if len(modes) == 1 and numbers and not others else None
    if number is None:
        names = ", ".join(map(str, [*modes, *others]))[:80]
        notes.append(f"the model's pooling ({names}) has no key in GGUF: the file gives no embeddings")
        return {}
    return {f"{architecture}.pooling_type": number}


def _modules(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """The folder of the pooling, and the folders of modules that GGUF cannot express. Without a list of
    modules, the folders have their usual names."""
    path = checkpoint.folder / _MODULES
    if not path.is_file():
        return _FOLDER, [name for name in ("2_Dense",) if (checkpoint.folder / name).is_dir()]
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConvertError(f"{path} is not a list of modules: download it again")
    by_kind: dict[str, list[str]] = {}
    for module in modules:
        stated = Settings(path, module)
        kind, place = stated.text("type").rpartition(".")[2], stated.text("path")
        if kind != "Transformer" and not _NAME.fullmatch(place):
            raise stated.error("path", "a folder next to it")
        by_kind.setdefault(kind, []).append(place)
    pooling, *further = by_kind.get("Pooling", [_FOLDER])
    return pooling, further + [name for kind in by_kind if kind not in _EXPRESSED for name in by_kind[kind]]

"""Reads how the vectors of a text's tokens become one, as the package sentence-transformers writes it."""

from typing import Any

from hotcold.convert.checkpoint import Checkpoint

_FOLDER, _PREFIX = "1_Pooling", "pooling_mode"
#: GGUF's numbers. The keys of older files are flags, those of newer ones have the name as their value.
_KINDS = {"mean": 1, "mean_tokens": 1, "cls": 2, "cls_token": 2, "lasttoken": 3}


def pooling_metadata(checkpoint: Checkpoint, architecture: str, notes: list[str]) -> dict[str, Any]:
    """The key of the pooling, if the folder names one. A way that GGUF has no number for is left out, with
    a note. ConvertError: its file cannot be read."""
    settings = checkpoint.settings(f"{_FOLDER}/config.json")
    begin = f"{_PREFIX}_"
    chosen = [key for key, value in settings.values.items() if key.startswith(begin) and value is True]
    modes: list[Any] = [key.removeprefix(begin) for key in chosen]
    if _PREFIX in settings:
        mode = settings.values[_PREFIX]
        modes = mode if isinstance(mode, list) else [mode]
    if not modes:
        return {}
    numbers = {_KINDS.get(mode) for mode in modes if isinstance(mode, str)}
    number = numbers.pop() if len(modes) == 1 and numbers else None
    if (checkpoint.folder / "2_Dense").is_dir():
        number = None  # its matrix would have to follow
        modes = [*modes, "2_Dense"]
    if number is None:
        names = ", ".join(map(str, modes))[:80]
        notes.append(f"its pooling ({names}) has no key in GGUF: the file gives no vectors")
        return {}
    return {f"{architecture}.pooling_type": number}

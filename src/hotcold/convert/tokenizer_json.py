"""Reads Hugging Face's ``tokenizer.json`` where it describes a byte-level BPE."""

from typing import Any

from hotcold.convert.checkpoint import ConvertError, Settings
from hotcold.formats.files import shown
from hotcold.model.bpe import GPT2, IGNORES_MERGES, PRE_TOKENIZERS, PUNCTUATION


def bpe_metadata(tokenizer: Settings) -> tuple[dict[str, Any], dict[int, str]]:
    """The algorithm as ``tokenizer.ggml.`` keys, and id -> token of the trained vocabulary.

    ``ConvertError``: another algorithm, or a part of this one that GGUF has no name for.
    """
    model = tokenizer.section("model")
    kind = "SentencePiece" if model.flag("byte_fallback", False) else model.text("type", "BPE")
    if kind != "BPE":
        raise ConvertError(f"{tokenizer.path} is {shown(kind)}: byte-level BPE or tokenizer.model is needed")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.values.get(key):
            raise model.error(key, "null")
    # llama.cpp leaves NFC out as well: hardly any text is not in it.
    if tokenizer.values.get("normalizer") not in (None, {"type": "NFC"}):
        raise tokenizer.error("normalizer", "null or NFC")
    tokens: dict[int, str] = {}
    for text, id in model.section("vocab").values.items():
        if type(id) is not int or id < 0 or id in tokens:
            seen = f"token {shown(text)} has id {shown(id)}"
            raise ConvertError(f"{tokenizer.path}: {seen}: one of its own is needed")
        tokens[id] = text
    merges = model.values.get("merges")
    if not isinstance(merges, list):
        raise model.error("merges", "a list of pairs")
    pairs = [_merge(tokenizer, merge) for merge in merges]
    pre = _pre_kind(tokenizer, model.flag("ignore_merges", False))
    return {"model": "gpt2", "pre": pre, "merges": pairs}, tokens


def added_tokens(tokenizer: Settings) -> list[tuple[Any, Any]]:
    """Ids, and entries with ``content`` and ``special``."""
    entries = tokenizer.values.get("added_tokens") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise tokenizer.error("added_tokens", "a list of objects")
    return [(entry.get("id"), entry) for entry in entries]


def adds(tokenizer: Settings, text: str | None, place: int) -> bool:
    """Whether the template around a text has the special token ``text`` first (0) or last (-1)."""
    steps = tokenizer.section("post_processor").values
    for step in [steps, *(steps.get("processors") or [])]:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single and isinstance(single[place], dict):
            token = single[place].get("SpecialToken")
            return isinstance(token, dict) and token.get("id") == text
    return False


def _merge(tokenizer: Settings, merge: Any) -> str:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)] if left and right and " " not in left + right:
            return f"{left} {right}"
    raise ConvertError(f"{tokenizer.path}: the merge {shown(merge)} is not a pair of tokens")


def _pre_kind(tokenizer: Settings, ignore_merges: bool) -> str:
    """llama.cpp's name of this ``pre_tokenizer``."""
    steps = _steps(tokenizer.values.get("pre_tokenizer"))
    kinds = [kind for kind, cuts in PRE_TOKENIZERS.items() if [*map(_plain, cuts), "ByteLevel"] == steps]
    fitting = [kind for kind in kinds if (kind in IGNORES_MERGES) == ignore_merges]
    if fitting:
        return fitting[0]
    if kinds:
        seen = f"{', '.join(kinds)}, but with ignore_merges {ignore_merges}"
    else:
        seen = f"{' then '.join(steps)[:600]!r}; known are {', '.join(PRE_TOKENIZERS)}"
    raise ConvertError(f"{tokenizer.path}: GGUF has no name for its pre_tokenizer: it is {seen}")


def _steps(step: Any) -> list[str]:
    """Regular expressions in their order, then ``ByteLevel``; what has no expression by its type."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            found = [expression for each in steps for expression in _steps(each)]
            # The spelling changes nothing for those after it, as long as they look at ASCII alone.
            spelled = [expression for expression in found if expression != "ByteLevel"]
            return spelled + ["ByteLevel"] * (len(spelled) < len(found))
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [*([_plain(GPT2)] if step.get("use_regex", True) else []), "ByteLevel"]
        case {
            "type": "Split",
            "pattern": {"Regex": str(pattern)},
            "behavior": behavior,
            "invert": invert,
        } if (behavior, invert) in (("Isolated", False), ("Removed", True)):
            return [_plain(pattern)]
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return [r"\p{N}" if individual else r"\p{N}+"]
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return [_plain(PUNCTUATION)]
        case {"type": str(kind)}:
            return [kind if kind not in ("ByteLevel", "Split") else f"{kind} with more"]
    return [shown(step)]


def _plain(expression: str) -> str:
    return expression.replace("\r", r"\r").replace("\n", r"\n")

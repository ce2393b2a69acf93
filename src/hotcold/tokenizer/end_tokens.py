"""Finds the tokens that end a text, by llama.cpp's rule: the ids in a file's keys, and the names of tokens.

Some converters write only one id, or give these tokens a wrong type; then the names help."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

#: Tokens that end a text if a vocabulary has them, whatever their type.
_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
))  # fmt: skip

#: Names of tokens around code to fill in. One of each kind counts: the key's token, or the first name.
_FILLING = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
        "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
        "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
        "\u2581<MID>", "<|code_middle|>", "<|middle|>",
    ),
}  # fmt: skip

#: Older names of some of these keys.
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}

#: Keys (``tokenizer.ggml.NAME_token_id``) whose tokens end a text.
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

#: If a vocabulary has a token of each pair, ``<|end|>`` closes only a part of an answer: gpt-oss, Solar Open.
_IN_PARTS = (("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
_END_OF_PART = "<|end|>"
#: In a vocabulary with one of these tokens, which end texts, ``</s>`` is HTML: Gemma 4 and PLaMo.
_HTML = ("<|tool_response>", "<|plamo:eos|>")
_CLOSING = "</s>"


@dataclass(frozen=True)
class EndTokens:
    stops: frozenset[int]  #: tokens that end a text
    #: these, and other tokens that ordinary text never becomes, also if the file gives them another type
    reserved: frozenset[int]
    filling: Mapping[str, int]  #: tokens around code to fill in: ``fim_pre``, ``fim_suf``, ``fim_mid`` ...


def end_tokens(
    tokens: Sequence[str], control: Iterable[int], ids: Mapping[str, int | None], further: Iterable[int] = ()
) -> EndTokens:
    """Finds the tokens that end a text. ``control`` are the file's control tokens; ``ids`` come from its
    keys, by the names in :data:`END_KEYS`; ``further`` are further tokens that end a text."""
    wanted = _ENDS.union(*_FILLING.values(), _HTML)
    ids_by_token: dict[str, set[int]] = {}
    for id, token in compress(enumerate(tokens), map(wanted.__contains__, tokens)):
        ids_by_token.setdefault(token, set()).add(id)
    kinds = {name: {key} for name in (*END_KEYS, *_FILLING) if (key := _of_keys(name, ids)) is not None}
    for kind, names in _FILLING.items():
        if first := next((name for name in names if name in ids_by_token), None):
            kinds.setdefault(kind, ids_by_token[first])
    stops = set(further).union(*(kinds.get(kind, ()) for kind in END_KEYS))
    stops = stops.union(*(ids_by_token[name] for name in _ENDS & ids_by_token.keys()))
    reserved = stops.union(*kinds.values())
    if all(any(name in ids_by_token for name in names) for names in _IN_PARTS):
        stops -= ids_by_token.get(_END_OF_PART, set())
    if any(ids_by_token.get(name, set()) & stops for name in _HTML):
        html = ids_by_token.get(_CLOSING, set()).difference(control)
        stops, reserved = stops - html, reserved - html
    filling = {kind: min(kinds[kind]) for kind in _FILLING if kind in kinds}
    return EndTokens(frozenset(stops), frozenset(reserved), filling)


def _of_keys(name: str, ids: Mapping[str, int | None]) -> int | None:
    id = ids.get(name)
    return ids.get(_OLD_KEYS.get(name, "")) if id is None else id


def ends_by_name(name: str) -> bool:
    """True if llama.cpp ends texts at a token of this name without a key for its id."""
    return name in _ENDS

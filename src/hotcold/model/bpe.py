"""Byte-level byte-pair encoding (``tokenizer.ggml.model`` = ``gpt2``): GPT-2, Llama 3, Qwen and others.

A text is cut into words, a word is spelled in 256 printable characters, one per byte, and neighbours merge in
the order of ``tokenizer.ggml.merges``. ``tokenizer.ggml.pre`` says how words are cut; its kinds are
llama.cpp's. Where llama.cpp's expression only comes near what a model was trained with, that stands."""

from collections.abc import Mapping
from typing import Any

from hotcold.formats.files import shown
from hotcold.model.vocabulary import PREFIX, TokenizerError, TokenType, Vocabulary, array, wrong

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@"
)  # words as CamelCase has them, with their contractions at @
_GPT4O = _CASED.replace("@", _SHORT + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_SYMBOLS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
#: letters of scripts that have cases, as deepseek-llm lists them
_LETTERS = (
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

# fmt: off
#: names -> expressions. Each cuts what those before it left: into its matches and what lies between them.
_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 a.x-4.0 mellum modern-bert jina-es "
     "jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", (GPT2,)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", (r"\p{N}", GPT2)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
     "chatglm-bpe glm4 glm5", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 solar-open grok-2 bailingmoe bailingmoe2 "
     "llada-moe", (_QWEN2,)),
    ("qwen35", (_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"s\p{L}", r"s\p{L}\p{M}"),)),
    ("gpt-4o llama4 kanana2 minimax-m2", (_GPT4O,)),
    ("tekken", (_GPT4O.replace(_SHORT + "?", "").replace("{1,3}", ""),)),
    ("kimi-k2", (r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]", "]"),)),
    ("bloom poro-chat gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    ("falcon", (PUNCTUATION, GPT2, "[0-9][0-9][0-9]")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("deepseek-llm", ("[\r\n]", rf"\s?[A-Za-z{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
                      "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")),
    ("deepseek-coder", ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _SYMBOLS + _END)),
    ("youtu",
     ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
      _GPT4O.replace("{1,3}", ""))),
    ("seed-coder", (_QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    ("exaone-moe", (_QWEN2.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
                    .replace(r"+[\r\n]*", r"+[\r\n/]?").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("jais-2", (_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "".join(
        rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s",)),
    ("chameleon", ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
                   r"[\p{P}!-/:-@\[-`{-~]", GPT2)),
)
# fmt: on
PRE_TOKENIZERS = {name: expressions for names, expressions in _TABLE for name in names.split()}
_LIKE_LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
#: kinds for which BOS comes before a text where the file is silent
ADDS_BOS = {*_LIKE_LLAMA3.split(), "chameleon"}
#: kinds for which EOS, here a separator, follows it
ADDS_EOS = {"jina-v1-en", "jina-v2-code", "roberta-bpe"}
#: kinds for which a word that is a token stays one, whatever the merges say
IGNORES_MERGES = {*_LIKE_LLAMA3.split(), "glm4", "glm5", "youtu"}

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
#: GPT-2's alphabet: printable Latin-1 characters stand for themselves, the rest follows from U+0100
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_IN_NO_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 never has


class ByteLevelBPE:
    """Turns text into token ids, and ids into bytes; ``pieces`` ``[V]`` are the bytes of each token."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, models

        kind = pre_kind(metadata)
        self.pieces = vocabulary.pieces(_spelled)
        ids = vocabulary.ordinary(TokenType.USER_DEFINED)
        merges = _merges(vocabulary.tokens, ids, metadata)
        self._tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=kind in IGNORES_MERGES))
        self._tokenizer.pre_tokenizer = pre_tokenizer(kind)
        self._absent = {byte for character, byte in _BYTES.items() if character not in ids} - _IN_NO_TEXT

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special. Raises ValueError for a byte that has no token."""
        absent = self._absent.intersection(text.encode()) if self._absent else None
        if absent:
            raise ValueError(f"the byte {min(absent):#04x} of the text has no token: use another model")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def pre_kind(metadata: Mapping[str, Any]) -> str:
    """``tokenizer.ggml.pre``, ``default`` without one as in llama.cpp; TokenizerError for an unknown kind."""
    kind = metadata.get(PREFIX + "pre", "default")
    if not isinstance(kind, str) or kind not in PRE_TOKENIZERS:
        raise wrong("pre", f"is {shown(kind)}: supported are {', '.join(PRE_TOKENIZERS)}")
    return kind


def pre_tokenizer(kind: str) -> Any:
    """What cuts a text into words and spells them (an object of the tokenizers library)."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[kind]]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, spelling])


def _spelled(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # not spelled in the alphabet: the text itself
        return token.encode()


def _merges(tokens: list[str], ids: Mapping[str, int], file: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs in the order in which they merge; those of tokens that text never becomes are left out."""
    merges = array(file, "merges", "U")
    if merges is None:
        raise TokenizerError(f"the file has no {PREFIX}merges: {PREFIX}model gpt2 needs them")
    pairs: dict[tuple[str, str], None] = {}
    known: set[str] = set()
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left in ids and right in ids and left + right in ids:
            pairs.setdefault((left, right))  # of equal pairs the first counts
            continue
        known = known or set(tokens)
        if not left or not right or not {left, right, left + right} <= known:
            raise wrong(f"merges[{i}]", f"is {shown(merge)}: two tokens that together are a token are needed")
    return list(pairs)

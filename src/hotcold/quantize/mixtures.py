"""Chooses the block type of each tensor of a quantised file, as llama.cpp's quantiser does.

A mixture such as ``Q4_K_M`` has a base type, and rules that give some tensors more bits: the values of
attention, the down matrices, attention's output, and the head. The rules are those of ``llama-quant.cpp`` in
llama.cpp (read at llama-cpp-python 0.3.36), without the types of 1 to 3 bits that need an importance matrix
and without the rules of single architectures with MLA."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hotcold.formats.blocks import GGML_TYPES, BlockType


@dataclass(frozen=True)
class Facts:
    """The facts about a model on which the choice depends."""

    architecture: str = ""
    layers: int = 0
    sharing: int = 1  #: query heads for each key head, of the first layer
    experts: int = 0
    importance: bool = False  #: an importance matrix is given

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, importance: bool = False) -> "Facts":
        name = metadata.get("general.architecture")
        architecture = name if isinstance(name, str) else ""

        def number(key: str, absent: int) -> int:
            value = metadata.get(f"{architecture}.{key}", absent)
            first = value[0] if getattr(value, "ndim", 0) and len(value) else value  # one for each layer
            return int(first) if isinstance(first, int | np.integer) else absent

        heads = number("attention.head_count", 1)
        key_heads = number("attention.head_count_kv", heads)
        sharing = heads // key_heads if key_heads else 0
        return cls(architecture, number("block_count", 0), sharing, number("expert_count", 0), importance)

    @property
    def large(self) -> bool:
        """True for models of 70 billion parameters, which llama.cpp recognises by their number of layers."""
        shared = self.architecture != "llama" or self.sharing > 1
        return shared and _LARGE.get(self.architecture) == self.layers


_LARGE = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


@dataclass(frozen=True)
class Place:
    """The place of a tensor: index ``index`` of ``count`` tensors of its kind."""

    index: int
    count: int
    facts: Facts


Condition: TypeAlias = Callable[[Place], bool]
#: A type and its condition. The first rule that holds counts; without one, the base type does.
Rule: TypeAlias = tuple[str, Condition]


def _always(place: Place) -> bool:
    return True


def _first(n: int) -> Condition:
    return lambda place: place.index < n


def _first_part(parts: int) -> Condition:
    return lambda place: place.index < place.count // parts


def _more_bits(place: Place) -> bool:
    """True for the first and the last eighth, and every third tensor between."""
    i, eighth = place.index, place.count // 8
    # C's remainder is negative before the first eighth, where the first condition holds.
    return i < eighth or i >= 7 * place.count // 8 or (i - eighth) % 3 == 2


def _shared(place: Place) -> bool:
    return place.facts.sharing >= 4


def _falcon(place: Place) -> bool:
    return place.facts.architecture == "falcon"


def _eight_experts(place: Place) -> bool:
    return place.facts.experts == 8


def _importance(place: Place) -> bool:
    return place.facts.importance


def _not(condition: Condition) -> Condition:
    return lambda place: not condition(place)


def _all(*conditions: Condition) -> Condition:
    return lambda place: all(condition(place) for condition in conditions)


@dataclass(frozen=True)
class Mixture:
    """A type of files: llama.cpp's number for it, the base type, and rules for kinds of tensors."""

    file_type: int
    base: str
    attn_v: Sequence[Rule] = ()
    ffn_down: Sequence[Rule] = ()
    attn_output: Sequence[Rule] = ()
    token_embd: str | None = None  #: the type of token embeddings that are not also the head


_OUTPUT_OF_EIGHT = [("Q5_K", _all(_eight_experts, _not(_falcon)))]


def _output(type: str) -> list[Rule]:
    return [(type, _all(_not(_falcon), _not(_eight_experts)))]


_EARLY_DOWN = [("Q5_K", _all(_first_part(8), _not(_importance)))]

MIXTURES: dict[str, Mixture] = {
    "F32": Mixture(0, "F32"),
    "F16": Mixture(1, "F16"),
    "BF16": Mixture(32, "BF16"),
    "Q8_0": Mixture(7, "Q8_0"),
    # Protects the first layers, which importance can make worse.
    "Q4_0": Mixture(2, "Q4_0", ffn_down=[("Q4_1", _all(_importance, _first_part(8)))]),
    "Q4_1": Mixture(3, "Q4_1"),
    "Q5_0": Mixture(8, "Q5_0", ffn_down=[("Q5_1", _all(_importance, _first_part(8)))]),
    "Q5_1": Mixture(9, "Q5_1"),
    "Q2_K": Mixture(
        10,
        "Q2_K",
        attn_v=[("Q4_K", _shared), ("Q3_K", _always)],
        ffn_down=[("Q3_K", _always)],
        attn_output=[*_OUTPUT_OF_EIGHT, *_output("Q3_K")],
    ),
    "Q2_K_S": Mixture(21, "Q2_K", attn_v=[("Q4_K", _shared)], ffn_down=[("Q4_K", _first_part(8))]),
    "Q3_K_S": Mixture(11, "Q3_K", attn_output=_OUTPUT_OF_EIGHT),
    "Q3_K_M": Mixture(
        12,
        "Q3_K",
        attn_v=[("Q5_K", _first(2)), ("Q4_K", _always)],
        ffn_down=[("Q5_K", _first_part(16)), ("Q4_K", _not(_falcon)), ("Q4_K", _more_bits)],
        attn_output=[*_OUTPUT_OF_EIGHT, *_output("Q4_K")],
    ),
    "Q3_K_L": Mixture(
        13,
        "Q3_K",
        attn_v=[("Q5_K", _always)],
        ffn_down=[("Q4_K", _falcon), ("Q5_K", _always)],
        attn_output=[("Q4_K", _falcon), *_output("Q5_K")],
    ),
    "Q4_K_S": Mixture(
        14,
        "Q4_K",
        attn_v=[("Q5_K", _first(4))],
        ffn_down=[("Q5_K", _all(_first_part(8), _not(_falcon)))],
        attn_output=_OUTPUT_OF_EIGHT,
    ),
    "Q4_K_M": Mixture(
        15,
        "Q4_K",
        attn_v=[("Q6_K", _more_bits)],
        ffn_down=[
            ("Q6_K", _all(_falcon, _first_part(16))),
            ("Q5_K", _all(_falcon, _more_bits)),
            ("Q6_K", _all(_not(_falcon), _more_bits)),
        ],
        attn_output=_OUTPUT_OF_EIGHT,
    ),
    "Q5_K_S": Mixture(16, "Q5_K"),
    "Q5_K_M": Mixture(17, "Q5_K", attn_v=[("Q6_K", _more_bits)], ffn_down=[("Q6_K", _more_bits)]),
    "Q6_K": Mixture(18, "Q6_K"),
    "IQ4_NL": Mixture(
        25, "IQ4_NL", attn_v=[("Q5_K", _shared)], ffn_down=_EARLY_DOWN, attn_output=_OUTPUT_OF_EIGHT
    ),
    "IQ4_XS": Mixture(
        30, "IQ4_XS", attn_v=[("Q5_K", _shared)], ffn_down=_EARLY_DOWN, attn_output=_OUTPUT_OF_EIGHT
    ),
    "TQ2_0": Mixture(37, "TQ2_0", token_embd="Q4_K"),
    "MXFP4_MOE": Mixture(38, "MXFP4"),
}
#: Mixtures that also llama.cpp makes only with an importance matrix.
NEED_IMPORTANCE = ("Q2_K_S",)
#: llama.cpp's other names of mixtures.
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

#: Types that a user may choose for single tensors: the types of mixtures, and their fallbacks.
TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4", "TQ2_0",
)  # fmt: skip

#: Type -> its fallback for rows that are no multiple of its block.
NARROW = {
    "IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip

#: Tensors that keep their type have one of these parts in their name, ...
NEVER = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel",
    "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight",
    "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight",
    "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.",
    "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
#: ... or one of these names.
NEVER_WHOLE = ("position_embd.weight", "token_types.weight")

#: Parts of names -> kinds of tensors; the first part that occurs counts.
_KINDS = (
    ("attn_qkv.weight", "attn_v"), ("attn_kv_b.weight", "attn_v"), ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"), ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
_WHOLE_KINDS = {
    "output.weight": "output",
    "token_embd.weight": "token_embd",
    "per_layer_token_embd.weight": "token_embd",
}
_LAYER = re.compile(r"blk\.(\d+)\.")
#: PowerInfer's predictors in a file.
PREDICTOR = re.compile(r"blk\.\d+\.fc[12]\.weight")
_TYPES = {type.name: type for type in GGML_TYPES.values()}


@dataclass(frozen=True)
class Wishes:
    """The user's options that override the mixture; types are ggml's names."""

    pure: bool = False  #: the base type for all
    output: str | None = None
    token_embd: str | None = None
    predictor: str | None = None  #: the type of PowerInfer's predictors, fc1 and fc2
    leave_output: bool = False  #: ``output.weight`` keeps its type
    #: patterns to search for in names, each with a type; the first match counts
    patterns: Sequence[tuple[re.Pattern[str], str]] = ()


@dataclass(frozen=True)
class Choice:
    type: BlockType
    wanted: BlockType  #: the type without the fallback for rows that do not fit


@dataclass
class _Counts:
    """The number of tensors of a kind, and the number of earlier ones."""

    total: dict[str, int]
    before: dict[str, int] = field(default_factory=dict)

    def next(self, kind: str) -> int:
        self.before[kind] = self.before.get(kind, 0) + 1
        return self.before[kind] - 1


def in_file_order(name: str) -> tuple[int, str]:
    """The key by which llama.cpp sorts the tensors of a file."""
    layer = _LAYER.match(name)
    return int(layer[1]) if layer else -1, name


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], mixture: Mixture, facts: Facts, wishes: Wishes | None = None
) -> dict[str, Choice]:
    """The types of the quantised tensors, in llama.cpp's order, without tensors that keep their type. Shapes
    are in NumPy order."""
    wishes = wishes or Wishes()
    names = sorted(shapes, key=in_file_order)
    counts = _Counts({"attn_v": sum(kind_of(name) == "attn_v" for name in names), "ffn_down": facts.layers})
    chooser = _Chooser(mixture, facts, wishes, counts, tied="output.weight" not in shapes)
    choices = {}
    for name in names:
        if may_change(name, shapes[name]) and not (wishes.leave_output and name == "output.weight"):
            wanted = chooser.choose(name, shapes[name])
            choices[name] = Choice(_TYPES[_fitting(wanted, shapes[name][-1])], _TYPES[wanted])
    return choices


@dataclass
class _Chooser:
    """Chooses types in llama.cpp's order, since rules count earlier tensors."""

    mixture: Mixture
    facts: Facts
    wishes: Wishes
    counts: _Counts
    tied: bool  # the token embeddings are also the head

    def choose(self, name: str, shape: tuple[int, ...]) -> str:
        kind, wishes = kind_of(name), self.wishes
        named = next((type for pattern, type in wishes.patterns if pattern.search(name)), None)
        if kind == "token_embd" and wishes.token_embd and not (named and name != "token_embd.weight"):
            return wishes.token_embd
        if kind == "output" and wishes.output:
            return wishes.output
        if named:
            return named
        if wishes.predictor and PREDICTOR.fullmatch(name):
            return wishes.predictor
        if wishes.pure or _TYPES[self.mixture.base].weights == 1:
            return self.mixture.base
        if kind == "output" or (kind == "token_embd" and self.tied):
            return wishes.output or self._head(shape)
        return self._by_rules(name, kind, shape)

    def _head(self, shape: tuple[int, ...]) -> str:
        base = self.mixture.base
        if (
            base in ("MXFP4", "Q8_0")
            or self.facts.architecture == "falcon"
            or shape[-1] % _TYPES[base].weights
        ):
            return "Q8_0"
        return "Q6_K"

    def _by_rules(self, name: str, kind: str, shape: tuple[int, ...]) -> str:
        mixture, facts = self.mixture, self.facts
        if mixture.base == "MXFP4":
            return "MXFP4" if len(shape) > 2 and shape[-3] > 1 else "Q8_0"
        if kind == "token_embd":
            return mixture.token_embd or mixture.base
        if kind == "attn_k":
            return "Q8_0" if facts.experts == 8 else mixture.base
        rules = {"attn_v": mixture.attn_v, "ffn_down": mixture.ffn_down, "attn_output": mixture.attn_output}
        index, count = self.counts.next(kind), self.counts.total.get(kind, 0)
        layer = _LAYER.match(name)
        if kind == "ffn_down" and facts.experts > 1 and layer:  # a layer has several
            index = int(layer[1])
        place = Place(index, count, facts)
        type = next((type for type, holds in rules.get(kind, ()) if holds(place)), mixture.base)
        if kind == "attn_v" and facts.large and type in ("Q3_K", "Q4_K"):
            type = "Q5_K"
        return "Q8_0" if kind == "attn_v" and facts.experts == 8 else type


def kind_of(name: str) -> str:
    """Returns the kind of a tensor, on which its type depends: ``attn_v``, ..., or ``other``."""
    if name in _WHOLE_KINDS:
        return _WHOLE_KINDS[name]
    return next((kind for part, kind in _KINDS if part in name), "other")


def may_change(name: str, shape: tuple[int, ...]) -> bool:
    """True for matrices of weights, except small important ones."""
    # ggml does not count outer dimensions of 1.
    matrix = any(size > 1 for size in shape[:-1])
    kept = name in NEVER_WHOLE or any(part in name for part in NEVER)
    return matrix and name.endswith("weight") and not kept


def _fitting(type: str, row: int) -> str:
    """The type, or a similar one whose block divides a row, or else F16."""
    for fits in (type, NARROW.get(type, type), "F16"):
        if row % _TYPES[fits].weights == 0:
            return fits
    raise AssertionError  # F16 always fits

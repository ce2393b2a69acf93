"""Reading a model's shape from metadata, and refusing what no model has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.plain_forward import Model

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import TensorInfo
from hotcold.model.config import Config, ModelError
from hotcold.model.families import FAMILIES, Scales
from hotcold.model.mixers.rope import Growth


def infos(*names: str, vocab: int = 61, dim: int = 48) -> dict[str, TensorInfo]:
    table = {"token_embd.weight": (vocab, dim)} | dict.fromkeys(names, (1, dim))
    return {name: TensorInfo(name, shape, BLOCK_TYPES["F32"], 0, 0) for name, shape in table.items()}


def read(metadata: dict[str, Any], magic: str = "GGUF", gated: bool = True) -> Config:
    return Config.from_metadata(metadata, magic, infos(*["blk.0.ffn_gate.weight"] if gated else []))


def metadata(**changes: Any) -> dict[str, Any]:
    """A llama's; dots of a key are written ``__``, and None removes it."""
    keys = Model().metadata()
    del keys["hotcold.ffn.activation"], keys["hotcold.ffn.threshold"]
    for name, value in changes.items():
        key = name.replace("__", ".")
        key = key if key.startswith(("general.", "hotcold.", "tokenizer.")) else f"llama.{key}"
        keys[key] = value
        if value is None:
            del keys[key]
    return keys


def test_a_llama() -> None:
    config = read(metadata())
    assert (config.architecture, config.family) == ("llama", FAMILIES["llama"])
    assert (config.layers, config.dim, config.vocab, config.context) == (2, 48, 61, 96)
    mixer = config.mixers[0]
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (6, 2, 10)
    assert config.neurons == (70, 90)
    assert (config.activation, config.threshold, config.gated) == ("silu", 0.0, True)
    assert config.down_layout == "by_output"
    assert (config.ropes[0].dim, config.ropes[0].base, config.ropes[0].interleaved) == (10, 5000.0, True)
    assert config.norm_eps == 1e-5


def test_what_a_file_may_leave_out() -> None:
    config = read(
        metadata(
            attention__head_count_kv=None,
            attention__key_length=None,
            attention__value_length=None,
            rope__dimension_count=None,
            rope__freq_base=None,
            feed_forward_length=np.uint32(100),
        )
    )
    mixer, rope = config.mixers[0], config.ropes[0]
    assert (mixer.kv_heads, mixer.head_dim, rope.dim, rope.base) == (6, 8, 8, 10000.0)
    assert config.neurons == (100, 100)


@pytest.mark.parametrize(
    ("architecture", "magic", "activation"),
    [("llama", "PWRI", "relu"), ("bamboo", "GGUF", "drelu"), ("bamboo", "PWRI", "drelu")],
)
def test_the_activation_follows_from_the_magic_unless_the_file_says_it(
    architecture: str, magic: str, activation: str
) -> None:
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in metadata().items()}
    keys["general.architecture"] = architecture
    assert read(keys, magic).activation == activation
    keys |= {
        "hotcold.ffn.activation": "relu2",
        "hotcold.ffn.threshold": 0.25,
        "hotcold.ffn.down_layout": "by_neuron",
    }
    config = read(keys, magic)
    assert (config.activation, config.threshold, config.down_layout) == ("relu2", 0.25, "by_neuron")


def test_rope_scaling() -> None:
    assert read(metadata(rope__scaling__type="none")).ropes[0].linear_factor == 1
    assert read(metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)).ropes[0].linear_factor == 4
    assert read(metadata(rope__scale_linear=2.0)).ropes[0].linear_factor == 2


#: Keys below ``rope.``, the factor that llama.cpp reads there, and whether it is a guess.
FACTORS: list[tuple[dict[str, Any], float, bool]] = [
    ({}, 1, False),
    ({"scaling__factor": 4.0}, 4, True),
    ({"scaling__factor": 1.0}, 1, False),
    ({"scaling__factor": 0.0}, 1, False),
    ({"scaling__factor": 4.0, "scale_linear": 2.0}, 4, True),
    ({"scaling__factor": 0.0, "scale_linear": 2.0}, 1, False),
    ({"scaling__type": "linear", "scale_linear": 2.0}, 2, False),
    ({"scaling__type": "linear", "scaling__factor": 4.0, "scale_linear": 2.0}, 4, False),
    ({"scaling__type": "linear", "scaling__factor": 0.0}, 1, False),
    ({"scaling__type": "linear"}, 1, False),
    ({"scaling__type": "none", "scaling__factor": 4.0}, 1, False),
    ({"scaling__type": "none", "scale_linear": 4.0}, 1, False),
    ({"scaling__type": "longrope", "scaling__factor": 4.0}, 4, False),
]


@pytest.mark.parametrize(("keys", "factor", "guessed"), FACTORS)
def test_a_factor_in_all_the_forms_that_files_have_it(
    keys: dict[str, Any], factor: float, guessed: bool
) -> None:
    config = read(metadata(**{f"rope__{key}": value for key, value in keys.items()}))
    assert [rope.linear_factor for rope in config.ropes] == [factor]
    assert all(rope.yarn is None for rope in config.ropes)
    note_begin = (
        "the file has llama.rope.scaling.factor 4 and no llama.rope.scaling.type: positions are divided by it"
    )
    assert [note.startswith(note_begin) for note in config.notes] == [True] * guessed


def test_yarns_factor_may_have_the_old_name() -> None:
    rope = read(metadata(rope__scaling__type="yarn", rope__scale_linear=4.0)).ropes[0]
    assert rope.yarn is not None and (rope.yarn.factor, rope.linear_factor) == (4, 1)
    zero = read(metadata(rope__scaling__type="yarn", rope__scaling__factor=0.0)).ropes[0]
    assert zero.yarn is not None and zero.yarn.factor == 1 and zero.magnitude == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.head_count", 6), ("attention.head_count_kv", 2), ("feed_forward_length", 70)],
)
@pytest.mark.parametrize("form", [np.int32, np.uint64, list])
def test_a_number_for_each_layer(key: str, value: int, form: type) -> None:
    repeated = [value] * 2 if form is list else np.full(2, value, form)
    name = key.replace(".", "__")
    one, each = (read(metadata(**{name: number})) for number in (np.uint32(value), repeated))
    assert one == each


def windows(**changes: Any) -> list[int | None]:
    return [layer.window for layer in read(metadata(**changes)).mixers]


def test_windows_are_the_familys_unless_the_file_says_which_layers_have_them() -> None:
    assert windows() == windows(attention__sliding_window=96) == windows(attention__sliding_window=0)
    assert windows() == [None, None]
    assert windows(attention__sliding_window=32) == [32, 32]
    pattern = "attention__sliding_window_pattern"
    assert windows(**{pattern: 2}, attention__sliding_window=32) == [32, None]
    assert windows(**{pattern: 0}, attention__sliding_window=32) == [32, 32]
    assert windows(**{pattern: [False, True]}, attention__sliding_window=32) == [None, 32]
    assert windows(**{pattern: np.array([1, 0])}, attention__sliding_window=32) == [32, None]
    assert read(metadata(attention__sliding_window=32)).context == 96


@pytest.mark.parametrize(
    ("architecture", "activation", "interleaved"),
    [
        ("qwen2", "silu", False),
        ("qwen3", "silu", False),
        ("falcon", "gelu_erf", False),
        ("llama", "silu", True),
    ],
)
def test_a_familys_facts(architecture: str, activation: str, interleaved: bool) -> None:
    layer_norm = architecture == "falcon"
    config = read(Model(architecture, activation=activation, layer_norm=layer_norm).metadata())
    assert (config.architecture, config.activation) == (architecture, activation)
    assert config.ropes[0].interleaved is interleaved
    assert (config.family.norm == "layer") is config.family.parallel is layer_norm


def of(architecture: str, **changes: Any) -> Config:
    """A model of a family, with a llama's keys and others (dots are written ``__``)."""
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in metadata().items()}
    keys |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in changes.items()}
    eps = "attention.layer_norm_epsilon"
    return read(keys | {"general.architecture": architecture, f"{architecture}.{eps}": 1e-5})


def test_layers_with_a_window_have_a_rotation_of_their_own() -> None:
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "attention__sliding_window": 8}
    mixers = of("gemma3", block_count=7, feed_forward_length=9, **scaled).mixers
    assert [layer.window for layer in mixers] == [8, 8, 8, 8, 8, None, 8]
    kinds = {(layer.rope.base, layer.rope.linear_factor) for layer in mixers if layer.rope}
    assert kinds == {(5000.0, 8.0), (10000.0, 1.0)}
    assert [rope.base for rope in of("gemma3", rope__freq_base_swa=70.0, **scaled).ropes] == [70]
    assert [(rope.base, rope.linear_factor) for rope in of("llama", **scaled).ropes] == [(5000, 8)]


#: Rotations of eight layers with a window, as the families' publishers say: the base of each, and whether
#: YaRN holds; None: no rotation.
ROTATIONS: dict[str, list[tuple[float, bool] | None]] = {
    "gemma3": [(1e4, False)] * 5 + [(5000.0, True)] + [(1e4, False)] * 2,
    "olmo2": ([(5000.0, False)] * 3 + [(5000.0, True)]) * 2,
    "smallthinker": [None, (5000.0, True), (5000.0, True), (5000.0, True)] * 2,
}


@pytest.mark.parametrize("window", [95, 96, 97, 4096])
@pytest.mark.parametrize("architecture", ROTATIONS)
def test_rotations_go_by_the_kind_of_layer_also_where_windows_reach_the_context(
    architecture: str, window: int
) -> None:
    facts: dict[str, Any] = {"block_count": 8, "feed_forward_length": 9}
    facts |= {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    mixers = of(architecture, **facts, attention__sliding_window=window).mixers
    rotations = [layer.rope and (layer.rope.base, layer.rope.yarn is not None) for layer in mixers]
    assert rotations == ROTATIONS[architecture]
    assert {layer.window for layer in mixers} == ({95, None} if window < 96 else {None})
    without = of(architecture, **facts, attention__sliding_window=0)
    assert {layer.rope and layer.rope.base for layer in without.mixers} == {5000.0}


def test_layers_without_positions() -> None:
    mixers = of("smollm3", block_count=5, feed_forward_length=9).mixers
    assert [layer.rope is None for layer in mixers] == [False, False, False, True, False]
    assert of("opt").ropes == ()


def test_scales_are_the_files_or_those_that_its_family_implies() -> None:
    assert of("llama").scales == Scales()
    assert of("minicpm").scales == Scales(12, pytest.approx(1.4 / 2**0.5), 48 / 256)
    assert of("minicpm", embedding_scale=3.0, logit_scale=0.0).scales.embedding == 3
    assert of("gemma3").scales == Scales(pytest.approx(48**0.5))
    largest = of("gemma3", block_count=62, feed_forward_length=9).scales
    assert largest.attention == pytest.approx((48 / 6) ** -0.5)
    four = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention__scale": 0.015625}
    assert of("granite", **four).scales == Scales(12, 0.22, 8, 0.015625)
    assert of("granite", attention__scale=0.0, residual_scale=0.0).scales == Scales()


def test_scales_of_gemma_2_and_of_cohere() -> None:
    assert of("gemma2").scales == Scales(pytest.approx(48**0.5))
    largest = of("gemma2", block_count=46, feed_forward_length=9).scales
    assert largest.attention == pytest.approx((48 / 6) ** -0.5)
    assert of("command-r", logit_scale=0.0625).scales == Scales(logits=16)
    assert of("cohere2", logit_scale=0.25).scales == Scales(logits=4)


def test_caps_and_windows_that_a_family_implies() -> None:
    """A file may state others; a cap of 0 says nothing, and a window of 0 is none."""
    gemma = of("gemma2", block_count=3, feed_forward_length=9, context_length=8192)
    assert (gemma.softcap, {mixer.softcap for mixer in gemma.mixers}) == (30, {50})
    assert [mixer.window for mixer in gemma.mixers] == [4096, None, 4096]
    stated = of(
        "gemma2", final_logit_softcapping=7.0, attn_logit_softcapping=0.0, attention__sliding_window=5
    )
    assert (stated.softcap, stated.mixers[0].softcap, stated.mixers[0].window) == (7, 50, 5)
    assert of("llama", final_logit_softcapping=30.0).softcap == 30
    assert of("llama").softcap is None
    code = of("starcoder2", context_length=8192)
    assert {mixer.window for mixer in code.mixers} == {4096}
    unwindowed = of("starcoder2", context_length=8192, attention__sliding_window=0)
    assert {mixer.window for mixer in unwindowed.mixers} == {None}
    command = of("cohere2", block_count=4, feed_forward_length=9, context_length=8192).mixers
    assert [(mixer.window, mixer.rope is None) for mixer in command] == [(4096, False)] * 3 + [(None, True)]


def test_scores_that_grow_with_positions() -> None:
    keys = {"attention__temperature_scale": 0.1, "rope__scaling__original_context_length": 16}
    config = of("mistral3", **keys)
    queries, both = config.ropes
    assert (queries.growth, both.growth) == (Growth(0.1, 16), None)
    longer = of("mistral3", **keys, attention__temperature_length=32)
    assert longer.ropes[0].growth == Growth(0.1, 32)
    assert len(of("mistral3").ropes) == 1


def test_glm_4_of_a_vision_model_has_its_rows_in_halves() -> None:
    assert of("glm4").ropes[0].interleaved
    assert not of("glm4", rope__dimension_sections=np.array([2, 3, 0, 0])).ropes[0].interleaved


BAD: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": None}, "general.architecture is missing"),
    ({"general__architecture": "mama"}, "'mama' is not supported: docs/families.md lists what runs, such as"),
    ({"general__architecture": "bert"}, "'bert' is not supported: it is an encoder: it gives vectors"),
    ({"general__type": "adapter"}, "the file is an adapter .LoRA., not a whole model"),
    ({"general__architecture": 7}, "architecture 7 is not supported: docs/families.md lists"),
    ({"general__architecture": "x\n" * 5000}, "architecture 'x.n"),
    ({"block_count": None}, "llama.block_count is missing"),
    ({"block_count": 0}, "llama.block_count is 0: a whole number from 1 to 1024"),
    ({"block_count": 2**31}, "llama.block_count is 2147483648: a whole number from 1 to 1024"),
    ({"block_count": -1}, "llama.block_count is -1"),
    ({"block_count": 2.0}, "llama.block_count is 2.0: a whole number"),
    ({"block_count": True}, "llama.block_count is True"),
    ({"block_count": "two"}, "llama.block_count is 'two'"),
    ({"block_count": np.array([2, 2])}, "llama.block_count is an array of 2"),
    ({"embedding_length": 2**40}, "llama.embedding_length is 1099511627776"),
    ({"embedding_length": None}, "llama.embedding_length is missing"),
    ({"attention__head_count": 0}, "llama.attention.head_count is 0"),
    ({"attention__head_count": None}, "llama.attention.head_count is missing"),
    ({"attention__head_count": np.array([6, 6, 6])}, "head_count is an array of 3: one number or 2 are"),
    ({"attention__head_count": np.array([6, 3])}, "head_count is 3 in some layers and 6 in others: layers"),
    ({"attention__head_count_kv": np.array([2, 6])}, "head_count_kv is 2 in some layers and 6 in others"),
    ({"attention__head_count": np.array([6.0, 6.0])}, "head_count.0. is 6.0: a whole number"),
    ({"attention__head_count_kv": 4}, "llama.attention.head_count_kv is 4: it must divide 6 heads"),
    ({"attention__head_count_kv": 0}, "llama.attention.head_count_kv is 0"),
    ({"attention__key_length": None, "attention__head_count": 7, "attention__head_count_kv": 1},
     "llama.attention.head_count is 7: it must divide 48 dimensions"),
    ({"attention__key_length": 2**20}, "llama.attention.key_length is 1048576"),
    ({"attention__value_length": 12}, "llama.attention.value_length differs from the keys' length 10"),
    ({"feed_forward_length": None}, "llama.feed_forward_length is missing"),
    ({"feed_forward_length": 0}, "llama.feed_forward_length is 0"),
    ({"feed_forward_length": np.array([70, 90, 70])}, "is an array of 3: one number or 2 are needed"),
    ({"feed_forward_length": np.array([70, 2**30])}, r"llama.feed_forward_length\[1\] is .*1073741824"),
    ({"feed_forward_length": ["70", "90"]}, r"llama.feed_forward_length\[0\] is '70'"),
    ({"context_length": 0}, "llama.context_length is 0"),
    ({"context_length": 2**40}, "llama.context_length is 1099511627776: a whole number from 1 to 16777216"),
    ({"context_length": None}, "llama.context_length is missing"),
    ({"attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ({"attention__layer_norm_rms_epsilon": 0.0}, "llama.attention.layer_norm_rms_epsilon is 0.0: above 0"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ({"attention__layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon is -1e-05"),
    ({"attention__layer_norm_rms_epsilon": 1.0}, "layer_norm_rms_epsilon is 1.0"),
    ({"attention__layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon is 'small'"),
    ({"rope__dimension_count": 7}, "llama.rope.dimension_count is 7: an even number"),
    ({"rope__dimension_count": 12}, "llama.rope.dimension_count is 12: a whole number from 2 to 10"),
    ({"rope__dimension_count": 0}, "llama.rope.dimension_count is 0"),
    ({"rope__freq_base": 0.0}, "llama.rope.freq_base is 0.0"),
    ({"rope__freq_base": float("inf")}, "llama.rope.freq_base is inf"),
    ({"rope__scaling__type": "ntk"}, "llama.rope.scaling.type is 'ntk': choose from none, linear, yarn"),
    ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor is missing"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_ext_factor": 0.5},
     "llama.rope.scaling.yarn_ext_factor is 0.5: only 1 is supported"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_slow": 5e-324},
     "llama.rope.scaling.yarn_beta_slow is 5e-324: above 1e-06 and at most 1e.06 is needed"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_fast": 5e-324},
     "llama.rope.scaling.yarn_beta_fast is 5e-324: above 1e-06"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
      "rope__scaling__yarn_ext_factor": np.array([1, 1])},
     "llama.rope.scaling.yarn_ext_factor is an array of 2: only 1 is supported"),
    ({"rope__scaling__factor": np.array([4.0, 4.0])}, "llama.rope.scaling.factor is an array of 2"),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 5e-324},
     "llama.rope.scaling.factor is 5e-324: above 1e-06"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 5e-324}, "rope.scaling.factor is 5e-324"),
    ({"rope__scale_linear": 5e-324}, "llama.rope.scale_linear is 5e-324: above 1e-06"),
    ({"logit_scale": 5e-324}, "llama.logit_scale is 5e-324: above 1e-06"),
    ({"expert_count": 8}, "expert_count is 8: this is not supported yet|expert_used_count is missing"),
    ({"attention__causal": False}, "llama.attention.causal is False: this is not supported yet"),
    ({"attention__clamp_kqv": np.array([0, 8])}, "llama.attention.clamp_kqv is an array of 2: this is not"),
    ({"attention__sliding_window": -1}, "llama.attention.sliding_window is -1: a whole number from 0"),
    ({"logit_scale": -0.5}, "llama.logit_scale is -0.5: above 1e-06"),
    ({"final_logit_softcapping": -1.0}, "llama.final_logit_softcapping is -1.0: above 1e-06 and at most"),
    (
        {"attention__temperature_scale": 0.1, "rope__dimension_count": 4},
        "temperature_scale is 0.1: it needs layers whose heads are rotated as a whole",
    ),
    ({"attention__temperature_scale": 0.1}, "rope.scaling.original_context_length is missing"),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": np.array([1, 0, 1])},
     "sliding_window_pattern is an array of 3: a period, or 2 truth values, are needed"),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": np.array([1, 2])},
     "sliding_window_pattern is an array of 2: a period, or 2 truth values, are needed"),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": 5},
     "sliding_window_pattern is 5: a whole number from 0 to 2"),
    ({"hotcold__ffn__activation": "swish"}, "hotcold.ffn.activation is 'swish': choose from relu, drelu"),
    ({"hotcold__ffn__activation": np.array([1, 2])}, "hotcold.ffn.activation is an array of 2"),
    ({"hotcold__ffn__threshold": 0.5}, "hotcold.ffn: activation threshold 0.5 with 'silu'"),
    ({"hotcold__ffn__threshold": float("nan")}, "hotcold.ffn: activation threshold nan"),
    ({"hotcold__ffn__threshold": "low"}, "hotcold.ffn.threshold is 'low': a number"),
    ({"hotcold__ffn__down_layout": "sideways"}, "down_layout is 'sideways': choose from by_neuron"),
    ({"tokenizer__ggml__tokens": ["a"] * 60}, "tokens has 60 tokens: token_embd.weight has 61"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), BAD, ids=lambda value: str(value)[:60] if isinstance(value, str) else ""
)
def test_what_no_model_has_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(metadata(**changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_harmless_keys_are_not_refused() -> None:
    read(metadata(expert_count=0, attn_logit_softcapping=0.0, attention__sliding_window=4096))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_table_without_a_position_is_refused(rows: int) -> None:
    """Its first two rows are not used."""
    keys = Model("opt", layer_norm=True, activation="relu", gated=False).metadata()
    table = TensorInfo("position_embd.weight", (rows, 48), BLOCK_TYPES["F32"], 0, 0)
    with pytest.raises(ModelError, match=f"rows of position_embd.weight is {rows}: a whole number from 3"):
        Config.from_metadata(keys, "GGUF", infos() | {table.name: table})
    three = replace(table, shape=(3, 48))
    assert Config.from_metadata(keys, "GGUF", infos() | {table.name: three}).context == 1


def test_drelu_needs_a_gate() -> None:
    with pytest.raises(ModelError, match="'drelu' without a gate"):
        read(metadata(hotcold__ffn__activation="drelu"), gated=False)


def test_a_vocabulary_alone_is_no_model() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight is missing"):
        Config.from_metadata(metadata(), "GGUF", {})

"""Reading a model's shape from metadata, and refusing what no model has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plain_forward import Model

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import TensorInfo
from hotcold.model.config import Config, ModelError
from hotcold.model.families import FAMILIES


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
    assert (config.heads, config.kv_heads, config.head_dim) == (6, 2, 10)
    assert config.neurons == (70, 90)
    assert (config.activation, config.threshold, config.gated) == ("silu", 0.0, True)
    assert config.down_layout == "by_output"
    assert (config.rope.dim, config.rope.base, config.rope.interleaved) == (10, 5000.0, True)
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
    assert (config.kv_heads, config.head_dim, config.rope.dim, config.rope.base) == (6, 8, 8, 10000.0)
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
    assert read(metadata(rope__scaling__type="none")).rope.linear_factor == 1
    assert read(metadata(rope__scaling__type="linear", rope__scaling__factor=4.0)).rope.linear_factor == 4
    assert read(metadata(rope__scale_linear=2.0)).rope.linear_factor == 2


def test_an_attention_window_limits_the_context() -> None:
    config = read(metadata(attention__sliding_window=32))
    assert config.context == 32
    assert config.notes == ("context is 32 of 96 positions: attention beyond its window is not supported",)
    assert read(metadata(attention__sliding_window=96)).notes == read(metadata()).notes == ()


@pytest.mark.parametrize(
    ("architecture", "activation", "interleaved"),
    [("qwen2", "silu", False), ("qwen3", "silu", False), ("falcon", "gelu", False), ("llama", "silu", True)],
)
def test_a_familys_facts(architecture: str, activation: str, interleaved: bool) -> None:
    layer_norm = architecture == "falcon"
    config = read(Model(architecture, activation=activation, layer_norm=layer_norm).metadata())
    assert (config.architecture, config.activation) == (architecture, activation)
    assert config.rope.interleaved is interleaved
    assert (config.family.norm == "layer") is config.family.parallel is layer_norm


BAD: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": None}, "general.architecture is missing"),
    ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported: choose from llama, bamboo,"),
    ({"general__architecture": 7}, "architecture 7 is not supported"),
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
    ({"attention__head_count": np.array([6, 6])}, "llama.attention.head_count is an array of 2"),
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
    ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn': choose from none, linear"),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "llama.rope.scaling.factor is 0.0"),
    ({"expert_count": 8}, "llama.expert_count is 8: this is not supported yet"),
    ({"attention__causal": False}, "llama.attention.causal is False: this is not supported yet"),
    ({"attention__clamp_kqv": np.array([0, 0])}, "llama.attention.clamp_kqv is an array of 2: this is not"),
    ({"attention__sliding_window": -1}, "llama.attention.sliding_window is -1: a whole number from 0"),
    ({"logit_scale": 0.5}, "llama.logit_scale is 0.5: this is not supported yet"),
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
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_harmless_keys_are_not_refused() -> None:
    read(metadata(expert_count=0, logit_scale=1.0, attention__sliding_window=4096))


def test_drelu_needs_a_gate() -> None:
    with pytest.raises(ModelError, match="'drelu' without a gate"):
        read(metadata(hotcold__ffn__activation="drelu"), gated=False)


def test_a_vocabulary_alone_is_no_model() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight is missing"):
        Config.from_metadata(metadata(), "GGUF", {})

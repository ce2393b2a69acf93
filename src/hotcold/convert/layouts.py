"""Hugging Face layouts: the names, shapes and activations of each family's checkpoints, as data.

GGUF names are those of llama.cpp's files; ``adapting`` brings ``config.json`` under Llama's keys."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotcold.convert import adapting, bitnet, gemma3n, gemma4, hybrids, latent, rwkv, stateful
from hotcold.convert import adapting_recent as recent
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import Settings
from hotcold.convert.source import Source


@dataclass(frozen=True)
class Rule:
    """A weight and its bias: HF's name, GGUF's name, and the shape in letters of ``metadata.dimensions``.

    ``{}`` in a name is the layer; a second ``{}`` in HF's is the expert (GGUF has one tensor for all
    experts). ``heads`` is the letter that counts the heads of rows with rotary positions, or ``groups`` if q,
    k and v come in groups. ``bias`` says whether the bias exists, ``when`` whether both exist: a bool, or the
    key of one. ``layers`` is the key of a list with a truth value for each layer; empty: all layers have
    both. ``bare`` names are complete, without ``.weight``.
    """

    source: str
    target: str
    shape: str
    heads: str = ""
    bias: bool | str = False
    when: bool | str = True
    layers: str = ""
    bare: bool = False

    @property
    def each_expert(self) -> bool:
        return self.source.count("{}") == 2


@dataclass(frozen=True)
class Layout:
    architecture: str  #: GGUF's name
    implementation: str  #: class in transformers
    activations: Mapping[str, str]  #: hidden_act -> Hotcold's name
    rules: tuple[Rule, ...]
    #: returns config.json's facts under Llama's keys, if the publishers chose others or left them to the
    #: class; ``architecture`` is GGUF's name if it depends on them
    adapt: Callable[[Settings], Mapping[str, Any]] = lambda config: {}
    #: returns keys that only this family has, without the architecture's name
    extra: Callable[[Settings], Mapping[str, Any]] = lambda config: {}
    llama_cpp: str | None = "silu"  #: llama.cpp's activation for this architecture; None: llama.cpp lacks it
    eps: str = "rms_norm_eps"  #: config.json's key
    layer_norm: bool = False
    interleaved: bool = False  #: rotary pairs are neighbours in GGUF files of this architecture
    already: bool = False  #: rotary pairs are neighbours in its checkpoints, too
    #: norms scale by weight + 1 (Gemma up to 3, Nemotron); GGUF files hold the sum, and readers add nothing
    norms_less_one: bool = False
    #: layers without a window if the file has no list: a period, and True if they begin it, else they end it
    full_attention: tuple[int, bool] | None = None
    yarn_truncates: bool = True  #: the ends of YaRN's ramp are rounded to whole pairs
    prefixes: Mapping[str, str] = field(default_factory=dict)  #: the checkpoint's prefixes -> the rules'
    ignored: tuple[str, ...] = ()  #: prefixes of names that do not belong to the text model
    #: for a model with other parts: model_types of its text model (``text_config``) -> their rows here; the
    #: first belongs to older files without a ``text_config``
    texts: Mapping[str, str] = field(default_factory=dict)
    drafting: bool = False  #: layers after the last one, and names with ``mtp.``, are draft blocks
    #: predictors that its checkpoints may hold: a name with places for the layer and for fc1 or fc2
    predictor: str = ""
    whole_ffn: bool = False  #: the FFN needs all neurons, so down is stored by output
    left_out: str = ""  #: regular expression of tensors that the model does not need; a note names them
    #: makes a layer's tensors that no rule describes, from sizes by letter and the layout of down
    layer_sources: Callable[[Checkpoint, int, Mapping[str, int], str], list[Source]] = lambda *facts: []


def _renamed(rules: tuple[Rule, ...], **names: str) -> tuple[Rule, ...]:
    """The rules with parts of their names replaced, HF's or GGUF's."""
    renamed = []
    for rule in rules:
        source, target = (
            ".".join(names.get(part, part) for part in name.split(".")) for name in (rule.source, rule.target)
        )
        renamed.append(replace(rule, source=source, target=target))
    return tuple(renamed)


def _mixed(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a model with dense first layers and experts in all others."""
    dense = {f"blk.{{}}.ffn_{part}": "dense_layers" for part in ("gate", "up", "down")}
    experts = re.compile(r"\.ffn_.*_(exps|shexp|inp)|\.exp_probs_b")
    return tuple(
        replace(rule, layers="expert_layers" if experts.search(rule.target) else dense.get(rule.target, ""))
        for rule in rules
    )


def _rules(*names: str, **flags: bool | str) -> tuple[Rule, ...]:
    """The rules of these names in ``layouts.json`` and ``hybrids.json``; ``bias`` and ``when`` may also name
    one of ``flags``."""
    files = (Path(__file__).with_name(f"{name}.json") for name in ("layouts", "hybrids"))
    groups = {name: rows for file in files for name, rows in json.loads(file.read_bytes()).items()}
    rules = (Rule(*row) for name in names for row in groups[name])
    return tuple(
        replace(rule, bias=flags.get(str(rule.bias), rule.bias), when=flags.get(str(rule.when), rule.when))
        for rule in rules
    )


#: Rules of draft blocks beyond those of a layer. Tensors marked "own" exist if they differ from the model's.
DRAFTING_RULES = _rules("nextn")

# Sparse variants of gates. FATReLU (arXiv 2402.13516) is a ReLU with the threshold hidden_act_param. dReLU
# (arXiv 2406.05955), the ReLU of gate and up, may have this threshold, too.
_SPARSE = {"relu": "relu", "fatrelu": "relu", "drelu": "drelu"}
_SILU = {"silu": "silu"} | _SPARSE
#: Classes that also compute states with hidden_act: a plain ReLU would apply to both, so it is left out.
_SILU_STATES = {name: each for name, each in _SILU.items() if name != "relu"}
_TANH = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu")
_GELU = {"gelu": "gelu_erf", **_TANH, "relu": "relu", "fatrelu": "relu"}
_RELU2 = {"relu2": "relu2"}

_PLAIN: dict[str, bool | str] = {
    "norm_bias": False, "qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": False,
    "gated": True, "dense": True, "ffn_norm": True,
}  # fmt: skip
_LLAMA = _rules("llama", **_PLAIN)
_NO_BIAS = _PLAIN | {"qkv_bias": False, "o_bias": False}
_UNGATED = _PLAIN | {"gated": False}
_NORM_BIAS = _UNGATED | {"norm_bias": True}
_EXPERTS = _PLAIN | {"gated": False, "dense": False}
_BIASED = _PLAIN | {"qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias"}
_BESIDE = _PLAIN | {"ffn_norm": False}
_HUNYUAN = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
_MIXTRAL = _rules("llama", "mixtral", **_NO_BIAS | _EXPERTS)
#: Prefixes of the text model in checkpoints of text and images, and prefixes of image tensors.
_OF_VISION = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_PARTS = (*_VISION, "mm_projector.", "model.mm_projector.", "model.visual.", "visual.")


def _wrapper(implementation: str, *ignored: str, **texts: str) -> Layout:
    """The row of a model with other parts, whose text model has a row of its own."""
    # transformers 5.23 saves the layers of Kimi K2.5's text model under the image model's name.
    prefixes = {"language_model.model.blocks.": "model.layers.", **_OF_VISION}
    return Layout("", implementation, {}, (), prefixes=prefixes, ignored=(*_PARTS, *ignored), texts=texts)


_GEMMA3 = Layout(
    "gemma3",
    "Gemma3ForCausalLM",
    _TANH | _SPARSE,
    _rules("gemma3", qk_norm=True),
    adapting.gemma3,
    adapting.gemma3_keys,
    llama_cpp="gelu",
    norms_less_one=True,
    full_attention=(6, False),
    prefixes=_OF_VISION,
    ignored=_VISION,
)
_GEMMA4 = Layout(
    "gemma4", "Gemma4ForCausalLM", _TANH | _SPARSE, _rules("gemma4"), gemma4.gemma4, gemma4.gemma4_keys,
    llama_cpp="gelu", prefixes=_OF_VISION, layer_sources=gemma4.layer_tensors,
    ignored=(*_VISION, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
)  # fmt: skip
_GEMMA3N = Layout(
    "gemma3n", "Gemma3nForCausalLM", _TANH, _rules("gemma4"), gemma3n.gemma3n, gemma3n.gemma3n_keys,
    llama_cpp="gelu", full_attention=(5, False), prefixes=_OF_VISION, layer_sources=gemma3n.layer_tensors,
    ignored=_GEMMA4.ignored,
)  # fmt: skip
_MISTRAL3 = Layout(
    "mistral3", "Ministral3ForCausalLM", _SILU, _rules("llama", **_NO_BIAS), recent.mistral3,
    recent.mistral3_keys, interleaved=True, prefixes=_OF_VISION, ignored=_VISION,
)  # fmt: skip
_QWEN3VL = Layout(
    "qwen3vl", "Qwen3VLForConditionalGeneration", _SILU, _rules("llama", **_PLAIN | {"qk_norm": True}),
    recent.qwen3vl, recent.qwen3vl_keys, prefixes=_OF_VISION, ignored=("model.visual.", "visual."),
)  # fmt: skip
_LLAMA4 = Layout(
    "llama4", "Llama4ForCausalLM", _SILU, _mixed(_rules("llama", "llama4", **_EXPERTS)), recent.llama4,
    recent.llama4_keys, interleaved=True, already=True, prefixes=_OF_VISION,
    ignored=(*_VISION, "vision_model."), layer_sources=partial(stateful.stacked_experts, mlp="feed_forward"),
)  # fmt: skip
_QWEN2VL = Layout(
    "qwen2vl", "Qwen2VLForConditionalGeneration", _SILU, _rules("llama", **_NO_BIAS | {"qkv_bias": True}),
    recent.qwen2vl, recent.qwen2vl_keys, prefixes=_OF_VISION, ignored=("model.visual.", "visual."),
)  # fmt: skip

_GLM4 = Layout(
    "glm4", "Glm4ForCausalLM", _SILU, _rules("glm4", post_norms=True), interleaved=True, already=True
)
_GLM4MOE = Layout(
    "glm4moe", "Glm4MoeForCausalLM", _SILU,
    _renamed(
        _mixed(
            _rules(
                "llama", "qwen3moe", "shared_experts", "glm4moe",
                **_PLAIN | {"o_bias": False, "qk_norm": "use_qk_norm"},
            )
        ),
        ffn_norm="post_attention_norm",
    ),
    recent.glm4_moe, recent.glm4_moe_keys, drafting=True,
)  # fmt: skip
_QWEN35 = Layout(
    "qwen35", "Qwen3_5ForCausalLM", _SILU_STATES, _rules("qwen35", dense=True), hybrids.qwen35,
    hybrids.qwen35_keys, norms_less_one=True, layer_sources=stateful.gated_delta,
    prefixes={"model.language_model.": "model.", "language_model.": "", "model.mtp.": "mtp."},
    ignored=("model.visual.",), drafting=True,
)  # fmt: skip
_QWEN35MOE = replace(
    _QWEN35, architecture="qwen35moe", implementation="Qwen3_5MoeForCausalLM",
    rules=_rules("qwen35", "qwen35moe", "qwen2moe", dense=False),
)  # fmt: skip
_GRANITE_MOE = Layout(
    "granitemoe", "GraniteMoeForCausalLM", _SILU, _rules("hybrid", "granitehybrid"), hybrids.granite_moe,
    hybrids.granite_moe_keys, interleaved=True, layer_sources=stateful.granite_hybrid,
)  # fmt: skip
_NEMOTRON_H = Layout(
    "nemotron_h", "NemotronHForCausalLM", _RELU2, _rules("nemotron_h"), hybrids.nemotron_h,
    hybrids.nemotron_h_keys, llama_cpp="relu2", eps="norm_eps", layer_sources=stateful.nemotron_h,
    prefixes={"model.": "backbone."}, drafting=True,
)  # fmt: skip

#: All tensors except attention, which latent.py has.
_DEEPSEEK_RULES = tuple(
    rule
    for rule in _mixed(_rules("llama", "qwen3moe", "shared_experts", **_NO_BIAS))
    if ".self_attn." not in rule.source
)
_DEEPSEEK_V2 = Layout(
    "deepseek2", "DeepseekV2ForCausalLM", _SILU, _DEEPSEEK_RULES, latent.deepseek_v2, latent.latent_keys,
    interleaved=True, already=True, drafting=True, layer_sources=latent.latent_attention,
)  # fmt: skip
_DEEPSEEK_V3 = replace(_DEEPSEEK_V2, implementation="DeepseekV3ForCausalLM", adapt=latent.deepseek_v3)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3, architecture="deepseek32", implementation="DeepseekV32ForCausalLM",
    extra=latent.indexed_keys, layer_sources=latent.indexed_attention,
)  # fmt: skip
_KIMI_LINEAR = replace(
    _DEEPSEEK_V3, architecture="kimi-linear", implementation="KimiLinearForCausalLM",
    rules=tuple(
        rule
        for rule in _mixed(_rules("llama", "kimi-linear", **_EXPERTS | {"qkv_bias": False}))
        if ".self_attn." not in rule.source
    ),
    activations=_SILU_STATES, adapt=latent.kimi_linear, extra=latent.kimi_linear_keys,
    layer_sources=latent.kimi_layer,
)  # fmt: skip

#: bitnet.py lists the other tensors.
_BITNET = Layout(
    "bitnet", "BitNetForCausalLM", _RELU2 | {"silu": "silu"},
    tuple(rule for rule in _rules("llama", **_NO_BIAS | _EXPERTS) if ".self_attn." not in rule.source),
    bitnet.bitnet, whole_ffn=True, layer_sources=bitnet.layer_tensors,
)  # fmt: skip

#: config.json's model_type -> its layout
LAYOUTS = {
    "llama": Layout("llama", "LlamaForCausalLM", _SILU, _LLAMA, interleaved=True),
    "sparsellama": Layout("llama", "SparseLlamaForCausalLM", _SILU, _LLAMA, interleaved=True),  # ProSparse
    # Bamboo's code applies hidden_act to both gate and up, and so does TurboSparse-Mistral's. The latter
    # computes only neurons for which the sigmoid of the predictor is above 1/2; it reads the residual stream.
    "bamboo": Layout(
        "bamboo", "BambooForCausalLM", {"relu": "drelu"}, _LLAMA, adapting.mistral, llama_cpp=None,
        interleaved=True, predictor="model.layers.{}.mlp.predictor.{}.weight",
    ),
    "mistral": Layout(
        "llama", "MistralForCausalLM", _SILU, _rules("llama", **_NO_BIAS), adapting.mistral, interleaved=True
    ),
    "minicpm": Layout(
        "minicpm", "MiniCPMForCausalLM", _SILU, _LLAMA, adapting.minicpm, adapting.minicpm_keys,
        interleaved=True,
    ),
    "ministral": Layout(
        "llama", "MinistralForCausalLM", _SILU, _rules("llama", **_NO_BIAS), adapting.ministral,
        interleaved=True,
    ),
    "mixtral": Layout(
        "llama", "MixtralForCausalLM", _SILU, _MIXTRAL, adapting.mixtral, adapting.expert_keys,
        interleaved=True,
    ),
    "turbosparsemixtral": Layout(
        "llama", "TurboSparseMixtralForCausalLM", {"relu": "drelu"}, _MIXTRAL, adapting.mistral,
        adapting.expert_keys, interleaved=True, left_out=r"\.predictor\.",
    ),
    "qwen2": Layout(
        "qwen2", "Qwen2ForCausalLM", _SILU, _rules("llama", **_NO_BIAS | {"qkv_bias": True}), adapting.qwen
    ),
    "qwen3": Layout(
        "qwen3", "Qwen3ForCausalLM", _SILU, _rules("llama", **_PLAIN | {"qk_norm": True}), adapting.qwen
    ),
    "qwen2_moe": Layout(
        "qwen2moe", "Qwen2MoeForCausalLM", _SILU,
        _rules("llama", "qwen3moe", "qwen2moe", **_EXPERTS | {"qkv_bias": "qkv_bias", "o_bias": False}),
        adapting.qwen2_moe, adapting.expert_keys,
    ),
    "qwen3_moe": Layout(
        "qwen3moe", "Qwen3MoeForCausalLM", _SILU, _rules("llama", "qwen3moe", **_EXPERTS | {"qk_norm": True}),
        adapting.qwen3_moe, adapting.expert_keys,
    ),
    "smallthinker": Layout(
        "smallthinker", "SmallThinkerForCausalLM", {"relu": "relu"},
        _rules("llama", "smallthinker", **_NO_BIAS | _EXPERTS), adapting.smallthinker,
        adapting.smallthinker_keys, llama_cpp="relu", full_attention=(4, True),
    ),
    "gpt_oss": Layout(
        "gpt-oss", "GptOssForCausalLM", {"swiglu_oai": "swiglu_oai"}, _rules("gpt-oss"), adapting.gpt_oss,
        adapting.expert_keys, llama_cpp="swiglu_oai", full_attention=(2, False), yarn_truncates=False,
    ),
    "opt": Layout(
        "opt", "OPTForCausalLM", _GELU, _rules("opt"), adapting.opt, llama_cpp=None, eps="layer_norm_eps",
        layer_norm=True, prefixes={"decoder.": "model.decoder."},
    ),
    "falcon": Layout(
        "falcon", "FalconForCausalLM", _GELU, _rules("falcon"), adapting.falcon, adapting.falcon_keys,
        llama_cpp="gelu", eps="layer_norm_epsilon", layer_norm=True,
    ),
    "nemotron": Layout(
        "nemotron", "NemotronForCausalLM", _RELU2, _rules("llama", **_NORM_BIAS), llama_cpp="relu2",
        eps="norm_eps", layer_norm=True, norms_less_one=True,
    ),
    "arcee": Layout(
        "arcee", "ArceeForCausalLM", _RELU2, _rules("llama", **_UNGATED), llama_cpp="relu2", interleaved=True
    ),
    "jais2": Layout(
        "jais2", "Jais2ForCausalLM", _RELU2, _rules("llama", **_NORM_BIAS), llama_cpp="relu2",
        eps="layer_norm_eps", layer_norm=True,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, implementation="Gemma3ForConditionalGeneration"),
    "gemma3n_text": _GEMMA3N,
    "gemma3n": replace(_GEMMA3N, implementation="Gemma3nForConditionalGeneration"),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(_GEMMA4, implementation="Gemma4ForConditionalGeneration"),
    "phi3": Layout("phi3", "Phi3ForCausalLM", _SILU, _rules("phi3"), adapting.phi3, adapting.phi3_keys),
    "olmo2": Layout("olmo2", "Olmo2ForCausalLM", _SILU, _rules("olmo2", "norms_of_all")),
    "olmo3": Layout(
        "olmo2", "Olmo3ForCausalLM", _SILU, _rules("olmo2", "norms_of_all"), adapting.olmo3,
        full_attention=(4, False),
    ),
    "exaone4": Layout(
        "exaone4", "Exaone4ForCausalLM", _SILU,
        _rules("olmo2", "norms_of_heads", attention_bias=False), recent.exaone4, full_attention=(4, False),
    ),
    # Its checkpoints have a draft block, which GGUF's readers of exaone4 do not support.
    "exaone4_5": _wrapper(
        "Exaone4_5_ForConditionalGeneration", "mtp.", exaone4="exaone4", exaone4_5_text="exaone4"
    ),
    "granite": Layout(
        "granite", "GraniteForCausalLM", _SILU, _LLAMA, extra=adapting.granite_keys, interleaved=True
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, implementation="GraniteMoeSharedForCausalLM"),
    "gemma": Layout(
        "gemma", "GemmaForCausalLM", _TANH | _SPARSE, _LLAMA, recent.gemma, llama_cpp="gelu",
        norms_less_one=True,
    ),
    "gemma2": Layout(
        "gemma2", "Gemma2ForCausalLM", _TANH | _SPARSE, _rules("gemma3", qk_norm=False), recent.gemma2,
        recent.gemma2_keys, llama_cpp="gelu", norms_less_one=True, full_attention=(2, False),
    ),
    "glm": Layout(
        "chatglm", "GlmForCausalLM", _SILU, _rules("glm4", post_norms=False), interleaved=True, already=True
    ),
    "glm4": _GLM4,
    "glm4v_text": replace(
        _GLM4, implementation="Glm4vTextModel", adapt=recent.glm4v, extra=recent.glm4v_keys
    ),
    "glm4v": _wrapper("Glm4vForConditionalGeneration", glm4v_text="glm4v_text"),
    "glm46v": _wrapper(
        "Glm46VForConditionalGeneration", glm4v_text="glm4v_text", glm4v_moe_text="glm4v_moe_text"
    ),
    "seed_oss": Layout(
        "seed_oss", "SeedOssForCausalLM", _SILU,
        _renamed(
            _rules("llama", **_PLAIN | {"o_bias": "attention_out_bias"}), ffn_norm="post_attention_norm"
        ),
    ),
    "starcoder2": Layout(
        "starcoder2", "Starcoder2ForCausalLM", _GELU,
        _renamed(
            _rules("llama", **_BIASED | {"norm_bias": True, "gated": False}), up_proj="c_fc",
            down_proj="c_proj",
        ),
        adapting.mistral, recent.starcoder2_keys, llama_cpp="gelu", eps="norm_epsilon", layer_norm=True,
    ),
    "cohere": Layout(
        "command-r", "CohereForCausalLM", _SILU, _rules("llama", "command-r", **_BESIDE),
        extra=recent.cohere_keys, eps="layer_norm_eps", layer_norm=True, interleaved=True, already=True,
    ),
    "cohere2": Layout(
        "cohere2", "Cohere2ForCausalLM", _SILU, _rules("llama", **_BESIDE), recent.cohere2,
        recent.cohere_keys, eps="layer_norm_eps", layer_norm=True, interleaved=True, already=True,
        full_attention=(4, False),
    ),
    "ernie4_5": Layout(
        "ernie4_5", "Ernie4_5ForCausalLM", _SILU, _rules("llama", **_BIASED),
        interleaved=True, already=True,
    ),
    "ernie4_5_moe": Layout(
        "ernie4_5-moe", "Ernie4_5_MoeForCausalLM", _SILU,
        _mixed(_rules("llama", "qwen3moe", "shared_experts", "ernie4_5-moe", **_BIASED)),
        recent.ernie4_5_moe, recent.ernie4_5_moe_keys, interleaved=True, already=True,
        ignored=("model.mtp_",),
    ),
    "glm4_moe": _GLM4MOE,
    "glm4v_moe_text": replace(
        _GLM4MOE, implementation="Glm4vMoeTextModel", adapt=recent.glm4v_moe, extra=recent.glm4v_moe_keys
    ),
    "glm4v_moe": _wrapper("Glm4vMoeForConditionalGeneration", glm4v_moe_text="glm4v_moe_text"),
    "llama4_text": _LLAMA4,
    "llama4": replace(_LLAMA4, implementation="Llama4ForConditionalGeneration"),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": _wrapper(
        "Kimi_K25ForConditionalGeneration", deepseek_v3="deepseek_v3", kimi_k2="deepseek_v3"
    ),
    "kimi_linear": _KIMI_LINEAR,
    "glm4_moe_lite": replace(_DEEPSEEK_V3, implementation="Glm4MoeLiteForCausalLM"),
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": replace(
        _DEEPSEEK_V32, architecture="glm-dsa", implementation="GlmMoeDsaForCausalLM"
    ),
    "ministral3": _MISTRAL3,
    "mistral3": replace(_MISTRAL3, implementation="Mistral3ForConditionalGeneration"),
    "hunyuan_v1_dense": Layout(
        "hunyuan-dense", "HunYuanDenseV1ForCausalLM", _SILU,
        _renamed(_rules("llama", **_PLAIN | {"qk_norm": True}), **_HUNYUAN), recent.hunyuan,
    ),
    "hunyuan_v1_moe": Layout(
        "hunyuan-moe", "HunYuanMoEV1ForCausalLM", _SILU,
        _renamed(
            _rules("llama", "qwen3moe", "hunyuan-moe", **_EXPERTS | {"qk_norm": True}), gate="gate.wg",
            **_HUNYUAN,
        ),
        recent.hunyuan_moe, adapting.expert_keys,
    ),
    "minimax_m2": Layout(
        "minimax-m2", "MiniMaxM2ForCausalLM", _SILU,
        _rules("llama", "mixtral", "minimax-m2", **_NO_BIAS | _EXPERTS), recent.minimax_m2,
        recent.minimax_m2_keys,
    ),
    "qwen2_vl": _QWEN2VL,
    "qwen2_5_vl": replace(_QWEN2VL, implementation="Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": _QWEN3VL,
    "qwen3_vl_moe": replace(
        _QWEN3VL, architecture="qwen3vlmoe", implementation="Qwen3VLMoeForConditionalGeneration",
        rules=_rules("llama", "qwen35moe", **_EXPERTS | {"qk_norm": True}), adapt=recent.qwen3vl_moe,
        extra=recent.qwen3vl_moe_keys, layer_sources=stateful.stacked_experts,
    ),
    "lfm2": Layout(
        "lfm2", "Lfm2ForCausalLM", _SILU, _rules("hybrid", "lfm2", attention_bias=False), hybrids.lfm2,
        hybrids.lfm2_keys, eps="norm_eps", layer_sources=stateful.short_conv,
    ),
    "lfm2_moe": Layout(
        "lfm2moe", "Lfm2MoeForCausalLM", _SILU, _rules("hybrid", "lfm2", "lfm2moe", attention_bias=False),
        hybrids.lfm2, hybrids.lfm2_keys, eps="norm_eps", layer_sources=stateful.short_conv,
    ),
    "lfm2_vl": _wrapper("Lfm2VlForConditionalGeneration", lfm2="lfm2", lfm2_moe="lfm2_moe"),
    "qwen3_5_text": _QWEN35,
    "qwen3_5": replace(_QWEN35, implementation="Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": _QWEN35MOE,
    "qwen3_5_moe": replace(_QWEN35MOE, implementation="Qwen3_5MoeForConditionalGeneration"),
    "qwen3_next": replace(_QWEN35MOE, architecture="qwen3next", implementation="Qwen3NextForCausalLM"),
    "nemotron_h": _NEMOTRON_H,
    "granitemoehybrid": Layout(
        "granitehybrid", "GraniteMoeHybridForCausalLM", _SILU_STATES, _rules("hybrid", "granitehybrid"),
        hybrids.granite_hybrid, hybrids.granite_hybrid_keys, interleaved=True,
        layer_sources=stateful.granite_hybrid,
    ),
    "falcon_h1": Layout(
        "falcon-h1", "FalconH1ForCausalLM", _SILU_STATES, _rules("hybrid", "falcon-h1"), hybrids.falcon_h1,
        hybrids.falcon_h1_keys, layer_sources=stateful.mamba,
    ),
    "mamba2": Layout(
        "mamba2", "Mamba2ForCausalLM", _SILU, _rules("mamba2"), hybrids.mamba2, hybrids.mamba2_keys,
        eps="norm_eps", layer_sources=stateful.mamba,
    ),
    "rwkv7": Layout(
        "rwkv7", "RWKV7ForCausalLM", _RELU2, _rules("rwkv7"), rwkv.rwkv7, rwkv.rwkv7_keys,
        llama_cpp="relu2", eps="norm_eps", layer_norm=True, layer_sources=rwkv.layer_tensors,
    ),
    "bitnet": _BITNET,
    "smollm3": Layout("smollm3", "SmolLM3ForCausalLM", _SILU, _LLAMA, adapting.smollm3, interleaved=True),
}  # fmt: skip

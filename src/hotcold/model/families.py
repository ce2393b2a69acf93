"""Model families as data: facts that an architecture's name implies and the GGUF file does not state.

A file states biases, gating, q/k norms, fused q/k/v, sinks, scales, a tied head and shapes, which are read
from it. A new family is an entry here, and its layout in ``convert/``; no other code tests family names."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Every:
    """Exceptional layers: the last, or with ``first`` the first, of every ``period`` layers."""

    period: int
    first: bool = False

    def __contains__(self, layer: int) -> bool:
        return layer % self.period == (0 if self.first else self.period - 1)


@dataclass(frozen=True)
class Scales:
    """Factors of a family; keys of a file take precedence (:meth:`Config.from_metadata`)."""

    embedding: float = 1.0
    residual: float = 1.0  #: factor of the outputs of attention and FFN
    logits: float = 1.0  #: divisor of logits, like GGUF's ``logit_scale`` of these families
    attention: float | None = None  #: factor of scores; None: one over the root of the head length


#: Makes scales from the number of layers, D and H.
ImpliedScales = Callable[[int, int, int], Scales]


#: Mixers with a state that is not in pages: the names of their modules in this folder.
STATEFUL = ("short_conv", "gated_delta", "kimi_delta", "mamba", "rwkv")


@dataclass(frozen=True)
class Family:
    name: str  #: GGUF's ``general.architecture``
    activation: str = "silu"  #: of the FFN, if a GGUF file has no ``hotcold.ffn.activation``
    norm: str = "rms"  #: RMSNorm, or ``layer``: LayerNorm
    norms: str = "before"  #: of the input of attention and FFN; ``after``: of their output; or ``both``
    #: q and k norms, if a file has them: ``head``, over each head, with equal weights; ``each``, over each
    #: head, with its own weights; ``all``, over all heads together
    qk_norm: str = "head"
    #: rotary pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2), as always with ``rope.dimension_sections``
    #: (GLM-4.1V)
    rope_interleaved: bool = False
    #: Positions are a learned table; the row of position 0. None: rotary positions
    learned_positions: int | None = None
    unrotated: Every | None = None  #: layers without any positions (NoPE)
    #: Layers with attention to all positions in a file with a sliding window; None: none
    full_attention: Every | None = None
    window_scaled: bool = True  #: rotary scaling and factors apply to layers with a window, too
    #: the ends of YaRN's ramp are rounded to whole pairs, like the paper's code
    yarn_whole: bool = True
    parallel: bool = False  #: attention and FFN both read the layer's input
    fused_gate: bool = False  #: ``ffn_up`` has the gate's rows, then up's
    scales: ImpliedScales = lambda layers, dim, heads: Scales()
    logits_multiplied: bool = False  #: GGUF's ``logit_scale`` multiplies logits, not divides (Cohere)
    rotated_norms: bool = False  #: q and k norms follow the rotation instead of preceding it
    #: Layers that rotate normalise q and k without weights, except in models with this number of experts
    plain_norms_unless: int | None = None
    #: A window is a chunk: a row attends to positions from the last multiple of its length on
    chunked: bool = False
    #: Scores of layers without rotation grow: the rate, and the positions per step of growth
    temperature: tuple[float, int] | None = None
    embedding_norm: bool = False  #: embeddings are normalised before the first layer (``token_embd_norm``)
    #: Layers with attention to all positions have no rotation if others have a window
    full_unrotated: bool = False
    router_early: bool = False  #: the router reads the layer's raw input, not the FFN's input
    factor_of_input: bool = False  #: an expert's factor multiplies its input instead of its output
    #: Attention with a latent cache (MLA)
    latent: bool = False
    #: Mixers with a state, of :data:`STATEFUL`, in layers without kv heads (``head_count_kv`` 0)
    stateful: str | None = None
    #: Each layer has attention and the mixer with a state, on the same input (Falcon-H1)
    together: bool = False
    #: A layer is a mixer or an FFN: an FFN if ``feed_forward_length`` is not 0, else a mixer. The norm before
    #: either is ``attn_norm``
    one_part: bool = False
    gated_attention: bool = False  #: ``attn_q`` holds for each head q, then a gate of attention's output
    tiled_heads: bool = True  #: of ``gated_delta``: v head h uses k head h modulo their number
    #: ``rope.scaling.finetuned`` false means: no rotary positions
    rope_if_finetuned: bool = False
    #: Layers with a window have their own head length, and layers may differ in kv heads. Values are
    #: normalised without weights; without ``attn_v`` they are computed from the input of keys
    kinds_of_heads: bool = False
    #: The model has several residual streams and adds a layer's input to its output. In some layers only a
    #: token's largest gates count (Gemma 3n)
    streams: bool = False
    #: Attention has a norm before its output matrix, and the FFN one before down (BitNet)
    norms_inside: bool = False
    #: Blocks after the last layer (``nextn``) are layers with attention that draft tokens
    drafts: bool = False
    #: The last norm of a draft block is a LayerNorm even if other norms are not
    draft_layer_norm: bool = False
    #: Defaults of GGUF keys that the family's files may omit, by the name without the architecture
    implied: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def of_block(self) -> "Family":
        """The family's facts for a draft block, which always has both attention and an FFN."""
        return replace(self, one_part=False)


def _minicpm(layers: int, dim: int, heads: int) -> Scales:
    """Returns the scales of MiniCPM 1B and 2B (arXiv 2404.06395), whose first files have no keys for them."""
    return Scales(embedding=12, residual=1.4 / math.sqrt(layers), logits=dim / 256)


def _gemma3(layers: int, dim: int, heads: int) -> Scales:
    """Returns the scales of Gemma 3; 27B (62 layers) scales scores by D / H. arXiv 2503.19786."""
    attention = (dim / heads) ** -0.5 if layers == 62 else None
    return Scales(embedding=math.sqrt(dim), attention=attention)


def _gemma(layers: int, dim: int, heads: int) -> Scales:
    """Returns the scales of Gemma 1; arXiv 2403.08295."""
    return Scales(embedding=math.sqrt(dim))


def _gemma2(layers: int, dim: int, heads: int) -> Scales:
    """Returns the scales of Gemma 2; 27B (46 layers) scales scores by D / H. arXiv 2408.00118."""
    attention = (dim / heads) ** -0.5 if layers == 46 else None
    return Scales(embedding=math.sqrt(dim), attention=attention)


def _gemma4(layers: int, dim: int, heads: int) -> Scales:
    """Returns the scales of Gemma 3n and 4. Scores are not scaled, since q and k are normalised."""
    return Scales(embedding=math.sqrt(dim), attention=1.0)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", rope_interleaved=True),  # Llama 2 and 3, Mistral; ReluLLaMA, ProSparse
        Family("bamboo", activation="drelu", rope_interleaved=True),
        Family("qwen2"),
        Family("qwen3"),
        Family("qwen2vl"),  # Qwen2-VL and 2.5-VL; in text all sections of positions are equal
        Family("qwen3vl"),  # the same
        Family("falcon", activation="gelu_erf", norm="layer", parallel=True),
        Family(
            "opt",
            activation="relu",
            norm="layer",
            learned_positions=2,
            implied={"attention.layer_norm_epsilon": 1e-5},
        ),
        Family("minicpm", rope_interleaved=True, scales=_minicpm),
        Family("nemotron", activation="relu2", norm="layer"),
        Family("arcee", activation="relu2", rope_interleaved=True),
        Family("jais2", activation="relu2", norm="layer"),
        Family("gemma", activation="gelu", scales=_gemma),  # Gemma 1, CodeGemma
        Family(
            "gemma2",
            activation="gelu",
            norms="both",
            full_attention=Every(2),
            scales=_gemma2,
            implied={
                "attention.sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        Family(
            "gemma3",
            activation="gelu",
            norms="both",
            full_attention=Every(6),
            window_scaled=False,
            scales=_gemma3,
            implied={"rope.freq_base_swa": 10000.0},
        ),
        Family(
            "gemma3n",
            activation="gelu",
            norms="both",
            full_attention=Every(5),
            window_scaled=False,
            kinds_of_heads=True,
            streams=True,
            scales=_gemma4,
            implied={"rope.freq_base_swa": 10000.0, "final_logit_softcapping": 30.0},
        ),
        Family(
            "gemma4",
            activation="gelu",
            norms="both",
            full_attention=Every(6),
            window_scaled=False,
            kinds_of_heads=True,
            scales=_gemma4,
            implied={"rope.freq_base_swa": 10000.0},
        ),
        Family("phi3", fused_gate=True),  # Phi-3, Phi-3.5 and Phi-4
        # OLMo 2, and OLMo 3, which has windows
        Family("olmo2", norms="after", qk_norm="all", full_attention=Every(4), window_scaled=False),
        # EXAONE 4; 1.2B has no windows, and all of its layers rotate
        Family("exaone4", norms="after", full_attention=Every(4), full_unrotated=True),
        # Granite 3, and Granite 4 with attention in all layers
        Family("granite", rope_interleaved=True, rope_if_finetuned=True),
        Family("granitemoe", rope_interleaved=True, rope_if_finetuned=True),
        Family("chatglm", fused_gate=True, rope_interleaved=True),  # ChatGLM3, GLM-4 of 2024, GLM-Edge
        Family(
            "glm4",
            norms="both",
            fused_gate=True,
            rope_interleaved=True,
            drafts=True,
        ),
        Family("seed_oss"),
        # The window of the published checkpoints; llama.cpp's files have no key for it.
        Family("starcoder2", activation="gelu", norm="layer", implied={"attention.sliding_window": 4096}),
        Family(
            "command-r",
            norm="layer",
            qk_norm="each",
            parallel=True,
            rope_interleaved=True,
            logits_multiplied=True,
        ),
        Family(
            "cohere2",
            norm="layer",
            parallel=True,
            rope_interleaved=True,
            logits_multiplied=True,
            full_attention=Every(4),
            full_unrotated=True,
            implied={"attention.sliding_window": 4096},
        ),
        Family("ernie4_5", rope_interleaved=True),
        Family("ernie4_5-moe", rope_interleaved=True, implied={"expert_gating_func": 1}),
        # GLM-4.5 to 4.7
        Family(
            "glm4moe",
            drafts=True,
            implied={"expert_gating_func": 2, "expert_weights_norm": False},
        ),
        # DeepSeek V2 to V3.1, R1; Kimi K2; GLM-4.7-Flash; Moonlight
        Family(
            "deepseek2",
            latent=True,
            rope_interleaved=True,
            drafts=True,
            implied={"expert_weights_norm": False},
        ),
        *(
            # DeepSeek V3.2; GLM-5
            Family(
                name,
                latent=True,
                rope_interleaved=True,
                drafts=True,
                implied={"expert_gating_func": 2, "expert_weights_norm": False},
            )
            for name in ("deepseek32", "glm-dsa")
        ),
        Family("mistral3", rope_interleaved=True),  # Ministral 3, whose scores grow with positions
        Family("hunyuan-dense", rotated_norms=True),
        Family("hunyuan-moe", rotated_norms=True),
        Family("minimax-m2", qk_norm="all", implied={"expert_gating_func": 2}),
        # Llama 4; 128 experts identify Maverick
        Family(
            "llama4",
            rope_interleaved=True,
            rotated_norms=True,
            plain_norms_unless=128,
            chunked=True,
            full_attention=Every(4),
            full_unrotated=True,
            temperature=(0.1, 8192),
            factor_of_input=True,
            implied={
                "attention.sliding_window": 8192,
                "expert_gating_func": 2,
                "expert_weights_norm": False,
            },
        ),
        Family("bitnet", activation="relu2", norms_inside=True),  # b1.58
        Family("smollm3", rope_interleaved=True, unrotated=Every(4)),
        Family("qwen2moe", implied={"expert_weights_norm": False}),
        Family("qwen3moe"),
        Family("qwen3vlmoe"),
        Family(
            "smallthinker",
            activation="relu",
            full_attention=Every(4, first=True),
            full_unrotated=True,
            router_early=True,
        ),
        # Like transformers; llama.cpp rounds YaRN's pairs here, too, which changes its logits slightly.
        Family(
            "gpt-oss",
            activation="swiglu_oai",
            full_attention=Every(2),
            yarn_whole=False,
        ),
        Family("lfm2", stateful="short_conv"),  # LFM2 and LFM2.5
        Family("lfm2moe", stateful="short_conv", implied={"expert_gating_func": 2}),
        *(
            Family(
                name,  # qwen35: Qwen 3.5, 3.6 and 3.8
                stateful="gated_delta",
                gated_attention=True,
                tiled_heads=name != "qwen3next",
                drafts=True,
                implied={"full_attention_interval": 4},
            )
            for name in ("qwen35", "qwen35moe", "qwen3next")
        ),
        *(
            # Nemotron-H, Nemotron Nano 2; Nemotron 3
            Family(
                name,
                activation="relu2",
                stateful="mamba",
                one_part=True,
                unrotated=Every(1),
                drafts=name == "nemotron_h_moe",
                draft_layer_norm=name == "nemotron_h_moe",
                implied={"expert_gating_func": 2, "expert_weights_norm": False},
            )
            for name in ("nemotron_h", "nemotron_h_moe")
        ),
        # Granite 4
        Family("granitehybrid", stateful="mamba", rope_interleaved=True, rope_if_finetuned=True),
        Family("falcon-h1", stateful="mamba", together=True),
        # Kimi Linear, whose attention does not rotate
        Family(
            "kimi-linear",
            latent=True,
            rope_interleaved=True,
            stateful="kimi_delta",
            unrotated=Every(1),
            implied={"expert_gating_func": 2},
        ),
        Family("mamba2", stateful="mamba", one_part=True),
        Family(
            "rwkv7",
            activation="relu2",
            norm="layer",
            stateful="rwkv",
            embedding_norm=True,
        ),
    )
}

"""Architectures of llama.cpp that are refused, by the reason; architectures in :data:`FAMILIES` run.

Their checkpoints are refused for the same reasons, under slightly different names."""

import re
from collections.abc import Iterable

from hotcold.values import shown

_ENTRY = "it needs an entry in families.py that is checked against its publishers' code"

#: Reasons, each with the architectures that it applies to.
_REASONS = {
    "the file is the image or audio part of a model (mmproj), and has no text model": "clip",
    "it is an encoder: it gives vectors and writes no text":
        "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert t5encoder "
        "gemma-embedding llama-embed",
    "it is an encoder with a decoder, and only decoders run": "t5",
    "it is a diffusion model: it does not generate token by token": "dream llada llada-moe rnd1",
    "it is an audio model": "wavtokenizer-dec qwen3tts pockettts",
    "it reads images, and its text model has experts or matrices of its own for them":
        "cogvlm chameleon deepseek2-ocr paddleocr hunyuan_vl",
    "it only drafts tokens for another model": "eagle3 dflash gemma4-assistant",
    "it needs ALiBi": "mpt bloom refact jais baichuan",
    "it needs clamped queries, keys and values": "dbrx olmo",
    "it needs a learned table of positions from position 0 on": "gpt2 starcoder",
    "it needs parallel attention and FFN with other norms or biases":
        "gptj gptneox phi2 stablelm codeshell plamo",
    "it needs layers of different shapes": "deci openelm plamo3 step35 mimo2 laguna",
    "it needs the recurrence of Mamba 1": "mamba jamba plamo2",
    "it needs the gated delta rule in a form of its own": "bailingmoe3",
    "it needs the recurrence of RWKV in a form of its own": "rwkv6 rwkv6qwen2 arwkv7",
    "it needs lightning attention": "minimax-01",
    "it needs a gate of each head's attention": "spark2_5",
    "it needs layers through which a token goes several times": "hrm_text",
    "bitnet.cpp's files are not supported: `hotcold convert` makes a file of the checkpoint":
        "bitnet-b1.58",
    "it needs attention with a latent cache (MLA), and an entry in families.py": "minicpm3 plm mistral4",
    "it needs attention by an index of keys": "minimax-m3 hy_v4 dots3note",
    "it needs several residual streams": "deepseek4 glm5-next kimi-k3 qwen4exp",
    "it needs a dense FFN in addition to its experts": "arctic grok grovemoe",
    "it needs an activation that is not supported": "apertus maple",
    "it needs a router that is not supported": "phimoe olmoe",
    _ENTRY:
        "dots1 bailingmoe bailingmoe2 deepseek exaone-moe afmoe hy_v3 cohere2moe qwen orion internlm2 "
        "xverse exaone pangu-embedded maincoder talkie mellum clef graniteswitch granite_swa "
        "muse-glimmer nanbeige",
}  # fmt: skip

#: The reason for each architecture.
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}

#: GGUF names of model_types that differ from them, both plain.
_MODEL_TYPES = {
    **dict.fromkeys(("albert", "deberta", "debertav2", "distilbert", "electra"), "bert"),
    "roberta": "bert", "xlmroberta": "bert",
    **dict.fromkeys(("bart", "mbart", "mt5", "umt5"), "t5"),
    "deepseekv4": "deepseek4", "gptbigcode": "starcoder", "phi": "phi2",
    "stablelmepoch": "stablelm", "whisper": "wavtokenizerdec", "falconmamba": "mamba",
    "minimaxtext01": "minimax01", "minimax": "minimax01",
}  # fmt: skip


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN_NAME = {_plain(name): reason for name, reason in REFUSED.items()}

#: Other kinds of files, by ``general.type``.
_KINDS = {
    "adapter": "the file is an adapter (LoRA), not a whole model",
    "mmproj": "the file is the image or audio part of a model (mmproj), and has no text model",
    "imatrix": "the file is an importance matrix: give it to hotcold quantize",
    "predictor": "the file holds predictors of a model: give the model, and this file as predictor",
    "profile": "the file is a profile of a model: give the model, and this file to hotcold plan",
}


def refusal(architecture: object, kind: object, known: Iterable[str]) -> str | None:
    """Returns why a file of this ``general.architecture`` and ``general.type`` is refused, or None."""
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if architecture is None:
        return "general.architecture is missing: this file has no model"
    name = architecture if isinstance(architecture, str) else ""
    if name in known:
        return None
    reason = reason_of(name) or f"docs/families.md lists what runs, such as {', '.join([*known][:4])}"
    return f"architecture {shown(architecture)} is not supported: {reason}"


def reason_of(name: str) -> str | None:
    """Returns why a GGUF architecture, or a model_type of config.json, is refused; None: unknown."""
    plain = _plain(name)
    return _BY_PLAIN_NAME.get(_MODEL_TYPES.get(plain, plain))

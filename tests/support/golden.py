"""Golden models: tiny random checkpoints and the logits that transformers computes for them (tests/data)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.checkpoints import golden_checkpoint

from hotcold.convert import ConvertOptions, convert

DATA = Path(__file__).parent.parent / "data"

#: Each in one point or more unlike the others; tests/data/golden_configs.py says in which.
NAMES = (
    "tiny-llama", "tiny-drelu", "tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-falcon40",
    "tiny-falcon",
)  # fmt: skip

#: Goldens of layers of several kinds, by make_hybrid_goldens.py.
GEMMA4 = ("tiny-gemma4", "tiny-gemma4-e", "tiny-gemma4-moe")
GEMMA3N = ("tiny-gemma3n",)

#: Goldens with latent attention (MLA).
LATENT = (
    "tiny-deepseek2-lite", "tiny-deepseek2", "tiny-deepseek3", "tiny-glm4-flash", "tiny-deepseek32",
    "tiny-glm-dsa",
)  # fmt: skip

#: Goldens of further families, all of them smaller.
FAMILIES = (
    "tiny-prosparse", "tiny-minicpm", "tiny-opt", "tiny-nemotron", "tiny-arcee", "tiny-jais2", "tiny-gemma3",
    "tiny-phi3", "tiny-olmo2", "tiny-olmo3", "tiny-granite", "tiny-smollm3", "tiny-glm4", "tiny-seed-oss",
    "tiny-starcoder2", "tiny-gemma2", "tiny-cohere2", "tiny-ernie4_5", "tiny-mistral3", "tiny-hunyuan-dense",
    "tiny-qwen3vl", "tiny-qwen3vlmoe", "tiny-granitemoe", "tiny-minimax-m2", "tiny-hunyuan-moe",
    "tiny-glm4moe", "tiny-ernie4_5moe", "tiny-command-r", "tiny-exaone4", "tiny-qwen2vl",
    "tiny-qwen2_5vl", "tiny-llama4", "tiny-bitnet", "tiny-gemma", "tiny-glm", "tiny-ministral",
    "tiny-granite4", "tiny-granitemoeshared", *GEMMA4, *GEMMA3N,
)  # fmt: skip

#: Goldens of models with other parts than text.
WRAPPERS = (
    "tiny-glm4v", "tiny-glm46v", "tiny-glm4vmoe", "tiny-kimi-k25", "tiny-lfm2vl", "tiny-exaone4_5",
)  # fmt: skip

#: Goldens whose layers keep a state, by make_hybrid_goldens.py.
HYBRIDS = (
    "tiny-lfm2", "tiny-lfm2moe", "tiny-qwen35", "tiny-qwen35moe", "tiny-qwen3next", "tiny-nemotron-h",
    "tiny-nemotron-h-moe", "tiny-nemotron-latent", "tiny-granite-h", "tiny-granite-h-moe", "tiny-falcon-h1",
    "tiny-mamba2",
)  # fmt: skip

#: Such goldens whose attention is latent.
LATENT_HYBRIDS = ("tiny-kimi-linear",)

#: Such goldens that GPUs do not compute, by make_rwkv_goldens.py.
CPU_HYBRIDS = ("tiny-rwkv7",)


@dataclass(frozen=True)
class Golden:
    """A model as GGUF and what it must compute; float32, V is 288.

    Attributes:
        path: the GGUF file.
        prompt: ``[P]`` int32 ids, beginning with BOS.
        prompt_logits: ``[P, V]`` after every prompt token.
        steps: ``[S]`` int32 greedy ids that follow the prompt.
        step_logits: ``[S, V]`` after each of them.
    """

    path: Path
    prompt: npt.NDArray[np.int32]
    prompt_logits: npt.NDArray[np.float32]
    steps: npt.NDArray[np.int32]
    step_logits: npt.NDArray[np.float32]


def golden(name: str, folder: Path, *, type: str = "F32", down: str | None = None) -> Golden:
    """Converts one of :data:`NAMES` into ``folder`` (exactly, with the default type) and loads its logits."""
    path = folder / f"{name}-{type}-{down}.gguf"
    convert(golden_checkpoint(name), path, ConvertOptions(type, down, force=True))
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as arrays:
        return Golden(path, **{key: arrays[key] for key in arrays.files})

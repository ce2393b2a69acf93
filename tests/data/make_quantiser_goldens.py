"""Writes quantiser_types.json: the types that llama.cpp's quantiser gives to the tensors of made-up models.

Needs llama-cpp-python (0.3.36 was used): ``PYTHONPATH=src python tests/data/make_quantiser_goldens.py``. The
models have the names and the row lengths of real ones, and few rows; a dry run tells every type."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from hotcold.formats.blocks import Tensor, block_type
from hotcold.formats.gguf import write_gguf

OUTPUT = Path(__file__).with_name("quantiser_types.json")
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11,
    "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "Q2_K_S": 21, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ2_0": 37, "MXFP4_MOE": 38,
}  # fmt: skip
FUSED = ["attn_qkv", "attn_output", "ffn_up", "ffn_down"]
ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output"]
GATED = ["ffn_gate", "ffn_up", "ffn_down"]
EXPERTS = ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
SHARED = ["ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]


def case(
    architecture: str, layers: int, heads: int, key_heads: int, parts: list[str], **more: Any
) -> dict[str, Any]:
    """A model: its keys, and ``parts``, the names of the matrices of a layer."""
    tied, experts, row, inner = (
        more.pop(key, absent)
        for key, absent in (("tied", False), ("experts", 0), ("row", 512), ("inner", 768))
    )
    keys: dict[str, Any] = {
        "block_count": layers, "attention.head_count": heads, "attention.head_count_kv": key_heads,
        "context_length": 128, "embedding_length": 32 * heads, "feed_forward_length": inner, "vocab_size": 8,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 32,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": inner}
    keys |= more.pop("keys", {})
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {
        "keys": {"general.architecture": architecture} | named,
        "layers": layers, "parts": parts + ["attn_norm"], "experts": experts, "row": row, "inner": inner,
        "whole": ["token_embd", "output_norm", *([] if tied else ["output"]), *more.pop("whole", [])],
    }  # fmt: skip


CASES = {
    "dense": case("llama", 32, 32, 32, ATTENTION + GATED),
    "grouped": case("llama", 22, 32, 4, ATTENTION + GATED),
    "smollm2": case("llama", 30, 9, 3, ATTENTION + GATED, tied=True, row=576, inner=1536),
    "large": case("llama", 80, 64, 8, ATTENTION + GATED),
    "large without groups": case("llama", 80, 64, 64, ATTENTION + GATED),
    "qwen2": case("qwen2", 80, 64, 8, ATTENTION + GATED),
    "eight experts": case("llama", 32, 32, 8, ATTENTION + EXPERTS, experts=8),
    "many experts": case("qwen2moe", 24, 16, 16, ATTENTION + EXPERTS + SHARED, experts=60),
    "qwen3moe": case("qwen3moe", 48, 32, 4, [*ATTENTION, *EXPERTS, "attn_q_norm"], experts=128),
    "falcon": case("falcon", 32, 71, 1, FUSED),
    "phi3": case("phi3", 40, 40, 10, FUSED),
    "opt": case("gpt2", 12, 12, 12, FUSED, whole=["position_embd"]),
    "gemma3": case("gemma3", 18, 4, 1, ATTENTION + GATED, tied=True, row=640, inner=2048,
                   keys={"attention.sliding_window": 64}),
    "narrow": case("llama", 5, 8, 8, ATTENTION + GATED, row=48, inner=80),
    "jais2": case("jais2", 68, 26, 26, [*ATTENTION, "ffn_up", "ffn_down"]),
    "seven layers": case("llama", 7, 8, 2, ATTENTION + GATED),
}  # fmt: skip
WISHES: dict[str, dict[str, Any]] = {
    "importance": {"importance": True},
    "pure": {"pure": True},
    "output": {"output_tensor_type": 8},
    "embeddings": {"token_embedding_type": 7},
    "leave": {"quantize_output_tensor": False},
    "patterns": {"patterns": [["attn_v", 8], ["blk.[0-3].ffn_down", 13]]},
}
WITH_WISHES = {"grouped": ("Q4_K_M", "Q4_0", "IQ4_XS", "Q5_0"), "smollm2": ("Q4_K_M", "Q4_0", "IQ4_NL")}


def tensors_of(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and the shapes of a case's tensors, in NumPy order."""

    def shape(part: str) -> tuple[int, ...]:
        row = model["inner"] if "ffn_down" in part else model["row"]
        return (row,) if "norm" in part else (model["experts"], 2, row) if "exps" in part else (2, row)

    names = [*model["whole"], *(f"blk.{i}.{part}" for i in range(model["layers"]) for part in model["parts"])]
    return {f"{name}.weight": shape(name) for name in names}


def types_of(path: Path, type: str, wishes: dict[str, Any]) -> dict[str, str]:
    """The types that llama.cpp's quantiser chooses for a file."""
    lines: list[str] = []
    callback = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode()))
    llama_cpp.llama_log_set(callback, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.dry_run, params.allow_requantize = FILE_TYPES[type], True, True
    keep = []
    for key, value in wishes.items():
        if key == "importance":
            ones = (ctypes.c_float * 4)(1, 1, 1, 1)
            data = (llama_cpp.llama_model_imatrix_data * 2)()
            data[0].name, data[0].data, data[0].size = b"none", ones, 4
            params.imatrix = data
            keep += [ones, data]
        elif key == "patterns":
            overrides = (llama_cpp.llama_model_tensor_override * (len(value) + 1))()
            for place, (pattern, kind) in enumerate(value):
                overrides[place].pattern, overrides[place].type = pattern.encode(), kind
            params.tt_overrides = overrides
            keep.append(overrides)
        else:
            setattr(params, key, value)
    code = llama_cpp.llama_model_quantize(str(path).encode(), b"/dev/null", ctypes.byref(params))
    text = "".join(lines)
    if code:
        raise SystemExit(text)
    found = re.findall(r"\] +(\S+) +- \[.*?\], type = +(\w+), size = [^\n]*?(?:\((\w+)\))?\n", text)
    return {name: (new or old).upper() for name, old, new in found}


def packed(model: dict[str, Any], types: dict[str, str]) -> dict[str, str]:
    """The types of each part over the layers, such as ``Q6_K*4 Q4_K``; the last one repeats."""
    result = {}
    for part in [*model["whole"], *model["parts"]]:
        layers = [part] if part in model["whole"] else [f"blk.{i}.{part}" for i in range(model["layers"])]
        runs = [
            (type, len(list(run)))
            for type, run in itertools.groupby(types[f"{name}.weight"] for name in layers)
        ]
        words = [type if n == 1 else f"{type}*{n}" for type, n in runs]
        result[part] = " ".join([*words[:-1], runs[-1][0]])
    return result


def main() -> None:
    goldens = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name, model in CASES.items():
            shapes = tensors_of(model)
            kind = block_type("F32")
            tensors = {n: Tensor(kind, s, np.zeros(kind.data_shape(s), np.uint8)) for n, s in shapes.items()}
            write_gguf(path, model["keys"], tensors)
            types: dict[str, Any] = {type: packed(model, types_of(path, type, {})) for type in FILE_TYPES}
            for type, (wish, params) in itertools.product(WITH_WISHES.get(name, ()), WISHES.items()):
                types[f"{type} {wish}"] = packed(model, types_of(path, type, params))
            goldens[name] = {
                key: model[key] for key in ("keys", "layers", "parts", "experts", "row", "inner", "whole")
            }
            # Most parts have the same types in all mixtures; each line is stated once.
            lines = sorted({f"{part}: {text}" for parts in types.values() for part, text in parts.items()})
            goldens[name]["lines"] = lines
            goldens[name]["types"] = {
                type: [lines.index(f"{part}: {text}") for part, text in parts.items()]
                for type, parts in types.items()
            }
            print(name, len(shapes))
    text = json.dumps(goldens, indent=1)
    text = re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    OUTPUT.write_text(text + "\n")


if __name__ == "__main__":
    main()

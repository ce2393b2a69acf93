"""Makes the golden model tiny-rwkv7 beside this file, as make_goldens.py makes the others.

    PYTHONPATH=tests python tests/data/make_rwkv_goldens.py

transformers has no RWKV-7, and the package of its publishers needs their own files. So the truth is written
here plainly, in float64 and from the paper (arXiv 2503.14456): a token at a time, states by
values and keys, nothing shared with Hotcold. Checkpoints have fla-hub's names. Every parameter is random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from support.checkpoints import write_safetensors

Doubles = npt.NDArray[np.float64]

SEED = 901
VOCAB = 288
#: Ranks and neurons that fit no vector.
CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "hidden_size": 64, "head_dim": 16,
    "num_hidden_layers": 3, "intermediate_size": 52, "hidden_ratio": 4.0, "hidden_act": "sqrelu",
    "norm_eps": 1e-5, "norm_bias": True, "norm_first": True, "attn": None, "vocab_size": VOCAB,
    "decay_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 3, "gate_low_rank_dim": 7,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
#: After the 256 bytes.
WORDS = (
    "\n\n", "User", "Assistant", ":", " the", "the", " a", " and", "th", "in", "ing", "he", " t", "\u00e4",
    b"\xe4\xbd", "\u4f60", "\u4f60\u597d", "'", '"', "\\", "\t\t", " '", "hello", "hell", " hello", "o wo",
    "  ", "    ", "</s", "[PAD7]", "an",
)  # fmt: skip


def vocabulary() -> str:
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        token = word.encode() if isinstance(word, str) else word
        if token not in tokens:
            tokens.append(token)
    lines = []
    for id, token in enumerate(tokens[: VOCAB - 1], start=1):
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{id} {literal} {len(token)}")
    return "".join(f"{line}\n" for line in lines)


def parameters() -> dict[str, npt.NDArray[Any]]:
    """bfloat16, which float32 holds exactly."""
    random = np.random.default_rng(SEED)
    dim, heads, n = CONFIG["hidden_size"], CONFIG["hidden_size"] // CONFIG["head_dim"], 52
    found: dict[str, Doubles] = {}

    def normal(*shape: int, by: float = 1.0, centre: float = 0.0) -> Doubles:
        values: Doubles = centre + by * random.standard_normal(shape)
        return values

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = normal(dim, by=0.3, centre=1), normal(dim, by=0.3)

    found["model.embeddings.weight"] = normal(VOCAB, dim)
    found["lm_head.weight"] = normal(VOCAB, dim, by=0.2)
    norm("model.norm")
    norm("model.layers.0.pre_norm")
    ranks = {
        part: CONFIG[f"{name}_low_rank_dim"]
        for part, name in zip("wavg", ("decay", "a", "v", "gate"), strict=True)
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        hf = f"model.layers.{layer}."
        norm(f"{hf}attn_norm")
        norm(f"{hf}ffn_norm")
        norm(f"{hf}attn.g_norm")
        for part in "rwkvag":
            found[f"{hf}attn.x_{part}"] = random.random((1, 1, dim))
        for part in "rkvo":
            found[f"{hf}attn.{part}_proj.weight"] = normal(dim, dim, by=1.2 * dim**-0.5)
        found[f"{hf}attn.k_k"] = normal(dim, by=0.3, centre=1)
        found[f"{hf}attn.k_a"] = normal(dim, by=0.3, centre=1)
        found[f"{hf}attn.r_k"] = normal(heads, dim // heads, by=0.3)
        for part, rank in ranks.items():
            if part == "v" and layer == 0:
                continue
            lora = f"{hf}attn.{part}_lora.lora."
            found[f"{lora}0.weight"] = normal(rank, dim, by=1.2 * dim**-0.5)
            found[f"{lora}2.weight"] = normal(dim, rank, by=1.2 * rank**-0.5)
            if part != "g":
                found[f"{lora}2.bias"] = normal(dim, centre=-1.0 * (part == "w"))
        found[f"{hf}ffn.x_k"] = random.random(dim)
        found[f"{hf}ffn.key.weight"] = normal(n, dim, by=1.2 * dim**-0.5)
        found[f"{hf}ffn.value.weight"] = normal(dim, n, by=1.2 * n**-0.5)
    return {name: values.astype(ml_dtypes.bfloat16) for name, values in found.items()}


class Model:
    """One sequence, a token at a time."""

    def __init__(self, config: dict[str, Any], stored: dict[str, npt.NDArray[Any]]) -> None:
        self.p = {name: values.astype(np.float64) for name, values in stored.items()}
        self.config = config
        dim, size, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
        self.heads = dim // size
        self.states = np.zeros((layers, self.heads, size, size))
        self.before = np.zeros((layers, 2, dim))

    def step(self, token: int) -> Doubles:
        p = self.p
        x = self.norm(p["model.embeddings.weight"][token], "model.layers.0.pre_norm")
        for layer in range(self.config["num_hidden_layers"]):
            hf = f"model.layers.{layer}."
            x = x + self.time_mix(layer, self.norm(x, f"{hf}attn_norm"))
            x = x + self.channel_mix(layer, self.norm(x, f"{hf}ffn_norm"))
        logits: Doubles = p["lm_head.weight"] @ self.norm(x, "model.norm")
        return logits

    def norm(self, x: Doubles, name: str) -> Doubles:
        x = (x - x.mean()) / np.sqrt(x.var() + self.config["norm_eps"])
        result: Doubles = x * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return result

    def low_rank(self, name: str, x: Doubles, between: Any = lambda x: x) -> Doubles:
        bias = self.p.get(f"{name}.lora.2.bias", 0.0)
        result: Doubles = (
            self.p[f"{name}.lora.2.weight"] @ between(self.p[f"{name}.lora.0.weight"] @ x) + bias
        )
        return result

    def time_mix(self, layer: int, x: Doubles) -> Doubles:
        p, hf = self.p, f"model.layers.{layer}.attn."
        before, self.before[layer, 0] = self.before[layer, 0].copy(), x
        xr, xw, xk, xv, xa, xg = (x + (before - x) * p[f"{hf}x_{part}"].reshape(-1) for part in "rwkvag")
        r, k, v = (p[f"{hf}{part}_proj.weight"] @ y for part, y in (("r", xr), ("k", xk), ("v", xv)))
        w = np.exp(-np.exp(-0.5) * sigmoid(self.low_rank(f"{hf}w_lora", xw, np.tanh)))
        a = sigmoid(self.low_rank(f"{hf}a_lora", xa))
        g = self.low_rank(f"{hf}g_lora", xg, sigmoid)
        if layer == 0:
            self.first = v
        else:
            v = v + (self.first - v) * sigmoid(self.low_rank(f"{hf}v_lora", xv))
        kk = k * p[f"{hf}k_k"]
        k = k * (1 + (a - 1) * p[f"{hf}k_a"])
        out = np.zeros_like(x)
        size = len(x) // self.heads
        for h in range(self.heads):
            at = slice(h * size, (h + 1) * size)
            unit = kk[at] / max(np.linalg.norm(kk[at]), 1e-12)
            s = self.states[layer, h]  # by values and keys
            s = s @ np.diag(w[at]) - np.outer(s @ unit, unit * a[at]) + np.outer(v[at], k[at])
            self.states[layer, h] = s
            y = s @ r[at]
            y = (y - y.mean()) / np.sqrt(y.var() + 64e-5)
            y = y * p[f"{hf}g_norm.weight"][at] + p[f"{hf}g_norm.bias"][at]
            out[at] = y + (r[at] * k[at] * p[f"{hf}r_k"][h]).sum() * v[at]
        result: Doubles = p[f"{hf}o_proj.weight"] @ (out * g)
        return result

    def channel_mix(self, layer: int, x: Doubles) -> Doubles:
        p, hf = self.p, f"model.layers.{layer}.ffn."
        before, self.before[layer, 1] = self.before[layer, 1].copy(), x
        hidden = p[f"{hf}key.weight"] @ (x + (before - x) * p[f"{hf}x_k"])
        result: Doubles = p[f"{hf}value.weight"] @ np.maximum(hidden, 0) ** 2
        return result


def sigmoid(x: Doubles) -> Doubles:
    result: Doubles = 1 / (1 + np.exp(-x))
    return result


def golden(model: Model, prompt_length: int, count: int) -> dict[str, npt.NDArray[Any]]:
    prompt = np.random.default_rng(SEED).integers(1, VOCAB, prompt_length)
    prompt[0] = 0
    logits = [model.step(int(id)) for id in prompt]
    steps, step_logits = [], []
    for _ in range(count):
        steps.append(int((step_logits or logits)[-1].argmax()))
        step_logits.append(model.step(steps[-1]))
    return {
        "prompt": prompt.astype(np.int32), "prompt_logits": np.array(logits, np.float32),
        "steps": np.array(steps, np.int32), "step_logits": np.array(step_logits, np.float32),
    }  # fmt: skip


def main() -> None:
    folder = Path(__file__).parent / "tiny-rwkv7"
    folder.mkdir(exist_ok=True)
    stored = parameters()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (folder / "rwkv_vocab_v20230424.txt").write_text(vocabulary(), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", stored)
    arrays = golden(Model(CONFIG, stored), 20, 12)
    np.savez_compressed(folder / "golden.npz", **arrays)
    spread, different = float(arrays["prompt_logits"].std()), len(set(arrays["steps"].tolist()))
    print(f"tiny-rwkv7: logits spread {spread:.2f}, {different} of 12 greedy ids differ")


if __name__ == "__main__":
    main()

"""Files of families that llama.cpp quantised, run here and by llama.cpp: perplexity and greedy tokens.

    python benchmarks/quality/families.py --data FOLDER     # of the shared test data (HOTCOLD_TEST_DATA)

Each model is a checkpoint with Hugging Face's names, written by NumPy, that ``convert --dense`` turns into
F16; llama.cpp's quantiser (package llama-cpp-python) makes the types of it. Llama, Phi-3, Granite and Mixtral
are stories260K made wider (as in formats.py), the last with experts that are copies of its FFN, and
score a text of stories. The others cannot say what stories260K says: their weights are random, and their text
is drawn from their own F16 file. Random models let rounding grow; what they show is F16. With ``--teach
STEPS`` transformers trains every family on one text of stories instead (taught.py), and another is scored.

Both programs also continue eight texts greedily, compared up to the first token whose two best logits lie
closer than 0.05 of their spread. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import ml_dtypes
import numpy as np

from hotcold.convert import ConvertOptions, convert
from hotcold.convert.finding import find_layout
from hotcold.convert.metadata import dimensions
from hotcold.convert.settings import Settings
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.tasks.scoring import log_softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.checkpoints import write_safetensors
from support.stories260k import write_stories260k

from lib.machine import REPOSITORY, commit
from quality import taught
from quality.formats import Ours, Theirs, make, widen

COMMON: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 288, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

#: config.json as publishers write it, in small
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0,
    },
    "nemotron": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2",
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7,
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None,
        "original_max_position_embeddings": 512, "pad_token_id": 0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "arcee": {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"},
    "jais2": {
        "architectures": ["Jais2ForCausalLM"], "model_type": "jais2", "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4,
        "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "gelu_pytorch_tanh",
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False,
        "alibi": False, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "head_dim": 32,
    },
    "qwen2moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
TOKENS = 48  #: of each greedy continuation
VOCABULARY = REPOSITORY / "tests/data/tiny_tokenizer.model"  #: 288 tokens: bytes and the shortest words
#: Texts of TinyStories: one is learnt, one is scored.
LESSONS, STORIES = "mines-opt-ml_decoding-gpt_tinystories_10k.txt", "smallGPT_tiny_stories.txt"


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Random weights of a size that keeps activations as they are. What layers add to the residual stream is
    small beside it and routers are decided, as in trained models: else rounding grows from layer to layer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(VOCABULARY, folder / "tokenizer.model")
    layout, facts = find_layout(Settings(folder / "config.json", config))
    rng, sizes = np.random.default_rng(seed), dimensions(facts)
    arrays = {}
    for rule in layout.rules:
        if not (facts.flag(rule.when, False) if isinstance(rule.when, str) else rule.when):
            continue
        bias = facts.flag(rule.bias, False) if isinstance(rule.bias, str) else rule.bias
        letters = rule.shape[1:] if rule.each_expert else rule.shape
        shape = tuple(sizes[letter] for letter in letters)
        for layer in range(sizes["L"] if "{}" in rule.target else 1):
            for expert in range(sizes["E"] if rule.each_expert else 1):
                name = rule.source.format(layer, expert)
                noise = rng.standard_normal(shape)
                if len(shape) == 1:
                    values = 0.3 * noise + (0 if layout.norms_less_one else 1)
                else:
                    values = noise * (0.25 if rule.shape == "VD" else shape[-1] ** -0.5)
                    values *= 0.3 if letters[0] == "D" else 4 if letters == "ED" else 1
                arrays[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)
                if bias:
                    arrays[f"{name}.bias"] = (0.1 * rng.standard_normal(shape[0])).astype(ml_dtypes.bfloat16)
    write_safetensors(folder / "model.safetensors", arrays)


#: Families that can say what stories260K says.
TRAINED = ("llama", "phi3", "granite", "mixtral")


def write_trained(folder: Path, wide: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """stories260K as this family; float32. The config.json that it gets."""
    keys, read = wide.metadata, (lambda name: wide.load(f"{name}.weight").dequantise())
    sizes = {
        "hidden_size": keys["llama.embedding_length"], "intermediate_size": keys["llama.feed_forward_length"],
        "num_hidden_layers": keys["llama.block_count"],
        "num_attention_heads": keys["llama.attention.head_count"],
        "num_key_value_heads": keys["llama.attention.head_count_kv"],
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "rms_norm_eps": float(keys["llama.attention.layer_norm_rms_epsilon"]),
    }  # fmt: skip
    config = config | sizes
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    # Granite's factors are undone by what they apply to.
    scores = config.get("attention_multiplier", head_dim**-0.5) * head_dim**0.5
    added = config.get("residual_multiplier", 1.0)
    out = {
        "model.embed_tokens": read("token_embd") / config.get("embedding_multiplier", 1.0),
        "model.norm": read("output_norm"),
        "lm_head": read("output") * config.get("logits_scaling", 1.0),
    }
    for i in range(config["num_hidden_layers"]):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        q, k, v, o, gate, up, down = (read(f"blk.{i}.{name}") for name in names)
        # Neighbours back to halves.
        q, k = (m.reshape(-1, head_dim // 2, 2, len(v[0])).swapaxes(1, 2).reshape(m.shape) for m in (q, k))
        q, o, down = q / scores, o / added, down / added
        layer, attention, mlp = f"model.layers.{i}.", f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        out[f"{layer}input_layernorm"] = read(f"blk.{i}.attn_norm")
        out[f"{layer}post_attention_layernorm"] = read(f"blk.{i}.ffn_norm")
        out[f"{attention}o_proj"] = o
        if config["model_type"] == "phi3":
            out[f"{attention}qkv_proj"] = np.vstack([q, k, v])
            out |= {f"{mlp}gate_up_proj": np.vstack([gate, up]), f"{mlp}down_proj": down}
            continue
        out |= {f"{attention}q_proj": q, f"{attention}k_proj": k, f"{attention}v_proj": v}
        if "num_local_experts" not in config:
            out |= {f"{mlp}gate_proj": gate, f"{mlp}up_proj": up, f"{mlp}down_proj": down}
            continue
        block, experts = f"{layer}block_sparse_moe.", config["num_local_experts"]
        out[f"{block}gate"] = np.random.default_rng(i).standard_normal((experts, len(q[0])))
        for expert in range(experts):
            prefix = f"{block}experts.{expert}."
            out |= {f"{prefix}w1": gate, f"{prefix}w3": up, f"{prefix}w2": down}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {f"{name}.weight": values.astype(np.float32) for name, values in out.items()}
    write_safetensors(folder / "model.safetensors", arrays)
    return config


def write_taught(
    folder: Path, config: dict[str, Any], texts: list[list[int]], steps: int, seed: int
) -> float:
    """The family after some steps of training, and its loss."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(VOCABULARY, folder / "tokenizer.model")
    arrays, loss = taught.teach(config, texts, steps, seed)
    write_safetensors(folder / "model.safetensors", arrays)
    return loss


def with_tokenizer(path: Path, wide: GGUFFile, output: Path) -> None:
    """The converted file with the tokenizer of stories260K, which is no checkpoint's."""
    with open_gguf(path) as file:
        kept = {key: v for key, v in file.metadata.items() if not key.startswith("tokenizer.")}
        tokenizer_keys = {key: v for key, v in wide.metadata.items() if key.startswith("tokenizer.")}
        write_gguf(output, kept | tokenizer_keys, {name: file.load(name) for name in file.tensors})


def drawn(model: Theirs, windows: int, length: int, seed: int) -> list[list[int]]:
    """Texts of the model, BOS first."""
    rng, texts = np.random.default_rng(seed), []
    for _ in range(windows):
        model.model.reset()
        text = [1]
        while len(text) < length:
            model.model.eval(text[-1:])
            logits = np.array(model.model.scores[model.model.n_tokens - 1])
            logits[:3] = -np.inf
            text.append(int((logits + rng.gumbel(size=len(logits))).argmax()))
        texts.append(text)
    return texts


def greedy(model: Theirs, text: list[int], count: int) -> tuple[list[int], list[float]]:
    """A continuation, and before each of its tokens how far the two best logits lie apart in spreads."""
    model.model.reset()
    model.model.eval(text)
    tokens, margins = [], []
    while len(tokens) < count:
        logits = np.array(model.model.scores[model.model.n_tokens - 1])
        second, first = np.partition(logits, -2)[-2:]
        margins.append(float((first - second) / logits.std()))
        tokens.append(int(logits.argmax()))
        model.model.eval(tokens[-1:])
    return tokens, margins


def prepare(family: str, folder: Path, f16: Path, args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Writes the family's F16 file; the texts that it is to score."""
    config, options = COMMON | FAMILIES[family], ConvertOptions("F16", dense=True, name="tiny")
    lessons, stories = (
        (args.data / "text/tinystories" / name).read_text(encoding="utf-8") for name in (LESSONS, STORIES)
    )
    if args.teach:
        loss = write_taught(folder / "model", config, taught.cut(lessons, VOCABULARY, 128), args.teach, seed)
        print(f"{family:<9} taught: {loss:.3f} nats a token", flush=True)
        convert(folder / "model", f16, options)
        return taught.cut(stories, VOCABULARY, args.length)[: 3 * args.windows]
    if family not in TRAINED:
        write_checkpoint(folder / "model", config, seed)
        convert(folder / "model", f16, options)
        return drawn(Theirs(f16, args, frozenset()), args.windows, args.length, seed)
    write_stories260k(folder / "narrow.gguf")
    with open_gguf(folder / "narrow.gguf") as narrow:
        widen(narrow, folder / "wide.gguf", 8)
    with open_gguf(folder / "wide.gguf") as wide:
        write_trained(folder / "model", wide, config)
        # Any vocabulary of as many tokens will do.
        pieces = {f"t{id}": id for id in range(len(wide.metadata["tokenizer.ggml.tokens"]))}
        model = {"type": "BPE", "vocab": pieces, "merges": []}
        bpe = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        (folder / "model/tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": bpe}))
        convert(folder / "model", folder / "own.gguf", options)
        with_tokenizer(folder / "own.gguf", wide, f16)
    return [window[: args.length] for window in Ours(f16, args).windows(stories, 3 * args.windows)]


def agreed(path: Path, ours: Ours, theirs: Theirs, texts: list[list[int]]) -> tuple[int, int]:
    """Counts greedy tokens up to the first near tie: equal ones, and all."""
    same = total = 0
    for text in texts[:8]:
        tokens, margins = greedy(theirs, text[:32], TOKENS)
        near = [margin < 0.05 for margin in margins]
        clear = near.index(True) if True in near else len(tokens)
        probabilities = ours.surprise([text[:32] + tokens[:clear]])[31:]
        for position in range(clear):
            best = log_softmax(np.array(theirs.model.scores[31 + position])[None])[0].max()
            same += int(abs(probabilities[position] + best) < 0.1)
            total += 1
    return same, total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("HOTCOLD_TEST_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None, help="the shared test data")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--types", nargs="+", default=("F16", "Q8_0", "Q4_K_M", "Q4_0"))
    parser.add_argument(
        "--teach", type=int, metavar="STEPS", help="train every family for this number of steps"
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=192, help="tokens of a window (192)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    reports = []
    for seed, family in enumerate(args.families):
        with tempfile.TemporaryDirectory() as temporary:
            f16 = Path(temporary) / "F16.gguf"
            texts = prepare(family, Path(temporary), f16, args, seed)
            for type in args.types:
                path = f16 if type == "F16" else Path(temporary) / f"{type}.gguf"
                if type != "F16":
                    make(f16, path, type)
                ours, theirs = Ours(path, args), Theirs(path, args, frozenset())
                ppl, their_ppl = (float(np.exp(each.surprise(texts).mean())) for each in (ours, theirs))
                same, total = agreed(path, ours, theirs, texts)
                reports.append(
                    {"family": family, "type": type, "ppl": ppl, "llama_cpp_ppl": their_ppl,
                     "ratio": ppl / their_ppl, "greedy_same": same, "greedy": total}
                )  # fmt: skip
                print(
                    f"{family:<9} {type:<7} perplexity {ppl:.4f}, llama.cpp {their_ppl:.4f}: "
                    f"{ppl / their_ppl - 1:+.4%}; greedy tokens {same} of {total}",
                    flush=True,
                )
    print(json.dumps({"commit": commit(), "llama_cpp": llama_cpp.__version__, "files": reports}))


if __name__ == "__main__":
    main()

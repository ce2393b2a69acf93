"""Converts RWKV-7 (arXiv 2503.14456) as fla-hub publishes it, and the vocabulary of its text file."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.adapting import Facts, refuse_others
from hotcold.convert.checkpoint import Checkpoint, Rearrange
from hotcold.convert.sentencepiece_model import Piece
from hotcold.convert.settings import MAX_JSON, ConvertError, Settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.tensor_files import Array
from hotcold.tokenizer.vocabulary import TokenType
from hotcold.values import not_utf8, shown

VOCABULARY = "rwkv_vocab_v20230424.txt"
#: The template for a checkpoint without one.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role']|capitalize + ': ' + message['content']|trim + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
#: The matrices of low rank: their letter, the key of config.json, its default as a power of D and a factor,
#: and GGUF's key.
_RANKS = (
    ("w", "decay_low_rank_dim", 0.5, 1.8, "decay"),
    ("a", "a_low_rank_dim", 0.5, 1.8, "iclr"),
    ("v", "v_low_rank_dim", 0.5, 1.3, "value_residual_mix"),
    ("g", "gate_low_rank_dim", 0.8, 0.6, "gate"),
)
_MIXED = "rwkvag"
_END_OF_TURN = b"\n\n"


def rwkv7(config: Settings) -> Facts:
    refuse_others(config, hidden_act="sqrelu", norm_bias=True, norm_first=True, attn=None)
    dim, head_dim = config.integer("hidden_size"), config.integer("head_dim", 64)
    if dim % head_dim:
        raise config.error("head_dim", f"a divisor of hidden_size {dim}")
    implied = -(-int(dim * config.number("hidden_ratio", 4.0)) // 32) * 32
    return {
        "hidden_act": "relu2",
        "head_dim": head_dim,
        "num_attention_heads": dim // head_dim,
        "num_key_value_heads": dim // head_dim,
        "intermediate_size": config.integer("intermediate_size", implied),
        "norm_eps": config.number("norm_eps", 1e-5),
        "max_position_embeddings": 1 << 20,  # the model has no limit
        "no_rope": True,
        "unread": ("model.layers.0.attn.v_lora.",),  # only some checkpoints have it
    }


def _ranks(config: Settings) -> dict[str, int]:
    dim = config.integer("hidden_size")
    return {
        part: config.integer(key, max(1, round(dim**power * factor / 32)) * 32)
        for part, key, power, factor, _ in _RANKS
    }


def rwkv7_keys(config: Settings) -> Facts:
    ranks = _ranks(config)
    unused = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    return {
        **dict.fromkeys(unused),
        "attention.head_count": 0,
        "wkv.head_size": config.integer("head_dim"),
        **{f"attention.{name}_lora_rank": ranks[part] for part, *_, name in _RANKS},
    }


def layer_tensors(
    checkpoint: Checkpoint, layer: int, sizes: Mapping[str, int], down_layout: str
) -> list[Source]:
    """Lists the tensors without a rule: mixes, pairs of low rank, vectors, and tensors of the first layer."""
    dim, ranks = sizes["D"], _ranks(checkpoint.config)
    hf, blk = f"model.layers.{layer}.", f"blk.{layer}."
    tensors = []

    def vector(target: str, origin: str) -> None:
        """Adds a vector, which the checkpoint may store with dimensions of 1, or by head."""
        shape = checkpoint.shape(origin) if origin in checkpoint.files else (dim,)
        shape = shape if np.prod(shape) == dim else (dim,)
        tensors.append(loaded(checkpoint, target, [origin], shape, _flat, (dim,)))

    def pair(part: str, target: str) -> None:
        lora, rank = f"{hf}attn.{part}_lora.lora.", ranks[part]
        for i, origin, shape in ((1, "0", (rank, dim)), (2, "2", (dim, rank))):
            name = f"{blk}time_mix_{target}{i}.weight"
            tensors.append(loaded(checkpoint, name, [f"{lora}{origin}.weight"], shape))
        if part != "g":
            vector(f"{blk}time_mix_{target}0.weight", f"{lora}2.bias")

    if layer == 0:
        for part in ("weight", "bias"):
            vector(f"token_embd_norm.{part}", f"{hf}pre_norm.{part}")
        pair("a", "v")  # copies that llama.cpp requires and does not read
    for part in "wag" if layer == 0 else "wavg":
        pair(part, part)
    for part in ("k_k", "k_a", "r_k"):
        vector(f"{blk}time_mix_{part}.weight", f"{hf}attn.{part}")
    vector(f"{blk}channel_mix_lerp_k.weight", f"{hf}ffn.x_k")
    return [*tensors, _lerps(checkpoint, f"{hf}attn.", f"{blk}time_mix_lerp_fused.weight", dim)]


def _lerps(checkpoint: Checkpoint, hf: str, target: str, dim: int) -> Source:
    """The six mixes of rows: one tensor in newer checkpoints, six in older ones."""
    shape: tuple[int, ...]
    if (joined := f"{hf}x_x") in checkpoint.files:
        shape = len(_MIXED), 1, 1, dim
        return loaded(checkpoint, target, [joined], checkpoint.shape(joined), _reshaped(*shape), shape)
    names = [f"{hf}x_{part}" for part in _MIXED]
    shape = checkpoint.shape(names[0]) if names[0] in checkpoint.files else (dim,)
    return loaded(checkpoint, target, names, shape, _reshaped(1, 1, dim), (1, 1, dim))


def _flat(values: Array) -> Array:
    return values.reshape(-1)


def _reshaped(*shape: int) -> Rearrange:
    return lambda values: values.reshape(shape)


def world_vocabulary(path: Path, tokens: list[Piece]) -> dict[str, Any]:
    """Keys of the vocabulary; its tokens are put into ``tokens``. A line has a token's id, the token as a
    Python literal, and its number of bytes. Id 0 has no line; it begins and ends texts. ConvertError: the
    file is damaged, or has too many tokens."""
    if path.stat().st_size > MAX_JSON:
        raise ConvertError(f"{path} is larger than {MAX_JSON >> 20} MiB: too large for a vocabulary")
    tokens[0] = Piece("<s>", 0.0, TokenType.CONTROL)
    ids: dict[bytes, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} {not_utf8(error)}") from None
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        token = _token(line, number)
        if token is None or number >= len(tokens):
            needed = f"the id {number} of {len(tokens)}, a token and the number of its bytes are needed"
            raise ConvertError(f"{path}: line {number} is {shown(line)}: {needed}")
        ids[token] = number
        tokens[number] = Piece(repr(token)[2:-1], 0.0, TokenType.NORMAL)
    return {
        "model": "rwkv",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "eot_token_id": ids.get(_END_OF_TURN),
        "eom_token_id": None,
        "padding_token_id": None,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def _token(line: str, number: int) -> bytes | None:
    """The bytes of a line's token; None if the line is damaged."""
    id, _, rest = line.partition(" ")
    literal, _, count = rest.rpartition(" ")
    try:
        token = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    token = token.encode(errors="replace") if isinstance(token, str) else token
    right = isinstance(token, bytes) and id == str(number) and count == str(len(token))
    return token if right and token else None

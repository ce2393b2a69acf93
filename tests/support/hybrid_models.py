"""Writes tiny random models whose layers keep states: of convolutions, a delta rule, Mamba-2, RWKV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.changed_models import changed
from support.vocabularies import CONTROL

from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf, write_gguf

KINDS = ("lfm2", "qwen35", "nemotron_h")
CPU_KINDS = ("rwkv7",)  #: that GPUs do not compute
_RANK = 6
_DIM, _HEADS, _HEAD, _NEURONS = 32, 2, 16, 40

#: Keys of each architecture beyond the common ones. Layer 2 of three has attention.
_KEYS: dict[str, dict[str, Any]] = {
    "lfm2": {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([0, 1, 0], np.uint32)},
    "qwen35": {
        "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.group_count": 2,
        "ssm.inner_size": 32, "attention.recurrent_layers": [True, False, True],
    },
    "nemotron_h": {
        "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.group_count": 2,
        "ssm.inner_size": 32, "attention.head_count_kv": np.array([0, 1, 0, 0], np.uint32),
        "feed_forward_length": np.array([0, 0, _NEURONS, 0], np.uint32), "block_count": 4,
    },
    "rwkv7": {
        "attention.head_count": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": _HEAD,
        **{f"attention.{name}_lora_rank": _RANK for name in ("decay", "iclr", "value_residual_mix", "gate")},
    },
}  # fmt: skip


def write_hybrid(path: Path, kind: str, context: int = 256, seed: int = 0) -> Path:
    """A file of one of :data:`KINDS` or :data:`CPU_KINDS`, with the built-in model's tokenizer."""
    with open_gguf(model_path()) as file:
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        vocab = file.tensors["token_embd.weight"].shape[0]
    keys: dict[str, Any] = {
        "block_count": 3,
        "context_length": context,
        "embedding_length": _DIM,
        "feed_forward_length": _NEURONS,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _HEAD if kind != "qwen35" else _HEAD // 2,
        "rope.freq_base": 5000.0,
        **_KEYS[kind],
    }
    metadata = {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in keys.items()}}
    write_gguf(path, {**tokenizer, **metadata}, _Tensors(seed).of(kind, vocab))
    return path


def with_chat(path: Path, out: Path, template: str) -> Path:
    """A copy of such a file with a chat template, whose vocabulary has ChatML's control tokens."""
    with open_gguf(path) as file:
        tokens, types = ([*file.metadata[f"tokenizer.ggml.{name}"]] for name in ("tokens", "token_type"))
    tokens[-2:], types[-2:] = ["<|im_start|>", "<|im_end|>"], [CONTROL] * 2
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.chat_template": template,
    }
    return changed(path, out, keys)


class _Tensors:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._found: dict[str, Tensor] = {}

    def of(self, kind: str, vocab: int) -> dict[str, Tensor]:
        self._add("token_embd.weight", vocab, _DIM)
        self._add("output.weight", vocab, _DIM)
        self._norm("token_embd_norm" if kind == "lfm2" else "output_norm", _DIM)
        if kind == "rwkv7":
            self._norm("token_embd_norm", _DIM)
            for i in range(3):
                self._rwkv(f"blk.{i}.", first=i == 0)
            return self._found
        for i in range(4 if kind == "nemotron_h" else 3):
            blk = f"blk.{i}."
            self._norm(f"{blk}attn_norm", _DIM)
            if i == 1:
                self._attention(blk, kind)
            elif not (kind == "nemotron_h" and i == 2):
                {"lfm2": self._short_conv, "qwen35": self._delta, "nemotron_h": self._mamba}[kind](blk)
            if kind != "nemotron_h":
                self._norm(f"{blk}{'post_attention_norm' if kind == 'qwen35' else 'ffn_norm'}", _DIM)
                self._add(f"{blk}ffn_gate.weight", _NEURONS, _DIM)
            if kind != "nemotron_h" or i == 2:
                self._add(f"{blk}ffn_up.weight", _NEURONS, _DIM)
                self._add(f"{blk}ffn_down.weight", _DIM, _NEURONS)
        return self._found

    def _add(self, name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        scale = shape[-1] ** -0.5 if scale is None else scale
        values = mean + scale * self._random.standard_normal(shape)
        self._found[name] = quantise(values.astype(np.float32), "F32")

    def _norm(self, name: str, *shape: int) -> None:
        self._add(f"{name}.weight", *shape, scale=0.2, mean=1.0)

    def _attention(self, blk: str, kind: str) -> None:
        self._add(f"{blk}attn_q.weight", (1 + (kind == "qwen35")) * _HEADS * _HEAD, _DIM)
        for part in "kv":
            self._add(f"{blk}attn_{part}.weight", _HEAD, _DIM)
        self._add(f"{blk}attn_output.weight", _DIM, _HEADS * _HEAD)
        if kind != "nemotron_h":
            for part in "qk":
                self._norm(f"{blk}attn_{part}_norm", _HEAD)

    def _short_conv(self, blk: str) -> None:
        self._add(f"{blk}shortconv.in_proj.weight", 3 * _DIM, _DIM)
        self._add(f"{blk}shortconv.conv.weight", _DIM, 3)
        self._add(f"{blk}shortconv.out_proj.weight", _DIM, _DIM)

    def _delta(self, blk: str) -> None:
        self._add(f"{blk}attn_qkv.weight", 64, _DIM)
        self._add(f"{blk}attn_gate.weight", 32, _DIM)
        for part in ("alpha", "beta"):
            self._add(f"{blk}ssm_{part}.weight", 4, _DIM)
        self._add(f"{blk}ssm_conv1d.weight", 64, 4)
        self._add(f"{blk}ssm_out.weight", _DIM, 32)
        self._norm(f"{blk}ssm_norm", 8)
        self._decays(blk)

    def _mamba(self, blk: str) -> None:
        self._add(f"{blk}ssm_in.weight", 2 * 32 + 2 * 2 * 8 + 4, _DIM)
        self._add(f"{blk}ssm_conv1d.weight", 32 + 2 * 2 * 8, 4)
        self._add(f"{blk}ssm_conv1d.bias", 32 + 2 * 2 * 8, scale=0.2)
        self._add(f"{blk}ssm_out.weight", _DIM, 32)
        self._norm(f"{blk}ssm_norm", 2, 16)
        self._add(f"{blk}ssm_d", 4, 1)
        self._decays(blk)

    def _rwkv(self, blk: str, *, first: bool) -> None:
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            self._norm(f"{blk}{name}", _DIM)
            self._add(f"{blk}{name}.bias", _DIM, scale=0.2)
        mix = f"{blk}time_mix_"
        for name in ("receptance", "key", "value", "output"):
            self._add(f"{mix}{name}.weight", _DIM, _DIM)
        for name in ("k_k", "k_a", "r_k"):
            self._norm(f"{mix}{name}", _DIM)
        for part in "wag" if first else "wavg":
            self._add(f"{mix}{part}1.weight", _RANK, _DIM)
            self._add(f"{mix}{part}2.weight", _DIM, _RANK)
            if part != "g":
                self._add(f"{mix}{part}0.weight", _DIM, mean=-2.0 * (part == "w"))  # slow decays
        self._add(f"{mix}lerp_fused.weight", 6, 1, 1, _DIM, scale=0.3, mean=0.5)
        self._add(f"{blk}channel_mix_lerp_k.weight", _DIM, scale=0.3, mean=0.5)
        self._add(f"{blk}channel_mix_key.weight", _NEURONS, _DIM)
        self._add(f"{blk}channel_mix_value.weight", _DIM, _NEURONS)

    def _decays(self, blk: str) -> None:
        """Between 1 and 0.2 a token, so that a state remembers all of a test's prompts."""
        shape = (4, 1) if f"{blk}ssm_d" in self._found else (4,)
        self._add(f"{blk}ssm_dt.bias", 4, scale=0.5)
        self._add(f"{blk}ssm_a", *shape, scale=0.1, mean=-0.5)

"""Tiny models whose experts have no gates, as Nemotron's have: relu(up x)^2. They are those of tiny-qwen2moe
with other experts, and with shared ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import golden_checkpoint
from support.expert_models import arrays, metadata

from hotcold.convert.checkpoint import open_checkpoint
from hotcold.formats.blocks import block_type, quantise
from hotcold.formats.gguf import write_gguf

EXPERTS, CHOSEN = 5, 2
NEURONS = 96  #: of an expert: three blocks of 32, and half a word of a mask at its end
SHARED = 160  #: of the shared expert


def ungated_model(
    folder: Path, type: str = "Q8_0", down: str = "by_output", *, twin: bool = False, factor: bool = True
) -> Path:
    """A model with experts and shared experts of this block type, all else in F32. About a quarter of the
    neurons is active. Its ``twin`` has a gate that is a copy of up, and relu: relu(u) u is relu(u)^2. Without
    ``factor`` the shared expert has none."""
    checkpoint = open_checkpoint(golden_checkpoint("tiny-qwen2moe"))
    random = np.random.default_rng(7)
    values = {name: each for name, each in arrays(checkpoint).items() if factor or "inp_shexp" not in name}
    for layer in range(2):
        for kind, count, n in (("exps", EXPERTS, NEURONS), ("shexp", 1, SHARED)):
            up = random.standard_normal((count, n, 32)) * 0.3 - random.random((count, n, 1)) * 0.05
            rows = random.standard_normal((count, n, 32)) * 0.3
            own = {"up": up, "down": rows if down == "by_neuron" else rows.swapaxes(1, 2)}
            values.pop(f"blk.{layer}.ffn_gate_{kind}.weight", None)
            if twin:
                own["gate"] = up
            for part, each in own.items():
                shaped = each if kind == "exps" else each[0]
                values[f"blk.{layer}.ffn_{part}_{kind}.weight"] = shaped.astype(np.float32)
    more: dict[str, Any] = {
        "hotcold.ffn.activation": "relu" if twin else "relu2",
        "hotcold.ffn.threshold": 0.9,
        "qwen2moe.expert_feed_forward_length": NEURONS,
        "qwen2moe.expert_shared_feed_forward_length": SHARED,
    }
    path = folder / f"ungated-{type}-{down}{'-twin' * twin}.gguf"
    write_gguf(path, metadata(checkpoint, down) | more, {k: _packed(k, v, type) for k, v in values.items()})
    return path


def _packed(name: str, values: np.ndarray, type: str) -> Any:
    wide = ("exps.weight" in name or "_shexp.weight" in name) and values.ndim > 1
    fits = wide and values.shape[-1] % block_type(type).weights == 0
    return quantise(np.ascontiguousarray(values), type if fits else "F32")

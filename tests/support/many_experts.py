"""Golden models of experts with more of them than they were made with, and budgets for a part of these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.checkpoints import golden_checkpoint
from support.expert_models import ARCHITECTURES, arrays, metadata, packed

from hotcold.convert.checkpoint import open_checkpoint
from hotcold.formats.gguf import write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions


def many_experts(name: str, folder: Path, *, type: str, down: str, count: int, fused: bool = False) -> Path:
    """Experts are the model's own, over and over, each scaled by another factor; ``fused``: each one's gate
    and up are one tensor's."""
    checkpoint = open_checkpoint(golden_checkpoint(name))
    random = np.random.default_rng(8)
    values = arrays(checkpoint)
    if down == "by_neuron":
        values |= {
            key: each.swapaxes(-1, -2) for key, each in values.items() if "ffn_down_exps.weight" in key
        }
    for key, each in values.items():
        if "_exps." in key:
            scales = random.uniform(0.8, 1.2, (count, *(1,) * (each.ndim - 1))).astype(np.float32)
            values[key] = np.resize(each, (count, *each.shape[1:])) * scales
        elif "ffn_gate_inp." in key:
            values[key] = random.standard_normal((count, *each.shape[1:])).astype(np.float32) * each.std()
    for key in [key for key in values if fused and "ffn_gate_exps.weight" in key]:
        up = values.pop(key.replace("gate_exps", "up_exps"))
        values[key.replace("gate_exps", "gate_up_exps")] = np.concatenate([values.pop(key), up], axis=1)
    keys = metadata(checkpoint, down)
    arch = ARCHITECTURES[checkpoint.config.values["model_type"]]
    path = folder / f"{name}-{type}-{down}-{count}.gguf"
    write_gguf(
        path,
        keys | {f"{arch}.expert_count": count},
        {key: packed(key, each, type) for key, each in values.items()},
    )
    return path


def budget(path: Path, share: float, **options: object) -> int:
    """The bytes in which this share of the experts fits, at least two of each layer, if the reading threads
    take no memory."""
    ample = LoadOptions(threads=1, ram_budget=1 << 30, **options)  # type: ignore[typeddict-item]
    needed = load(path, ample).plan.experts
    assert needed is not None and needed.all_fit
    places = max(2, round(share * needed.experts))
    return sum(needed.bill.values()) + places * sum(needed.unit_bytes)

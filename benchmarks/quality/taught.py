"""Trains small models of any family of transformers on stories: trained weights for a comparison of files,
where no trained checkpoint is available.

    pip install torch transformers
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor

BATCH = 8  #: texts of a step
RATE = 3e-3  #: the highest learning rate of AdamW; it rises for a tenth of the steps and falls to zero


def cut(text: str, tokenizer: Path, length: int) -> list[list[int]]:
    """Texts of ``length`` tokens, BOS (1) first."""
    ids = SentencePieceProcessor(model_file=str(tokenizer)).encode(text)
    step = length - 1
    return [[1, *ids[begin : begin + step]] for begin in range(0, len(ids) - step, step)]


def teach(
    config: dict[str, Any], texts: list[list[int]], steps: int, seed: int
) -> tuple[dict[str, np.ndarray[Any, Any]], float]:
    """The model's tensors under their published names, bfloat16, and the last steps' mean loss in nats."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).float()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    order = np.random.default_rng(seed)
    losses = []
    for _ in range(steps):
        batch = torch.tensor([texts[i] for i in order.integers(len(texts), size=BATCH)])
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:  # it puts experts back under the names of checkpoints
        model.save_pretrained(folder)
        arrays = load_file(Path(folder) / "model.safetensors")
    tensors = {name: each.astype(ml_dtypes.bfloat16) for name, each in arrays.items()}
    return tensors, float(np.mean(losses[-10:]))

"""Trains a sparse model of a dense one with transformers' Trainer.

Usage:

    pip install 'hotcold[train]' accelerate
    python examples/sparse_trainer.py CHECKPOINT TEXT OUTPUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hotcold.training import SparsitySchedule, make_sparse, measure_sparsity, save_sparse

checkpoint, text, output = sys.argv[1:4]
CONTEXT, BATCH, STEPS = 64, 8, 40

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"])
windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
learned, choosing, judging = windows[:-16], windows[-16:-8], windows[-8:]

dense = AutoModelForCausalLM.from_pretrained(checkpoint)
model = make_sparse(AutoModelForCausalLM.from_pretrained(checkpoint), "drelu")
settings = TrainingArguments(
    output_dir=f"{output}.trainer",
    max_steps=STEPS,
    per_device_train_batch_size=BATCH // 2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
data = [{"input_ids": window, "labels": window} for window in learned]
Trainer(model, settings, train_dataset=data, callbacks=[SparsitySchedule(0.3)]).train()

save_sparse(model, output, tokenizer=tokenizer, threshold="per-layer", held_out=choosing.split(4))
print("original:", measure_sparsity(dense, judging.split(4)))
print("sparse:", measure_sparsity(model, judging.split(4), reference=dense))

"""Trains a sparse model of a dense one in a plain loop, in several processes.

Usage:

    pip install 'hotcold[train]' accelerate
    accelerate launch --num_processes 2 examples/sparse_accelerate.py CHECKPOINT TEXT OUTPUT
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotcold.training import SparsityPenalty, SparsitySchedule, make_sparse, measure_sparsity, save_sparse

checkpoint, text, output = sys.argv[1:4]
CONTEXT, BATCH, STEPS = 64, 8, 40

accelerator = Accelerator(cpu=not torch.cuda.is_available())
rank, processes = accelerator.process_index, accelerator.num_processes
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"])
windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
learned, choosing, judging = windows[:-16], windows[-16:-8], windows[-8:]

dense = AutoModelForCausalLM.from_pretrained(checkpoint).to(accelerator.device)
model = make_sparse(AutoModelForCausalLM.from_pretrained(checkpoint), "drelu")
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
loader = torch.utils.data.DataLoader(learned, BATCH // processes, shuffle=True, drop_last=True)
model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
penalty, schedule = SparsityPenalty(model), SparsitySchedule(0.3)

batches, model = iter(loader), model.train()
for step in range(STEPS):
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        batch = next(batches)
    penalty.weight = schedule.weight_at(step / STEPS)
    loss = model(batch, labels=batch).loss + penalty()
    accelerator.backward(loss)
    optimiser.step()
    optimiser.zero_grad()

held_out = choosing[rank::processes].split(4)
save_sparse(model, output, tokenizer=tokenizer, threshold="per-layer", held_out=held_out)
sparsity = measure_sparsity(model, judging[rank::processes].split(4), reference=dense)
accelerator.print("sparse:", sparsity)

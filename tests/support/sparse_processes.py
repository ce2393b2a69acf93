"""One of two processes that train a sparse model: `sparse_processes.py ddp|fsdp CHECKPOINT OUTPUT STORE` with
RANK and WORLD_SIZE. A test compares the result with that of one process on whole batches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from hotcold.training import SparsityPenalty, make_sparse, measure_sparsity, save_sparse

STEPS, ROWS, LENGTH = 3, 4, 24


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def sparse_model(checkpoint: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return make_sparse(model, "drelu")


def train(model: Any, rank: int, processes: int) -> list[float]:
    """Trains on this process's rows of each batch; returns the zeros by layer of one more batch."""
    penalty = SparsityPenalty(model, 5.0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for step in range(STEPS):
        rows = batch(step)[rank::processes]
        loss = model(rows, labels=rows).loss + penalty()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return measure_sparsity(model, [batch(STEPS)[rank::processes]]).zeros


def main(kind: str, checkpoint: str, output: str, store: str) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    model = sparse_model(Path(checkpoint))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    zeros = train(model, rank, processes)
    save_sparse(model, output, original=checkpoint, report={"zeros": zeros})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

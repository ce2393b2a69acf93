"""The processes of a distributed run. A run without torch.distributed is one process."""

from collections.abc import Callable
from typing import Any

from hotcold.training.libraries import torch


def process_count() -> int:
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if several else 1


def process_rank() -> int:
    """The number of this process; the first one, 0, reports and writes."""
    return int(torch.distributed.get_rank()) if process_count() > 1 else 0


def sum_of_processes(values: Any) -> Any:
    """The sum of a tensor over all processes, in place."""
    if process_count() > 1:
        torch.distributed.all_reduce(values)
    return values


def in_first_process(work: Callable[[], object]) -> None:
    """Calls ``work`` in the first process, while the others wait."""
    if not process_rank():
        work()
    if process_count() > 1:
        torch.distributed.barrier()

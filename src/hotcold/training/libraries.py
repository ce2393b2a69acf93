"""The libraries of the extra `[train]`: without torch, importing this module raises an error of one line.

Other modules of this package import ``torch`` from here, so import them where a command first needs one."""

from typing import Any

from hotcold.extras import importing

__all__ = ["state_dict_functions", "torch", "transformers"]

with importing("train", "training"):
    import torch


def transformers() -> Any:
    """The package `transformers`, which takes seconds to import. UserError: it is missing."""
    with importing("train", "training"):
        import transformers as package
    return package


def state_dict_functions() -> Any:
    """The functions of torch that gather and scatter the weights of sharded models."""
    import torch.distributed.checkpoint.state_dict as functions

    return functions

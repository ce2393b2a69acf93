"""The libraries of the extra `[train]`: without torch, importing this module raises an error of one line.

Other modules of this package import ``torch`` from here, so import them where a command first needs one."""

from typing import Any

from hotcold.extras import importing

__all__ = ["summary_writer", "torch", "transformers"]

with importing("train", "training"):
    import torch


def transformers() -> Any:
    """The package `transformers`, which takes seconds to import. UserError: it is missing."""
    with importing("train", "training"):
        import transformers as package
    return package


def summary_writer() -> Any:
    """The class of torch that writes events for TensorBoard, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter

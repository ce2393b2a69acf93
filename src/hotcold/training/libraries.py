"""The libraries of the extra `[train]`: without torch, importing this module raises an error of one line.

Other modules of this package import ``torch`` from here, so import them where a command first needs one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotcold.errors import UserError
from hotcold.extras import importing
from hotcold.values import printable

__all__ = ["library_errors", "summary_writer", "torch", "transformers"]

with importing("train", "training"):
    import torch


def transformers() -> Any:
    """The package `transformers`, which takes seconds to import. UserError: it is missing."""
    with importing("train", "training"):
        import transformers as package
    return package


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turns an error of another library, which may be of any class, into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {printable(' '.join(str(error).split()))}") from None


def summary_writer() -> Any:
    """The class of torch that writes events for TensorBoard, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter

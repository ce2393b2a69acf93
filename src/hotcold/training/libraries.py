"""The libraries of the extra `[train]`, imported here alone: without torch this is one line for the user.

The other modules of the room take ``torch`` from here, so import them where a command first needs them."""

from typing import Any

from hotcold.errors import UserError

__all__ = ["torch", "transformers"]

_FIX = "training needs pip install 'hotcold[train]'"

try:
    import torch
except ImportError as error:
    raise UserError(f"{error}: {_FIX}") from None


def transformers() -> Any:
    """The package `transformers`, which takes seconds to import. UserError: it is missing."""
    try:
        import transformers as package
    except ImportError as error:
        raise UserError(f"{error}: {_FIX}") from None
    return package

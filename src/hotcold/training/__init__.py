"""Trains predictors and sparse models with torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotcold.training.saving import save_sparse as save_sparse
    from hotcold.training.schedule import SparsitySchedule as SparsitySchedule
    from hotcold.training.sparse_model import Measured as Measured
    from hotcold.training.sparse_model import SparsityPenalty as SparsityPenalty
    from hotcold.training.sparse_model import make_sparse as make_sparse
    from hotcold.training.sparse_model import measure_sparsity as measure_sparsity
    from hotcold.training.text_predictors import train_predictors as train_predictors
    from hotcold.training.thresholds import Thresholds as Thresholds
    from hotcold.training.thresholds import choose_thresholds as choose_thresholds

_MODULES = {
    "Measured": "sparse_model",
    "SparsityPenalty": "sparse_model",
    "SparsitySchedule": "schedule",
    "Thresholds": "thresholds",
    "choose_thresholds": "thresholds",
    "make_sparse": "sparse_model",
    "measure_sparsity": "sparse_model",
    "save_sparse": "saving",
    "train_predictors": "text_predictors",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that the options of commands need no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hotcold.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hotcold.training.{_MODULES[name]}"), name)

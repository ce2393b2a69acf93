"""Writes a sparse MoE model with each expert's neurons sorted by activity, so that cold ones can stay in the
file (`ram_budget`), and first reports the expected gain. A predictor next to the model is sorted, too."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import PAGE, BatchLimits, PredictorTensors
from hotcold.model.config import Config
from hotcold.model.weights import check_tensors
from hotcold.placement.expert_cache import BudgetTooSmallError, ExpertCachePlan
from hotcold.placement.hot_neurons import HotNeurons
from hotcold.placement.profiles import Profile, read_profile, write_profile
from hotcold.placement.sizes import CHUNK, sizes_of_file
from hotcold.quantize.layouts import LayoutOptions, Rewritten, change_layout
from hotcold.quantize.reordering import Order, check_order
from hotcold.runtime.loading import plan_memory
from hotcold.sparse.predictor import (
    PredictorFacts,
    check_predictors,
    predictor_names,
    read_predictor,
    write_sidecar,
)
from hotcold.tasks.ram_planning import expected_misses
from hotcold.tasks.texts import new_file
from hotcold.values import size
from hotcold.version import __version__


@dataclass(frozen=True)
class HotFirstWorth:
    """Bytes that a token is expected to read from a model's file under a budget for half of the experts.
    ``str()`` gives the line that ``hotcold convert`` prints."""

    budget_bytes: int
    expert_bytes_per_token: float | None  #: whole experts; None: two of each layer do not fit
    row_bytes_per_token: float | None  #: rows of single neurons; None: not even the gates fit
    rows_per_token: float | None  #: number of these neurons
    unit: str = ""  #: which neurons these are

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return asdict(self)

    def __str__(self) -> str:
        whole, rows = self.expert_bytes_per_token, self.row_bytes_per_token
        before = "two experts of each layer do not fit" if whole is None else size(round(whole))
        after = "gates do not fit, so whole experts are read"
        if rows is not None and self.rows_per_token is not None:
            after = f"{size(round(rows))} of {self.rows_per_token:.0f} {self.unit or 'neurons'}"
        return (
            f"with {size(self.budget_bytes)} of memory for half of the experts a token is expected to read "
            f"from the disk: {before} as whole experts, {after} with hot neurons first"
        )


def hot_first(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    profile: str | os.PathLike[str],
    *,
    force: bool = False,
    told: Callable[[HotFirstWorth], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Rewritten, HotFirstWorth]:
    """Writes ``output``, a file of the same model, and its profile next to it; ``told`` gets the expected
    gain before. ``profile`` is a file of :func:`hotcold.profile`. If a predictor is next to ``model``, its
    sorted copy is written next to ``output``, whose file then stores the rows of a neuron together.

    UserError: the profile or the predictor belongs to another model, or the neurons cannot be reordered."""
    source, new = Path(model), Path(output)
    beside, named = new.with_suffix(".profile.gguf"), source.with_suffix(".predictor.gguf")
    predictor = named if named.exists() else None
    for path in (beside, new.with_suffix(".predictor.gguf")) if predictor else (beside,):
        if not force:
            new_file(path)
    with open_gguf(source) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        if config.experts is None or config.whole:
            raise UserError(
                f"{source.name}: hot neurons can be stored first only in MoE models whose gates give zeros"
            )
        check_tensors(file, config, predictor_names(file))
        sizes = sizes_of_file(file, config, BatchLimits.from_context(PAGE, 1, CHUNK), "f16")
        counted = read_profile(Path(profile), sizes)
        order = {}
        for layer, firing in enumerate(counted.firing):
            if not len(firing) or layer in sizes.ordinary:
                continue
            one = np.asarray(firing).reshape(config.experts.count, -1)
            first = np.arange(len(one))[:, None] * one.shape[1]
            order[layer] = (np.argsort(-one, axis=1, kind="stable") + first).reshape(-1)
        check_order(file, config, order, "gguf", (config.down_layout, config.down_layout))
        moved = [each[order[i]] if i in order else each for i, each in enumerate(counted.firing)]
        facts = None if predictor is None else _facts_of(predictor, config, file.fingerprint())
        worth = _worth(file, config, replace(counted, firing=moved), facts)
    if told is not None:
        told(worth)
    settings = LayoutOptions(order=order, force=force, side_by_side=predictor is not None)
    done = change_layout(source, new, settings, progress)
    with open_gguf(new) as file:
        keys: dict[str, Any] = {"version": __version__, "model_fingerprint": file.fingerprint()}
    if predictor is not None:
        _move_predictor(predictor, new.with_suffix(".predictor.gguf"), config, order, keys)
    if counted.counted is not None:
        keys["tokens"] = counted.counted
    write_profile(beside, replace(counted, firing=moved, source=f"hot first, of {Path(profile).name}"), keys)
    return done, worth


def _facts_of(predictor: Path, config: Config, fingerprint: str) -> PredictorFacts:
    with open_gguf(predictor) as file:
        return check_predictors(file, config, fingerprint)


def _move_predictor(
    source: Path, output: Path, config: Config, order: Mapping[int, Order], keys: Mapping[str, Any]
) -> None:
    """Writes a model's predictor with its neurons in another order."""
    layers: list[PredictorTensors | None] = []
    with open_gguf(source) as file:
        for layer, n in enumerate(config.neurons):
            one = read_predictor(file, config, layer) if n else None
            if one is not None and layer in order:
                rows = order[layer]
                one = replace(one, second=one.second.take_rows(rows), threshold=one.threshold[rows])
            layers.append(one)
        start = "hotcold.predictor."
        told = {key.removeprefix(start): v for key, v in file.metadata.items() if key.startswith(start)}
    del told["model_fingerprint"], told["relu"]
    write_sidecar(output, keys["model_fingerprint"], layers, told)


def _worth(
    file: GGUFFile, config: Config, profile: Profile, predictor: PredictorFacts | None
) -> HotFirstWorth:
    """Returns the expected gain; ``profile`` has the neurons in the new order."""
    sparsity = "exact" if predictor is None else "predicted"
    all_of_it = plan_memory(file, {"ram_budget": 1 << 60, "sparsity": sparsity}).experts
    assert all_of_it is not None
    bill = dict(all_of_it.bill)
    budget = sum(bill.values()) + all_of_it.expert_bytes // 2
    assert config.experts is not None
    whole = None
    try:
        expert_cache = ExpertCachePlan.fit(budget, bill, file, config).by_profile(
            profile, config.experts.chosen
        )
    except BudgetTooSmallError:
        pass
    else:
        missed = expected_misses(expert_cache, config, profile)
        whole = sum(n * unit for n, unit in zip(missed, expert_cache.unit_bytes, strict=True))
    named = predictor and (predictor.candidates or [0.0] * config.layers)
    hot = HotNeurons.fit(budget, bill, file, config, profile, named or ())
    if hot is None:
        return HotFirstWorth(budget, whole, None, None)
    if predictor is not None:  # then the rows of a neuron are stored together
        hot = replace(hot, reads=tuple(min(1, n) for n in hot.reads))
    cold = hot.cold_per_token(profile)
    read = sum(hot.disk_bytes(layer, n) for layer, n in enumerate(cold))
    return HotFirstWorth(budget, whole, read, sum(cold), hot.unit)

"""Files with hot neurons first: writes a sparse model of experts with each expert's neurons in order of
activity, so that cold ones can stay in the file (`ram_budget`). Reports the expected gain before. Also
reorders the model's predictor."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.files import output_file
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
from hotcold.values import size
from hotcold.version import __version__


@dataclass(frozen=True)
class HotFirstWorth:
    """Bytes of a model's file that a token is expected to read under a budget for half of the experts.
    ``str()`` gives the lines that ``hotcold convert`` prints."""

    budget_bytes: int
    expert_bytes_per_token: float | None  #: whole experts; None: the budget cannot hold two of each layer
    row_bytes_per_token: float | None  #: rows of single neurons; None: the budget cannot hold the gates
    rows_per_token: float | None  #: neurons with these rows
    unit: str = ""  #: unit name of these neurons

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
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
    show: Callable[[HotFirstWorth], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Rewritten, HotFirstWorth]:
    """Writes ``output``, a file of the same model, and its profile as a sidecar; calls ``show`` with the
    expected gain before. ``profile`` is a file of :func:`hotcold.profile`. If ``model`` has a predictor as a
    sidecar, one for ``output`` is also written, and the rows of a neuron become contiguous. UserError: the
    profile or the predictor is another model's, or the neurons cannot be reordered."""
    source, new = Path(model), Path(output)
    sidecar, old_predictor = new.with_suffix(".profile.gguf"), source.with_suffix(".predictor.gguf")
    predictor = old_predictor if old_predictor.exists() else None
    for path in (sidecar, new.with_suffix(".predictor.gguf")) if predictor else (sidecar,):
        output_file(path, force=force, inputs=[source, profile, old_predictor])
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
            activity = np.asarray(firing).reshape(config.experts.count, -1)
            first = np.arange(len(activity))[:, None] * activity.shape[1]
            order[layer] = (np.argsort(-activity, axis=1, kind="stable") + first).reshape(-1)
        check_order(file, config, order, "gguf", (config.down_layout, config.down_layout))
        moved = [each[order[i]] if i in order else each for i, each in enumerate(counted.firing)]
        facts = None if predictor is None else _facts_of(predictor, config, file.fingerprint())
        worth = _worth(file, config, replace(counted, firing=moved), facts)
    if show is not None:
        show(worth)
    settings = LayoutOptions(order=order, force=force, side_by_side=predictor is not None)
    done = change_layout(source, new, settings, progress)
    with open_gguf(new) as file:
        keys: dict[str, Any] = {"version": __version__, "model_fingerprint": file.fingerprint()}
    if predictor is not None:
        _move_predictor(predictor, new.with_suffix(".predictor.gguf"), config, order, keys)
    if counted.counted is not None:
        keys["tokens"] = counted.counted
    write_profile(sidecar, replace(counted, firing=moved, source=f"hot first, of {Path(profile).name}"), keys)
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
            tensors = read_predictor(file, config, layer) if n else None
            if tensors is not None and layer in order:
                rows = order[layer]
                second, threshold = tensors.second.take_rows(rows), tensors.threshold[rows]
                tensors = replace(tensors, second=second, threshold=threshold)
            layers.append(tensors)
        start = "hotcold.predictor."
        values = {key.removeprefix(start): v for key, v in file.metadata.items() if key.startswith(start)}
    del values["model_fingerprint"], values["relu"]
    write_sidecar(output, keys["model_fingerprint"], layers, values)


def _worth(
    file: GGUFFile, config: Config, profile: Profile, predictor: PredictorFacts | None
) -> HotFirstWorth:
    """Computes the expected gain; ``profile`` has the neurons in the new order."""
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
    if predictor is not None:  # the rows of a neuron will be contiguous
        hot = replace(hot, reads=tuple(min(1, n) for n in hot.reads))
    cold = hot.cold_per_token(profile)
    read = sum(hot.disk_bytes(layer, n) for layer, n in enumerate(cold))
    return HotFirstWorth(budget, whole, read, sum(cold), hot.unit)

"""Writes a sparse model of experts with each expert's neurons in the order in which they fire, so that cold
ones can stay in the file (`ram_budget`), and says before what that is worth."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import PAGE
from hotcold.model.config import Config
from hotcold.placement.hot_neurons import HotNeurons
from hotcold.placement.profiles import Profile, read_profile, write_profile
from hotcold.placement.shelves import NoRoomError, Shelves
from hotcold.placement.sizes import sizes_of_file
from hotcold.quantize.layouts import LayoutOptions, Rewritten, change_layout
from hotcold.quantize.reordering import check_order
from hotcold.runtime.loading import shelves_of
from hotcold.sparse.profiler import KEPT_EXPERTS
from hotcold.tasks.ram_planning import kept_share, missing_shares, routing_shares
from hotcold.tasks.texts import new_file
from hotcold.values import size
from hotcold.version import __version__


@dataclass(frozen=True)
class HotFirstWorth:
    """Bytes of a model's file that a token is expected to read under a budget that holds half of the experts.
    ``str()`` gives what ``hotcold convert`` prints."""

    budget_bytes: int
    expert_bytes_per_token: float | None  #: whole experts; None: two of each layer do not fit
    row_bytes_per_token: float | None  #: rows of neurons that fire; None: not even the gates fit
    rows_per_token: float | None

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return asdict(self)

    def __str__(self) -> str:
        whole, rows = self.expert_bytes_per_token, self.row_bytes_per_token
        before = "two experts of each layer do not fit" if whole is None else size(round(whole))
        after = "gates do not fit, so whole experts are read"
        if rows is not None and self.rows_per_token is not None:
            after = f"{size(round(rows))} in {self.rows_per_token:.0f} rows of neurons that fire"
        return (
            f"a budget of {size(self.budget_bytes)}, room for half of the experts: a token reads of the disk "
            f"{before} as whole experts, {after} with hot neurons first (expected)"
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
    """Writes ``output``, a file of the same model, and its profile beside it; ``told`` hears what it is worth
    before that. ``profile`` is a file of :func:`hotcold.profile`.

    UserError: the profile is another model's, or the neurons cannot change places."""
    source, new = Path(model), Path(output)
    beside = new.with_suffix(".profile.gguf")
    if not force:
        new_file(beside)
    with open_gguf(source) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        if config.experts is None or config.whole:
            raise UserError(
                f"{source.name}: neurons lie hot first in models of experts whose gates give zeros"
            )
        sizes = sizes_of_file(file, config, PAGE, "f16")
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
        worth = _worth(file, config, replace(counted, firing=moved))
    if told is not None:
        told(worth)
    done = change_layout(source, new, LayoutOptions(order=order, force=force), progress)
    with open_gguf(new) as file:
        facts: dict[str, Any] = {"version": __version__, "model_fingerprint": file.fingerprint()}
    if counted.counted is not None:
        facts["tokens"] = counted.counted
    if counted.kept_experts is not None:
        facts[KEPT_EXPERTS] = counted.kept_experts
    write_profile(beside, replace(counted, firing=moved, source=f"hot first, of {Path(profile).name}"), facts)
    return done, worth


def _worth(file: GGUFFile, config: Config, profile: Profile) -> HotFirstWorth:
    """``profile`` has the neurons in the new order."""
    all_of_it = shelves_of(file, config, {"ram_budget": 1 << 60})
    bill = dict(all_of_it.bill)
    budget = sum(bill.values()) + all_of_it.expert_bytes // 2
    assert config.experts is not None
    whole = None
    try:
        shelves = Shelves.fit(budget, bill, file, config).by_profile(profile, config.experts.chosen)
    except NoRoomError:
        pass
    else:
        shares = routing_shares(config, profile)
        missing = [
            missing_shares(shelves, layer, each) * (1 - kept_share(profile, layer))
            for layer, each in enumerate(shares)
        ]
        whole = sum(float(n.sum()) * unit for n, unit in zip(missing, shelves.unit_bytes, strict=True))
    hot = HotNeurons.fit(budget, bill, file, config, profile)
    if hot is None:
        return HotFirstWorth(budget, whole, None, None)
    cold = hot.cold_per_token(profile)
    read = sum(hot.disk_bytes(layer, n) for layer, n in enumerate(cold))
    return HotFirstWorth(budget, whole, read, sum(cold))

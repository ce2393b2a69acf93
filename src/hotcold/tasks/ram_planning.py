"""Plan of a model of experts within a RAM budget, and the file reads that a token is expected to need."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.api.llm import Model, source_of
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.expert_cache import ExpertCachePlan
from hotcold.placement.hot_neurons import HotNeurons
from hotcold.placement.profiles import Profile, find_profile
from hotcold.placement.routes import how_many, mean, missed_by_token
from hotcold.runtime.loading import plan_memory
from hotcold.runtime.memory import check_budget
from hotcold.runtime.opening import file_of
from hotcold.values import bytes_of, exact_size, printable, size

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class RAMPlan:
    """A plan: the bill of memory and the expected misses; ``str()`` gives the lines that ``hotcold plan``
    prints. A profile has the experts that consecutive tokens of a text chose. Without one, tokens are assumed
    to choose experts independently of each other."""

    model: str
    context: int  #: positions
    routing: str  #: source of the experts' shares
    expert_cache: ExpertCachePlan | HotNeurons
    hit_share: float  #: share of the chosen experts, or of the active neurons, that is in memory
    missed_per_token: float  #: experts or neurons that a token reads from the file
    disk_bytes_per_token: float

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        fields = {name: value for name, value in vars(self).items() if name != "expert_cache"}
        return fields | {"shelves": self.expert_cache.report()}

    def __str__(self) -> str:
        expert_cache = self.expert_cache
        budget = exact_size(expert_cache.budget_bytes)
        bill = [*expert_cache.bill.items(), ("experts", expert_cache.expert_bytes)]
        read = size(round(self.disk_bytes_per_token))
        return "\n".join(
            [
                printable(f"{'model':<12}{self.model}", 80),
                printable(f"{'routing':<12}{self.routing}", 80),
                "",
                f"{'context':<12}{self.context}",
                f"{'budget':<12}{budget}",
                *(f"{what:<12}{size(n):>12}" for what, n in bill if n),
                f"{'total':<12}{size(sum(n for _, n in bill)):>12}",
                f"{'':<12}{expert_cache.fitting}, {expert_cache.share:.1%} of the experts' bytes",
                "",
                f"{'predicted':<12}{self.hit_share:.1%} of the {expert_cache.unit} are in memory",
                f"{'':<12}{self.missed_per_token:.2f} per token are not, which reads {read} from the file",
                f"{'speed':<12}hotcold bench with `ram_budget={budget}` measures it",
            ]
        )


def plan_ram(
    model: Model,
    ram_budget: int | str,
    *,
    context: int | None = None,
    cache_type: str | None = None,
    sparsity: str | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> RAMPlan:
    """Plans which experts of a model a budget of memory holds, and counts the expected misses. Nothing is
    timed: :func:`hotcold.bench` with this ``ram_budget`` measures the speed.

    >>> print(plan_ram("model.gguf", "12GiB"))

    Args:
        model: a GGUF file of a model of experts, or a loaded model.
        ram_budget: a size, as the option of :class:`LLM`.
        context: positions; None: the file's, at most 4096; 0: the model's limit.
        cache_type: type of keys and values; None: ``f16``.
        sparsity: as the option of :class:`LLM`, for files whose cold neurons can stay there.
        profile: a file of :func:`hotcold.profile`, with the choice of experts; None takes
            ``MODEL.profile.gguf`` in the model's folder, else assumes that all are equally likely.

    UserError: the model has no experts, the budget cannot hold two of each layer or exceeds this machine's
    memory, or a file is damaged."""
    budget = bytes_of("ram_budget", ram_budget)
    check_budget(budget)
    path = file_of(source_of(model))
    with open_gguf(path) as file:
        how = {"context": context, "cache_type": cache_type, "sparsity": sparsity}
        memory = plan_memory(file, how | {"ram_budget": budget})
        config, expert_cache, sizes = memory.config, memory.experts, memory.sizes(file, gpu=False)
        assert expert_cache is not None
        given = find_profile(sizes, None if profile is None else Path(profile), path)
        if isinstance(expert_cache, HotNeurons):
            active = [
                float(np.sum(each)) if n else 0.0
                for each, n in zip(given.firing, expert_cache.neurons, strict=True)
            ]
            chosen = sum(n * (named or 1.0) for n, named in zip(active, expert_cache.named, strict=True))
            missed = expert_cache.cold_per_token(given)
            read = sum(expert_cache.disk_bytes(layer, n) for layer, n in enumerate(missed))
        else:
            shares = routing_shares(config, given)
            units = expert_cache.unit_bytes
            chosen = sum(float(each.sum()) for each, unit in zip(shares, units, strict=True) if unit)
            missed = expected_misses(expert_cache, config, given)
            read = sum(n * unit for n, unit in zip(missed, units, strict=True))
    return RAMPlan(
        model=sizes.name,
        context=memory.request.context,
        routing="all experts chosen equally often (assumed)" if given.routing is None else given.source,
        expert_cache=expert_cache,
        hit_share=1 - sum(missed) / max(chosen, 1e-9),
        missed_per_token=sum(missed),
        disk_bytes_per_token=read,
    )


def expected_misses(expert_cache: ExpertCachePlan, config: Config, profile: Profile) -> list[float]:
    """Returns, by layer, the mean number of experts that a token chooses and misses."""
    shares = routing_shares(config, profile)
    return [mean(missed_experts(expert_cache, layer, profile, each)) for layer, each in enumerate(shares)]


def routing_shares(config: Config, profile: Profile) -> list[Floats]:
    """Returns, by layer, the share of tokens that choose each expert; equal shares if they were not
    counted."""
    experts = config.experts
    assert experts is not None
    alike: list[Floats] = [
        np.full(experts.count, config.chosen_of(i) / experts.count) for i in range(config.layers)
    ]
    if profile.routing is None:
        return alike
    return [
        assumed if len(each) == 1 else _steadied(each, profile.counted)
        for each, assumed in zip(profile.routing, alike, strict=True)
    ]


def missed_experts(expert_cache: ExpertCachePlan, layer: int, profile: Profile, shares: Floats) -> Floats:
    """Returns the share of tokens that miss 0, 1, 2, ... of a layer's experts. They are counted on the
    profile's text if the profile has each token's experts, else derived from ``shares``."""
    slots = expert_cache.slots[layer]
    if not expert_cache.unit_bytes[layer] or slots == expert_cache.experts:
        return np.ones(1)
    if profile.routes is None:
        return how_many(missing_shares(expert_cache, layer, shares))
    pinned = expert_cache.pinned[layer] if expert_cache.pinned else 0
    return missed_by_token(profile.routes[layer], expert_cache.experts, slots, pinned)


def _steadied(shares: Floats, tokens: int | None) -> Floats:
    """Shrinks the shares of a number of tokens towards their mean, by the spread that chance alone causes:
    the hottest experts of a short text are less hot in another."""
    values: Floats = np.asarray(shares, np.float64)
    spread, mean = float(values.var()), float(values.mean())
    if tokens is None or not spread:
        return values
    chance = float((values * (1 - values)).mean()) / tokens
    return mean + (values - mean) * max(0.0, 1 - chance / spread)


def missing_shares(expert_cache: ExpertCachePlan, layer: int, shares: Floats) -> Floats:
    """Returns the share of tokens that choose each expert and miss it. Experts that are not pinned are
    replaced by least recent use: one is present if any of the last T tokens chose it. T is such that the
    present experts fill the slots (the Che approximation)."""
    missing = np.zeros(len(shares))
    slots = expert_cache.slots[layer]
    if not expert_cache.unit_bytes[layer] or slots == expert_cache.experts:
        return missing
    pinned = [*expert_cache.hot[layer][: expert_cache.pinned[layer]]] if expert_cache.hot else []
    come = np.delete(np.arange(len(shares)), pinned)
    others = np.clip(shares[come], 0, 1 - 1e-9)
    free = float(slots - len(pinned))
    low, high = 0.0, 1.0
    while _there(others, high).sum() < min(free, float(np.count_nonzero(others))) - 1e-6 and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _there(others, middle).sum() < free else (low, middle)
    missing[come] = others * (1 - _there(others, high))
    return missing


def _there(shares: Floats, tokens: float) -> Floats:
    present: Floats = 1 - (1 - shares) ** tokens
    return present

"""Costs of generation: bytes and parameters read, neurons computed, seconds.

Bytes are the weights and KV cache that kernels must read; activations stay in the caches and are not counted.
Divided by the time of the same steps, they give the achieved memory bandwidth."""

from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import FFN_COUNTS, DiskCounts


@dataclass(frozen=True)
class Footprint:
    """The bytes that one decode step reads, besides the rows of neurons that it chooses."""

    #: read once by each step: attention, norms, head, predictors, and shared experts computed as a whole
    step_bytes: int
    step_params: int
    token_bytes: int  #: one row of the embedding table; it has ``dim`` parameters
    neurons: tuple[int, ...]  #: number in each layer
    dim: int  #: the model's width D: parameters of one gate, up or down row
    row_bytes: tuple[tuple[int, ...], ...]  #: of one gate, up and down row and one run's scales, by layer
    kv_bytes: int  #: K and V of one position in all layers
    state_bytes: int = 0  #: a sequence's state in all layers, read and written for each token
    #: as ``row_bytes``, of sparse shared experts; empty if :class:`Counters` has none
    shared_row_bytes: tuple[tuple[int, ...], ...] = ()


@dataclass
class Counters:
    """Sums over the steps of an engine; the difference of two snapshots describes the steps between."""

    rows: npt.NDArray[np.int64]  #: ``[layers, 5]`` as in FFNStats, of steps without prompt rows
    prompt_tokens: int = 0
    prompt_s: float = 0.0  #: seconds of steps with any prompt row
    decode_tokens: int = 0  #: in steps without prompt rows, like the next fields
    decode_steps: int = 0
    decode_s: float = 0.0
    #: the part of ``decode_s`` in recorded programs and drafting; the remainder is Python's
    run_s: float = 0.0
    kv_positions: int = 0  #: positions that attention read
    drafts: int = 0  #: rows of draft tokens
    rejected_drafts: int = 0  #: rows of rejected draft tokens, which ``decode_tokens`` excludes
    draft_bytes: int = 0  #: bytes that a draft block or draft model read
    #: as ``rows``, of sparse shared experts; no layers if there are none
    shared: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, len(FFN_COUNTS)), np.int64))
    disk: DiskCounts = field(default_factory=DiskCounts)  #: experts read from the file

    def nbytes(self, footprint: Footprint) -> int:
        """Returns the bytes that the steps of generation read."""
        computed = self.decode_tokens + self.rejected_drafts
        row_bytes = int(bytes_of_rows(self.rows, footprint.row_bytes).sum())
        row_bytes += int(bytes_of_rows(self.shared, footprint.shared_row_bytes).sum())
        weights = self.decode_steps * footprint.step_bytes + computed * footprint.token_bytes + row_bytes
        states = self.kv_positions * footprint.kv_bytes + computed * footprint.state_bytes
        return weights + states + self.draft_bytes

    def copy(self) -> Self:
        return replace(self, rows=self.rows.copy(), shared=self.shared.copy())

    def since(self, before: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class DiskFigures:
    """Figures of the expert cache; None if all experts are in memory."""

    expert_hit_share: float | None = None  #: share of the needed experts that were in memory
    disk_bytes_per_token: float | None = None
    stalls_per_token: float | None = None  #: how often computing waited for a read
    stall_s_per_token: float | None = None


@dataclass(frozen=True)
class Figures(DiskFigures):
    """Figures of an interval of generation, for users. None if nothing was decoded."""

    prompt_tok_s: float | None  #: prompt tokens per second, of all sequences together
    tok_s: float | None = None  #: generated tokens per second, of all sequences together
    bytes_per_token: float | None = None  #: read per generated token
    gb_s: float | None = None  #: 1e9 bytes read per second of generation
    active_share: float | None = None  #: neurons computed / neurons, mean over layers and generated tokens
    active_share_by_layer: tuple[float, ...] = ()
    #: parameters used for one generated token; a row read for several tokens of a step counts once
    params_per_token: float | None = None
    python_share: float | None = None  #: part of the generation time outside recorded programs
    rows_per_step: float | None = None  #: mean sequences of a generation step
    tokens_per_step: float | None = None  #: mean tokens of a generation step, accepted draft tokens included

    @classmethod
    def from_counters(cls, counters: Counters, footprint: Footprint) -> Self:
        tokens, steps, seconds = counters.decode_tokens, counters.decode_steps, counters.decode_s
        prompt_tok_s = counters.prompt_tokens / counters.prompt_s if counters.prompt_s else None
        if not tokens:
            return cls(prompt_tok_s)
        sequences = tokens - counters.drafts + counters.rejected_drafts
        computed = tokens + counters.rejected_drafts
        read = int(counters.rows[:, :3].sum() + counters.shared[:, :3].sum())
        total_bytes = counters.nbytes(footprint)
        params = computed * (footprint.step_params + footprint.dim) + read * footprint.dim
        neurons = np.asarray(footprint.neurons)  # a layer may have none
        active = counters.rows[:, 3] / (np.maximum(neurons, 1) * computed)
        return cls(
            prompt_tok_s=prompt_tok_s,
            tok_s=tokens / seconds if seconds else None,
            bytes_per_token=total_bytes / tokens,
            gb_s=total_bytes / seconds / 1e9 if seconds else None,
            active_share=float(active[neurons > 0].mean()) if neurons.any() else 0.0,
            active_share_by_layer=tuple(active.tolist()),
            params_per_token=params / tokens,
            rows_per_step=sequences / steps,
            tokens_per_step=tokens / steps,
            **_expert_cache_figures(counters.disk, tokens),
            python_share=1 - counters.run_s / seconds if seconds else None,
        )


def _expert_cache_figures(counts: DiskCounts, tokens: int) -> dict[str, float]:
    named = counts.hits + counts.misses
    if not named:
        return {}
    return {
        "expert_hit_share": counts.hits / named,
        "disk_bytes_per_token": counts.nbytes / tokens,
        "stalls_per_token": counts.stalls / tokens,
        "stall_s_per_token": counts.stall_s / tokens,
    }


def bytes_of_rows(
    rows: npt.NDArray[np.int64], row_bytes: tuple[tuple[int, ...], ...]
) -> npt.NDArray[np.int64]:
    """Returns the bytes of counted rows ``[..., layers, 5]``, by layer: of gates, ups, downs and scales."""
    nbytes: npt.NDArray[np.int64] = rows[..., [0, 1, 2, 4]] * np.reshape(row_bytes, (-1, 4)).astype(np.int64)
    return nbytes

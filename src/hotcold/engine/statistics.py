"""What generation costs, counted: bytes and parameters read, neurons computed, seconds.

Bytes are those of weights and KV cache that the kernels must read; activations stay in the caches and are not
counted. With the time of the same steps they give the rate at which memory was really read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Footprint:
    """What one decode step reads, apart from how many neurons it takes.

    Attributes:
        step_bytes, step_params: attention, norms, head and predictors, read once by each step.
        token_bytes, token_params: one row of the embedding table.
        neurons: neurons of each layer.
        dim: the model's width D, the parameters of one gate, up or down row.
        row_bytes: bytes of one gate, up and down row of each layer (gate 0 without gating).
        kv_bytes: K and V of one position in all layers.
    """

    step_bytes: int
    step_params: int
    token_bytes: int
    token_params: int
    neurons: tuple[int, ...]
    dim: int
    row_bytes: tuple[tuple[int, int, int], ...]
    kv_bytes: int


@dataclass
class Counters:
    """Sums over the steps of an engine; the difference of two snapshots describes what lay between.

    Attributes:
        prompt_tokens, prompt_s: prompt rows, and the seconds of the steps that had any.
        decode_tokens, decode_steps, decode_s: decode rows and seconds of the steps that had no prompt row.
        run_s: the part of ``decode_s`` that was spent in the recorded program; the rest is Python's.
        kv_positions: positions that attention read in those steps.
        rows: ``[layers, 4]`` int64, as in :class:`~hotcold.kernels.backend.FFNStats`, of those steps.
    """

    rows: npt.NDArray[np.int64]
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    run_s: float = 0.0
    kv_positions: int = 0

    def copy(self) -> Counters:
        return replace(self, rows=self.rows.copy())

    def since(self, before: Counters) -> Counters:
        return Counters(
            rows=self.rows - before.rows,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            prompt_s=self.prompt_s - before.prompt_s,
            decode_tokens=self.decode_tokens - before.decode_tokens,
            decode_steps=self.decode_steps - before.decode_steps,
            decode_s=self.decode_s - before.decode_s,
            run_s=self.run_s - before.run_s,
            kv_positions=self.kv_positions - before.kv_positions,
        )


@dataclass(frozen=True)
class Figures:
    """What a user is told about a piece of generation. None where nothing was decoded.

    Attributes:
        prompt_tok_s, tok_s: tokens a second of prompt and of generation.
        bytes_per_token: read per generated token.
        gb_s: 1e9 bytes read a second while generating.
        active_share: neurons computed / neurons, mean over layers and generated tokens.
        active_by_layer: the same, for each layer.
        params_per_token: parameters that took part in one generated token (a neuron's row that serves several
            tokens of one step is counted once).
        python_share: the part of generation's time spent outside the recorded program.
    """

    prompt_tok_s: float | None
    tok_s: float | None
    bytes_per_token: float | None
    gb_s: float | None
    active_share: float | None
    active_by_layer: tuple[float, ...]
    params_per_token: float | None
    python_share: float | None

    @classmethod
    def of(cls, counters: Counters, footprint: Footprint) -> Figures:
        tokens, steps = counters.decode_tokens, counters.decode_steps
        prompt_tok_s = counters.prompt_tokens / counters.prompt_s if counters.prompt_s else None
        if not tokens:
            return cls(prompt_tok_s, None, None, None, None, (), None, None)
        read = counters.rows[:, :3]
        row_bytes = np.asarray(footprint.row_bytes, np.int64)
        total_bytes = (
            steps * footprint.step_bytes
            + tokens * footprint.token_bytes
            + int((read * row_bytes).sum())
            + counters.kv_positions * footprint.kv_bytes
        )
        params = tokens * (footprint.step_params + footprint.token_params) + int(read.sum()) * footprint.dim
        active = counters.rows[:, 3] / (np.asarray(footprint.neurons) * tokens)
        return cls(
            prompt_tok_s=prompt_tok_s,
            tok_s=tokens / counters.decode_s if counters.decode_s else None,
            bytes_per_token=total_bytes / tokens,
            gb_s=total_bytes / counters.decode_s / 1e9 if counters.decode_s else None,
            active_share=float(active.mean()),
            active_by_layer=tuple(float(share) for share in active),
            params_per_token=params / tokens,
            python_share=1 - counters.run_s / counters.decode_s if counters.decode_s else None,
        )

"""Positions in each layer's attention, from GGUF metadata: its rotation and its window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.model.families import Every, Family
from hotcold.model.keys import Keys, ModelError, is_number, whole
from hotcold.model.mixers.rope import Rope, Yarn
from hotcold.values import shown

_SCALINGS = ("none", "linear", "yarn", "longrope")
_FACTOR, _OLD_FACTOR = "rope.scaling.factor", "rope.scale_linear"


@dataclass(frozen=True)
class LayerPositions:
    rope: Rope | None  #: None: queries and keys are not rotated
    window: int | None  #: positions that a row attends to, its own included; None: all up to its own
    windowed: bool = False  #: a layer of the kind with a window, even if the window hides nothing


def read_positions(
    keys: Keys, family: Family, layers: int, head_dim: int, context: int
) -> tuple[LayerPositions, ...]:
    """Reads the positions of each layer. ModelError names the key, the value and the allowed values."""
    rope = _rope(keys, family, head_dim, context) if _rotates(keys, family) else None
    window = keys.whole("attention.sliding_window", 0, 1 << 32, default=0)
    windowed = _windowed(keys, family, layers) if window else (False,) * layers
    local = rope and _window_rope(keys, family, rope, local_head_dim(keys, family, head_dim))
    unrotated = family.unrotated or ()
    if family.full_unrotated and any(windowed):
        rope = None
    ropes = (None if i in unrotated else local if windowed[i] else rope for i in range(layers))
    # A window of all positions hides nothing; its layers still have the rotation of layers with a window.
    narrow = window if window < context else None
    return tuple(LayerPositions(r, narrow if w else None, w) for r, w in zip(ropes, windowed, strict=True))


def local_head_dim(keys: Keys, family: Family, head_dim: int) -> int:
    """Reads the length of heads in layers with a window; ``head_dim`` is that of other layers."""
    if not family.kinds_of_heads:
        return head_dim
    length = keys.whole("attention.key_length_swa", 1, 1024, default=head_dim)
    if keys.whole("attention.value_length_swa", 1, 1024, default=length) != length:
        raise ModelError(f"{keys.name('attention.value_length_swa')} differs from the keys' length {length}")
    return length


def _rotates(keys: Keys, family: Family) -> bool:
    """Returns whether any layer rotates queries and keys."""
    if family.learned_positions is not None or family.unrotated == Every(1):
        return False
    return not family.rope_if_finetuned or keys.truth("rope.scaling.finetuned", True)


def _windowed(keys: Keys, family: Family, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has the window: by the file's list or period, else by the family's."""
    key, full = "attention.sliding_window_pattern", family.full_attention
    pattern: Any = keys.get(key)
    if isinstance(pattern, np.ndarray | Sequence) and not isinstance(pattern, str):
        if len(pattern) != layers or any(flag not in (False, True) for flag in pattern):
            got = f"{keys.name(key)} is {shown(pattern)}"
            raise ModelError(f"{got}: a period, or {layers} truth values, are needed")
        return tuple(bool(flag) for flag in pattern)
    if pattern is not None:
        period = whole(keys.name(key), pattern, 0, layers)
        full = Every(period, full.first if full else False) if period else None
    return tuple(full is None or i not in full for i in range(layers))


def _rope(keys: Keys, family: Family, head_dim: int, context: int) -> Rope:
    dim = keys.whole("rope.dimension_count", 2, head_dim, default=head_dim)
    _even(keys, "rope.dimension_count", dim)
    base = keys.number("rope.freq_base", 1, 1e12, default=10000.0)
    kind, factor = scaling(keys)
    original = keys.whole("rope.scaling.original_context_length", 1, 1 << 24, default=context)
    magnitude = keys.factor("rope.scaling.attn_factor", 1.0)
    interleaved = family.rope_interleaved and "rope.dimension_sections" not in keys
    rope = Rope(dim, base, interleaved, magnitude=magnitude, original=original)
    if kind == "yarn":
        return _yarn(keys, rope, factor, whole=family.yarn_whole, latent=family.latent)
    return replace(rope, linear_factor=factor)


def scaling(keys: Keys) -> tuple[str, float]:
    """Reads the kind of scaling, and the divisor of positions, like llama.cpp. A factor without a kind is
    linear; ``rope.scale_linear`` is its old name; 0 is unset; the kind ``none`` ignores it."""
    kind = keys.choice("rope.scaling.type", _SCALINGS, "linear")
    if kind == "yarn" and _FACTOR not in keys and _OLD_FACTOR not in keys:
        raise ModelError(f"{keys.name(_FACTOR)} is missing: yarn needs it")
    factor = keys.factor(_FACTOR if _FACTOR in keys else _OLD_FACTOR, 1.0)
    return kind, 1.0 if kind == "none" else factor


def scaling_notes(keys: Keys) -> tuple[str, ...]:
    """Returns a note for the user if the file does not state the kind of scaling."""
    _, factor = scaling(keys)
    if "rope.scaling.type" in keys or _FACTOR not in keys or factor == 1:
        return ()
    guess = "positions are divided by it (linear scaling), as in llama.cpp"
    return (f"the file has {keys.name(_FACTOR)} {factor:g} and no {keys.name('rope.scaling.type')}: {guess}",)


def _yarn(keys: Keys, rope: Rope, factor: float, *, whole: bool, latent: bool) -> Rope:
    fast = keys.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, default=32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, default=1.0)
    mixed = keys.get("rope.scaling.yarn_ext_factor", 1)
    if not is_number(mixed) or abs(mixed) != 1:
        got = f"{keys.name('rope.scaling.yarn_ext_factor')} is {shown(mixed)}"
        raise ModelError(f"{got}: only 1 is supported")

    def grown(weight: float) -> float:
        """Returns the temperature of scores, which grows with the context (section 3.4 of the paper)."""
        return 1 + 0.1 * weight * float(np.log(max(factor, 1)))

    everywhere = keys.factor("rope.scaling.yarn_log_multiplier", 0.0)
    # In latent attention all growth is a factor of scores: latent_growth.
    implied = grown(1) / (grown(everywhere) if everywhere else 1) if not (latent and everywhere) else 1.0
    magnitude = rope.magnitude * keys.factor("rope.scaling.yarn_attn_factor", implied)
    return replace(rope, yarn=Yarn(factor, rope.original, fast, slow, whole), magnitude=magnitude)


def latent_growth(keys: Keys) -> float:
    """Returns the factor of YaRN for scores of latent attention; ``yarn_log_multiplier`` is a tenth of the
    publishers' ``mscale_all_dim``."""
    kind, factor = scaling(keys)
    if kind != "yarn":
        return 1.0
    everywhere = keys.factor("rope.scaling.yarn_log_multiplier", 0.0)
    return (1 + everywhere * math.log(max(factor, 1))) ** 2


def _window_rope(keys: Keys, family: Family, rope: Rope, head_dim: int) -> Rope:
    """Returns the rotation of layers with a window, and heads of this length."""
    base = keys.number("rope.freq_base_swa", 1, 1e12, default=rope.base)
    if not family.window_scaled:
        rope = replace(rope, linear_factor=1.0, yarn=None, magnitude=1.0, factored=False)
    if not family.kinds_of_heads:
        return replace(rope, base=base)
    dim = keys.whole("rope.dimension_count_swa", 2, head_dim, default=head_dim)
    return replace(rope, base=base, dim=_even(keys, "rope.dimension_count_swa", dim))


def _even(keys: Keys, key: str, dim: int) -> int:
    if dim % 2:
        raise ModelError(f"{keys.name(key)} is {dim}: an even number is needed")
    return dim

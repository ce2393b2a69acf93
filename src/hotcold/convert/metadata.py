"""Makes GGUF metadata of a checkpoint's shape and arithmetic, with llama.cpp's keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.convert.layouts import Layout
from hotcold.convert.settings import Settings, is_number
from hotcold.convert.tensor_files import Array
from hotcold.model.families import FAMILIES
from hotcold.model.mixers.rope import frequencies, llama3_factors
from hotcold.values import shown

#: ``dynamic`` scales only beyond the context, and a file is never run beyond it.
_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
_FULL, _WINDOW = "full_attention", "sliding_attention"  # kinds of layers
_ORIGINAL = "original_max_position_embeddings"


def dimensions(config: Settings) -> dict[str, int]:
    """Sizes by letter: D model width, H heads, G kv heads, d head_dim; rows of Q query, K key, F query, key
    and value, W query and its gate; N neurons, U rows of gate and up, C two concatenated model rows, V
    vocabulary, L layers. If present: E experts, M neurons of an expert, I dimensions that it reads, S neurons
    of a shared expert, P learned positions. Raises :class:`ConvertError` if sizes do not fit together."""
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if "head_dim" not in config and dim % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size {dim} (or a head_dim)")
    head_dim, neurons = config.integer("head_dim", dim // heads), config.integer("intermediate_size")
    if head_dim % 2:
        if "head_dim" not in config:
            raise config.error("num_attention_heads", f"a number that makes heads of {dim} / it even")
        raise config.error("head_dim", "an even number (rotary positions turn pairs)")
    sizes = {
        "D": dim,
        "H": heads,
        "G": kv_heads,
        "d": head_dim,
        "Q": heads * head_dim,
        "K": kv_heads * head_dim,
        "F": (heads + 2 * kv_heads) * head_dim,
        "N": neurons,
        "U": 2 * neurons,
        "W": 2 * heads * head_dim,
        "C": 2 * dim,
        "V": config.integer("vocab_size"),
        "L": config.integer("num_hidden_layers"),
    }
    if "num_local_experts" in config:
        sizes |= {
            "E": config.integer("num_local_experts"),
            "M": config.integer("moe_intermediate_size", neurons),
            "I": config.integer("moe_latent_size", dim),
        }
    if "shared_width" in config:
        sizes |= {"S": config.integer("shared_width"), "1": 1}
    if "learned_positions" in config:
        # OPT's table begins with two unused rows.
        sizes["P"] = config.integer("max_position_embeddings") + 2
    return sizes


def model_metadata(config: Settings, layout: Layout) -> dict[str, Any]:
    sizes = dimensions(config)
    eps = np.float32(config.number(layout.eps))
    metadata: dict[str, Any] = {
        "vocab_size": sizes["V"],
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": sizes["D"],
        "block_count": sizes["L"],
        "feed_forward_length": sizes["N"],
        "attention.head_count": sizes["H"],
        "attention.head_count_kv": sizes["G"],
        f"attention.layer_norm_{'' if layout.layer_norm else 'rms_'}epsilon": eps,
        **_windows(config, layout),
    }
    rope: dict[str, Any] = {}
    if _rotates(config):
        rope = _rope_metadata(config, layout)
    else:
        config.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    # Keep the order of earlier files, so that a conversion gives the same bytes.
    first = "rope.dimension_count"
    metadata |= {first: rope[first]} if rope else {}
    if "head_dim" in config:
        metadata["attention.key_length"] = metadata["attention.value_length"] = sizes["d"]
    metadata |= rope
    metadata |= layout.extra(config)
    for key, value in _window_base(config, layout).items() if rope else ():
        metadata.setdefault(key, value)
    return {f"{layout.architecture}.{key}": value for key, value in metadata.items()}


def _windows(config: Settings, layout: Layout) -> dict[str, Any]:
    windows: list[bool] = config.get("windows", [])
    if not any(windows):
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": config.integer("sliding_window")}
    period, first = layout.full_attention or (len(windows) + 1, False)
    if windows != [i % period != (0 if first else period - 1) for i in range(len(windows))]:
        keys["attention.sliding_window_pattern"] = windows
    return keys


@dataclass(frozen=True)
class Rope:
    theta: float
    kind: str  #: one of ``_KINDS``
    dim: int  #: values of a head that are rotated
    settings: Settings  #: the object that describes the scaling
    config: Settings

    @property
    def original(self) -> int:
        """The context of training, before it was extended."""
        return self.config.integer(_ORIGINAL, self.settings.integer(_ORIGINAL, self._context))

    @property
    def stretched(self) -> float:
        """Longrope's factor on queries and keys (arXiv 2402.13753) for the extended context."""
        if self.original < 2:
            raise (self.config if _ORIGINAL in self.config else self.settings).error(
                _ORIGINAL, "an integer above 1"
            )
        return math.sqrt(1 + math.log(max(self.growth, 1.0)) / math.log(self.original))

    @property
    def _context(self) -> int:
        return self.config.integer("max_position_embeddings")

    @property
    def growth(self) -> float:
        """The growth of the context: the stated factor, or the new context over the old one."""
        return self.settings.number("factor", self._context / self.original)


def _rotates(config: Settings) -> bool:
    return "learned_positions" not in config and not config.flag("no_rope", False)


def rope_of(config: Settings) -> Rope:
    """The rope of layers with full attention, as transformers 5 reads it: keys inside the scaling's object
    take precedence over the same keys outside, except for the original context."""
    settings = _scaling(config)
    theta = settings.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = _kind(settings, config.section("rope_names"))
    head_dim = dimensions(config)["d"]
    share = settings.number("partial_rotary_factor", config.number("partial_rotary_factor", 1))
    dim = int(head_dim * share)
    if kind == "proportional":  # all pairs have a frequency, which may be 0
        return Rope(theta, kind, head_dim, settings, config)
    partly = config.flag("rotates_partly", False)
    if share > 1 or dim % 2 or dim < 2 or (share != 1 and not partly):
        source = settings if "partial_rotary_factor" in settings else config
        if not partly:
            raise source.error("partial_rotary_factor", "1, since the model's class rotates all of a head,")
        raise source.error("partial_rotary_factor", f"a share of head_dim {head_dim} that is an even number")
    return Rope(theta, kind, dim, settings, config)


def _scaling(config: Settings) -> Settings:
    """The object that describes the scaling: ``rope_scaling`` in older files, ``rope_parameters`` in newer
    ones. ``rope_scaling`` takes precedence. If ``rope_parameters`` differ by kind of layer, it changes the
    keys of layers with full attention."""
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    old = old.section(_FULL) if _FULL in old else old
    if _FULL in new or _WINDOW in new:
        return new.section(_FULL).having(old.values)
    return old if old.values else new


def _kind(settings: Settings, names: Settings | None = None) -> str:
    """The kind of scaling: ``rope_type``, else its older name ``type``, else none. ``names`` maps a class's
    names of kinds to the usual names."""
    key = "rope_type" if "rope_type" in settings else "type"
    kind = settings.text(key, "default")
    kind = {"su": "longrope"}.get(kind, kind)
    kind = names.text(kind, kind) if names else kind
    if kind not in _KINDS:
        raise settings.error(key, f"one of {', '.join(_KINDS)}")
    return kind


def rope_notes(config: Settings) -> list[str]:
    """Notes on parts of the scaling that the file lacks."""
    if not _rotates(config):
        return []
    rope = rope_of(config)
    if rope.kind == "default" and "factor" in rope.settings:
        got = f"its rotary scaling has a factor of {shown(rope.settings.values['factor'])} and no type"
        return [f"{got}: positions are not scaled, as transformers reads it"]
    if rope.kind == "dynamic":
        context = config.integer("max_position_embeddings")
        return [f"its rotary scaling is dynamic, which changes nothing up to {context} positions: left out"]
    return []


def _window_base(config: Settings, layout: Layout) -> dict[str, Any]:
    """The key of the rotary base of layers with a window, if it differs. ConvertError: GGUF has no keys for
    the scaling of these layers."""
    settings = config.section("rope_parameters").section(_WINDOW)
    if not settings.values:
        return {}
    rope, kind = rope_of(config), _kind(settings)
    needed = rope.kind if FAMILIES[layout.architecture].window_scaled else "default"
    if kind != needed:
        raise settings.error("rope_type", f"{needed} in layers with a window")
    theta = settings.number("rope_theta", config.number("rope_theta", rope.theta))
    return {} if theta == rope.theta else {"rope.freq_base_swa": np.float32(theta)}


def _rope_metadata(config: Settings, layout: Layout) -> dict[str, Any]:
    rope = rope_of(config)
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": np.float32(rope.theta)}
    if rope.kind == "linear":
        keys["rope.scaling.type"] = "linear"
        keys["rope.scaling.factor"] = np.float32(rope.settings.number("factor"))
    if rope.kind == "yarn":
        keys |= _yarn(rope, layout)
    if rope.kind == "longrope":
        keys["rope.scaling.type"] = "longrope"
        keys["rope.scaling.original_context_length"] = rope.original
        factor = rope.settings.number("attention_factor", rope.stretched)
        keys["rope.scaling.attn_factor"] = np.float32(factor)
    return keys


def _yarn(rope: Rope, layout: Layout) -> dict[str, Any]:
    """YaRN's keys (arXiv 2309.00071); without a temperature, readers use the paper's."""
    settings = rope.settings
    if settings.flag("truncate", True) is not layout.yarn_truncates:
        raise settings.error("truncate", str(layout.yarn_truncates).lower())
    # null means the growth of the context.
    factor = rope.growth if settings.get("factor", 0) is None else settings.number("factor")
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": np.float32(factor),
        "rope.scaling.original_context_length": rope.original,
    }
    for key in ("beta_fast", "beta_slow"):
        if settings.get(key):
            keys[f"rope.scaling.yarn_{key}"] = np.float32(settings.number(key))
    if "attention_factor" in settings:
        keys["rope.scaling.yarn_attn_factor"] = np.float32(settings.number("attention_factor"))
    elif settings.get("mscale_all_dim"):  # it enters the factor together with mscale only
        weights = ("mscale", "mscale_all_dim") if settings.get("mscale") else ()
        grown = [1 + 0.1 * settings.number(key) * math.log(max(factor, 1)) for key in weights]
        implied = 1 + 0.1 * math.log(max(factor, 1))
        keys["rope.scaling.yarn_attn_factor"] = np.float32(grown[0] / grown[1] if grown else implied)
    return keys


def rope_tables(config: Settings) -> Mapping[str, Array]:
    """GGUF's tensors of frequency divisors, ``[rotary dim / 2]``: Llama 3's or longrope's."""
    if not _rotates(config):
        return {}
    rope = rope_of(config)
    if rope.kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(rope)}
    if rope.kind == "proportional":
        return {"rope_freqs.weight": _proportional_factors(rope)}
    if rope.kind == "longrope":
        return {
            f"rope_factors_{kind}.weight": _longrope_factors(rope, f"{kind}_factor")
            for kind in ("long", "short")
        }
    return {}


def _llama3_factors(rope: Rope) -> Array:
    settings = rope.settings
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if not low < high:
        raise settings.error("high_freq_factor", f"a number above low_freq_factor {low:g}")
    steps = frequencies(rope.dim, rope.theta)
    return llama3_factors(steps, settings.number("factor"), low, high, rope.original).astype(np.float32)


def _proportional_factors(rope: Rope) -> Array:
    """Frequency divisors: the scaling factor for rotated pairs, 1e30 for pairs that stay unrotated."""
    share, factor = (rope.settings.number(key, 1.0) for key in ("partial_rotary_factor", "factor"))
    if share > 1:
        raise rope.settings.error("partial_rotary_factor", "a share up to 1")
    factors = np.full(rope.dim // 2, 1e30, np.float32)
    factors[: int(share * rope.dim // 2)] = factor
    return factors


def _longrope_factors(rope: Rope, key: str) -> Array:
    values, half = rope.settings.get(key), rope.dim // 2
    numbers = values if isinstance(values, list) else []
    if len(numbers) != half or not all(is_number(n) for n in numbers):
        raise rope.settings.error(key, f"a list of {half} numbers above 0")
    return np.array(numbers, np.float32)

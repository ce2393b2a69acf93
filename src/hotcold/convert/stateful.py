"""Lists GGUF tensors that differ from a checkpoint's: of layers with a state, and of fused experts."""

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, Rearrange
from hotcold.convert.source import Source, loaded
from hotcold.convert.tensor_files import Array

Sizes = Mapping[str, int]


def short_conv(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """LFM2's convolutions, and the biases of its routers."""
    config, dim = checkpoint.config, sizes["D"]
    hf, blk = f"model.layers.{layer}.", f"blk.{layer}."
    sources = []
    if config.values["state_layers"][layer]:
        taps, conv = config.integer("conv_L_cache"), f"{hf}conv.conv.weight"
        target, shape = f"{blk}shortconv.conv.weight", (dim, 1, taps)
        sources.append(loaded(checkpoint, target, [conv], shape, _columns, (dim, taps)))
        parts = {"in_proj": (3 * dim, dim), "out_proj": (dim, dim)}
        for part, rows in parts.items():
            target, origin = f"{blk}shortconv.{part}", f"{hf}conv.{part}"
            sources.append(loaded(checkpoint, f"{target}.weight", [f"{origin}.weight"], rows))
            if config.flag("conv_bias", False):
                sources.append(loaded(checkpoint, f"{target}.bias", [f"{origin}.bias"], rows[:1]))
        if config.flag("conv_bias", False):
            origin = f"{hf}conv.conv.bias"
            sources.append(loaded(checkpoint, f"{blk}shortconv.conv.bias", [origin], (dim,)))
    if config.values["expert_layers"][layer] and config.flag("use_expert_bias", True):
        origin = f"{hf}feed_forward.expert_bias"
        sources.append(loaded(checkpoint, f"{blk}exp_probs_b.bias", [origin], (sizes["E"],)))
    return sources


def stacked_experts(
    checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str, mlp: str = "mlp"
) -> list[Source]:
    """The experts of a layer, if it has any, and no other tensors; ``mlp`` is HF's name of the FFN."""
    if not checkpoint.config.get("expert_layers", [True] * sizes["L"])[layer]:
        return []
    return _experts(checkpoint, f"model.layers.{layer}.{mlp}.experts.", f"blk.{layer}.", sizes, down_layout)


def gated_delta(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """The layers without attention of Qwen3.5 and Qwen3-Next, and the experts of both."""
    config, hf, blk = checkpoint.config, f"model.layers.{layer}.", f"blk.{layer}."
    sources: list[Source] = []
    if config.values["state_layers"][layer]:
        joined = config.text("model_type") == "qwen3_next"
        make = _of_qwen3_next if joined else _of_qwen35
        sources += make(checkpoint, f"{hf}linear_attn.", blk, sizes["D"])
    if "E" not in sizes:
        return sources
    return sources + _experts(checkpoint, f"{hf}mlp.experts.", blk, sizes, down_layout)


def _of_qwen3_next(checkpoint: Checkpoint, hf: str, blk: str, dim: int) -> list[Source]:
    config = checkpoint.config
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    inner = values * value_dim
    channels = 2 * keys * key_dim + inner
    # Rows by k head: q, k, then v and z of all its v heads.
    ends = np.cumsum([key_dim, key_dim, inner // keys])
    rows = np.split(np.arange(channels + inner).reshape(keys, -1), ends, axis=1)
    *qkv, z = (part.reshape(-1) for part in rows)
    origin, shape = [f"{hf}in_proj_qkvz.weight"], (channels + inner, dim)
    take = [partial(_take, order=order) for order in (np.concatenate(qkv), z)]
    return [
        loaded(checkpoint, f"{blk}attn_qkv.weight", origin, shape, take[0], (channels, dim)),
        loaded(checkpoint, f"{blk}attn_gate.weight", origin, shape, take[1], (inner, dim)),
        loaded(checkpoint, f"{blk}ssm_ba.weight", [f"{hf}in_proj_ba.weight"], (2 * values, dim)),
        *_rest(checkpoint, hf, blk, dim, np.arange(values)),
    ]


def _of_qwen35(checkpoint: Checkpoint, hf: str, blk: str, dim: int) -> list[Source]:
    """The mixed projections of Qwen3.5. In GGUF, v head h uses k head h modulo the number of k heads."""
    config = checkpoint.config
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    inner, before = values * value_dim, 2 * keys * key_dim
    order = np.arange(values).reshape(keys, -1).T.reshape(-1)
    rows = _rows_of_heads(order, value_dim)
    qkv = np.concatenate([np.arange(before), before + rows])
    sources = []
    for target, origin, permutation in (
        ("attn_qkv", "in_proj_qkv", qkv),
        ("attn_gate", "in_proj_z", rows),
        ("ssm_beta", "in_proj_b", order),
        ("ssm_alpha", "in_proj_a", order),
    ):
        shape, take = (len(permutation), dim), partial(_take, order=permutation)
        sources.append(loaded(checkpoint, f"{blk}{target}.weight", [f"{hf}{origin}.weight"], shape, take))
    assert len(rows) == inner
    return [*sources, *_rest(checkpoint, hf, blk, dim, order)]


def _rest(checkpoint: Checkpoint, hf: str, blk: str, dim: int, order: Array) -> list[Source]:
    """The tensors that both families have, with v heads in this order."""
    config, values = checkpoint.config, len(order)
    keys, taps = config.integer("linear_num_key_heads"), config.integer("linear_conv_kernel_dim")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    rows = _rows_of_heads(order, value_dim)
    before = 2 * keys * key_dim
    channels, heads = np.concatenate([np.arange(before), before + rows]), (values,)

    def conv(array: Array) -> Array:
        taken: Array = _columns(array)[channels]
        return taken

    def out(array: Array) -> Array:
        columns: Array = array[:, rows]
        return columns

    count = len(channels)
    return [
        loaded(
            checkpoint,
            f"{blk}ssm_conv1d.weight",
            [f"{hf}conv1d.weight"],
            (count, 1, taps),
            conv,
            (count, taps),
        ),
        loaded(checkpoint, f"{blk}ssm_dt.bias", [f"{hf}dt_bias"], heads, partial(_take, order=order)),
        loaded(checkpoint, f"{blk}ssm_a", [f"{hf}A_log"], heads, lambda a: minus_exp(a[order])),
        loaded(checkpoint, f"{blk}ssm_norm.weight", [f"{hf}norm.weight"], (value_dim,)),
        loaded(checkpoint, f"{blk}ssm_out.weight", [f"{hf}out_proj.weight"], (dim, len(rows)), out),
    ]


def mamba(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """The Mamba-2 layers of any family."""
    config, dim, blk = checkpoint.config, sizes["D"], f"blk.{layer}."
    if not config.values["state_layers"][layer]:
        return []
    ssm = config.values["ssm"]
    hf = ssm["prefix"].format(layer)
    inner, taps, heads, groups = ssm["heads"] * ssm["head_dim"], ssm["taps"], ssm["heads"], ssm["groups"]
    channels = inner + 2 * groups * ssm["state"]
    rows = inner + channels + heads
    factors = config.get("factors", {})

    def into(array: Array) -> Array:
        if not factors:
            return array
        states = groups * ssm["state"]
        counts = {"z": inner, "x": inner, "B": states, "C": states, "d": heads}
        pairs = [(n, *factors[f"ssm_in {part}"]) for part, n in counts.items()]
        of_rows = [np.full(n, (read if array.ndim > 1 else 1) * given) for n, read, given in pairs]
        return (array.astype(np.float32).T * np.concatenate(of_rows).astype(np.float32)).T

    def column(array: Array) -> Array:
        return array[:, None]

    def out(array: Array) -> Array:
        factor = math.prod(factors.get("ssm_out", ()))
        return array if factor == 1 else array.astype(np.float32) * np.float32(factor)

    def one(target: str, origin: str, shape: tuple[int, ...], change: Rearrange, *result: int) -> Source:
        return loaded(checkpoint, blk + target, [hf + origin], shape, change, result or shape)

    tensors = [
        one("ssm_in.weight", "in_proj.weight", (rows, dim), into),
        one("ssm_conv1d.weight", "conv1d.weight", (channels, 1, taps), _columns, channels, taps),
        one("ssm_dt.bias", "dt_bias", (heads,), _same),
        one("ssm_a", "A_log", (heads,), lambda array: column(minus_exp(array)), heads, 1),
        one("ssm_d", "D", (heads,), column, heads, 1),
        one("ssm_out.weight", "out_proj.weight", (dim, inner), out),
    ]
    if ssm["conv_bias"]:
        tensors.append(one("ssm_conv1d.bias", "conv1d.bias", (channels,), _same))
    if ssm.get("norm", True):
        grouped = groups, inner // groups
        tensors.append(
            one("ssm_norm.weight", "norm.weight", (inner,), lambda a: a.reshape(grouped), *grouped)
        )
    if ssm["bias"]:
        tensors.append(one("ssm_in.bias", "in_proj.bias", (rows,), into))
    if ssm.get("out_bias", ssm["bias"]):
        tensors.append(one("ssm_out.bias", "out_proj.bias", (dim,), out))
    return tensors


def nemotron_h(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """Mamba-2, and the biases of routers."""
    sources = mamba(checkpoint, layer, sizes, down_layout)
    if checkpoint.config.values["expert_layers"][layer]:
        origin = f"backbone.layers.{layer}.mixer.gate.e_score_correction_bias"
        sources.append(loaded(checkpoint, f"blk.{layer}.exp_probs_b.bias", [origin], (sizes["E"],)))
    return sources


def granite_hybrid(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """Mamba-2 layers, and FFNs with fused gate and up; there may be a shared expert, too."""
    sources, hf, blk = (
        mamba(checkpoint, layer, sizes, down_layout),
        f"model.layers.{layer}.",
        f"blk.{layer}.",
    )
    dim, shared = sizes["D"], sizes.get("S", 0 if "E" in sizes else sizes["N"])
    if shared:
        kind, mlp = "_shexp" if "E" in sizes else "", f"{hf}shared_mlp."
        joined, out = f"{mlp}input_linear.weight", f"{mlp}output_linear.weight"
        sources += _halves(checkpoint, joined, blk, kind, (shared, dim))
        target = f"{blk}ffn_down{kind}.weight"
        sources.append(down_source(checkpoint, target, out, (dim, shared), down_layout))
    if "E" in sizes:
        moe, e, m = f"{hf}block_sparse_moe.", sizes["E"], sizes["M"]
        sources.append(
            loaded(checkpoint, f"{blk}ffn_gate_inp.weight", [f"{moe}router.layer.weight"], (e, dim))
        )
        sources += _halves(checkpoint, f"{moe}input_linear.weight", blk, "_exps", (e, m, dim))
        target, origin = f"{blk}ffn_down_exps.weight", f"{moe}output_linear.weight"
        sources.append(down_source(checkpoint, target, origin, (e, dim, m), down_layout))
    return sources


def _experts(checkpoint: Checkpoint, hf: str, blk: str, sizes: Sizes, down_layout: str) -> list[Source]:
    """Experts stored in one tensor, as in transformers, or one tensor for each expert. A tensor of all
    experts may be transposed (as published for Qwen3-VL and Llama 4)."""
    e, m, dim = sizes["E"], sizes["M"], sizes["D"]
    target, both, down = f"{blk}ffn_down_exps.weight", f"{hf}gate_up_proj", f"{hf}down_proj"
    if both in checkpoint.files:
        stored = [checkpoint.shape(name) for name in (both, down) if name in checkpoint.files]
        turned = stored == [(e, dim, 2 * m), (e, m, dim)]  # one of the two may be square, but not both
        sources = _halves(checkpoint, both, blk, "_exps", (e, m, dim), turned=turned)
        return [*sources, down_source(checkpoint, target, down, (e, dim, m), down_layout, turned=turned)]
    sources = []
    for part in ("gate", "up"):
        names = [f"{hf}{i}.{part}_proj.weight" for i in range(e)]
        sources.append(loaded(checkpoint, f"{blk}ffn_{part}_exps.weight", names, (m, dim)))
    names = [f"{hf}{i}.down_proj.weight" for i in range(e)]
    if down_layout == "by_neuron":
        return [*sources, loaded(checkpoint, target, names, (dim, m), np.transpose, (m, dim))]
    return [*sources, loaded(checkpoint, target, names, (dim, m))]


def _halves(
    checkpoint: Checkpoint,
    origin: str,
    blk: str,
    kind: str,
    shape: tuple[int, ...],
    *,
    turned: bool = False,
) -> list[Source]:
    """Gate and up from one tensor with the rows of both, or with ``turned`` the columns; ``shape`` is the
    shape of one of them."""
    *experts, n, dim = shape
    stored = (*experts, dim, 2 * n) if turned else (*experts, 2 * n, dim)
    parts = {"gate": slice(0, n), "up": slice(n, None)}
    return [
        loaded(
            checkpoint,
            f"{blk}ffn_{part}{kind}.weight",
            [origin],
            stored,
            partial(_some, rows=rows, turned=turned),
            shape,
        )
        for part, rows in parts.items()
    ]


def down_source(
    checkpoint: Checkpoint,
    target: str,
    origin: str,
    shape: tuple[int, ...],
    down_layout: str,
    *,
    turned: bool = False,
) -> Source:
    """Down of this shape; ``turned``: the checkpoint stores it transposed."""
    by_neuron, other = down_layout == "by_neuron", (*shape[:-2], *shape[:-3:-1])
    change = _same if by_neuron == turned else _turned
    return loaded(
        checkpoint, target, [origin], other if turned else shape, change, other if by_neuron else shape
    )


def _rows_of_heads(order: Array, rows: int) -> Array:
    """The indices of all rows when heads of ``rows`` rows are in this order."""
    numbers: Array = (order[:, None] * rows + np.arange(rows)).reshape(-1)
    return numbers


def minus_exp(values: Array) -> Array:
    return -np.exp(values.astype(np.float32))


def _same(values: Array) -> Array:
    return values


def _columns(values: Array) -> Array:
    """A convolution's weights ``[channels, 1, taps]`` as a matrix."""
    return values[:, 0]


def _take(values: Array, order: Array) -> Array:
    return values[order]


def _some(values: Array, rows: slice, *, turned: bool) -> Array:
    return (_turned(values) if turned else values)[..., rows, :]


def _turned(values: Array) -> Array:
    return values.swapaxes(-1, -2)

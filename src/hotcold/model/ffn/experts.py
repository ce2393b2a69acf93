"""Experts of a model: their metadata, the tensors of a layer, and its router.

Names are llama.cpp's: ``ffn_gate_inp`` is the router, ``exp_probs_b`` its selection bias, and
``ffn_{gate,up,down}_exps`` have the concatenated matrices of a layer's experts. ``*_shexp`` belong to a
shared expert, which every token uses; ``ffn_gate_inp_shexp`` gives its factor."""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.formats.gguf import GGUFFile, TensorInfo
from hotcold.formats.stored import StoredTensor
from hotcold.formats.words import MAX_EXPERTS
from hotcold.kernels.backend import (
    MAX_CHOSEN,
    MAX_EXPERT_GROUPS,
    Backend,
    Chosen,
    ExpertGroups,
    FFNTensors,
    Floats,
    equal_ends,
)
from hotcold.kernels.checks import wrong_groups
from hotcold.model.families import Family
from hotcold.model.keys import Keys, ModelError
from hotcold.model.reading import stored_matrix
from hotcold.values import shown

Shape = tuple[int, ...]

#: Score of each ``expert_gating_func``; 0 is unset. A softmax of only the chosen experts equals one of all
#: experts with normalised factors.
_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax"}
_OF_THE_CHOSEN = 3


@dataclass(frozen=True)
class Experts:
    """The experts of each layer; a token uses ``chosen`` of ``count``, and always a shared expert, if any.
    Where layers differ (Nemotron's Puzzle), ``chosen`` and ``neurons`` are maxima."""

    count: int  #: E
    chosen: int  #: k
    neurons: int  #: of each expert
    score: str  #: with ``normalise`` and ``scale``, as in :meth:`Backend.router`
    normalise: bool
    scale: float
    shared: int = 0  #: neurons of the shared expert; 0: none
    #: the shared expert is an ordinary FFN parallel to the experts; both have norms of their own, and the
    #: router has another norm of the residual stream
    beside: bool = False
    factor_of_input: bool = False  #: as :attr:`Family.factor_of_input`
    groups: ExpertGroups | None = None  #: None: a token may choose any experts
    latent: int = 0  #: input and output width of experts except the shared one; 0: the model's
    #: ``chosen`` and ``neurons`` by layer, if they differ; zeros in a layer without experts
    by_layer: tuple[tuple[int, int], ...] = ()

    def of(self, layer: int) -> "Experts":
        """Returns the experts of one layer that has experts."""
        if not self.by_layer:
            return self
        chosen, neurons = self.by_layer[layer]
        return replace(self, chosen=chosen, neurons=neurons, by_layer=())

    @property
    def shared_kind(self) -> str:
        """Suffix of the names of the shared expert's tensors."""
        return "" if self.beside else "_shexp"

    def buffers(self, dim: int) -> dict[str, Shape]:
        """Returns names and row shapes of buffers (:meth:`DeviceBuffers.buffer`) that layers of width ``dim``
        share."""
        if self.latent:
            return dict.fromkeys(("latent x", "latent out"), (self.latent,))
        if self.factor_of_input:
            return {"experts in": (dim,), "one": (1,)}
        return dict.fromkeys(("experts in", "experts out", "shared out"), (dim,)) if self.beside else {}

    @property
    def ends(self) -> tuple[int, ...]:
        """End of each expert's neurons."""
        return equal_ends(self.count * self.neurons, self.count)


def ffn_names(blk: str, present: Container[str]) -> tuple[str, str]:
    """Returns names of up and down in a layer without experts; RWKV has other names."""
    if f"{blk}channel_mix_key.weight" in present:
        return "channel_mix_key", "channel_mix_value"
    return "ffn_up", "ffn_down"


def chosen_buffers(ops: Backend, rows: int, k: int) -> Chosen:
    """Makes buffers for the choices of ``rows`` rows, of k experts each."""
    return Chosen(ops.zeros((rows, k), np.int32), ops.zeros((rows, k)))


def read_experts(
    keys: Keys, family: Family, layers: int, most_neurons: int, tensors: Mapping[str, TensorInfo]
) -> Experts | None:
    """Reads the shape of experts; None without any. ModelError names key, value and allowed values."""
    count = keys.whole("expert_count", 0, MAX_EXPERTS, default=0)
    if not count:
        return None
    by_layer = _by_layer(keys, family, layers, most_neurons // count, count)
    chosen = keys.alike("expert_used_count", 1, min(count, MAX_CHOSEN), layers) if not by_layer else 0
    chosen = max((k for k, _ in by_layer), default=chosen)
    function = keys.whole("expert_gating_func", 0, max(_SCORES), default=0)
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    score = _SCORES.get(function, "sigmoid" if biased else "softmax")
    normalise: Any = keys.get("expert_weights_norm", True)
    if not isinstance(normalise, bool):
        raise ModelError(f"{keys.name('expert_weights_norm')} is {shown(normalise)}: a truth value is needed")
    shared_experts = keys.whole("expert_shared_count", 0, MAX_EXPERTS, default=1)
    implied = _shape(tensors, "ffn_up_shexp")[:1] if shared_experts else ()
    shared = keys.whole("expert_shared_feed_forward_length", 0, most_neurons, default=sum(implied))
    if beside := any(name.endswith(".pre_ffw_norm_2.weight") for name in tensors):
        shared = keys.alike("feed_forward_length", 1, most_neurons, layers)
    return Experts(
        count=count,
        chosen=chosen,
        neurons=max(n for _, n in by_layer)
        if by_layer
        else _neurons(keys, family, layers, most_neurons // count, chosen, tensors),
        score=score,
        normalise=normalise or function == _OF_THE_CHOSEN,
        scale=keys.factor("expert_weights_scale", 1.0),
        shared=shared,
        beside=beside,
        factor_of_input=_of_input(keys, family, chosen),
        groups=_groups(keys, count, chosen, best=2 if biased or score == "sigmoid" else 1),
        latent=keys.whole("moe_latent_size", 0, 1 << 17, default=0),
        by_layer=by_layer,
    )


def _by_layer(keys: Keys, family: Family, layers: int, most: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns the experts that a token chooses in each layer, and their neurons, if layers differ.
    ModelError: in a layer only one of the two is 0."""
    chosen_key, neurons_key = "expert_used_count", "expert_feed_forward_length"
    if not family.one_part or neurons_key not in keys:
        return ()
    chosen = keys.per_layer(chosen_key, 0, min(count, MAX_CHOSEN), layers)
    neurons = keys.per_layer(neurons_key, 0, most, layers)
    if len({*chosen} - {0}) < 2 and len({*neurons} - {0}) < 2:
        return ()
    arrays = not isinstance(keys.get(chosen_key), int), not isinstance(keys.get(neurons_key), int)
    wrong = [i for i, (k, n) in enumerate(zip(chosen, neurons, strict=True)) if bool(k) != bool(n)]
    if wrong and all(arrays):
        i = wrong[0]
        got = f"{keys.name(chosen_key)}[{i}] is {chosen[i]} and {neurons_key}[{i}] {neurons[i]}"
        raise ModelError(f"{got}: both or none may be 0")
    return tuple((k, n) if k and n else (0, 0) for k, n in zip(chosen, neurons, strict=True))


def _groups(keys: Keys, count: int, chosen: int, best: int) -> ExpertGroups | None:
    """Reads the groups of experts. A group ranks by the sum of its two largest ranks (DeepSeek-V3), with a
    softmax without a bias (DeepSeek-V2) by the largest."""
    groups = keys.whole("expert_group_count", 0, MAX_EXPERT_GROUPS, default=0)
    if groups < 2:
        return None
    grouping = ExpertGroups(groups, keys.whole("expert_group_used_count", 1, groups, default=groups), best)
    if wrong := wrong_groups(count, chosen, grouping):
        raise ModelError(f"{keys.name('expert_group_count')} is {groups}: {wrong}")
    return None if grouping.used == groups else grouping


def dense_layers(keys: Keys, layers: int) -> frozenset[int]:
    """Returns the layers with an ordinary FFN in a model of experts: the first layers, and all later ones
    except the last of each ``interleave_moe_layer_step``."""
    first = keys.whole("leading_dense_block_count", 0, layers, default=0)
    step = keys.whole("interleave_moe_layer_step", 0, layers, default=1) or 1
    return frozenset(i for i in range(layers) if i < first or (i + 1) % step)


def layer_neurons(
    keys: Keys, family: Family, layers: int, experts: Experts | None, dense: frozenset[int], most: int
) -> tuple[int, ...]:
    """Returns N of each layer, of all experts together; 0 in a layer without an FFN."""
    key, least = "feed_forward_length", 0 if family.one_part else 1
    if experts is None:
        return keys.per_layer(key, least, most, layers)
    of_experts = [experts.count * experts.of(i).neurons for i in range(layers)]
    if not family.one_part and not dense:
        return tuple(of_experts)
    stated = keys.per_layer(key, least, most, layers)
    if experts.by_layer and (wrong := [i for i, n in enumerate(stated) if bool(n) != bool(of_experts[i])]):
        got = f"{keys.name(key)}[{wrong[0]}] is {stated[wrong[0]]}"
        raise ModelError(f"{got}, which differs from expert_feed_forward_length of the layer")
    return tuple(n if i in dense or not n else of_experts[i] for i, n in enumerate(stated))


def _of_input(keys: Keys, family: Family, chosen: int) -> bool:
    if family.factor_of_input and chosen > 1:
        got = f"{keys.name('expert_used_count')} is {chosen}"
        raise ModelError(f"{got}: 1 is needed where an expert's factor multiplies its input")
    return family.factor_of_input


def _shape(tensors: Mapping[str, TensorInfo], name: str) -> Shape:
    """Returns a tensor's shape in the first layer that has it; empty if there is none."""
    sizes = (info.shape for each, info in tensors.items() if re.fullmatch(rf"blk\.\d+\.{name}\.weight", each))
    return next(sizes, ())


def _neurons(
    keys: Keys, family: Family, layers: int, most: int, chosen: int, tensors: Mapping[str, TensorInfo]
) -> int:
    """Returns the neurons of an expert, from its own key. Without that key, the shape of up shows the meaning
    of ``feed_forward_length``: the neurons of one expert (Mixtral), or of the ``chosen`` together (first
    files of Qwen2-MoE)."""
    expert_key, layer_key = "expert_feed_forward_length", "feed_forward_length"
    if expert_key in keys:
        return keys.alike(expert_key, 1, most, layers, none=family.one_part)
    up = _shape(tensors, "ffn_up_exps")
    neurons, rest = divmod(keys.alike(layer_key, 1, most * chosen, layers, none=family.one_part), chosen)
    if up[1:2] == (neurons,) and not rest:
        return neurons
    return keys.alike(layer_key, 1, most, layers, none=family.one_part)


def expert_shapes(
    experts: Experts, dim: int, blk: str, layout: str, present: Container[str], *, gated: bool
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns shapes by name of a layer's required and of its optional tensors."""
    e, n, d = experts.count, experts.neurons, experts.latent or dim
    matrices: dict[str, Shape] = {"ffn_up_exps": (e, n, d)}
    matrices["ffn_down_exps"] = (e, n, d) if layout == "by_neuron" else (e, d, n)
    biases: dict[str, Shape] = {"ffn_gate_inp": (e,), "ffn_up_exps": (e, n), "ffn_down_exps": (e, d)}
    if gated and f"{blk}ffn_gate_up_exps.weight" in present:
        matrices["ffn_gate_up_exps"], biases["ffn_gate_up_exps"] = (e, 2 * n, d), (e, 2 * n)
        del matrices["ffn_up_exps"], biases["ffn_up_exps"]
    elif gated:
        matrices["ffn_gate_exps"], biases["ffn_gate_exps"] = (e, n, d), (e, n)
    if experts.latent:
        matrices |= {"ffn_latent_down": (d, dim), "ffn_latent_up": (dim, d)}
    required = {f"{blk}{name}.weight": shape for name, shape in matrices.items()}
    required[f"{blk}ffn_gate_inp.weight"] = (e, dim)
    optional = {f"{blk}{name}.bias": shape for name, shape in biases.items()}
    optional[f"{blk}exp_probs_b.bias"] = (e,)
    if s := experts.shared:
        parts = {"ffn_up": (s, dim), "ffn_down": (s, dim) if layout == "by_neuron" else (dim, s)}
        if gated:
            parts["ffn_gate"] = (s, dim)
        required |= {f"{blk}{name}{experts.shared_kind}.weight": shape for name, shape in parts.items()}
        if not experts.beside:
            optional[f"{blk}ffn_gate_inp_shexp.weight"] = (dim,)
    if experts.beside:
        norms = "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"
        required |= {f"{blk}{name}.weight": (dim,) for name in norms} | {f"{blk}ffn_gate_inp.scale": (dim,)}
        optional[f"{blk}ffn_down_exps.scale"] = (e,)
    return required, optional


def expert_tensors(
    file: GGUFFile,
    experts: Experts,
    blk: str,
    vector: Callable[[str], Floats | None],
    *,
    gated: bool,
    **facts: Any,
) -> FFNTensors:
    """Returns a layer's experts, still in the file. ``vector`` reads a bias, or returns None without one;
    ``facts`` are other fields of :class:`FFNTensors`."""

    def rows(name: str) -> StoredTensor:
        """Returns the concatenated rows of all experts."""
        if experts.beside and name == "ffn_down_exps":  # its factors are the router's
            return file.stored(f"{blk}{name}.weight").flat()
        return stored_matrix(file, f"{blk}{name}", vector).flat()

    def bias(name: str) -> Floats | None:
        return vector(f"{blk}{name}.bias")

    gate: StoredTensor | None
    if f"{blk}ffn_gate_up_exps.weight" in file.tensors:
        gate, up, gate_bias, up_bias = _halves(experts, rows("ffn_gate_up_exps"), bias("ffn_gate_up_exps"))
    else:
        gate, up = rows("ffn_gate_exps") if gated else None, rows("ffn_up_exps")
        gate_bias, up_bias = (bias(f"ffn_{part}_exps") for part in ("gate", "up"))
    return FFNTensors(
        gate=gate,
        up=up,
        down=rows("ffn_down_exps"),
        gate_bias=None if gate_bias is None else gate_bias.reshape(-1),
        up_bias=None if up_bias is None else up_bias.reshape(-1),
        down_bias=bias("ffn_down_exps"),
        experts=experts.count,
        chosen=experts.chosen,
        **facts,
    )


def _halves(
    experts: Experts, fused: StoredTensor, bias: Floats | None
) -> tuple[StoredTensor, StoredTensor, Floats | None, Floats | None]:
    """Splits a tensor with each expert's gate rows, then its up rows, into gate, up and their biases."""
    order = np.arange(2 * experts.count * experts.neurons).reshape(experts.count, 2, -1)
    first, second = (order[:, half].reshape(-1) for half in (0, 1))
    biases = (None, None) if bias is None else (bias.reshape(-1)[first], bias.reshape(-1)[second])
    return fused.take_rows(first), fused.take_rows(second), *biases

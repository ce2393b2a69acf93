"""Experts of a model: what a file says of them, the tensors of a layer, and its router.

Names are llama.cpp's: ``ffn_gate_inp`` is the router, ``exp_probs_b`` is added where it chooses, and
``ffn_{gate,up,down}_exps`` have the matrices of all experts of a layer, one after another. ``*_shexp`` are a
shared expert's, which every token gets, and ``ffn_gate_inp_shexp`` gives the factor that it gets it with."""

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

#: ``expert_gating_func``, and which score it is; 0 says nothing. A softmax of the
#: chosen alone is one of all experts where the factors are made to add up to 1.
_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax"}
_OF_THE_CHOSEN = 3


@dataclass(frozen=True)
class Experts:
    """The experts of each layer; a token gets ``chosen`` of ``count``, and always the shared one, if any.
    Where layers differ (Nemotron's Puzzle), ``chosen`` and ``neurons`` are the most."""

    count: int  #: E
    chosen: int  #: k
    neurons: int  #: of each
    score: str  #: with ``normalise`` and ``scale``, those of :meth:`Backend.router`
    normalise: bool
    scale: float
    shared: int = 0  #: neurons of the shared expert; 0: there is none
    #: the shared expert is an ordinary FFN beside the experts; each of the two has norms of its own, and the
    #: router another one of the residual stream
    beside: bool = False
    factor_of_input: bool = False  #: as :attr:`Family.factor_of_input`
    groups: ExpertGroups | None = None  #: None: a token may get any
    latent: int = 0  #: dimensions that experts read and write, the shared one excepted; 0: those of the model
    #: ``chosen`` and ``neurons`` of each layer, where they differ; zeros where a layer has no experts
    by_layer: tuple[tuple[int, int], ...] = ()

    def of(self, layer: int) -> "Experts":
        """The same for a layer that has experts."""
        if not self.by_layer:
            return self
        chosen, neurons = self.by_layer[layer]
        return replace(self, chosen=chosen, neurons=neurons, by_layer=())

    @property
    def shared_kind(self) -> str:
        """The last part of the names of the shared expert's tensors."""
        return "" if self.beside else "_shexp"

    def buffers(self, dim: int) -> dict[str, Shape]:
        """Names and shapes of a row, in :meth:`DeviceBuffers.buffer`, that layers of ``dim`` dimensions
        share."""
        if self.latent:
            return dict.fromkeys(("latent x", "latent out"), (self.latent,))
        if self.factor_of_input:
            return {"experts in": (dim,), "one": (1,)}
        return dict.fromkeys(("experts in", "experts out", "shared out"), (dim,)) if self.beside else {}

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each one's neurons end."""
        return equal_ends(self.count * self.neurons, self.count)


def ffn_names(blk: str, present: Container[str]) -> tuple[str, str]:
    """Names of up and down of a layer's FFN without experts; RWKV's are others."""
    if f"{blk}channel_mix_key.weight" in present:
        return "channel_mix_key", "channel_mix_value"
    return "ffn_up", "ffn_down"


def chosen_buffers(ops: Backend, rows: int, k: int) -> Chosen:
    """The choices of ``rows`` rows, each of which chooses k experts."""
    return Chosen(ops.zeros((rows, k), np.int32), ops.zeros((rows, k)))


def read_experts(
    keys: Keys, family: Family, layers: int, most_neurons: int, tensors: Mapping[str, TensorInfo]
) -> Experts | None:
    """Reads the shape of experts; None where the file has none. ModelError has the key, the value, those
    allowed."""
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
    some = keys.whole("expert_shared_count", 0, MAX_EXPERTS, default=1)
    implied = _shape(tensors, "ffn_up_shexp")[:1] if some else ()
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
    """How many experts a token gets in each layer, and their neurons, if layers differ in them. ModelError:
    only one of the two is 0 in a layer, or all are."""
    used, own = "expert_used_count", "expert_feed_forward_length"
    if not family.one_part or own not in keys:
        return ()
    chosen = keys.per_layer(used, 0, min(count, MAX_CHOSEN), layers)
    neurons = keys.per_layer(own, 0, most, layers)
    if len({*chosen} - {0}) < 2 and len({*neurons} - {0}) < 2:
        return ()
    arrays = not isinstance(keys.get(used), int), not isinstance(keys.get(own), int)
    wrong = [i for i, (k, n) in enumerate(zip(chosen, neurons, strict=True)) if bool(k) != bool(n)]
    if wrong and all(arrays):
        i = wrong[0]
        seen = f"{keys.name(used)}[{i}] is {chosen[i]} and {own}[{i}] {neurons[i]}"
        raise ModelError(f"{seen}: both or none may be 0")
    return tuple((k, n) if k and n else (0, 0) for k, n in zip(chosen, neurons, strict=True))


def _groups(keys: Keys, count: int, chosen: int, best: int) -> ExpertGroups | None:
    """Groups rank by the sum of their two largest ranks (DeepSeek-V3); those of a softmax without a bias
    (DeepSeek-V2) by the largest."""
    groups = keys.whole("expert_group_count", 0, MAX_EXPERT_GROUPS, default=0)
    if groups < 2:
        return None
    found = ExpertGroups(groups, keys.whole("expert_group_used_count", 1, groups, default=groups), best)
    if wrong := wrong_groups(count, chosen, found):
        raise ModelError(f"{keys.name('expert_group_count')} is {groups}: {wrong}")
    return None if found.used == groups else found


def dense_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers of a model of experts that have an ordinary FFN: the first ones, and among the others those
    that are not the last of each so many."""
    first = keys.whole("leading_dense_block_count", 0, layers, default=0)
    step = keys.whole("interleave_moe_layer_step", 0, layers, default=1) or 1
    return frozenset(i for i in range(layers) if i < first or (i + 1) % step)


def layer_neurons(
    keys: Keys, family: Family, layers: int, experts: Experts | None, dense: frozenset[int], most: int
) -> tuple[int, ...]:
    """N of each layer, of all experts together; 0 where a layer has no FFN."""
    key, least = "feed_forward_length", 0 if family.one_part else 1
    if experts is None:
        return keys.per_layer(key, least, most, layers)
    of_experts = [experts.count * experts.of(i).neurons for i in range(layers)]
    if not family.one_part and not dense:
        return tuple(of_experts)
    stated = keys.per_layer(key, least, most, layers)
    if experts.by_layer and (wrong := [i for i, n in enumerate(stated) if bool(n) != bool(of_experts[i])]):
        seen = f"{keys.name(key)}[{wrong[0]}] is {stated[wrong[0]]}"
        raise ModelError(f"{seen}, which differs from expert_feed_forward_length of the layer")
    return tuple(n if i in dense or not n else of_experts[i] for i, n in enumerate(stated))


def _of_input(keys: Keys, family: Family, chosen: int) -> bool:
    if family.factor_of_input and chosen > 1:
        seen = f"{keys.name('expert_used_count')} is {chosen}"
        raise ModelError(f"{seen}: 1 is needed where an expert's factor multiplies its input")
    return family.factor_of_input


def _shape(tensors: Mapping[str, TensorInfo], name: str) -> Shape:
    """Returns a tensor's shape in the first layer that has it; empty if there is none."""
    found = (info.shape for each, info in tensors.items() if re.fullmatch(rf"blk\.\d+\.{name}\.weight", each))
    return next(found, ())


def _neurons(
    keys: Keys, family: Family, layers: int, most: int, chosen: int, tensors: Mapping[str, TensorInfo]
) -> int:
    """Returns the neurons of an expert, from a key of its own. Without one, ``feed_forward_length`` counts
    those of one expert (Mixtral) or of the ``chosen`` together (first files of Qwen2-MoE), as the shape of
    up tells."""
    own, common = "expert_feed_forward_length", "feed_forward_length"
    if own in keys:
        return keys.alike(own, 1, most, layers, none=family.one_part)
    up = _shape(tensors, "ffn_up_exps")
    each, rest = divmod(keys.alike(common, 1, most * chosen, layers, none=family.one_part), chosen)
    if up[1:2] == (each,) and not rest:
        return each
    return keys.alike(common, 1, most, layers, none=family.one_part)


def expert_shapes(
    experts: Experts, dim: int, blk: str, layout: str, present: Container[str], *, gated: bool
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes by name of what a layer needs, and of what it may have."""
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
    """A layer's experts, still in the file. ``vector`` reads a bias, None where there is none; ``facts`` are
    other fields of :class:`FFNTensors`."""

    def rows(name: str) -> StoredTensor:
        """The rows of all experts, one expert after another."""
        if experts.beside and name == "ffn_down_exps":  # whose factors are the router's
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
    """Gate, up and their biases of a tensor that has each expert's gate rows, then its up rows."""
    order = np.arange(2 * experts.count * experts.neurons).reshape(experts.count, 2, -1)
    first, second = (order[:, half].reshape(-1) for half in (0, 1))
    biases = (None, None) if bias is None else (bias.reshape(-1)[first], bias.reshape(-1)[second])
    return fused.take_rows(first), fused.take_rows(second), *biases

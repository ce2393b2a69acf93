"""Reading of a layer's FFN from a file: the tensors, and the class for its kind."""

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import numpy as np

from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import FFNTensors, FFNWeights, Floats
from hotcold.model.config import Config
from hotcold.model.ffn.experts import expert_shapes, expert_tensors, ffn_names
from hotcold.model.ffn.feed_forward import FeedForward
from hotcold.model.ffn.gate_cut import read_cut
from hotcold.model.ffn.latent import LatentFFN
from hotcold.model.ffn.parallel import ParallelExperts
from hotcold.model.ffn.plain import PlainFFN
from hotcold.model.ffn.routed import RoutedFFN, Router, SharedExpert
from hotcold.model.ffn.scaled_input import ScaledInputFFN
from hotcold.model.mixers.mixer import Tensors
from hotcold.model.reading import Shape, TensorReader, made_matrix

#: Makes a backend's weights of a layer's tensors.
MakeWeights = Callable[[FFNTensors], FFNWeights]


def ffn_shapes(config: Config, layer: int, present: Container[str]) -> Tensors:
    """Returns shapes by name of the required and of the optional tensors of a layer's FFN."""
    d, n, blk = config.dim, config.neurons[layer], f"blk.{layer}."
    if config.normed:
        return config.normed[layer].tensors(d, blk), {}
    if experts := config.experts_of(layer):
        return expert_shapes(experts, d, blk, config.down_layout, present, gated=config.gated)
    if not n:
        return {}, {}
    fused, (down, layout) = config.family.fused_gate, _down(config, blk, present)
    matrices: dict[str, Shape] = {ffn_names(blk, present)[0]: (2 * n if fused else n, d)}
    if config.gated and not fused:
        matrices["ffn_gate"] = n, d
    matrices[down] = (n, d) if layout == "by_neuron" else (d, n)
    biases = {f"{blk}{name}.bias": (d if name == down else rows[0],) for name, rows in matrices.items()}
    return {f"{blk}{name}.weight": shape for name, shape in matrices.items()}, dict[str, Shape](biases)


def read_feed_forward(
    reader: TensorReader, config: Config, layer: int, make: MakeWeights, router: Router | None
) -> FeedForward:
    """Reads a layer's FFN; ``router`` is the router on the FFN's input. Errors as in :func:`load_weights`."""
    blk, experts = f"blk.{layer}.", config.experts_of(layer)
    if config.normed:
        return config.normed[layer].read(reader, blk)
    weights = _make_weights(reader, read_tensors(reader, config, layer), make)
    if experts is None:
        cut = config.cut_of(layer)
        gates = None if cut is None else read_cut(reader, f"{blk}ffn_gate", config.neurons[layer], cut)
        return PlainFFN(weights, gates, config.mixers[layer].read_shift(reader, blk))
    shared = _read_shared(reader, config, layer) if experts.shared else None
    of_all: dict[str, Any] = {"neurons": weights, "router": router, "shared": shared}
    if experts.latent:
        down, up = (reader.matrix(f"{blk}ffn_latent_{part}") for part in ("down", "up"))
        return LatentFFN(**of_all, down=down, up=up)
    if experts.beside:
        return ParallelExperts(
            **of_all,
            # The router's input is normalised, then divided by the root of D.
            router_input=reader.norm(f"{blk}ffn_gate_inp.scale", config.dim**-0.5),
            input=reader.norm(f"{blk}pre_ffw_norm_2"),
            output=reader.norm(f"{blk}post_ffw_norm_2"),
            shared_output=reader.norm(f"{blk}post_ffw_norm_1"),
        )
    if experts.factor_of_input:
        ones = made_matrix(reader.backend, np.ones((config.dim, 1), np.float32))
        return ScaledInputFFN(**of_all, scale_input=ones)
    return RoutedFFN(**of_all)


def read_router(reader: TensorReader, config: Config, layer: int) -> Router | None:
    """Reads a layer's router; None in a layer without experts."""
    if (experts := config.experts_of(layer)) is None:
        return None
    blk = f"blk.{layer}."
    scale = reader.buffer(f"{blk}ffn_down_exps.scale") if experts.beside else None
    matrix = reader.matrix(f"{blk}ffn_gate_inp")
    return Router(experts, matrix, reader.buffer(f"{blk}exp_probs_b.bias"), scale)


def _make_weights(reader: TensorReader, tensors: FFNTensors, make: MakeWeights) -> FFNWeights:
    weights = make(tensors)
    reader.count(tensors.gate, tensors.up, tensors.down)
    return weights


def _read_shared(reader: TensorReader, config: Config, layer: int) -> SharedExpert:
    gate, name = None, f"blk.{layer}.ffn_gate_inp_shexp.weight"
    if name in reader.file.tensors:
        row = reader.file.stored(name)
        # One row, with either shape in the file.
        nbytes = row.rows * row.row_bytes
        gate = reader.backend.matrix(replace(row, shape=(1, config.dim), rows=1, row_bytes=nbytes))
        reader.count(row)
    tensors = read_shared_tensors(reader, config, layer)
    return SharedExpert(gate, _make_weights(reader, tensors, reader.backend.ffn_weights))


def read_shared_tensors(reader: TensorReader, config: Config, layer: int) -> FFNTensors:
    """Returns the tensors of a layer's shared expert, or of the FFN parallel to the experts."""
    assert config.experts is not None
    kind, blk = config.experts.shared_kind, f"blk.{layer}."
    gate = reader.stored(f"{blk}ffn_gate{kind}") if config.gated else None
    up, down = (reader.stored(f"{blk}ffn_{part}{kind}") for part in ("up", "down"))
    return FFNTensors(gate, up, down, config.down_layout, config.activation, config.threshold_of(layer))


def read_tensors(reader: TensorReader, config: Config, layer: int) -> FFNTensors:
    """Returns the tensors of a layer's neurons, still in the file; their reader counts them."""
    blk = f"blk.{layer}."
    if experts := config.experts_of(layer):
        return expert_tensors(
            reader.file,
            experts,
            blk,
            reader.vector,
            gated=config.gated,
            down_layout=config.down_layout,
            activation=config.activation,
            threshold=config.threshold_of(layer),
        )
    gate, up, gate_bias, up_bias = _gate_and_up(reader, config, blk)
    name, layout = _down(config, blk, reader.file.tensors)
    down, down_bias = reader.stored(f"{blk}{name}"), reader.vector(f"{blk}{name}.bias")
    if config.cut_of(layer) is not None:  # GateCut computes the gate separately
        gate = gate_bias = None
    biases, threshold = (gate_bias, up_bias, down_bias), config.threshold_of(layer)
    return FFNTensors(gate, up, down, layout, config.activation_of(layer), threshold, *biases)


def _gate_and_up(
    reader: TensorReader, config: Config, blk: str
) -> tuple[AnyTensor | None, AnyTensor, Floats | None, Floats | None]:
    """Returns gate and up, then their biases."""
    name = f"{blk}{ffn_names(blk, reader.file.tensors)[0]}"
    up, bias = reader.stored(name), reader.vector(f"{name}.bias")
    if not config.family.fused_gate:
        gate = reader.stored(f"{blk}ffn_gate") if config.gated else None
        return gate, up, reader.vector(f"{blk}ffn_gate.bias"), bias
    gates, ups = slice(0, up.shape[0] // 2), slice(up.shape[0] // 2, None)
    biases = (None, None) if bias is None else (bias[gates], bias[ups])
    return up.take_rows(gates), up.take_rows(ups), *biases


def _down(config: Config, blk: str, present: Container[str]) -> tuple[str, str]:
    by_neuron = f"{blk}ffn_down_t.weight" in present
    return ("ffn_down_t", "by_neuron") if by_neuron else (ffn_names(blk, present)[1], config.down_layout)

"""Makes transformers models sparse in place, and measures and penalises their activations."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from hotcold.errors import UserError
from hotcold.training.libraries import torch
from hotcold.training.modeling_hotcold import (
    ACTIVATION_KEYS,
    DENSE_KEY,
    NAMES,
    SparseActivation,
    activation_name,
    ffns,
    first_projection,
    put_in,
)
from hotcold.training.processes import process_count, sum_of_processes
from hotcold.values import printable

#: ReLU of the gate, or of gate and up (dReLU, arXiv 2406.05955).
Kind = Literal["relu", "drelu"]
KINDS: tuple[Kind, ...] = ("relu", "drelu")

IGNORED = -100  #: label of tokens without a loss, as in transformers
_CLOSE = 1e-2  # largest difference of an FFN of a known form, relative to its largest output


class WatchedActivation(SparseActivation):
    """A :class:`SparseActivation` that keeps figures of the last forward pass.

    In training these are the sum of absolute values, which is differentiable, and the number of zeros. Each
    pass replaces them, so a pass that activation checkpointing repeats has no effect."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__(kind, layer)
        self.counting = False
        self.begin()

    def begin(self) -> None:
        self.magnitude: Any = None  #: sum of absolute values
        self.values, self.zeros = 0, 0

    def forward(self, gate: Any, up: Any = None) -> Any:
        values = super().forward(gate, up)
        if up is None:  # the FFN's own forward calls this once
            self.begin()
        if self.counting or (self.training and torch.is_grad_enabled()):
            magnitude = values.abs().sum(dtype=torch.float32)
            self.magnitude = magnitude if self.magnitude is None else self.magnitude + magnitude
            self.values = self.values + values.numel()
            self.zeros = self.zeros + (values.numel() - torch.count_nonzero(values.detach()))
        if self.counting:
            positive = gate.detach().relu()
            self.gates = positive.square().sum(dtype=torch.float64), torch.count_nonzero(positive)
        return values


def make_sparse(model: Any, activation: Kind = "drelu") -> Any:
    """Replaces the activation of all FFNs of a causal language model in place; returns the model.

    Weights and their names stay. ``config.json`` gets the name of the new activation, so that a checkpoint
    cannot be loaded with the old one by mistake. Call it before the model is compiled or sharded, and before
    or after adapters such as LoRA are added. FFNs without a gate need ``relu``. On a sparse model it changes
    the activation, and thresholds become 0.

    >>> model = make_sparse(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"), "drelu")

    UserError: the activation is not known, or an FFN has an unknown form."""
    if activation not in KINDS:
        raise UserError(f"activation {activation!r}: choose from {', '.join(KINDS)}")
    if not hasattr(model, "config"):
        got = printable(type(model).__name__)
        raise UserError(f"{got} is not a model of transformers: pass the model itself, before DDP or FSDP")
    key = activation_key(model.config)
    modules = list(ffns(model))
    _check_layers(model, {layer for _, _, layer in modules})
    for module, form, layer in modules:
        name = f"the FFN {printable(type(module).__name__)} of layer {layer}"
        if form == "plain" and activation == "drelu":
            raise UserError(f"{name} has no gate: use activation='relu'")
        if not _computes(module, form):
            raise UserError(f"{name} is of an unknown form: it computes more than {_FORMS}")
    if others := _other_activations(model, modules):
        if activation == "relu":
            fix = "activation='drelu' changes only FFNs"
            raise UserError(f"{key} is the activation of {others[0]}, too: {fix}")
        if (dense := getattr(model.config, key)) not in NAMES:
            setattr(model.config, DENSE_KEY, dense)
    put_in(model, lambda layer: WatchedActivation(activation, layer))
    setattr(model.config, key, activation)
    if getattr(model.config, "hidden_act_param", None) is not None:
        model.config.hidden_act_param = None
    return model


def activation_key(config: Any) -> str:
    """The key of the activation in a model's configuration. UserError: it has none."""
    for key in ACTIVATION_KEYS:
        if isinstance(getattr(config, key, None), str):
            return key
    got = printable(type(config).__name__)
    raise UserError(f"{got} names no activation: one of {', '.join(ACTIVATION_KEYS)} is needed")


def _check_layers(model: Any, layers: set[int]) -> None:
    """Raises UserError if some layers have no FFN of a known form."""
    if not layers:
        raise UserError(f"{printable(type(model).__name__)} has no FFN of a known form: {_FORMS} are needed")
    if unknown := set(range(model.config.get_text_config().num_hidden_layers)) - layers:
        raise UserError(f"the FFN of layer {min(unknown)} is of an unknown form: {_FORMS} are needed")


def _other_activations(model: Any, known: list[tuple[Any, str, int]]) -> list[str]:
    """Names of the classes outside FFNs with an activation. UserError: one of them is an unknown FFN."""
    inside = {id(part) for ffn, _, _ in known for part in [ffn, *ffn.children()]}
    names = []
    for module in model.modules():
        if id(module) not in inside and (activation_name(module) or hasattr(module, "activation")):
            names.append(printable(type(module).__name__))
            if re.search("mlp|expert|ffn|feedforward", names[-1].lower()):
                raise UserError(f"the FFN {names[-1]} is of an unknown form: {_FORMS} are needed")
    return names


_FORMS = "gate, up and down projections (separate, fused, or of experts), or fc1 and fc2"


def _computes(module: Any, form: str) -> bool:
    """True if an FFN computes only projections and activation, tested with one random input.

    Other forms would silently lose their other computations, such as multipliers."""
    if form == "plain" or hasattr(module, "sparse_activation"):
        return True
    weight = next(module.parameters())
    if weight.is_meta or hasattr(weight, "device_mesh"):
        raise UserError("the weights are not in memory, or sharded: call make_sparse before that")
    activation = getattr(module, activation_name(module), None)
    if activation is None:
        return False
    experts = form == "experts"
    width = module.gate_up_proj.shape[1] if experts else first_projection(module).in_features
    x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        both = x if experts else first_projection(module)(x)
        gate, up = (both, module.up_proj(x)) if form == "separate" else both.chunk(2, dim=-1)
        product = activation(gate) * up
        computed = module._apply_gate(both) if experts else module(x)
        expected = product if experts else module.down_proj(product)
    if not bool(torch.isfinite(expected).all()):
        raise UserError("an FFN computes values that are not finite: a weight is not a number, or too large")
    return bool((computed - expected).abs().max() <= _CLOSE * expected.abs().max())


def activations_of(model: Any) -> list[WatchedActivation]:
    """The activations of a model; none if it is not sparse."""
    return [module for module in model.modules() if isinstance(module, WatchedActivation)]


def sparse_layers(model: Any) -> list[list[WatchedActivation]]:
    """The activations of a model by layer, also inside wrappers such as DDP. UserError: it has none."""
    layers: dict[int, list[WatchedActivation]] = {}
    for activation in activations_of(model):
        layers.setdefault(activation.layer, []).append(activation)
    if not layers:
        raise UserError(f"{printable(type(model).__name__)} is not sparse: call make_sparse(model) first")
    return [layers[number] for number in sorted(layers)]


def set_thresholds(layers: list[list[WatchedActivation]], thresholds: Sequence[float]) -> None:
    for layer, threshold in zip(layers, thresholds, strict=True):
        for activation in layer:
            activation.threshold = float(threshold)


class SparsityPenalty:
    """The L1 penalty on a model's activations: ``loss = model(**batch).loss + penalty()``.

    Each layer's mean absolute activation counts in units of that layer's first batch, so ``weight`` is the
    cost of the first activations, in nats. Call it after each forward pass in training. Save ``state_dict()``
    with a checkpoint, since the loss after a restart depends on the units."""

    def __init__(self, model: Any, weight: float = 0.3) -> None:
        if not 0 <= weight < math.inf:
            raise UserError(f"weight {weight:g}: a number of at least 0 is needed")
        self._layers, self.weight = sparse_layers(model), weight
        self.units: list[float] = []
        self.zeros: list[Any] = []  #: by layer, share of zeros in the last batch, as tensors

    def __call__(self) -> Any:
        """The penalty of the last forward pass. UserError: that pass stored no activations."""
        means, self.zeros = [], []
        for layer in self._layers:
            used = [activation for activation in layer if activation.magnitude is not None]
            if not used:
                raise UserError(
                    "no activations to penalise: call the penalty once after each forward pass in training; "
                    "activation checkpointing needs use_reentrant=False"
                )
            values = sum(activation.values for activation in used)
            means.append(sum(activation.magnitude for activation in used) / values)
            self.zeros.append(sum(activation.zeros for activation in used) / values)
            for activation in used:
                activation.begin()
        magnitudes = torch.stack([mean.to(means[0].device) for mean in means])
        if not self.units:
            units = sum_of_processes(magnitudes.detach().clone()) / process_count()
            self.units.extend(units.clamp_min(1e-12).tolist())
        return self.weight * (magnitudes / magnitudes.new_tensor(self.units)).mean()

    @property
    def mean_zeros(self) -> float:
        """The share of zeros in the last batch."""
        return sum(map(float, self.zeros)) / max(1, len(self.zeros))

    def state_dict(self) -> dict[str, Any]:
        return {"units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = list(state["units"])


@dataclass(frozen=True)
class Measured:
    """Quality and sparsity of a model on a text."""

    tokens: int  #: predicted tokens
    perplexity: float
    zeros: list[float]  #: share of activations that are zero, by layer; empty for a model that is not sparse
    divergence: float | None = None  #: mean Kullback-Leibler divergence from the reference, nats

    @property
    def mean_zeros(self) -> float:
        return sum(self.zeros) / len(self.zeros) if self.zeros else math.nan


Batch = Any  #: ids ``[B, T]``, or a dictionary of a model's inputs


def measure_sparsity(model: Any, batches: Iterable[Batch], reference: Any = None) -> Measured:
    """Measures zeros by layer, perplexity, and the divergence from a reference model if there is one.

    ``batches`` hold token ids, or inputs of the model's forward (``input_ids``, ``attention_mask``,
    ``labels``). In a distributed run each process passes its own batches, and all get the sum. A model with
    its original activation has no zeros. UserError: there is no batch."""
    activations = activations_of(model)
    device = next(model.parameters()).device
    layers = sorted({activation.layer for activation in activations})
    zeros, values = torch.zeros(2, len(layers), dtype=torch.float64, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with evaluating(model, counting=True), evaluating(reference), torch.no_grad():
        for batch in batches:
            inputs, labels = inputs_of(batch, device)
            logits = model(**inputs, use_cache=False).logits
            others = reference(**inputs, use_cache=False).logits if reference is not None else None
            sums += losses(logits, others, labels)
            for activation in activations:
                zeros[layers.index(activation.layer)] += activation.zeros
                values[layers.index(activation.layer)] += activation.values
                activation.begin()
    for totals in (sums, zeros, values):
        sum_of_processes(totals)
    loss, divergence, tokens = sums.tolist()
    if not tokens:
        raise UserError("there is no token to measure with: give at least one batch of two tokens")
    perplexity = math.exp(min(loss / tokens, 700.0))
    kl = divergence / tokens if reference is not None else None
    return Measured(int(tokens), perplexity, (zeros / values.clamp_min(1)).tolist(), kl)


def losses(logits: Any, others: Any, labels: Any) -> Any:
    """Sums over the predicted tokens of a batch: loss, divergence from other logits if there are some, and
    the number of tokens. Logits in float32 are large, so it takes a window at a time."""
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
    for number, row in enumerate(labels):
        used = row[1:] != IGNORED
        scores = torch.log_softmax(logits[number, :-1][used].float(), dim=-1)
        sums[0] -= scores.gather(1, row[1:][used, None]).sum()
        sums[2] += used.sum()
        if others is not None:
            aim = torch.log_softmax(others[number, :-1][used].float(), dim=-1)
            sums[1] += torch.nn.functional.kl_div(scores, aim, log_target=True, reduction="sum")
    return sums


def inputs_of(batch: Batch, device: Any) -> tuple[dict[str, Any], Any]:
    """Inputs of a model's forward pass without labels; and the labels."""
    if not isinstance(batch, dict):
        batch = {"input_ids": torch.as_tensor(batch)}
    inputs = {key: torch.as_tensor(value).to(device) for key, value in batch.items()}
    if (ids := inputs.get("input_ids")) is not None and ids.ndim != 2:
        got = f"a batch of shape {tuple(ids.shape)}"
        raise UserError(f"{got}: token ids of shape [windows, tokens] are needed")
    labels = inputs.pop("labels", None)
    if labels is None:
        labels = inputs["input_ids"]
        if (mask := inputs.get("attention_mask")) is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
    return inputs, labels


@contextmanager
def evaluating(model: Any, *, counting: bool = False) -> Iterator[None]:
    """Sets a model, if there is one, to evaluation and its activations to counting inside the block."""
    if model is None:
        yield
        return
    training, counters = model.training, activations_of(model) if counting else []
    model.eval()
    for activation in counters:
        activation.counting = True
    try:
        yield
    finally:
        model.train(training)
        for activation in counters:
            activation.counting = False

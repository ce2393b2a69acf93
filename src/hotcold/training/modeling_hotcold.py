"""FFNs of transformers models with ReLU or dReLU as their activation.

Sparse checkpoints hold a copy of this file, so it imports only torch and transformers. The last class of the
copy computes the activation in `config.json`: `AutoModelForCausalLM.from_pretrained(FOLDER,
trust_remote_code=True)` loads it. Its weights have the names of the class in transformers."""

import re
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

#: Keys of `config.json` that name the activation, by family.
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation")
#: Activations of `config.json` that transformers does not have.
NAMES = ("fatrelu", "drelu")
#: Key of the activation of modules that are no FFNs, if they read it from the same key as FFNs.
DENSE_KEY = "dense_hidden_act"
#: Attributes of FFNs that hold the activation.
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "gelu_impl")
#: Projections of FFNs without a gate.
_PLAIN = (
    ("up_proj", "down_proj"), ("fc1", "fc2"), ("fc_in", "fc_out"), ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)  # fmt: skip


class SparseActivation(torch.nn.Module):  # type: ignore[misc]
    """The activation of one FFN: ``relu(gate) * up``, or ``relu(gate) * relu(up)`` for ``drelu``.

    A gate passes if it is greater than ``threshold`` (FATReLU). FFNs without a gate pass one argument."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__()
        self.kind, self.layer, self.threshold = kind, layer, 0.0

    def begin(self) -> None:
        """Prepares for a forward pass of the FFN."""

    def forward(self, gate: Any, up: Any = None) -> Any:
        values = torch.where(gate > self.threshold, gate, 0)
        if up is None:
            return values
        return values * (torch.relu(up) if self.kind == "drelu" else up)

    def extra_repr(self) -> str:
        return f"{self.kind}, threshold={self.threshold:g}"


def ffns(model: Any) -> Iterator[tuple[Any, str, int]]:
    """The FFNs of a model: module, form (separate, fused, experts or plain) and number of the layer."""
    for name, module in model.named_modules():
        number = re.search(r"\.(\d+)(\.|$)", name)
        if number and (form := _form(module)):
            yield module, form, int(number[1])


def _form(module: Any) -> str:
    def modules(*names: str) -> bool:
        return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)

    if modules("gate_proj", "up_proj", "down_proj"):
        return "separate"
    if modules("gate_up_proj", "down_proj"):
        return "fused"
    if _are_experts(module):
        return "experts"
    if activation_name(module) and any(modules(*names) for names in _PLAIN):
        return "plain"
    return ""


def _are_experts(module: Any) -> bool:
    """True if a module holds experts as in transformers 5: gate and up rows of all experts in one tensor."""
    weights = getattr(module, "gate_up_proj", None)
    return (
        isinstance(weights, torch.nn.Parameter)
        and weights.ndim == 3
        and hasattr(module, "_apply_gate")
        and getattr(module, "is_concatenated", False)
        and not getattr(module, "has_bias", True)
    )


def activation_name(module: Any) -> str:
    """The attribute of an FFN that holds its activation; empty if it has none."""
    return next((name for name in _ACTIVATIONS if callable(getattr(module, name, None))), "")


def first_projection(module: Any) -> Any:
    """The first projection of an FFN without experts."""
    names = ("gate_proj", "gate_up_proj", *(first for first, _ in _PLAIN))
    return next(getattr(module, name) for name in names if hasattr(module, name))


def put_in(model: Any, make: Callable[[int], SparseActivation]) -> list[SparseActivation]:
    """Replaces the activation of every FFN by ``make(layer)``. Parameters and their names stay."""
    activations = []
    for module, form, layer in list(ffns(model)):
        activations.append(activation := make(layer))
        if form == "plain":
            setattr(module, activation_name(module), activation)
            continue
        module.sparse_activation = activation
        # Bound methods, unlike closures, follow the module when a model is copied.
        if form == "experts":
            module._apply_gate = MethodType(_apply_gate, module)
            module.forward = MethodType(_experts_forward, module)
            if getattr(module.config, "_experts_implementation", None) in (None, "eager"):
                model.set_experts_implementation("grouped_mm")  # the eager one ignores _apply_gate
        else:
            module.forward = MethodType(_separate if form == "separate" else _fused, module)
    return activations


def put_in_named(model: Any, name: str, given: float | list[float] | None) -> None:
    """Sets the activation and the thresholds of ``config.json``, if transformers has no such activation."""
    if name not in NAMES:
        return
    kind = "drelu" if name == "drelu" else "relu"
    for activation in put_in(model, lambda layer: SparseActivation(kind, layer)):
        if given:
            activation.threshold = given[activation.layer] if isinstance(given, list) else given


def _separate(module: Any, x: Any) -> Any:
    module.sparse_activation.begin()
    return module.down_proj(module.sparse_activation(module.gate_proj(x), module.up_proj(x)))


def _fused(module: Any, x: Any) -> Any:
    module.sparse_activation.begin()
    return module.down_proj(module.sparse_activation(*module.gate_up_proj(x).chunk(2, dim=-1)))


def _apply_gate(module: Any, gate_up: Any) -> Any:
    return module.sparse_activation(*gate_up.chunk(2, dim=-1))


def _experts_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    module.sparse_activation.begin()
    return type(module).forward(module, *args, **kwargs)


class SparseCausalLM:
    """A mixin for transformers classes that adds the activations ``fatrelu`` and ``drelu``."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        key = next(key for key in ACTIVATION_KEYS if hasattr(config, key))
        name = getattr(config, key)
        if name in NAMES:  # other modules may have an activation of the same key
            setattr(config, key, getattr(config, DENSE_KEY, "relu"))
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        setattr(config, key, name)
        put_in_named(self, name, getattr(config, "hidden_act_param", None))

    @classmethod
    def is_custom_code(cls) -> bool:
        """Makes transformers convert the names of weights in files as it does for its own class."""
        return False

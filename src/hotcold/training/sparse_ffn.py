"""Puts ReLU or dReLU in the place of the activation of a transformers model, and watches what it gives."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from hotcold.errors import UserError
from hotcold.training.libraries import torch
from hotcold.values import printable

#: ReLU of the gate, or of gate and up (dReLU, arXiv 2406.05955).
Kind = Literal["relu", "drelu"]
KINDS: tuple[Kind, ...] = ("relu", "drelu")


class SparseActivation:
    """The activation of all FFNs of a model: ``relu(gate) * up``, or ``relu(gate) * relu(up)``.

    A gate passes where it is greater than ``threshold`` (FATReLU, arXiv 2402.13516). Each forward pass
    leaves ``magnitudes`` behind, by layer the mean absolute value of what goes into the down projection,
    which is differentiable. While ``counting`` is true, zeros and gates are added up by layer. One that is
    not ``watching`` does neither."""

    def __init__(self, kind: Kind, layers: int, threshold: float = 0.0, *, watching: bool = True) -> None:
        self.kind, self.layers, self.threshold = kind, layers, threshold
        self.watching, self.counting = watching, False
        self.reset()

    def reset(self) -> None:
        self.magnitudes: dict[int, list[Any]] = {}
        self._zeros, self._values = [0] * self.layers, [0] * self.layers
        self._gates, self._squares = 0, 0.0

    def __call__(self, layer: int, gate: Any, up: Any) -> Any:
        passed = torch.where(gate > self.threshold, gate, 0)
        values = passed * (torch.relu(up) if self.kind == "drelu" else up)
        if self.counting:
            self._zeros[layer] += int((values == 0).sum())
            self._values[layer] += values.numel()
            self._gates += int((gate > 0).sum())
            self._squares += float(gate.relu().double().square().sum())
        elif self.watching:
            self.magnitudes.setdefault(layer, []).append(values.abs().mean())
        return values

    @property
    def layer_magnitudes(self) -> Any:
        """``[layers]``, mean absolute values of the last forward pass."""
        means = [torch.stack(self.magnitudes[layer]).mean() for layer in range(self.layers)]
        return torch.stack(means)

    @property
    def zeros(self) -> list[float]:
        """By layer, the share of values that were zero while counting."""
        return [zeros / max(1, values) for zeros, values in zip(self._zeros, self._values, strict=True)]

    @property
    def gate_scale(self) -> float:
        """The root mean square of the positive gates that were seen while counting."""
        return float((self._squares / max(1, self._gates)) ** 0.5)


def put_in(model: Any, activation: SparseActivation) -> None:
    """Replaces the activation of all FFNs, experts too. UserError: an FFN's form is not known."""
    for number, layer in enumerate(decoder_layers(model)):
        places = [_in_place(module, functools.partial(activation, number)) for module in layer.modules()]
        if not any(places):
            seen = printable(type(getattr(layer, "mlp", layer)).__name__)
            known = "a gate, an up and a down projection are needed, each alone, fused, or of experts"
            raise UserError(f"the FFN {seen} of layer {number} is of an unknown form: {known}")


def decoder_layers(model: Any) -> list[Any]:
    """The layers of a causal language model of transformers. UserError: it keeps them elsewhere."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise UserError(f"{printable(type(model).__name__)} has no model.layers: it cannot be made sparse")
    return list(layers)


def _in_place(module: Any, activation: Callable[[Any, Any], Any]) -> bool:
    """Makes a module compute with the activation, if it is an FFN of a known form."""

    def linear(*names: str) -> bool:
        return all(isinstance(getattr(module, name, None), torch.nn.Linear) for name in names)

    if linear("gate_proj", "up_proj", "down_proj"):
        module.forward = lambda x: module.down_proj(activation(module.gate_proj(x), module.up_proj(x)))
    elif linear("gate_up_proj", "down_proj"):
        module.forward = lambda x: module.down_proj(activation(*module.gate_up_proj(x).chunk(2, dim=-1)))
    elif _are_experts(module):
        module._apply_gate = lambda both: activation(*both.chunk(2, dim=-1))
    else:
        return False
    return True


def _are_experts(module: Any) -> bool:
    """Experts as transformers 5 keeps them: gates and ups, one after the other, in one tensor."""
    weights = getattr(module, "gate_up_proj", None)
    return (
        isinstance(weights, torch.nn.Parameter)
        and weights.ndim == 3
        and hasattr(module, "_apply_gate")
        and getattr(module, "is_concatenated", False)
        and not getattr(module, "has_bias", True)
    )


def uses_experts(model: Any) -> bool:
    return any(_are_experts(module) for module in model.modules())

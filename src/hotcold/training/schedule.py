"""The stages in which the penalty on activations grows, for any loop and for transformers' Trainer."""

import math
from collections.abc import Sequence
from typing import Any

from hotcold.errors import UserError
from hotcold.training.libraries import transformers
from hotcold.training.sparse_model import IGNORED, SparsityPenalty

#: Ends of the stages, as shares of the run, and the share of the penalty that each reaches. In the first
#: stage the model recovers from its new activation; in the last it adapts to the full penalty.
STAGES = ((0.10, 0.0), (0.30, 0.1), (0.50, 0.4), (0.70, 1.0), (1.0, 1.0))

_NAME = "SparsitySchedule"


def penalty_share(progress: float, stages: Sequence[tuple[float, float]] = STAGES) -> float:
    """The share of the penalty at a share of the run; it changes between stages along half a sine."""
    begin, low = 0.0, 0.0
    for end, high in stages:
        if progress < end:
            return low + (high - low) * (1 - math.cos(math.pi * (progress - begin) / (end - begin))) / 2
        begin, low = end, high
    return low


_ExportableState = transformers().trainer_callback.ExportableState  # what the Trainer saves with a checkpoint


class SparsitySchedule(transformers().TrainerCallback, _ExportableState):  # type: ignore[misc,valid-type]
    """Weights of the penalty over a run, and a callback that adds the penalty to the Trainer's loss.

    In a loop of your own: ``penalty.weight = schedule.weight_at(step / steps)``. With the Trainer:
    ``Trainer(model, callbacks=[SparsitySchedule(0.3)], ...)`` for a model of ``make_sparse``. The Trainer's
    logs then have ``sparsity_penalty`` and ``zeros``, and its checkpoints the penalty's units."""

    def __init__(self, weight: float = 0.3, stages: Sequence[tuple[float, float]] = STAGES) -> None:
        ends = [end for end, _ in stages]
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0:
            raise UserError(f"stages end at {ends}: shares of the run in ascending order are needed")
        if not 0 <= weight < math.inf:
            raise UserError(f"weight {weight:g}: a number of at least 0 is needed")
        self.weight, self.stages = weight, [(float(end), float(share)) for end, share in stages]
        self._units: list[float] = []  #: of the penalty, which fills the list in the first batch
        self._penalty: SparsityPenalty | None = None

    def weight_at(self, progress: float) -> float:
        """The weight of the penalty at a share of the run, from 0 to 1."""
        return self.weight * penalty_share(progress, self.stages)

    def state(self) -> dict[str, Any]:
        """The state that the Trainer saves with a checkpoint."""
        arguments = {"weight": self.weight, "stages": self.stages}
        return {"args": arguments, "attributes": {"_units": self._units}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._penalty = SparsityPenalty(model, 0.0)
        continued = (self._units or _saved_units(state)) if state.global_step else []
        self._units = self._penalty.units = continued
        if state.global_step and not self._units:
            fix = "start again, or continue a checkpoint that was saved with SparsitySchedule"
            raise UserError(f"the checkpoint of step {state.global_step} has no units of the penalty: {fix}")
        self._hook = model.register_forward_hook(self._add_penalty, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._penalty is not None
        self._penalty.weight = self.weight_at(state.global_step / max(1, state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._penalty is not None and self._penalty.zeros and logs is not None and "loss" in logs:
            figures = {"sparsity_penalty": float(self._last), "zeros": self._penalty.mean_zeros}
            logs |= figures
            state.log_history[-1] |= figures  # the Trainer has copied the logs by now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()

    def _add_penalty(self, model: Any, args: Any, inputs: dict[str, Any], output: Any) -> Any:
        if not model.training or self._penalty is None:
            return output
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is None:
            fix = "add SparsityPenalty(model)() to the loss of your own compute_loss"
            raise UserError(f"the model gave no loss to add the penalty to: {fix}")
        penalty = self._penalty()
        self._last = penalty.detach()
        output["loss"] = loss + self._share(inputs) * penalty
        return output

    def _share(self, inputs: dict[str, Any]) -> Any:
        """The share of a batch in its step. With ``num_items_in_batch`` the Trainer adds up the losses of the
        batches in a step; otherwise it takes their mean, and the share is 1."""
        items, labels = inputs.get("num_items_in_batch"), inputs.get("labels")
        if items is None or labels is None:
            return 1.0
        return (labels[..., 1:] != IGNORED).sum() / items


def _saved_units(state: Any) -> list[float]:
    """The units in the Trainer's state, which it reads from the checkpoint that it continues."""
    saved = (state.stateful_callbacks or {}).get(_NAME, {})
    saved = saved[0] if isinstance(saved, list) else saved
    return list(saved.get("attributes", {}).get("_units", []))

"""A backend without the ops that keep a state."""

from typing import Any, NoReturn

from hotcold.errors import UserError


class NoStateOps:
    """Refuses what :class:`hotcold.kernels.state_ops.StateOps` describes."""

    name: str

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self.name} has no layers that keep a state of a sequence: use `gpu=off`")

    short_conv = gated_delta = decay = ssm_scan = multiply = _refuse

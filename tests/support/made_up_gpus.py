"""GPUs that are in no machine, for tests of what is done with one."""

from __future__ import annotations

from typing import Any

from hotcold.kernels.gpu import GPU


def made_up(index: int, name: str, **more: Any) -> GPU:
    """A discrete card of 8 GiB, all of them free, unless ``more`` says otherwise."""
    facts: dict[str, Any] = {
        "kind": "discrete",
        "driver": "driver 1.0",
        "api": "Vulkan 1.3.0",
        "uuid": f"{index:032x}",
        "memory_bytes": 8 << 30,
        "free_bytes": None,
        "unified": False,
    }
    return GPU(index=index, name=name, **(facts | more))

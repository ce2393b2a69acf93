"""A process that makes each Vulkan function fail once, while a model is loaded and in a step, and says what
came of it: a line of JSON for each case.

``python failing.py DRIVER MODEL submit|spin [FUNCTION ...]``"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.vulkan.devices import choose_drivers  # noqa: E402

choose_drivers()

from support.placed import on_two  # noqa: E402
from support.vulkan import faults  # noqa: E402
from support.vulkan.devices import FULL, device_index  # noqa: E402

from hotcold.engine.engine import Engine  # noqa: E402
from hotcold.engine.request import Job, Request  # noqa: E402
from hotcold.engine.sampler import SamplingParams  # noqa: E402
from hotcold.kernels.vulkan.backend import VulkanBackend  # noqa: E402
from hotcold.runtime.session import Session  # noqa: E402

HANG_SECONDS = 60
OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST = -1, -2, -4
RESULTS = {
    "vkAllocateMemory": OUT_OF_DEVICE_MEMORY,
    "vkQueueSubmit": DEVICE_LOST,
    "vkWaitSemaphores": DEVICE_LOST,
    "vkGetSemaphoreCounterValue": DEVICE_LOST,
    "vkDeviceWaitIdle": DEVICE_LOST,
}


@dataclass
class Model:
    device: int
    path: Path
    spin: bool

    def load(self) -> Session:
        """With its first step, in which programs are recorded."""
        session = on_two(VulkanBackend(self.device, spin=self.spin), 0.5, self.path)
        try:
            self.step(session)
        except BaseException:
            session.close()
            raise
        return session

    def step(self, session: Session) -> list[int]:
        request = Request(Job([1, 5, 9], SamplingParams(temperature=0), max_tokens=4, ignore_eos=True))
        Engine(session).run([request])
        return request.output


def counts() -> dict[str, int]:
    return {name: count for name, count in faults.calls().items() if count}


def leaked(failed: str = "") -> dict[str, int]:
    """Counts what was made and not destroyed, by the function that makes it, less what failed to be made."""
    gc.collect()
    calls, found = faults.calls(), {}
    for name, made in calls.items():
        freed = "vkFreeMemory" if name == "vkAllocateMemory" else name.replace("vkCreate", "vkDestroy")
        freed = freed.replace("ComputePipelines", "Pipeline")
        if freed != name and made - (name == failed) != calls[freed]:
            found[name] = made - (name == failed) - calls[freed]
    return found


def failures(model: Model, only: list[str]) -> Iterator[dict[str, Any]]:
    model.load().close()  # the first one probes the device, which is done once
    gc.collect()
    faults.forget_calls()
    session = model.load()
    while_loading = counts()
    wanted = model.step(session)
    in_step = {name: n - while_loading.get(name, 0) for name, n in counts().items()}
    session.close()
    del session
    yield {"stage": "none", "leaked": leaked(), "tokens": wanted, "wanted": wanted}
    cases = []
    for stage, called in (("load", while_loading), ("step", in_step)):
        for function, calls in called.items():
            if calls <= 0 or (only and function not in only) or not faults.can_fail(function):
                continue
            some = [1, calls // 2 + 1] if FULL else [calls // 2 + 1]
            cases += [(stage, function, nth) for nth in (dict.fromkeys(some) if stage == "load" else (1,))]
    for i, case in enumerate(cases, 1):
        # All fail in one process: what keeps a model from being loaded is met later, too.
        again = FULL or i % 4 == 0 or i == len(cases)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        yield {"wanted": wanted, **failure(model, *case, again=again)}
        faulthandler.cancel_dump_traceback_later()


def failure(model: Model, stage: str, function: str, nth: int, *, again: bool) -> dict[str, Any]:
    """The outcome of one failure, and what the model gives when it is loaded ``again`` (else None)."""
    faults.forget_calls()
    said, kind, before = "", "", 0
    session = None
    try:
        if stage == "step":
            session = model.load()
        before = counts().get(function, 0)
        faults.fail(function, nth, RESULTS.get(function, OUT_OF_HOST_MEMORY))
        if stage == "step":
            assert session is not None
            model.step(session)
        else:
            session = model.load()
    except Exception as error:
        said, kind = str(error), type(error).__name__
    finally:
        faults.fail(function, 0, 0)
    reached = counts().get(function, 0) - before >= nth
    if session is not None:
        session.close()
    session = None
    first = leaked(function if reached else "")
    faults.forget_calls()
    tokens = None
    if again:
        session = model.load()
        tokens = model.step(session)
        session.close()
        session = None
    return {
        "stage": stage,
        "function": function,
        "nth": nth,
        "reached": reached,
        "error": said,
        "kind": kind,
        "leaked": first | leaked(),
        "tokens": tokens,
    }


if __name__ == "__main__":
    which = Model(device_index(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "spin")
    for found in failures(which, sys.argv[4:]):
        print(json.dumps(found), flush=True)

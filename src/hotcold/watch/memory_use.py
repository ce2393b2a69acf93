"""Memory of a loaded model and a session, by kind and by device."""

from dataclasses import dataclass

from hotcold.kernels.backend import Backend
from hotcold.runtime.session import Session
from hotcold.sparse.ffn import SplitWeights

#: Kinds of memory, in the order of display.
KINDS = ("neurons", "attention", "predictor", "head", "embedding", "kv", "buffers", "states", "draft")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one of :data:`KINDS`. With one backend all are the CPU's."""

    kind: str
    gpu_bytes: int
    cpu_bytes: int


def memory_use(session: Session) -> tuple[MemoryUse, ...]:
    """Returns the memory in use: weights, keys, values and states as allocated, ``buffers`` as planned.

    ``states`` and ``draft`` (a draft block with its keys and values) may be absent."""
    model = session.model
    config, weights, devices = model.config, model.weights, model.devices
    cache_type = model.plan.request.cache_type
    hot: dict[str, int] = {}
    cold: dict[str, int] = {}

    def add(kind: str, backend: Backend, nbytes: int) -> None:
        side = cold if backend is model.backend else hot
        side[kind] = side.get(kind, 0) + nbytes

    for kind, backend, nbytes in session.read_whole():
        if kind != "head" or weights.head is not weights.embedding:
            add(kind, backend, nbytes)
    for i, (layer, backend) in enumerate(zip(weights.layers, devices.layers, strict=True)):
        if session.shared_counts:
            add("attention", backend, layer.shared_bytes)
        add("attention", backend, session.chosen_bytes[i])
        add("kv", backend, session.cache.pages * config.mixers[i].page_bytes(cache_type))
        if session.slots:
            add("states", backend, model.plan.slots * config.mixers[i].slot_bytes)
        if isinstance(layer.ffn, SplitWeights):
            add("neurons", backend, layer.ffn.hot.nbytes if layer.ffn.hot else 0)
            add("neurons", model.backend, layer.ffn.cold.nbytes)
            add("neurons", model.backend, layer.ffn.streamed.nbytes if layer.ffn.streamed else 0)
        else:
            add("neurons", backend, layer.ffn.nbytes)
    add("embedding", devices.embedding, weights.embedding.nbytes)
    if weights.inputs is not None:
        add("embedding", devices.embedding, weights.inputs.table_bytes)
    if weights.draft is not None and config.draft is not None:
        add("draft", model.backend, weights.draft.own_bytes(weights))
        add(
            "draft",
            model.backend,
            session.cache.pages * config.draft.page_bytes(cache_type),
        )
    backends = set(devices.parts)
    planned = {gpu: has.nbytes["buffers"] for gpu, has in zip(model.gpus, model.on_gpus, strict=False)}
    for used_backend in backends:
        add("buffers", used_backend, planned.get(used_backend, model.plan.step_bytes))
    absent = {"states": session.slots is None, "draft": weights.draft is None}
    kinds = (kind for kind in KINDS if not absent.get(kind))
    return tuple(MemoryUse(kind, hot.get(kind, 0), cold.get(kind, 0)) for kind in kinds)

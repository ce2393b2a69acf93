"""What tests ask of buffers, which show their values to their own backend alone."""

from __future__ import annotations

from hotcold.engine.session import Session


def cache_bytes(session: Session) -> int:
    """Of the keys and values of all layers."""
    layers = zip(session.model.devices.layers, session.cache.layers, strict=True)
    return sum(ops.read(buffer).nbytes for ops, layer in layers for buffer in layer)

"""Metrics for Prometheus, in their own registry."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotcold.engine.generation import Piece
from hotcold.hosting.state import ProcessStats
from hotcold.version import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class _Figure(NamedTuple):
    name: str
    help: str
    counts: bool  #: true if the value never decreases


#: Field of :class:`ProcessStats` -> metric.
_ENGINE_METRICS = {
    "slots": _Figure("slots", "Limit of requests that run at the same time", False),
    "running": _Figure("requests_running", "Requests that run", False),
    "waiting": _Figure("requests_waiting", "Requests in the queue", False),
    "pages": _Figure("cache_pages", "Pages of the KV cache", False),
    "free_pages": _Figure("cache_pages_free", "Free pages of the KV cache", False),
    "shared_pages": _Figure("cache_pages_shared", "Pages that only the prefix cache holds", False),
    "states": _Figure("states", "Slots for states of recurrent layers", False),
    "free_states": _Figure("states_free", "Free slots for states", False),
    "shared_states": _Figure("states_shared", "States that only the prefix cache holds", False),
    "prompt_tokens": _Figure("prompt_tokens", "Prompt tokens computed", True),
    "reused_tokens": _Figure("reused_tokens", "Prompt tokens served from the prefix cache", True),
    "generated_tokens": _Figure("generated_tokens", "Tokens generated", True),
    "guessed_tokens": _Figure("guessed_tokens", "Draft tokens verified", True),
    "accepted_tokens": _Figure("accepted_tokens", "Draft tokens accepted", True),
    "steps": _Figure("steps", "Steps of the model", True),
    "preemptions": _Figure("preemptions", "Requests preempted because the KV cache was full", True),
    "prompt_s": _Figure("prompt_seconds", "Time of steps with prompt tokens", True),
    "decode_s": _Figure("decode_seconds", "Time of decode steps", True),
    "active_share": _Figure("active_share", "Share of neurons computed for generated tokens", False),
    "gb_s": _Figure("read_gigabytes_per_second", "Bandwidth of weights read for generated tokens", False),
    "expert_hits": _Figure("expert_hits", "Expert cache hits", True),
    "expert_misses": _Figure("expert_misses", "Expert cache misses", True),
    "disk_bytes": _Figure("disk_read_bytes", "Bytes of experts read from the model's file", True),
    "stalls": _Figure("disk_waits", "Times that a step waited for reads of experts", True),
    "stall_s": _Figure("disk_wait_seconds", "Time that steps waited for reads of experts", True),
    "rss_bytes": _Figure("engine_memory_bytes", "Memory of the engine's process, weights included", False),
}


class Metrics:
    """The metrics of a server. Requests are counted here; the engine's values are passed to :meth:`text`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineFigures()
        self.registry.register(self._engine)
        options: Any = {"registry": self.registry, "namespace": "hotcold"}
        self._requests = Counter("requests", "Responses, by route and status", ["route", "status"], **options)
        self._seconds = Histogram("request_seconds", "Time of whole requests", buckets=_SECONDS, **options)
        self._first = Histogram(
            "time_to_first_token_seconds",
            "Time to the first token, with waiting",
            buckets=_SECONDS,
            **options,
        )
        self._between = Histogram(
            "inter_token_seconds", "Time between two tokens", buckets=_BETWEEN, **options
        )
        self._queue = Histogram("queue_seconds", "Time in the queue", buckets=_SECONDS, **options)
        self._steps = Histogram(
            "step_seconds", "Time from one step of the model to the next", buckets=_BETWEEN, **options
        )
        self._streams = Gauge("generations_running", "Generations that run or wait", **options)
        self._ends = Counter("generations", "Finished generations, by finish reason", ["reason"], **options)
        self._loaded = Gauge("model_loaded", "Share of the model that is loaded", **options)
        about = Gauge("info", "Version of Hotcold", ["version"], **options)
        about.labels(__version__).set(1)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.observe(seconds)

    def begun(self) -> None:
        self._streams.inc()

    def first(self, piece: Piece) -> None:
        """Records the first piece of a text."""
        if piece.timings.ttft_s is not None:
            self._first.observe(piece.timings.ttft_s)
        if piece.timings.queued_s is not None:
            self._queue.observe(piece.timings.queued_s)

    def between(self, seconds: float) -> None:
        self._between.observe(seconds)

    def ended(self, reason: str) -> None:
        self._streams.dec()
        self._ends.labels(reason).inc()

    def text(self, loaded: float, stats: ProcessStats | None) -> bytes:
        """Returns all metrics in Prometheus's format. ``stats`` is None if the engine does not answer."""
        self._loaded.set(loaded)
        for seconds in () if stats is None else stats.step_s:
            self._steps.observe(seconds)
        self._engine.stats = stats
        text: bytes = generate_latest(self.registry)
        return text


class _EngineFigures(Collector):
    stats: ProcessStats | None = None

    def collect(self) -> Iterator[Metric]:
        for field, figure in _ENGINE_METRICS.items():
            value = getattr(self.stats, field, None)
            if value is None:  # not measured yet
                continue
            kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
            yield kind(f"hotcold_{figure.name}", figure.help, value=float(value))

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
    "slots": _Figure("slots", "The most requests that can run", False),
    "running": _Figure("requests_running", "Requests that have a slot", False),
    "waiting": _Figure("requests_waiting", "Requests that wait for a slot", False),
    "pages": _Figure("cache_pages", "Pages of the cache of keys and values", False),
    "free_pages": _Figure("cache_pages_free", "Pages that nobody holds", False),
    "shared_pages": _Figure("cache_pages_shared", "Pages held only for requests to come", False),
    "states": _Figure("states", "Slots for states of sequences, where layers keep some", False),
    "free_states": _Figure("states_free", "Slots for states that nobody holds", False),
    "shared_states": _Figure("states_shared", "Copies of states held only for requests to come", False),
    "prompt_tokens": _Figure("prompt_tokens", "Tokens of prompts that were computed", True),
    "reused_tokens": _Figure("reused_tokens", "Tokens of prompts that were in the cache already", True),
    "generated_tokens": _Figure("generated_tokens", "Tokens that were generated", True),
    "guessed_tokens": _Figure("guessed_tokens", "Tokens that were guessed and verified", True),
    "accepted_tokens": _Figure("accepted_tokens", "Guessed tokens that were right", True),
    "steps": _Figure("steps", "Runs of the model", True),
    "preemptions": _Figure("preemptions", "Requests put back because the cache was full", True),
    "prompt_s": _Figure("prompt_seconds", "Time of steps with rows of prompts", True),
    "decode_s": _Figure("decode_seconds", "Time of steps that only generate", True),
    "active_share": _Figure("active_share", "Share of neurons that generated tokens computed", False),
    "gb_s": _Figure("read_gigabytes_per_second", "Weights read for generated tokens", False),
    "expert_hits": _Figure("expert_hits", "Experts that a step named and that were in memory", True),
    "expert_misses": _Figure("expert_misses", "Experts that were read of the model's file", True),
    "disk_bytes": _Figure("disk_read_bytes", "Read of the model's file for experts", True),
    "stalls": _Figure("disk_waits", "Times that computing waited for experts", True),
    "stall_s": _Figure("disk_wait_seconds", "Time that computing waited for experts", True),
    "rss_bytes": _Figure("engine_memory_bytes", "Memory of the engine's process, weights included", False),
}


class Metrics:
    """The metrics of a server. Requests are counted here; the engine's values are passed to :meth:`text`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineFigures()
        self.registry.register(self._engine)
        options: Any = {"registry": self.registry, "namespace": "hotcold"}
        self._requests = Counter("requests", "Answers, by route and status", ["route", "status"], **options)
        self._seconds = Histogram("request_seconds", "Whole requests", buckets=_SECONDS, **options)
        self._first = Histogram(
            "time_to_first_token_seconds", "Waiting included", buckets=_SECONDS, **options
        )
        self._between = Histogram("inter_token_seconds", "Between two tokens", buckets=_BETWEEN, **options)
        self._queue = Histogram("queue_seconds", "Until a request had a slot", buckets=_SECONDS, **options)
        self._steps = Histogram(
            "step_seconds", "From a run of the model to the next", buckets=_BETWEEN, **options
        )
        self._streams = Gauge("generations_running", "Texts being generated or waiting to be", **options)
        self._ends = Counter("generations", "Finished texts, by why they ended", ["reason"], **options)
        self._loaded = Gauge("model_loaded", "Share of the model that is loaded", **options)
        about = Gauge("info", "The program's version", ["version"], **options)
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

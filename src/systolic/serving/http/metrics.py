"""Prometheus metrics: vLLM's names under the prefix ``systolic``, and what XLA adds: programs, buckets, padding.

The Kubernetes Gateway API Inference Extension maps names by configuration: ``systolic:num_requests_waiting``,
``systolic:num_requests_running`` and ``systolic:kv_cache_usage_perc`` are the three gauges that it asks for.
"""

import threading
from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from systolic.serving.served import Key

PREFIX = "systolic:"
MODEL = ("model_name", "version", "engine")
SHORT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
"""Seconds to a first token."""
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""Seconds per token."""
LONG = (
    0.005,
    0.02,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
)
"""Seconds of a request."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens."""


class Gauges:
    """Gauges of one opening of a version of a model, from any thread: kept until they are shown, and on the page from then on.

    Args:
        shown: Whether they are from the start.
    """

    def __init__(self, *, shown: bool = False) -> None:
        self._values: dict[tuple[Gauge, tuple[str, ...]], float | Callable[[], float]] = {}
        self._shown, self._lock = shown, threading.Lock()

    def set(
        self, gauge: Gauge, labels: tuple[str, ...], value: float | Callable[[], float]
    ) -> None:
        """Sets a gauge to a value, or to what a function gives."""
        with self._lock:
            self._set(gauge, labels, value)

    def add(self, gauge: Gauge, labels: tuple[str, ...], more: float) -> None:
        """Adds to a gauge that begins at 0."""
        with self._lock:
            before = self._values.get((gauge, labels), 0.0)
            assert isinstance(before, int | float)
            self._set(gauge, labels, before + more)

    def show(self) -> None:
        """Puts them on the page."""
        with self._lock:
            self._shown = True
            for (gauge, labels), value in self._values.items():
                self._set(gauge, labels, value)

    def hide(self) -> None:
        """Writes no more; what is on the page is taken out by its owner."""
        with self._lock:
            self._shown = False

    def _set(
        self, gauge: Gauge, labels: tuple[str, ...], value: float | Callable[[], float]
    ) -> None:
        self._values[gauge, labels] = value
        if self._shown:
            child = gauge.labels(*labels)
            if isinstance(value, int | float):
                child.set(value)
            else:
                child.set_function(value)


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: list[Gauge] = []
        self._opening: dict[Key, Gauges] = {}
        self._served: dict[Key, Gauges] = {}
        ProcessCollector(registry=self.registry)
        self.http_requests = self.counter(
            "http_requests", "Answers by route and status", "route", "status"
        )
        self.http_seconds = self.histogram(
            "http_request_duration_seconds", "Time to the last byte", LONG, "route"
        )
        self.http_in_flight = self.gauge("http_requests_in_flight", "Requests that are answered")
        self.cancelled = self.counter(
            "http_requests_cancelled", "Requests whose client left", "route"
        )
        self.ready = self.gauge("ready", "1 while every model answers")
        self.startup = self.gauge(
            "startup_seconds",
            "Seconds of each phase of the start",
            "model_name",
            "version",
            "phase",
        )
        self.compiles = self.counter(
            "compile", "Programs that were made ready", *MODEL, "bucket", "cause"
        )
        self.compile_seconds = self.counter(
            "compile_seconds", "Seconds that programs took to compile or to be read", *MODEL
        )
        self.cache_hits = self.counter(
            "compile_cache_hits", "Programs that were on the disk", *MODEL
        )
        self.cache_misses = self.counter(
            "compile_cache_misses", "Programs that were not on the disk", *MODEL
        )
        self.weights_seconds = self.gauge(
            "weights_load_seconds", "Seconds of reading and placing the weights", *MODEL
        )
        self.memory = self.gauge(
            "hbm_bytes",
            "Bytes of one device by the compiled programs: weights, pages, temporaries, free",
            *MODEL,
            "kind",
        )
        self.memory_limit = self.gauge(
            "hbm_limit_bytes", "Bytes that programs may use of one device", *MODEL
        )
        self.late_compiles = self.counter(
            "recompile_after_ready", "Programs compiled after the model was ready: always 0", *MODEL
        )
        self.buckets = self.counter("bucket_selected", "Runs of each program", *MODEL, "bucket")
        self.useful = self.counter("useful_tokens", "Positions that held a token", *MODEL)
        self.padding = self.counter("padding_tokens", "Positions that held none", *MODEL)
        self.rows_padded = self.counter("batch_rows_padded", "Rows that held no example", *MODEL)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter of this registry."""
        return Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge of this registry."""
        made = Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry)
        if set(MODEL[:2]) <= set(labels):
            self._gauges.append(made)
        return made

    def gauges(self, model: str, version: int) -> "Gauges":
        """Those of a version that is opened: hidden while one of the same label is served."""
        key = model, version
        return self._opening.setdefault(key, Gauges(shown=key not in self._served))

    def opened(self, model: str, version: int, seconds: float) -> None:
        """Shows the gauges of a version that is ready after so many seconds, in place of those of another one of its label."""
        found = self.gauges(model, version)
        found.set(self.startup, (model, str(version), "total"), seconds)
        if (model, version) in self._served:
            self.forget(model, version)
        self._served[model, version] = self._opening.pop((model, version))
        found.show()

    def failed(self, model: str, version: int) -> None:
        """Takes out the gauges of a version that could not be opened; those of one of its label that is served stay."""
        self._opening.pop((model, version), Gauges()).hide()
        if (model, version) not in self._served:
            self._remove(model, version)

    def forget(self, model: str, version: int) -> None:
        """Takes out the gauges of a version that is no longer there; what was counted of it stays."""
        self._served.pop((model, version), Gauges()).hide()
        self._remove(model, version)

    def _remove(self, model: str, version: int) -> None:
        for one in self._gauges:
            one.remove_by_labels({"model_name": model, "version": str(version)})

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """A histogram of this registry."""
        return Histogram(f"{PREFIX}{name}", text, labels, registry=self.registry, buckets=buckets)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

"""Prometheus metrics: vLLM's names under the prefix ``systolic``, and what XLA adds: programs, buckets, padding.

The Kubernetes Gateway API Inference Extension maps names by configuration: ``systolic:num_requests_waiting``,
``systolic:num_requests_running`` and ``systolic:kv_cache_usage_perc`` are the three gauges that it asks for, and
``systolic:lora_requests_info`` has its labels of adapters.
"""

import threading
import time
from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from systolic.job.serving_memory import ServingMemory
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.facts import AnswerFacts, BatchFacts, CompileFacts
from systolic.serving.http.telemetry import EventLog
from systolic.serving.registry import Key, Served, ServedText
from systolic.serving.text.buckets import Buckets
from systolic.serving.text.request import Finish, TextOutput
from systolic.serving.text.sequence import EngineLoad, StepFacts
from systolic.steps.serving_layout import DeviceShares

PREFIX = "systolic:"
MODEL = ("model_name", "version", "engine")
SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
"""Seconds to a first token."""
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""Seconds per token."""
LONG = (0.005, 0.02, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)  # fmt: skip
"""Seconds of a request."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens."""
PHASES = ("weights", "trace", "compile", "keep", "load")
"""Phases of a model's start; those of programs are summed over the threads that make them ready."""


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
            "compile",
            "Programs, and sizes that share one, that were made ready",
            *MODEL,
            "bucket",
            "cause",
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
        self.adapters = AdapterMetrics(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter of this registry."""
        return Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge of this registry."""
        gauge = Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry)
        if set(MODEL[:2]) <= set(labels):
            self._gauges.append(gauge)
        return gauge

    def gauges(self, model: str, version: int) -> "Gauges":
        """Gauges of a version that is being opened: hidden while one of the same label is served."""
        key = model, version
        return self._opening.setdefault(key, Gauges(shown=key not in self._served))

    def opened(self, model: str, version: int, seconds: float) -> None:
        """Shows the gauges of a version that is ready after so many seconds, in place of those of another one of its label."""
        gauges = self.gauges(model, version)
        gauges.set(self.startup, (model, str(version), "total"), seconds)
        if (model, version) in self._served:
            self._take_out(model, version)
        self._served[model, version] = self._opening.pop((model, version))
        gauges.show()

    def failed(self, model: str, version: int) -> None:
        """Takes out the gauges of a version that could not be opened; those of one of its label that is served stay."""
        self._opening.pop((model, version), Gauges()).hide()
        if (model, version) not in self._served:
            self._remove(model, version)

    def forget(self, model: str, version: int) -> None:
        """Takes out the gauges of a version that is no longer there, and the counters by adapter; what else was counted of it stays."""
        self._take_out(model, version)
        self.adapters.forget(model, version)

    def _take_out(self, model: str, version: int) -> None:
        self._served.pop((model, version), Gauges()).hide()
        self._remove(model, version)

    def _remove(self, model: str, version: int) -> None:
        for gauge in self._gauges:
            gauge.remove_by_labels({"model_name": model, "version": str(version)})

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """A histogram of this registry."""
        return Histogram(f"{PREFIX}{name}", text, labels, registry=self.registry, buckets=buckets)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class AdapterMetrics:
    """Metrics of adapters by name; the series of one that is not served any more end."""

    def __init__(self, metrics: Metrics) -> None:
        gauge, counter, at = metrics.gauge, metrics.counter, (*MODEL[:2], "lora_name")
        info = (*MODEL[:2], "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        about = "Unix seconds, and the adapters that are loaded, and that texts wait for"
        self.info = gauge("lora_requests_info", about, *info)
        self.running = gauge("lora_num_requests_running", "Texts in the step", *at)
        self.waiting = gauge("lora_num_requests_waiting", "Texts that wait", *at)
        self.prompt = counter("lora_prompt_tokens", "Tokens of prompts", *at)
        self.generated = counter("lora_generation_tokens", "Tokens generated", *at)
        self.successes = counter("lora_request_success", "Ended requests", *at, "finished_reason")

    def show(self, models: Sequence[Served]) -> None:
        """Sets the gauges to what the models of a server hold now."""
        for gauge in (self.info, self.running, self.waiting):
            gauge.clear()
        for base in models:
            if not isinstance(base, ServedText) or base.slots is None:
                continue
            at, places = (base.name, str(base.version)), list(base.slots.taken.values())
            names = [own.name for own in models if (own.base, own.version) == base.key]
            waits = []
            for name in sorted(names):
                counts = [place.num_texts() for place in places if place.name == name]
                running, waiting = (sum(numbers) for numbers in zip(*counts, (0, 0), strict=True))
                for counter in (self.prompt, self.generated):
                    counter.labels(*at, name)  # at 0, before its first request
                self.running.labels(*at, name).set(running)
                self.waiting.labels(*at, name).set(waiting)
                waits += [name] if waiting else []
            lists = ",".join(sorted(names)), ",".join(waits)
            self.info.labels(*at, str(base.slots.count), *lists).set(time.time())

    def forget(self, name: str, version: int) -> None:
        """Takes out what was counted of an adapter, or of all adapters of a model."""
        for counter in (self.successes, self.prompt, self.generated):
            for label in ("lora_name", "model_name"):
                counter.remove_by_labels({label: name, "version": str(version)})


def begin_counts(metrics: Metrics, gauges: Gauges, at: tuple[str, str, str]) -> None:
    """Counters at 0 that would else be absent until they first count."""
    for counter in (metrics.late_compiles, metrics.cache_hits, metrics.cache_misses):
        counter.labels(*at)
    for phase in PHASES:  # Other engines of the model may have added to it.
        gauges.add(metrics.startup, (*at[:2], phase), 0.0)


def count_compile(
    metrics: Metrics, gauges: Gauges, at: tuple[str, str, str], facts: CompileFacts
) -> None:
    """Counts a program of a model."""
    if facts.shared:
        metrics.compiles.labels(*at, facts.bucket, "shared").inc()
        return
    metrics.compile_seconds.labels(*at).inc(facts.seconds)
    (metrics.cache_hits if facts.cached else metrics.cache_misses).labels(*at).inc()
    cause = "late" if facts.after_ready else "kept" if facts.cached else "start"
    metrics.compiles.labels(*at, facts.bucket, cause).inc()
    if not facts.after_ready:
        for phase, seconds in facts.phases.items():
            gauges.add(metrics.startup, (*at[:2], phase), seconds)
    if facts.after_ready:
        metrics.late_compiles.labels(*at).inc()


class TextMetrics:
    """Metrics of language models; a :class:`~systolic.serving.text.sequence.EngineWatcher` for each by :meth:`of`."""

    def __init__(self, metrics: Metrics) -> None:
        self.all = metrics
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        self.running = gauge("num_requests_running", "Texts in the step", *MODEL)
        self.waiting = gauge("num_requests_waiting", "Texts that wait", *MODEL)
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of pages in use, 1 is all", *MODEL)
        self.pages = gauge("kv_cache_pages", "Pages of the cache", *MODEL)
        self.pages_in_use = gauge("kv_cache_pages_in_use", "Pages that texts hold", *MODEL)
        self.preemptions = counter("num_preemptions", "Texts that lost their pages", *MODEL)
        self.drafts = counter("spec_decode_num_drafts", "Verified proposals", *MODEL)
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens proposed", *MODEL)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Tokens accepted", *MODEL)
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up", *MODEL)
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the cache", *MODEL)
        self.prompt = counter("prompt_tokens", "Tokens of prompts", *MODEL)
        self.generated = counter("generation_tokens", "Tokens generated", *MODEL)
        self.successes = counter("request_success", "Ended requests", *MODEL, "finished_reason")
        self.step_tokens = histogram("iteration_tokens_total", "Tokens per step", SIZES, *MODEL)
        self.step_seconds = histogram("step_seconds", "Wall time per step", EACH, *MODEL)
        self.host_seconds = counter(
            "step_host_seconds", "Host time that the device did not hide", *MODEL
        )
        self.first = histogram("time_to_first_token_seconds", "To the first token", SHORT, *MODEL)
        self.each = histogram("time_per_output_token_seconds", "Per token after it", EACH, *MODEL)
        self.total = histogram("e2e_request_latency_seconds", "To the last token", LONG, *MODEL)
        self.queue = histogram(
            "request_queue_time_seconds", "Until the first token was read", LONG, *MODEL
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From then to the first new token", LONG, *MODEL
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From then to the last", LONG, *MODEL
        )

    def of(self, model: str, version: int = 1, engine: int = 0) -> "TextMeter":
        """The watcher of an engine of a model."""
        gauges = self.all.gauges(model, version)
        return TextMeter(self, gauges, (model, str(version), str(engine)))


class TextMeter:
    """Counts what one language model does; a :class:`~systolic.serving.text.sequence.EngineWatcher`."""

    def __init__(self, metrics: TextMetrics, gauges: Gauges, at: tuple[str, str, str]) -> None:
        self._all, self._gauges, self._at = metrics, gauges, at
        self._pages = 1
        begin_counts(metrics.all, gauges, self._at)
        self._loads(0, 0, 0)

    def compiled(self, facts: CompileFacts) -> None:
        """After each program that is made ready before the first step."""
        count_compile(self._all.all, self._gauges, self._at, facts)

    def measured(self, memory: ServingMemory) -> None:
        """When the memory is known."""
        kinds = {
            "weights": memory.weights_bytes,
            "pages": memory.pages_bytes,
            "temporaries": memory.temporary_bytes,
            "free": memory.left_bytes,
        }
        for kind, size in kinds.items():
            self._gauges.set(self._all.all.memory, (*self._at, kind), size)
        self._gauges.set(self._all.all.memory_limit, self._at, memory.capacity_bytes)

    def placed(self, seconds: float) -> None:
        """After reading weights, and after laying them out."""
        self._gauges.add(self._all.all.weights_seconds, self._at, seconds)
        self._gauges.add(self._all.all.startup, (*self._at[:2], "weights"), seconds)

    def _loads(self, running: int, waiting: int, pages_in_use: int) -> None:
        every, at, put = self._all, self._at, self._gauges.set
        put(every.running, at, running)
        put(every.waiting, at, waiting)
        put(every.pages_in_use, at, pages_in_use)
        put(every.cache_usage, at, pages_in_use / self._pages)

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        every, at = self._all, self._at
        tokens = facts.decode_rows + facts.prefill_tokens
        self._pages = max(facts.pages_total, 1)
        self._loads(facts.running, facts.waiting, facts.pages_in_use)
        self._gauges.set(every.pages, at, facts.pages_total)
        every.preemptions.labels(*at).inc(facts.preempted)
        every.step_tokens.labels(*at).observe(tokens)
        every.step_seconds.labels(*at).observe(facts.seconds)
        every.host_seconds.labels(*at).inc(max(facts.host_seconds, 0.0))
        every.all.buckets.labels(*at, facts.bucket).inc()
        every.all.useful.labels(*at).inc(tokens)
        every.all.padding.labels(*at).inc(facts.padded_tokens)
        late = every.all.late_compiles.labels(*at)
        if facts.compiled:
            late.inc()
            every.all.compiles.labels(*at, facts.bucket, "late").inc()

    def ended(self, output: TextOutput, load: EngineLoad) -> None:
        """After each request."""
        every, at = self._all, self._at
        # No step comes after the last request, which would say so.
        self._loads(load.running, load.waiting, load.pages_in_use)
        adapted = (every.all.adapters, (*at[:2], output.adapter_name))
        for counters, labels in ((every, at), adapted) if output.adapter_name else ((every, at),):
            counters.successes.labels(*labels, (output.finish or Finish.stop).value).inc()
            counters.prompt.labels(*labels).inc(output.prompt_tokens if output.started else 0)
            counters.generated.labels(*labels).inc(output.completion_tokens)
        every.drafts.labels(*at).inc(output.drafts)
        every.drafted.labels(*at).inc(output.drafted_tokens)
        every.accepted.labels(*at).inc(output.accepted_tokens)
        every.queries.labels(*at).inc(output.queried_tokens)
        every.hits.labels(*at).inc(output.cached_tokens)
        every.queue.labels(*at).observe(output.queue_seconds)
        every.total.labels(*at).observe(output.seconds)
        if output.first_token_seconds is None:
            return
        every.first.labels(*at).observe(output.first_token_seconds)
        every.prefill.labels(*at).observe(
            max(output.first_token_seconds - output.queue_seconds, 0.0)
        )
        after = max(output.seconds - output.first_token_seconds, 0.0)
        every.decode.labels(*at).observe(after)
        if output.completion_tokens > 1:
            every.each.labels(*at).observe(after / (output.completion_tokens - 1))


class BatchMetrics:
    """Metrics of batch models; a :class:`~systolic.serving.facts.BatchWatcher` for each by :meth:`of`."""

    def __init__(self, metrics: Metrics) -> None:
        self.all = metrics
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        self.requests = counter("batch_requests", "Ended requests", *MODEL, "ended")
        self.examples = counter("batch_examples", "Examples answered", *MODEL)
        self.waiting = gauge("batch_examples_waiting", "Examples that wait", *MODEL)
        self.died = counter("batch_workers_died", "Workers that died and were replaced", *MODEL)
        self.size = histogram("batch_size", "Examples per batch", SIZES[:11], *MODEL)
        self.padding_share = histogram(
            "batch_padding_share",
            "Share of positions that hold nothing",
            [n / 10 for n in range(11)],
            *MODEL,
        )
        self.queue = histogram("batch_queue_seconds", "Wait for a batch", SHORT, *MODEL)
        self.compute = histogram("batch_compute_seconds", "Of a batch on the device", SHORT, *MODEL)
        self.decoding = histogram("batch_decode_seconds", "Reading of files", SHORT, *MODEL)
        self.total = histogram("batch_request_seconds", "From submit to answer", SHORT, *MODEL)

    def of(self, model: str, version: int = 1) -> "BatchMeter":
        """The watcher of a model."""
        return BatchMeter(self, self.all.gauges(model, version), (model, str(version), "0"))


class BatchMeter:
    """Counts what one batch model does; a :class:`~systolic.serving.facts.BatchWatcher`."""

    def __init__(self, metrics: BatchMetrics, gauges: Gauges, at: tuple[str, str, str]) -> None:
        self._all, self._gauges, self._at = metrics, gauges, at
        begin_counts(metrics.all, gauges, self._at)

    def read(self, seconds: float) -> None:
        """After the weights were read."""
        self._gauges.set(self._all.all.weights_seconds, self._at, seconds)
        self._gauges.set(self._all.all.startup, (*self._at[:2], "weights"), seconds)

    def compiled(self, facts: CompileFacts) -> None:
        """After each program."""
        count_compile(self._all.all, self._gauges, self._at, facts)

    def opened(self, waiting: Callable[[], int]) -> None:
        """Before anything else."""
        self._gauges.set(self._all.waiting, self._at, waiting)

    def died(self, reason: str) -> None:
        """After a worker died."""
        del reason
        self._all.died.labels(*self._at).inc()

    def ran(self, facts: BatchFacts) -> None:
        """After each batch."""
        every, at = self._all, self._at
        every.all.buckets.labels(*at, facts.bucket).inc()
        every.all.useful.labels(*at).inc(facts.useful_positions)
        every.all.padding.labels(*at).inc(facts.padded_positions)
        every.all.rows_padded.labels(*at).inc(facts.rows - facts.examples)
        every.padding_share.labels(*at).observe(facts.padding_share)
        every.size.labels(*at).observe(facts.examples)
        every.queue.labels(*at).observe(facts.queue_seconds)
        every.compute.labels(*at).observe(facts.compute_seconds)

    def answered(self, facts: AnswerFacts) -> None:
        """After each request."""
        every, at = self._all, self._at
        every.requests.labels(*at, facts.ended.value).inc()
        every.examples.labels(*at).inc(facts.examples)
        every.decoding.labels(*at).observe(facts.decode_seconds)
        every.total.labels(*at).observe(facts.seconds)


class TextLoadMetrics:
    """An :class:`~systolic.serving.text.opening.OpeningWatcher`.

    Args:
        model: Its name.
        meter: Counts.
        log: Written to.
        engine: Its number among the model's engines, which the log names from the second on.
    """

    def __init__(self, model: str, meter: TextMeter, log: EventLog, engine: int = 0) -> None:
        self._model, self._meter, self._log = model, meter, log
        if engine:
            self._model = f"{model} (engine {engine})"

    def sized(self, buckets: Buckets, programs: int, kernel: str) -> None:
        """Before the first program is compiled."""
        self._log.write(
            "sizes",
            model=self._model,
            programs=programs,
            sizes={
                "decode rows": list(buckets.rows),
                "prompt tokens": list(buckets.lengths),
                "pages": list(buckets.pages),
            },
            padding={name: round(share, 4) for name, share in buckets.padding.items()},
            measured=buckets.measured,
            kernel=kernel,
        )

    def compiled(self, facts: CompileFacts) -> None:
        """After each program."""
        self._meter.compiled(facts)
        tell_compile(self._log, self._model, facts)

    def measured(self, memory: ServingMemory, context: int) -> None:
        """When the largest programs are compiled."""
        self._meter.measured(memory)
        room = memory.concurrency(context)
        self._log.write(
            "memory", model=self._model, **memory.to_json(), context=context, texts=room
        )

    def placed(self, seconds: float) -> None:
        """After the weights were laid out."""
        self._meter.placed(seconds)


class BatchLoadMetrics:
    """A :class:`~systolic.serving.facts.BatchWatcher` that also writes compiles into the log.

    Args:
        model: Its name.
        meter: Counts.
        log: Written to.
    """

    def __init__(self, model: str, meter: BatchMeter, log: EventLog) -> None:
        self._model, self._meter, self._log = model, meter, log

    def sized(self, buckets: BucketGrid) -> None:
        """Before the first program is compiled."""
        sizes = {"batch": list(buckets.rows)}
        lengths = [length for length in buckets.lengths if length is not None]
        if lengths:
            sizes["positions"] = lengths
        self._log.write(
            "sizes",
            model=self._model,
            programs=len(buckets.all),
            sizes=sizes,
            padding={"all": round(buckets.padding_share, 4)},
            measured=buckets.measured,
        )

    def compiled(self, facts: CompileFacts) -> None:
        """After each program."""
        self._meter.compiled(facts)
        tell_compile(self._log, self._model, facts)

    def opened(self, waiting: Callable[[], int]) -> None:
        """Before anything else."""
        self._meter.opened(waiting)

    def died(self, reason: str) -> None:
        """After a worker died."""
        self._meter.died(reason)
        self._log.write("worker_died", model=self._model, error=reason)

    def ran(self, facts: BatchFacts) -> None:
        """After each batch."""
        self._meter.ran(facts)

    def answered(self, facts: AnswerFacts) -> None:
        """After each request."""
        self._meter.answered(facts)


def layout_writer(model: str, log: EventLog) -> Callable[[DeviceShares], None]:
    """Writes the layout of a model; nothing where the machine has one device."""

    def write_layout(shares: DeviceShares) -> None:
        if shares.devices == 1:
            return
        log.write(
            "layout",
            model=model,
            devices=shares.devices,
            engines=shares.engines,
            tensor=shares.tensor,
            expert=shares.expert,
            idle=shares.idle,
            reason=shares.reason,
        )
        if shares.idle:
            log.warn(f"{model}: {shares.told_idle}")

    return write_layout


def tell_compile(log: EventLog, model: str, facts: CompileFacts) -> None:
    """Writes a program that was compiled or found on the disk."""
    log.write(
        "compiled",
        model=model,
        program=facts.bucket,
        seconds=round(facts.seconds, 3),
        cached=facts.cached,
        shared=facts.shared or None,
        late=facts.after_ready or None,
        done=facts.done or None,
        programs=facts.programs or None,
    )

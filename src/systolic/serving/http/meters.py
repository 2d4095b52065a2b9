"""Metrics of models: what engines and batch models tell their watchers, counted."""

from collections.abc import Callable

from systolic.forecasting.serving_memory import ServingMemory
from systolic.serving.batch.facts import AnswerFacts, BatchFacts
from systolic.serving.compiles import CompileFacts
from systolic.serving.http.metrics import EACH, LONG, MODEL, SHORT, SIZES, Gauges, Metrics
from systolic.serving.text.facts import RequestFacts, StepFacts

PHASES = ("weights", "trace", "compile", "keep", "load")
"""Of a model's start; those of programs are summed over the threads that make them ready."""


def begin_counts(metrics: Metrics, gauges: Gauges, at: tuple[str, str, str]) -> None:
    """Counters at 0 that would else be absent until they first count."""
    for one in (metrics.late_compiles, metrics.cache_hits, metrics.cache_misses):
        one.labels(*at)
    for phase in PHASES:  # Other engines of the model may have added to it.
        gauges.add(metrics.startup, (*at[:2], phase), 0.0)


def count_compile(
    metrics: Metrics, gauges: Gauges, at: tuple[str, str, str], facts: CompileFacts
) -> None:
    """Counts a program of a model."""
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
    """Metrics of language models; a :class:`~systolic.serving.text.facts.EngineWatcher` for each by :meth:`of`."""

    def __init__(self, metrics: Metrics) -> None:
        self.all = metrics
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        self.running = gauge("num_requests_running", "Texts in the step", *MODEL)
        self.waiting = gauge("num_requests_waiting", "Texts that wait", *MODEL)
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of pages in use, 1 is all", *MODEL)
        self.pages = gauge("kv_cache_pages", "Pages of the cache", *MODEL)
        self.pages_in_use = gauge("kv_cache_pages_in_use", "Pages that texts hold", *MODEL)
        self.preemptions = counter("num_preemptions", "Texts that lost their pages", *MODEL)
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
    """Counts what one language model does; a :class:`~systolic.serving.text.facts.EngineWatcher`."""

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

    def ended(self, facts: RequestFacts) -> None:
        """After each request."""
        every, at = self._all, self._at
        # No step comes after the last request, which would say so.
        self._loads(facts.running, facts.waiting, facts.pages_in_use)
        every.successes.labels(*at, facts.finish.value).inc()
        every.prompt.labels(*at).inc(facts.prompt_tokens if facts.begun else 0)
        every.generated.labels(*at).inc(facts.completion_tokens)
        every.queries.labels(*at).inc(facts.queried_tokens)
        every.hits.labels(*at).inc(facts.cached_tokens)
        every.queue.labels(*at).observe(facts.queue_seconds)
        every.total.labels(*at).observe(facts.seconds)
        if facts.first_token_seconds is None:
            return
        every.first.labels(*at).observe(facts.first_token_seconds)
        every.prefill.labels(*at).observe(max(facts.first_token_seconds - facts.queue_seconds, 0.0))
        after = max(facts.seconds - facts.first_token_seconds, 0.0)
        every.decode.labels(*at).observe(after)
        if facts.completion_tokens > 1:
            every.each.labels(*at).observe(after / (facts.completion_tokens - 1))


class BatchMetrics:
    """Metrics of batch models; a :class:`~systolic.serving.batch.facts.BatchWatcher` for each by :meth:`of`."""

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
    """Counts what one batch model does; a :class:`~systolic.serving.batch.facts.BatchWatcher`."""

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

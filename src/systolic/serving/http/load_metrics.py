"""Metrics and log of models that are being loaded."""

from collections.abc import Callable

from systolic.job.serving_memory import ServingMemory
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.batch.facts import AnswerFacts, BatchFacts
from systolic.serving.compiles import CompileFacts
from systolic.serving.http.metrics import BatchMeter, TextMeter
from systolic.serving.http.telemetry import EventLog
from systolic.serving.text.buckets import Buckets
from systolic.steps.serving_layout import DeviceShares


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
    """A :class:`~systolic.serving.batch.facts.BatchWatcher` that also writes compiles into the log.

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
        lengths = [one for one in buckets.lengths if one is not None]
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


def layout_told(model: str, log: EventLog) -> Callable[[DeviceShares], None]:
    """Writes the layout of a model; nothing where the machine has one device."""

    def told(shares: DeviceShares) -> None:
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

    return told


def tell_compile(log: EventLog, model: str, facts: CompileFacts) -> None:
    """Writes a program that was compiled or found on the disk."""
    log.write(
        "compiled",
        model=model,
        program=facts.bucket,
        seconds=round(facts.seconds, 3),
        cached=facts.cached,
        late=facts.after_ready or None,
        done=facts.done or None,
        programs=facts.programs or None,
    )

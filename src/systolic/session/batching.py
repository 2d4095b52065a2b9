"""``systolic batch``: the requests of a file answered by a model, without a server."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from systolic.core.errors import MissingExtraError
from systolic.formats.outline import model_contents
from systolic.formats.registry import in_files
from systolic.job import Precision
from systolic.serving.offline.answerer import Answerer
from systolic.serving.offline.files import BatchInput, BatchOutput, BatchProgress
from systolic.session.serving import ServeSettings, ServeTarget, checked_targets, open_served

AHEAD = 2
"""Lines in flight for each text that is continued at once: while one runs, another waits for its place."""
IN_FLIGHT = 128
"""Lines in flight of a model that writes no text."""
QUEUED = 1 << 16
"""Texts or examples that may wait: lines can have many, and none is refused for others' sake."""
STALLED_SECONDS = 3600.0
"""Time of a call after which a model that writes no text counts as stuck; nobody waits for a single answer here."""


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """What to answer, and how.

    Args:
        model: ``DIR`` or ``NAME=DIR``; of several versions the newest.
        source: The requests.
        out: The results.
        settings: How the model is opened.
        in_flight: Lines that are asked at once; 0 takes :data:`AHEAD` for each of its rows, or :data:`IN_FLIGHT`.
    """

    model: str
    source: Path
    out: Path
    settings: ServeSettings
    in_flight: int = 0


def run_batch(
    order: BatchOrder, shown: Callable[[BatchProgress], None], warn: Callable[[str], None]
) -> BatchProgress:
    """Answers each line of a file that has no result yet; Ctrl+C ends it when the lines in flight have theirs.

    Args:
        order: What to answer.
        shown: Called a few times a second with the progress.
        warn: Called with warnings.

    Raises: as :class:`BatchInput`, :class:`BatchOutput`, :func:`checked_targets` and :func:`open_served`, and
        MissingExtraError: the packages of the extra ``serve`` are not installed.
        DataError: the output has results of another model or other options.
        RunError: the model stopped, or the disk is full; run again, it continues.
    """
    target = max(checked_targets([order.model]), key=lambda one: one.version)
    output = BatchOutput.open(order.out, BatchInput.read(order.source))
    try:
        if output.answered:
            answerer_of(target, order.settings).check(order.out)
        elif output.left:
            answerer_of(target, order.settings).begin(order.out)
        if not output.left:
            return output.progress
        return _answered(output, target, order, shown, warn)
    finally:
        output.close()


def _answered(
    output: BatchOutput,
    target: ServeTarget,
    order: BatchOrder,
    shown: Callable[[BatchProgress], None],
    warn: Callable[[str], None],
) -> BatchProgress:
    try:
        from systolic.serving.display.log import OpeningLog
        from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
        from systolic.serving.offline.run import BatchRun, WarningLog
        from systolic.serving.registry import ServedText
    except ImportError as error:
        raise MissingExtraError("systolic batch", "serve") from error
    settings, metrics = order.settings, Metrics()
    settings = replace(
        settings,
        sizes=replace(settings.sizes, queued=QUEUED),
        batch=replace(settings.batch, waiting=QUEUED, stalled_seconds=STALLED_SECONDS),
    )
    texts, batches = TextMetrics(metrics), BatchMetrics(metrics)
    # A terminal shows a bar instead.
    log = WarningLog(warn) if sys.stderr.isatty() else OpeningLog(warn)
    begun = time.monotonic()
    served = open_served(target, settings, texts, batches, log)
    try:
        served.start()
        seconds = round(time.monotonic() - begun, 3)
        log.write("warm", model=served.name, version=served.version, seconds=seconds)
        ahead = AHEAD * settings.sizes.rows if isinstance(served, ServedText) else IN_FLIGHT
        run = BatchRun(output, served, order.in_flight or ahead, warn)
        asyncio.run(run.run(shown))
        return run.progress
    finally:
        served.drain(0.0)


def answerer_of(target: ServeTarget, settings: ServeSettings) -> Answerer:
    """What a model's answers depend on.

    Raises: as :func:`~systolic.inference.model.prepare_model`.
    """
    contents = model_contents(target.path, settings.checkpoint)
    return Answerer(
        model=target.name,
        version=target.version,
        weights=contents.weights,
        texts=contents.texts,
        precision=_precision(target, settings),
        context=settings.sizes.context,
    )


def _precision(target: ServeTarget, settings: ServeSettings) -> str:
    asked = settings.precision
    if not in_files(target.path):
        return "the run's" if asked is Precision.auto else asked.value
    from systolic.steps.machine import LocalDevices

    return asked.resolve(LocalDevices.here().platform).value

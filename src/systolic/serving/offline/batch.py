"""``systolic batch``: the requests of a file answered by a model, without a server."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError
from systolic.core.files import write_json
from systolic.core.reporter import reporter
from systolic.formats.outline import model_contents
from systolic.formats.registry import in_files
from systolic.job import Precision
from systolic.serving.http.telemetry import EventLog
from systolic.serving.offline.files import BatchInput, BatchOutput, BatchProgress
from systolic.serving.server import ServeSettings, ServeTarget, checked_targets, open_served


@dataclass(frozen=True, kw_only=True, slots=True)
class Answerer:
    """Everything that answers depend on, beside the lines that ask for them."""

    model: str
    """Its name, which answers hold."""
    version: int
    weights: str
    """Digest of weights and config; a copy elsewhere has the same."""
    texts: str
    """Digest of tokenizer, chat template and preprocessing; empty where it has none of them."""
    precision: str
    """Precision of the computation."""
    context: int
    """Tokens of a text; 0 for the model's own limit."""

    def begin(self, out: Path) -> None:
        """Writes the file of an output that has no result yet.

        Raises:
            RunError: it can't be written.
        """
        write_json(answerer_file(out), asdict(self))

    def check(self, out: Path) -> None:
        """Compares the file of an output that has results.

        Raises:
            DataError: something else gave them, or the file is gone or damaged.
        """
        file = answerer_file(out)
        try:
            before = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{out} has results, and {file} that says which model gave them can't be read; put it back, or name another output"
            ) from error
        known = before if isinstance(before, dict) else {}
        differ = [
            f"{name} {known.get(name)!s:.40}, now {value}"
            for name, value in asdict(self).items()
            if known.get(name) != value
        ]
        if differ:
            raise DataError(
                f"{out} has results of another model or other options ({'; '.join(differ)}); use those again, or name another output"
            )


def answerer_file(out: Path) -> Path:
    """The file beside an output."""
    return out.with_name(f"{out.name}.model.json")


AHEAD = 2
"""Lines in flight for each text that is continued at once: while one runs, another waits for its place."""
IN_FLIGHT = 128
"""Lines in flight of a model that writes no text."""
QUEUED = 1 << 16
"""Texts or examples that may wait: lines can have many, and none is refused for others' sake."""
STALLED_SECONDS = 3600.0
"""Time of a call after which a model that writes no text counts as stuck; nobody waits for a single answer here."""


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """An event of a model that is opened, as the log of a server has it: ``context``, ``compiled``, ``warm``."""

    event: str
    fields: Mapping[str, Any]


class _ReporterLog(EventLog):
    """A log whose warnings and events the reporter is given."""

    def write(self, event: str, **fields: Any) -> None:
        """Warns of failures, and of what opening a model warns of; reports all else."""
        text = fields.get("message") if event == "warning" else fields.get("error")
        if text:
            reporter().warn(text)
        else:
            reporter().update(ModelEvent(event, fields))


def run_batch(
    model: str, source: Path, out: Path, settings: ServeSettings, in_flight: int = 0
) -> BatchProgress:
    """Answers each line of a file that has no result yet; Ctrl+C ends it when the lines in flight have theirs.

    The reporter is given the progress a few times a second, and a :class:`ModelEvent` for what opening the model tells.

    Args:
        model: ``DIR`` or ``NAME=DIR``; of several versions the newest.
        source: The requests.
        out: The results.
        settings: How the model is opened.
        in_flight: Lines that are asked at once; 0 takes :data:`AHEAD` for each of its rows, or :data:`IN_FLIGHT`.

    Raises: as :func:`systolic.batch`.
    """
    target = max(checked_targets([model]), key=lambda target: target.version)
    output = BatchOutput.open(out, BatchInput.read(source))
    try:
        if output.answered:
            answerer_of(target, settings).check(out)
        elif output.left:
            answerer_of(target, settings).begin(out)
        if not output.left:
            return output.progress
        return _answered(output, target, settings, in_flight)
    finally:
        output.close()


def _answered(
    output: BatchOutput, target: ServeTarget, settings: ServeSettings, in_flight: int
) -> BatchProgress:
    from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
    from systolic.serving.offline.run import BatchRun
    from systolic.serving.registry import ServedText

    metrics = Metrics()
    settings = replace(
        settings,
        sizes=replace(settings.sizes, queued=QUEUED),
        batch=replace(settings.batch, waiting=QUEUED, stalled_seconds=STALLED_SECONDS),
    )
    texts, batches = TextMetrics(metrics), BatchMetrics(metrics)
    log, begun = _ReporterLog(), time.monotonic()
    served = open_served(target, settings, texts, batches, log)
    try:
        served.start()
        seconds = round(time.monotonic() - begun, 3)
        log.write("warm", model=served.name, version=served.version, seconds=seconds)
        ahead = AHEAD * settings.sizes.rows if isinstance(served, ServedText) else IN_FLIGHT
        run = BatchRun(output, served, in_flight or ahead, reporter().warn)
        asyncio.run(run.run(reporter().update))
        return run.progress
    finally:
        served.drain(0.0)


def answerer_of(target: ServeTarget, settings: ServeSettings) -> Answerer:
    """Weights, texts and options that a model's answers depend on.

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
    precision = settings.precision
    if not in_files(target.path):
        return "the run's" if precision is Precision.auto else precision.value
    from systolic.steps.machine import LocalDevices

    return precision.resolve(LocalDevices.here().platform).value

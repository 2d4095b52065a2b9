"""A watcher that writes TensorBoard events: scalars of training and evaluation, samples as text."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.report import figures
from systolic.runs.metrics import (
    EvalRecord,
    LoggedRecord,
    SampleRecord,
    StartRecord,
    TrainRecord,
    seen,
)

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

FLUSH_SECONDS = 10.0
"""Longest delay until TensorBoard sees a record."""


def import_alone() -> None:
    """Imports tensorboardX without PyTorch and boto3, which it imports where they are installed: two seconds and 300 MB that nothing here uses."""
    if "tensorboardX" in sys.modules:
        return
    absent = [name for name in ("torch", "boto3") if name not in sys.modules]
    # An entry that is None makes an import fail, which the library takes for its absence.
    sys.modules.update(dict.fromkeys(absent))  # ty: ignore[no-matching-overload]
    try:
        import_module("tensorboardX")
    finally:
        for name in absent:
            del sys.modules[name]


class TensorBoard:
    """Writes events into ``folder`` (``RUN/tensorboard``) from the first record on, one a record.

    A resumed run adds a file that hides earlier values after the step it resumed from.
    A disk that fills up ends the events, not the run. For that the events are written in place:
    the library's queue would block the run for ever once its thread has met a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventsWriter | None = None
        self._flushed = 0.0
        self._closed = False

    def see(self, record: dict[str, Any]) -> None:
        """Writes a record's values into the file's buffer; ignored after ``close``."""
        if self._closed or record["kind"] == "evaluating":
            return
        try:
            if record["kind"] != "end":
                self._write(seen(record))
        except OSError:
            self.close()

    def close(self) -> None:
        """Flushes and closes the file; may be called twice."""
        self._closed = True
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except OSError:
            return

    def _write(self, record: LoggedRecord) -> None:
        import_alone()
        # Classes that protobuf makes when the module is imported.
        from tensorboardX.proto.event_pb2 import Event  # ty: ignore[import-not-found]
        from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[import-not-found]
        from tensorboardX.summary import text

        if self._writer is None:
            self._writer = self._open(record)
        if isinstance(record, SampleRecord):
            summary = text("sample", "\n".join(f"    {line}" for line in record.text.splitlines()))
        else:
            values = {
                tag: n
                for tag, v in _scalars(record).items()
                if (n := figures.number(v)) is not None
            }
            summary = Summary(
                value=[Summary.Value(tag=t, simple_value=v) for t, v in values.items()]
            )
        if not summary.value:
            return
        now = record.time or 0.0
        self._writer.write_event(Event(step=record.step, wall_time=now, summary=summary))
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._writer.flush()

    def _open(self, record: LoggedRecord) -> "EventsWriter":
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # ty: ignore[import-not-found]

        self._folder.mkdir(parents=True, exist_ok=True)
        writer = EventsWriter(str(self._folder / "events"))
        if isinstance(record, StartRecord) and record.resumed_from is not None:
            log = SessionLog(status=SessionLog.START)
            writer.write_event(
                Event(step=record.resumed_from + 1, wall_time=record.time, session_log=log)
            )
        return writer


def _scalars(record: LoggedRecord) -> dict[str, Any]:
    """Values by tag."""
    match record:
        case TrainRecord():
            return {
                "train/loss": record.loss,
                "train/learning_rate": record.learning_rate,
                "train/gradient_norm": record.grad_norm,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/examples_per_second": record.examples_per_second,
                "speed/step_seconds": record.step_seconds,
                "speed/forecast_step_seconds": record.forecast_step_seconds,
                "speed/mfu": record.mfu,
                "speed/data_wait": record.data_wait,
                "memory/bytes": record.memory_bytes,
                **{f"train/{name}": value for name, value in record.terms.items()},
            }
        case EvalRecord():
            return {f"{record.split}/{name}": value for name, value in record.metrics.items()}
    return {}

"""Log of a run: one JSON record a line, appended completely or not at all, which watchers of a training get as well.

A record is a plain mapping where it is written and for watchers; :func:`typed` makes it one value where it is read.
"""

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from systolic.core.errors import RunError
from systolic.core.files import write_atomically

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXT = frozenset({"prompt", "text", "detail", "name"})
"""Fields that are always text."""
_LASTING = frozenset({"bad_step", "skip", "lost", "resume", "stop", "interrupt"})
"""Events that stay when training returns to an earlier checkpoint."""
Record = Mapping[str, Any]


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of JSON. Numbers that JSON lacks become the text ``NaN``, ``Infinity``, ``-Infinity``.

    Raises:
        TypeError: a value that is neither JSON nor a NumPy scalar.
    """
    return (json.dumps(_plain(record), allow_nan=False, ensure_ascii=False) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """Inverse of :func:`encode`.

    Raises:
        ValueError: the line is not a record.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    return _numbers(record)


class Log:
    """Appends records to a file; each is in the file when :meth:`append` returns.

    Raises:
        RunError: the file does not open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
            RunError: the disk is full; the file keeps the records before.
            TypeError: see :func:`encode`.
        """
        handle = self._open()
        line = encode(record)
        before = os.fstat(handle).st_size
        try:
            done = 0
            while done < len(line):
                done += os.write(handle, line[done:])
        except OSError as error:
            os.ftruncate(handle, before)
            raise RunError(
                f"{self.path} could not be written ({error.strerror}); what it held is intact; free space and continue with --resume {shlex.quote(str(self.path.parent))}"
            ) from error

    def truncate(self, step: int, again: Callable[[Record], bool]) -> int:
        """Drops the records after ``step``, atomically; returns their number.

        Earlier records, and those of ``step`` itself, are dropped where ``again`` says that they will be made again.

        Bad steps, skips, lost processes, resumes, stops and interruptions stay. A run's ``end`` is dropped at any step, since
        the run continues.
        """
        records = list(read(self.path))
        kept = [record for record in records if _stays(record, step) and not again(record)]
        self.close()
        write_atomically(self.path, b"".join(map(encode, kept)))
        self._open()
        return len(records) - len(kept)

    def sync(self) -> None:
        """Has the disk, or the bucket that a mount writes to, hold what was appended."""
        if self._handle is not None:
            with suppress(OSError):  # Some mounts have no such call.
                os.fsync(self._handle)

    def close(self) -> None:
        """Closes the file; a later append opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        if self._handle is None:
            try:
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                _end_last_line(self.path, self._handle)
            except OSError as error:
                raise RunError(
                    f"{self.path} could not be opened ({error.strerror}); choose another folder"
                ) from error
        return self._handle


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a log, oldest first, without a cut last line.

    Raises:
        RunError: a line before the last is damaged; names it.
    """
    for number, record, is_whole in scan(path):
        if record is not None:
            yield record
        elif is_whole:
            raise RunError(f"line {number} of {path} is damaged; delete that line and try again")


def scan(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, bool]]:
    """Lines of a log: number from 1, record (``None`` for a damaged line), whether the line has its end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = decode(line)
            except ValueError:
                record = None
            yield number, record, line.endswith(b"\n")


def number(value: Any) -> float | None:
    """A record's value as a float: ``None`` stays absent, NaN stays NaN, text is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


class LoggedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl, of any kind."""

    step: int = 0
    time: float | None = None
    """Unix seconds."""
    elapsed: float = 0.0
    """Seconds of training until then, pauses left out; of a run that was read back."""


class StartRecord(LoggedRecord, frozen=True, kw_only=True):
    """The start of a session; versions before lack some of its fields."""

    name: str | None = None
    """The job's."""
    steps: int | float | None = None
    unit: str | None = None
    """``tokens`` or ``examples``."""
    num_parameters: int | None = None
    """Parameters that train."""
    total_parameters: int | None = None
    devices: str | None = None
    """Number and kind: ``2 x cpu``."""
    num_devices: int | None = None
    device_kind: str | None = None
    precision: str | None = None
    flags: list[str] = []
    """Compiler flags."""
    batch: int | None = None
    """Examples a step."""
    examples: int | None = None
    """Examples of the training data."""
    workers: int = 0
    layout: dict[str, int] = {}
    """Sizes of the mesh axes."""
    resumed_from: int | None = None
    """Step of the checkpoint that it continued from."""
    shares: tuple[str, ...] = ("*accuracy", "*_rate", "*_share")
    """The task's terms that are shares of 1; versions before have none and show these names so."""


class TrainRecord(LoggedRecord, frozen=True, kw_only=True):
    """Means over the steps since the record before."""

    step: int
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    num_steps: int | None = None
    step_seconds: float | None = None
    forecast_step_seconds: float | None = None
    forecast_ratio: float | None = None
    """Measured over forecast step time."""
    mfu: float | None = None
    data_wait: float | None = None
    """Share of the time."""
    device_wait: float | None = None
    memory_bytes: float | None = None
    eta_seconds: float | None = None
    terms: dict[str, float] = {}
    """Numbers that the task adds, by name."""


class EvalRecord(LoggedRecord, frozen=True, kw_only=True):
    """An evaluation."""

    step: int
    split: str
    metrics: dict[str, Any] = {}
    seconds: float | None = None
    batches: int | None = None
    """Batches that were read."""
    of: int | None = None
    """Batches of the split."""
    final: bool = False
    """Whether it is of the end of the run."""


class EvaluatingRecord(LoggedRecord, frozen=True, kw_only=True):
    """Progress of an evaluation, for watchers only."""

    split: str
    batches: int
    of: int | None = None


class EventRecord(LoggedRecord, frozen=True, kw_only=True):
    """A compilation, a checkpoint, a bad step …"""

    name: str = "event"
    seconds: float = 0.0
    detail: str = ""


class SampleRecord(LoggedRecord, frozen=True, kw_only=True):
    """Text that a language model generated."""

    prompt: str = ""
    text: str = ""


class FinalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run's last step."""

    loss: float | None = None
    metrics: dict[str, Any] = {}
    """By split and name: ``validation_loss``."""


class ForecastRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Step time of a plan, beside the measured one; empty for a run without a plan."""

    step_seconds: float | None = None
    measured_step_seconds: float | None = None


class SummaryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a session, in summary.json and metrics.jsonl."""

    steps: int
    time: dict[str, float]
    """Seconds by what they went to."""
    seconds: float = 0.0
    """Wall time."""
    run: str | None = None
    final: FinalRecord | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    mfu: float | None = None
    forecast: ForecastRecord = ForecastRecord()
    checkpoint: str | None = None
    epochs: float | None = None
    bad_steps: int = 0
    skipped_files: int = 0
    recompiles: int = 0
    interrupted: str | None = None
    """The signal that ended it."""
    stopped: str | None = None
    """Why it ended before its last step."""
    next: str | None = None
    """Command to type next."""


class ProbedParameter(msgspec.Struct, frozen=True, kw_only=True):
    """Norms of a parameter at a probe: numbers, or lists of them by layer where it stacks the layers."""

    shape: list[int]
    dtype: str
    gradient: float | list[float]
    weight: float | list[float]
    update: float | list[float]
    lost: float | list[float]
    """Share of the updates that rounding loses."""


class ProbeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of diagnoses.jsonl (see :mod:`systolic.training.diagnosis`)."""

    step: int
    learning_rate: float = 0.0
    big_square: float = math.nan
    """Squared norm of the batch's gradient."""
    small_square: float = math.nan
    """Mean squared norm of those of its parts; NaN where it has one."""
    batch: int = 0
    """Examples."""
    parts: int = 1
    parameters: dict[str, ProbedParameter] = {}
    """Parameters by path."""
    epochs: float | None = None
    """Passes over the training data before it."""


_KINDS: Mapping[str, type[LoggedRecord]] = {
    "start": StartRecord,
    "train": TrainRecord,
    "eval": EvalRecord,
    "evaluating": EvaluatingRecord,
    "event": EventRecord,
    "sample": SampleRecord,
}
_TRAIN = frozenset(TrainRecord.__struct_fields__)


def typed(record: Record) -> LoggedRecord:
    """A record as the value of its kind; of a kind that this version has not, what all have.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    kind = _KINDS.get(record["kind"], LoggedRecord)
    fields = _present(record)
    if kind is TrainRecord:
        terms = {n: v for n in fields.keys() - _TRAIN if (v := number(fields[n])) is not None}
        fields["terms"] = {name: terms[name] for name in fields if name in terms}
    return msgspec.convert(fields, kind)


def summary_of(record: Record) -> SummaryRecord:
    """Summary of a run's end.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    return msgspec.convert(_present(record), SummaryRecord)


def probe_of(record: Record) -> ProbeRecord:
    """Gradient probe.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    return msgspec.convert(_present(record), ProbeRecord)


def seen(record: Record) -> LoggedRecord:
    """A watcher's record as :func:`typed` makes it once it is written."""
    return typed(decode(encode(record)))


def _present(record: Record) -> dict[str, Any]:
    """Fields that are not null, which stands for what is unknown."""
    return {name: value for name, value in record.items() if value is not None}


def loss_of(record: TrainRecord) -> float:
    """A record's loss; NaN where it has none."""
    return math.nan if record.loss is None else record.loss


def norm_of(record: TrainRecord) -> float:
    """A record's gradient norm; NaN where it has none."""
    return math.nan if record.grad_norm is None else record.grad_norm


def rate_of(record: TrainRecord) -> float:
    """A record's learning rate; NaN where it has none."""
    return math.nan if record.learning_rate is None else record.learning_rate


def _end_last_line(path: Path, handle: int) -> None:
    """Ends the last line, or removes it if a kill cut it short."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        decode(content[start:])
    except ValueError:
        os.ftruncate(handle, start)
    else:
        os.write(handle, b"\n")


def _stays(record: Mapping[str, Any], step: int) -> bool:
    kind = record.get("kind")
    if kind == "end":
        return False
    if kind == "start" or (kind == "event" and record.get("name") in _LASTING):
        return True
    at = record.get("step")
    return at is None or at <= step


def _plain(value: Any) -> Any:
    import numpy as np  # here, for a run is opened by commands that need no arrays

    match value:
        case None | bool() | int() | str():
            return value
        case np.generic():
            return _plain(value.item())
        case np.ndarray():
            return _plain(value.tolist())
        case float():
            if math.isfinite(value):
                return value
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
    raise TypeError(f"a record cannot hold {type(value).__name__}")


def _numbers(value: Any) -> Any:
    match value:
        case dict():
            return {k: v if k in _TEXT else _numbers(v) for k, v in value.items()}
        case list():
            return [_numbers(item) for item in value]
        case str():
            return _SPELLED.get(value, value)
    return value


class Watcher(Protocol):
    """Watcher of the records of ``metrics.jsonl``; must not raise and must return at once."""

    def see(self, record: dict[str, Any]) -> None:
        """Takes a record; its ``kind`` is start, train, eval, event, sample or end."""
        ...

    def close(self) -> None:
        """Called when the run is over, for any reason."""
        ...

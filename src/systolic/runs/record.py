"""A run read back from its directory: one value behind its summary, its page and its explanation.

Reading forgives what a crash leaves (a torn last line, a missing or damaged summary, no environment
file) and names it in :attr:`RunRecord.damage`.
"""

import contextlib
import enum
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import NotFoundError, RunError, SystolicError
from systolic.runs import metrics
from systolic.runs.job_record import JobRecord
from systolic.runs.metrics import (
    EvalRecord,
    EventRecord,
    LoggedRecord,
    ProbeRecord,
    SampleRecord,
    StartRecord,
    SummaryRecord,
    TrainRecord,
    loss_of,
    norm_of,
    probe_of,
    summary_of,
    typed,
)
from systolic.runs.run import (
    DIAGNOSES,
    ENVIRONMENT,
    JOB,
    METRICS,
    SUMMARY,
    Run,
    job_fields,
    renamed,
)

Record = dict[str, Any]
_T = TypeVar("_T")
KINDS = ("step", "data_wait", "compile", "eval", "checkpoint")


class State(enum.Enum):
    """How far a run came."""

    finished = "finished"
    stopped = "stopped"
    """Ended before its last step by its own rule: early stopping."""
    interrupted = "interrupted"
    """Ended from outside, after saving."""
    failed = "failed"
    """A bad step ended it: the last thing on record is that step."""
    unfinished = "unfinished"
    """No summary: it still trains, or was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of a run directory; records by kind, oldest first.

    Every record of ``metrics.jsonl`` has ``elapsed``: seconds of training, pauses left out.
    """

    path: Path
    job: JobRecord = field(default_factory=JobRecord)
    """``job.json``; without a job where there is none."""
    job_fields: Mapping[str, Any] = field(default_factory=dict)
    """The same as it is written, with what other versions add; {} where there is none."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: SummaryRecord | None = None
    """Summary of the last session; ``None`` for a run that has not ended."""
    began: float | None = None
    """Unix seconds of the first record."""
    starts: Sequence[StartRecord] = ()
    """One record for each session."""
    last: LoggedRecord | None = None
    """The last record of any kind; None if there is none."""
    train: Sequence[TrainRecord] = ()
    evals: Sequence[EvalRecord] = ()
    events: Sequence[EventRecord] = ()
    samples: Sequence[SampleRecord] = ()
    diagnoses: Sequence[ProbeRecord] = ()
    """Gradients and updates by layer (see :mod:`systolic.training.diagnosis`)."""
    seconds: float = 0.0
    """From the first record to the last, without the pauses between sessions."""
    step_seconds: float = 0.0
    """Time of the steps of all sessions."""
    resumes: Sequence[float] = ()
    """``elapsed`` at the start of each session but the first."""
    damage: Sequence[str] = ()
    """Damaged lines and files, a sentence each with the values that replace them."""

    @property
    def start(self) -> StartRecord:
        """Start record of the last session; without fields if none was written."""
        return self.starts[-1] if self.starts else StartRecord()

    @property
    def name(self) -> str:
        """The job's name, or the directory's."""
        return self.start.name or self.job.outline.name or self.path.name

    @property
    def num_sessions(self) -> int:
        """How often it was started; 1 for a run without records too."""
        return len(self.resumes) + 1

    @property
    def resumed_from(self) -> int:
        """Steps done before the last session."""
        return self.start.resumed_from or 0

    @property
    def steps(self) -> int | None:
        """Steps the job asks for."""
        steps = self.start.steps or self.job.outline.steps
        return None if steps is None else int(steps)

    @property
    def step(self) -> int:
        """The last step on record."""
        steps = [record.step for record in (*self.train[-1:], *self.evals[-1:])]
        return max(steps if self.summary is None else [*steps, self.summary.steps], default=0)

    @property
    def state(self) -> State:
        """How far it came, from its files alone."""
        if self.summary is None:
            last = self.last
            failed = isinstance(last, EventRecord) and last.name in ("bad_step", "skip")
            return State.failed if failed else State.unfinished
        if self.summary.interrupted:
            return State.interrupted
        return State.stopped if self.summary.stopped else State.finished

    @property
    def is_finished(self) -> bool:
        """Whether it came to the job's last step."""
        if self.summary is None or self.state is not State.finished:
            return False
        return self.summary.steps >= (math.inf if self.start.steps is None else self.start.steps)

    @property
    def final_metrics(self) -> Mapping[str, Any]:
        """The summary's metrics, or those of the last evaluation of each split, named alike."""
        if self.summary is not None and self.summary.final is not None:
            return self.summary.final.metrics
        return {
            f"{record.split}_{name}": value
            for record in self.evals
            for name, value in record.metrics.items()
        }

    @property
    def final_loss(self) -> float | None:
        """The summary's loss, or the last one on record; NaN if that was not a number."""
        if self.summary is not None and self.summary.final is not None:
            return self.summary.final.loss
        return loss_of(self.train[-1]) if self.train else None

    @property
    def train_steps(self) -> Sequence[int]:
        """The step of each train record."""
        return [record.step for record in self.train]

    @property
    def losses(self) -> Sequence[float]:
        """The loss of each train record, NaN among them."""
        return [loss_of(record) for record in self.train]

    @property
    def norms(self) -> Sequence[float]:
        """The gradient norms that are numbers."""
        return [n for record in self.train if math.isfinite(n := norm_of(record))]

    @property
    def peak_rate(self) -> float:
        """The highest learning rate on record; 0 where there is none."""
        return max((record.learning_rate or 0.0 for record in self.train), default=0.0)

    @property
    def reads_text(self) -> bool:
        """Whether it trains a language model: its throughput counts tokens."""
        if self.start.unit is not None:
            return self.start.unit == "tokens"
        return any(record.tokens_per_second is not None for record in self.train)

    @property
    def unit(self) -> str:
        """Unit of a batch: rows of tokens, or examples."""
        return "rows" if self.reads_text else "examples"

    @property
    def epochs(self) -> float | None:
        """Passes over the training data; ``None`` where that is not known."""
        if self.summary is not None and self.summary.epochs is not None:
            return self.summary.epochs
        probed = [probe.epochs for probe in self.diagnoses if probe.epochs is not None]
        if probed:
            return probed[-1]
        examples, batch = self.start.examples, self.start.batch
        if not examples or not batch or not self.train:
            return None
        return self.train[-1].step * batch / examples

    @property
    def has_diverged(self) -> bool:
        """Whether the last loss on record is not a number."""
        return bool(self.train) and not math.isfinite(loss_of(self.train[-1]))

    def loss_near(self, step: int) -> float | None:
        """Median training loss of the last records up to a step; ``None`` where there are none."""
        losses = (loss_of(record) for record in self.train if record.step <= step)
        before = [loss for loss in losses if math.isfinite(loss)]
        window = max(3, len(self.train) // 20)
        return statistics.median(before[-window:]) if before else None


def load_run(path: Path, *, last_session: bool = False) -> RunRecord:
    """Reads a run directory, of this version or an earlier one.

    Args:
        path: The directory.
        last_session: Leave out the records and diagnoses of earlier sessions: the summary's times are of the last.

    Raises:
        NotFoundError: there is no such directory, or it holds neither job.json nor metrics.jsonl.
        RunError: job.json or environment.json is damaged.
    """
    if not ((path / METRICS).is_file() or (path / JOB).is_file()):
        raise NotFoundError(
            f"{path} is not a run (no {JOB}, no {METRICS}); give a directory that systolic train made"
        )
    ledger = _RecordCollector()
    lines, damage = _read_lines(path / METRICS, _logged)
    diagnoses, more = _read_lines(path / DIAGNOSES, probe_of)
    if last_session:
        lines, diagnoses = _last_session(lines, diagnoses)
    for record in lines:
        ledger.add(record)
    summary, lost = _read_summary(path, ledger.end)
    job, fields = _read_object(path / JOB, _job) or (JobRecord(), {})
    return RunRecord(
        path=path,
        job=job,
        job_fields=fields,
        environment=_read_object(path / ENVIRONMENT, json.loads) or {},
        summary=summary,
        began=ledger.began,
        starts=ledger.of(StartRecord),
        last=ledger.last,
        train=ledger.of(TrainRecord),
        evals=ledger.of(EvalRecord),
        events=ledger.of(EventRecord),
        samples=ledger.of(SampleRecord),
        diagnoses=diagnoses,
        seconds=ledger.elapsed,
        step_seconds=ledger.stepped + ledger.open,
        resumes=ledger.resumes,
        damage=[*lost, *damage, *more],
    )


def _job(content: bytes) -> tuple[JobRecord, Record]:
    """A job.json as a value, and as it is written."""
    fields = job_fields(content)
    return JobRecord.from_json(fields), fields


def _logged(record: Record) -> LoggedRecord | SummaryRecord:
    """A line of metrics.jsonl.

    Raises:
        KeyError: it has no kind or no time.
        msgspec.ValidationError: a field is damaged.
    """
    kind, _ = record["kind"], record["time"]
    return summary_of(record) if kind == "end" else typed(record)


def _read_lines(path: Path, read: Callable[[Record], _T]) -> tuple[list[_T], list[str]]:
    """Intact records of a log, and a sentence about damaged lines."""
    records, damaged = [], []
    for line, record, _ in metrics.scan(path):
        try:
            if record is None:
                raise KeyError(line)
            records.append(read(record))
        except (KeyError, msgspec.ValidationError):
            damaged.append(line)
    if not damaged:
        return records, []
    more = f" and {len(damaged) - 3:,} more" if len(damaged) > 3 else ""
    lines = f"{', '.join(map(str, damaged[:3]))}{more}"
    words = (
        f"line {lines} of {path.name} is"
        if len(damaged) == 1
        else f"lines {lines} of {path.name} are"
    )
    return records, [f"{words} damaged and left out"]


def _last_session(
    lines: list[LoggedRecord | SummaryRecord], diagnoses: list[ProbeRecord]
) -> tuple[list[LoggedRecord | SummaryRecord], list[ProbeRecord]]:
    starts = [(at, line) for at, line in enumerate(lines) if isinstance(line, StartRecord)]
    if not starts:
        return lines, diagnoses
    at, start = starts[-1]
    before = start.resumed_from or 0
    return lines[at:], [probe for probe in diagnoses if probe.step > before]


def _read_summary(path: Path, end: SummaryRecord | None) -> tuple[SummaryRecord | None, list[str]]:
    """The summary, or where the file is damaged the run's ``end`` record, which holds the same values."""
    try:
        return _read_object(
            path / SUMMARY, lambda content: summary_of(renamed(metrics.decode(content), path))
        ), []
    except RunError:
        what = "its records" if end is None else "the figures of the run's end"
    return end, [f"{path / SUMMARY} is damaged; {what} in {METRICS} count instead"]


def _read_object(path: Path, decode: Callable[[bytes], _T]) -> _T | None:
    if not path.is_file():
        return None
    try:
        return decode(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path} is damaged ({error}); move it away to read the rest of the run"
        ) from error


@dataclass(slots=True)
class _RecordCollector:
    """Collects records in file order, session by session."""

    last: LoggedRecord | None = None
    end: SummaryRecord | None = None
    records: list[LoggedRecord] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    began: float | None = None
    stepped: float = 0.0
    """Seconds of steps in sessions before the last."""
    open: float = 0.0
    """Seconds of steps in the last one."""
    counted: float = 0.0
    """Steps in both."""
    _origin: float = 0.0
    """Unix seconds at which ``elapsed`` would have been 0, had there been no pause."""

    def add(self, record: LoggedRecord | SummaryRecord) -> None:
        """Dates a record of metrics.jsonl and keeps it."""
        self._count(record)
        if isinstance(record, SummaryRecord):
            self.end = record
            return
        if record.time is not None:
            self._date(record.time, is_start=isinstance(record, StartRecord))
        self.last = msgspec.structs.replace(record, elapsed=self.elapsed)
        self.records.append(self.last)

    def of(self, kind: type[_T]) -> list[_T]:
        """The records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def _count(self, record: LoggedRecord | SummaryRecord) -> None:
        """Adds up the time of steps; of a session before the last its train records tell it, up to where the next began."""
        match record:
            case StartRecord():
                done = record.resumed_from or 0
                share = done / self.counted if self.counted else 1.0
                self.stepped, self.open = (self.stepped + self.open) * share, 0.0
                self.counted = done
            case TrainRecord():
                count = record.num_steps or 0
                busy = 1 - (record.data_wait or 0.0)
                self.open += (record.step_seconds or 0.0) * count * busy
                self.counted += count
            case SummaryRecord():
                self.open = record.time.get("step") or self.open

    def _date(self, time: float, *, is_start: bool) -> None:
        if self.began is None:
            self.began = self._origin = time
        elif is_start:
            self.resumes.append(self.elapsed)
            self._origin = time - self.elapsed
        self.elapsed = max(self.elapsed, time - self._origin)


def slice_of(run: Run) -> Slice:
    """The devices that a run was last trained on.

    Raises:
        NotFoundError: the catalogue has no such chip, or no slice of so many.
    """
    starts = load_run(run.path).starts
    if not starts:
        raise NotFoundError(f"{run.path} has no session on record; train it first")
    number, kind = _devices(starts[-1])
    chip = by_device_kind(kind)
    name = "cpu" if kind == "cpu" else chip.name if chip else ""
    if not name:
        raise NotFoundError(
            f"the catalogue has no {kind}; forecast on another: systolic explain RECIPE --on v5e-16"
        )
    return slice_with(number, name, kind)


def slice_with(number: int, name: str, kind: str) -> Slice:
    """The slice of so many devices of a chip.

    Args:
        number: Devices.
        name: The chip's in the catalogue.
        kind: The chip's for people.

    Raises:
        NotFoundError: there is none of so many.
    """
    # Slices of some generations are named by cores, of which a chip has two.
    for text in (f"{number}x{name}", f"{name}-{number}", f"{name}-{2 * number}"):
        with contextlib.suppress(SystolicError):
            on = slice(text)
            if on.num_devices == number:
                return on
    raise NotFoundError(
        f"the catalogue has no slice of {number} x {kind}; systolic chips {name} lists those that it has"
    )


def _devices(start: StartRecord) -> tuple[int, str]:
    """Number and kind of the devices of a session."""
    if start.num_devices is not None and start.device_kind is not None:
        return start.num_devices, start.device_kind
    count, _, kind = (start.devices or "").partition(" x ")  # of an earlier version
    return int(count), kind


def steps_of(
    train: Iterable[TrainRecord], resumed_from: int = 0
) -> Iterator[tuple[TrainRecord, int]]:
    """Pairs each record with the number of steps it averages.

    Records of earlier versions lack the number: it is then the steps since the previous record.

    Args:
        resumed_from: steps done before the first record's session.
    """
    before = resumed_from
    for record in train:
        steps = max(record.step - before, 0) if record.num_steps is None else record.num_steps
        yield record, steps
        before = record.step


def spent(
    train: Iterable[TrainRecord],
    evals: Iterable[EvalRecord],
    events: Iterable[EventRecord],
    resumed_from: int = 0,
) -> dict[str, float]:
    """Seconds by :data:`KINDS`; the start of the run is in none of them."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = "compile" if event.name == "recompile" else event.name
        if kind in ("compile", "checkpoint"):
            by_kind[kind] += event.seconds
    by_kind["eval"] = sum(record.seconds or 0.0 for record in evals)
    for record, steps in steps_of(train, resumed_from):
        seconds, waited = (record.step_seconds or 0.0) * steps, record.data_wait or 0.0
        by_kind["data_wait"] += seconds * waited
        by_kind["step"] += seconds * (1 - waited)
    return by_kind

"""A run read back from its directory: one value behind its summary, its page and its explanation.

Reading forgives what a crash leaves (a torn last line, a missing or damaged summary, no environment
file) and names it in :attr:`RunRecord.damage`.

Devices that a run was trained on, as a slice of the catalogue.
"""

import contextlib
import enum
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import NotFoundError, RunError, SystolicError
from systolic.runs import metrics
from systolic.runs.metrics import number
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

KINDS = ("start", "train", "eval", "event", "sample")
"""Records that are kept as lists."""


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
    job: Mapping[str, Any] = field(default_factory=dict)
    """``job.json``; {} where there is none."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    """Summary of the last session; ``None`` for a run that has not ended."""
    began: float | None = None
    """Unix seconds of the first record."""
    starts: Sequence[Record] = ()
    """One record for each session."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """The last record of any kind; {} if there is none."""
    train: Sequence[Record] = ()
    evals: Sequence[Record] = ()
    events: Sequence[Record] = ()
    samples: Sequence[Record] = ()
    diagnoses: Sequence[Record] = ()
    """Gradients and updates by layer (see :mod:`systolic.training.probe`)."""
    seconds: float = 0.0
    """From the first record to the last, without the pauses between sessions."""
    step_seconds: float = 0.0
    """Time of the steps of all sessions."""
    resumes: Sequence[float] = ()
    """``elapsed`` at the start of each session but the first."""
    damage: Sequence[str] = ()
    """Damaged lines and files, a sentence each with the values that replace them."""

    @property
    def start(self) -> Mapping[str, Any]:
        """Start record of the last session; {} if none was written."""
        return self.starts[-1] if self.starts else {}

    @property
    def name(self) -> str:
        """The job's name, or the directory's."""
        return str(self.start.get("name") or self._plain_job.get("name") or self.path.name)

    @property
    def num_sessions(self) -> int:
        """How often it was started; 1 for a run without records too."""
        return len(self.resumes) + 1

    @property
    def resumed_from(self) -> int:
        """Steps done before the last session."""
        return self.start.get("resumed_from") or 0

    @property
    def steps(self) -> int | None:
        """Steps the job asks for."""
        steps = number(self.start.get("steps") or self._plain_job.get("steps"))
        return None if steps is None else int(steps)

    @property
    def step(self) -> int:
        """The last step on record."""
        summary = () if self.summary is None else ({"step": self.summary.get("steps")},)
        records = (*self.train[-1:], *self.evals[-1:], *summary)
        steps = [n for record in records if (n := number(record.get("step"))) is not None]
        return int(max(steps, default=0))

    @property
    def state(self) -> State:
        """How far it came, from its files alone."""
        if self.summary is None:
            failed = self.last.get("name") in ("bad_step", "skip")
            return State.failed if failed else State.unfinished
        if self.summary.get("interrupted"):
            return State.interrupted
        return State.stopped if self.summary.get("stopped") else State.finished

    @property
    def is_finished(self) -> bool:
        """Whether it came to the job's last step."""
        if self.summary is None or self.state is not State.finished:
            return False
        return self.summary["steps"] >= self.start.get("steps", math.inf)

    @property
    def final_metrics(self) -> Mapping[str, Any]:
        """The summary's metrics, or those of the last evaluation of each split, named alike."""
        if self.summary is not None and "final" in self.summary:
            return self.summary["final"]["metrics"]
        return {
            f"{record['split']}_{name}": value
            for record in self.evals
            for name, value in record["metrics"].items()
        }

    @property
    def final_loss(self) -> float | None:
        """The summary's loss, or the last one on record; NaN if that was not a number."""
        if self.summary is not None and "final" in self.summary:
            return number(self.summary["final"]["loss"])
        return loss_of(self.train[-1]) if self.train else None

    @property
    def train_steps(self) -> Sequence[int]:
        """The step of each train record."""
        return [record["step"] for record in self.train]

    @property
    def losses(self) -> Sequence[float]:
        """The loss of each train record, NaN among them."""
        return [record["loss"] for record in self.train]

    @property
    def peak_rate(self) -> float:
        """The highest learning rate on record; 0 where there is none."""
        return max((record["learning_rate"] for record in self.train), default=0.0)

    @property
    def reads_text(self) -> bool:
        """Whether it trains a language model: its throughput counts tokens."""
        if (unit := self.start.get("unit")) is not None:
            return unit == "tokens"
        return any("tokens_per_second" in record for record in self.train)

    @property
    def unit(self) -> str:
        """Unit of a batch: rows of tokens, or examples."""
        return "rows" if self.reads_text else "examples"

    @property
    def epochs(self) -> float | None:
        """Passes over the training data; ``None`` where that is not known."""
        counted = (*self.diagnoses, *filter(None, [self.summary]))
        known = [epochs for record in counted if (epochs := record.get("epochs")) is not None]
        if known:
            return known[-1]
        examples, batch = self.start.get("examples"), self.start.get("batch")
        if not examples or not batch or not self.train:
            return None
        return self.train[-1]["step"] * batch / examples

    @property
    def has_diverged(self) -> bool:
        """Whether the last loss on record is not a number."""
        return bool(self.train) and not math.isfinite(loss_of(self.train[-1]))

    def loss_near(self, step: int) -> float | None:
        """Median training loss of the last records up to a step; ``None`` where there are none."""
        before = [r["loss"] for r in self.train if r["step"] <= step and math.isfinite(r["loss"])]
        window = max(3, len(self.train) // 20)
        return statistics.median(before[-window:]) if before else None

    @property
    def _plain_job(self) -> Mapping[str, Any]:
        return self.job.get("job") or {}


def loss_of(record: Record) -> float:
    """A record's loss; NaN where it has none."""
    loss = number(record.get("loss"))
    return math.nan if loss is None else loss


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
    records, damage = _read_lines(path / METRICS)
    diagnoses, more = _read_lines(path / DIAGNOSES)
    if last_session:
        records, diagnoses = _last_session(records, diagnoses)
    ledger = _RecordCollector()
    for record in records:
        ledger.add(record)
    summary, lost = _read_summary(path, ledger.end)
    return RunRecord(
        path=path,
        job=_read_object(path / JOB, job_fields) or {},
        environment=_read_object(path / ENVIRONMENT, json.loads) or {},
        summary=summary,
        began=ledger.began,
        starts=ledger.records["start"],
        last=ledger.last,
        train=ledger.records["train"],
        evals=ledger.records["eval"],
        events=ledger.records["event"],
        samples=ledger.records["sample"],
        diagnoses=diagnoses,
        seconds=ledger.elapsed,
        step_seconds=ledger.stepped + ledger.open,
        resumes=ledger.resumes,
        damage=[*lost, *damage, *more],
    )


def _read_lines(path: Path) -> tuple[list[Record], list[str]]:
    """Intact records of a log, and a sentence about damaged lines."""
    records, damaged = [], []
    for line, record, _ in metrics.scan(path):
        if record is None or (path.name == METRICS and not {"kind", "time"} <= set(record)):
            damaged.append(line)
        else:
            records.append(record)
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
    records: list[Record], diagnoses: list[Record]
) -> tuple[list[Record], list[Record]]:
    starts = [n for n, record in enumerate(records) if record["kind"] == "start"]
    session = records[starts[-1] :] if starts else records
    before = (session[0].get("resumed_from") or 0) if session else 0
    return session, [record for record in diagnoses if record["step"] > before]


def _read_summary(path: Path, end: Record | None) -> tuple[Record | None, list[str]]:
    """The summary, or where the file is damaged the run's ``end`` record, which holds the same values."""
    try:
        summary = _read_object(path / SUMMARY, metrics.decode)
        if summary is None:
            return None, []
        if {"steps", "time"} <= set(summary):
            return renamed(summary, path), []
    except RunError:
        pass
    what = "its records" if end is None else "the figures of the run's end"
    return end, [f"{path / SUMMARY} is damaged; {what} in {METRICS} count instead"]


def _read_object(path: Path, decode: Callable[[bytes], Any]) -> Record | None:
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

    last: Record = field(default_factory=dict)
    end: Record | None = None
    records: dict[str, list[Record]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
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

    def add(self, record: Record) -> None:
        """Sorts a record of metrics.jsonl by its kind and dates it."""
        kind = record["kind"]
        self._count(record)
        if kind == "end":
            self.end = record  # The values of summary.json: its ``time`` is where the time went.
            return
        if (time := number(record["time"])) is not None:
            self._date(time, is_start=kind == "start")
        record["elapsed"] = self.elapsed
        self.last = record
        if kind in self.records:
            self.records[kind].append(record)

    def _count(self, record: Record) -> None:
        """Adds up the time of steps; of a session before the last its train records tell it, up to where the next began."""
        match record["kind"]:
            case "start":
                done = number(record.get("resumed_from")) or 0.0
                share = done / self.counted if self.counted else 1.0
                self.stepped, self.open = (self.stepped + self.open) * share, 0.0
                self.counted = done
            case "train":
                each, count, waited = (
                    number(record.get(name)) or 0.0
                    for name in ("step_seconds", "num_steps", "data_wait")
                )
                self.open += each * count * (1 - waited)
                self.counted += count
            case "end":
                time = record["time"]
                session = number(time.get("step")) if isinstance(time, Mapping) else None
                self.open = session or self.open

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
    start = load_run(run.path).start
    if not start:
        raise NotFoundError(f"{run.path} has no session on record; train it first")
    number, kind = _devices(start)
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


def _devices(start: Mapping[str, Any]) -> tuple[int, str]:
    """Number and kind of the devices of a session."""
    if "num_devices" in start:
        return start["num_devices"], start["device_kind"]
    count, _, kind = start["devices"].partition(" x ")  # of an earlier version
    return int(count), kind

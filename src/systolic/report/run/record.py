"""A run read back from its directory: the one record behind the summary and the page.

Reading forgives what a crash leaves: a torn last line, a missing summary, no environment file.
"""

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.artifact.metrics import decode
from systolic.artifact.run import ENVIRONMENT, JOB, METRICS, SUMMARY
from systolic.core.errors import NotFoundError, RunError
from systolic.report import figures

Record = dict[str, Any]

KINDS = ("train", "eval", "event", "sample")
"""Records that are kept as lists; ``start`` and ``end`` are looked at one by one."""


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
    """The files of a run directory. Every record has ``elapsed``: seconds of training, pauses left out."""

    path: Path
    job: Record
    environment: Record
    summary: Record | None
    """Of the last session."""
    began: float | None
    """Unix seconds of the first record."""
    start: Record
    """The start record of the last session; {} if none was written."""
    last: Record
    """The last record of all; {} if there is none."""
    train: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]
    samples: tuple[Record, ...]
    seconds: float
    """From the first record to the last, without the pauses between sessions."""
    resumes: tuple[float, ...]
    """``elapsed`` at the start of each session but the first."""
    num_damaged: int
    """Lines of metrics.jsonl that are not records."""

    @property
    def name(self) -> str:
        """The job's name, or the directory's."""
        return str(self.start.get("name") or self._plain_job.get("name") or self.path.name)

    @property
    def num_sessions(self) -> int:
        """How often it was started; 1 for a run without records too."""
        return len(self.resumes) + 1

    @property
    def steps(self) -> int | None:
        """Steps the job asks for."""
        steps = figures.number(self.start.get("steps") or self._plain_job.get("steps"))
        return None if steps is None else int(steps)

    @property
    def step(self) -> int:
        """The last step on record."""
        summary = () if self.summary is None else ({"step": self.summary.get("steps")},)
        records = (*self.train[-1:], *self.evals[-1:], *summary)
        steps = [n for record in records if (n := figures.number(record.get("step"))) is not None]
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
    def final_metrics(self) -> Record:
        """The summary's metrics, or those of the last evaluation of each split, named alike."""
        if self.summary is not None:
            return self.summary["final"]["metrics"]
        return {
            f"{record['split']}_{name}": value
            for record in self.evals
            for name, value in record["metrics"].items()
        }

    @property
    def final_loss(self) -> float | None:
        """The summary's loss, or the last one on record; NaN if that was not a number."""
        if self.summary is not None:
            return figures.number(self.summary["final"]["loss"])
        return loss_of(self.train[-1]) if self.train else None

    @property
    def reads_text(self) -> bool:
        """Whether it trains a language model: its throughput counts tokens."""
        return self.start.get("unit") == "tokens"

    @property
    def has_diverged(self) -> bool:
        """Whether the last loss on record is not a number."""
        return bool(self.train) and not math.isfinite(loss_of(self.train[-1]))

    @property
    def _plain_job(self) -> Record:
        return self.job.get("job") or {}


def loss_of(record: Record) -> float:
    """A record's loss; NaN where it has none."""
    loss = figures.number(record.get("loss"))
    return math.nan if loss is None else loss


def load_run(path: Path) -> RunRecord:
    """Reads a run directory.

    Raises:
        NotFoundError: there is no such directory, or it holds neither job.json nor metrics.jsonl.
        RunError: job.json, environment.json or summary.json is damaged.
    """
    metrics = path / METRICS
    if not (metrics.is_file() or (path / JOB).is_file()):
        raise NotFoundError(
            f"{path} is not a run (no {JOB}, no {METRICS}); give a directory that systolic train made"
        )
    ledger = _Ledger()
    if metrics.is_file():
        with metrics.open("rb") as lines:
            for line in lines:
                ledger.add(line)
    train, evals, events, samples = (tuple(ledger.records[kind]) for kind in KINDS)
    return RunRecord(
        path=path,
        job=_read_object(path / JOB) or {},
        environment=_read_object(path / ENVIRONMENT) or {},
        summary=_read_object(path / SUMMARY),
        began=ledger.began,
        start=ledger.start,
        last=ledger.last,
        train=train,
        evals=evals,
        events=events,
        samples=samples,
        seconds=ledger.elapsed,
        resumes=tuple(ledger.resumes),
        num_damaged=ledger.num_damaged,
    )


def _read_object(path: Path) -> Record | None:
    if not path.is_file():
        return None
    try:
        return decode(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RunError(
            f"{path} is damaged ({error}); move it away to read the rest of the run"
        ) from error


@dataclass(slots=True)
class _Ledger:
    """Collects records in file order, session by session."""

    start: Record = field(default_factory=dict)
    last: Record = field(default_factory=dict)
    records: dict[str, list[Record]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    resumes: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    num_damaged: int = 0
    began: float | None = None
    _origin: float = 0.0
    """Unix seconds at which ``elapsed`` would have been 0, had there been no pause."""

    def add(self, line: bytes) -> None:
        """One line of metrics.jsonl."""
        try:
            record = decode(line)
            kind, time = record["kind"], figures.number(record["time"])
        except (ValueError, KeyError):
            self.num_damaged += 1
            return
        if kind == "end":
            return  # what summary.json says; its ``time`` is where the time went
        if time is not None:
            self._date(time, is_start=kind == "start")
        if kind == "start":
            self.start = record
        record["elapsed"] = self.elapsed
        self.last = record
        if kind in self.records:
            self.records[kind].append(record)

    def _date(self, time: float, *, is_start: bool) -> None:
        if self.began is None:
            self.began = self._origin = time
        elif is_start:
            self.resumes.append(self.elapsed)
            self._origin = time - self.elapsed
        self.elapsed = max(self.elapsed, time - self._origin)

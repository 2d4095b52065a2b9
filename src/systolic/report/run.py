"""A run read back from its directory: the one record behind the summary and the page.

Reading forgives what a crash leaves: a torn last line, a missing summary, no environment file.
"""

import enum
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.core.errors import NotFoundError, RunError
from systolic.report import figures

Record = dict[str, Any]


class State(enum.Enum):
    """How far a run came."""

    finished = "finished"
    stopped = "stopped"
    """Ended before its last step by its own rule: the guard, early stopping."""
    interrupted = "interrupted"
    """Ended from outside, after saving."""
    unfinished = "unfinished"
    """No summary: it still trains, or was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The files of a run directory. Every record has ``elapsed``: seconds of training, pauses left out."""

    path: Path
    job: Record
    environment: Record
    summary: Record | None
    began: float | None
    """Unix seconds of the first record."""
    start: Record
    """The start record of the last session; {} if none was written."""
    train: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]
    samples: tuple[Record, ...]
    seconds: float
    """Wall time of all sessions."""
    num_sessions: int
    resumes: tuple[float, ...]
    """``elapsed`` at the start of each session but the first."""
    num_superseded: int
    """Train records after a checkpoint that a later session went back to; they are left out."""
    num_damaged: int
    """Lines of metrics.jsonl that are not records."""
    last_session_events: tuple[Record, ...]

    @property
    def name(self) -> str:
        """The job's name, or the directory's."""
        job = self.job.get("job") or {}
        return str(self.start.get("name") or job.get("name") or self.path.name)

    @property
    def steps(self) -> int | None:
        """Steps the job asks for."""
        steps = figures.number(self.start.get("steps") or (self.job.get("job") or {}).get("steps"))
        return None if steps is None else int(steps)

    @property
    def step(self) -> int:
        """The last step on record."""
        records = (*self.train[-1:], *self.evals[-1:])
        steps = [number for r in records if (number := figures.number(r.get("step"))) is not None]
        own = figures.number((self.summary or {}).get("steps"))
        return int(own if own is not None else max(steps, default=0))

    @property
    def state(self) -> State:
        """How far it came, from its files alone."""
        names = {event.get("name") for event in self.last_session_events}
        if "interrupt" in names:
            return State.interrupted
        if "stop" in names:
            return State.stopped
        return State.unfinished if self.summary is None else State.finished

    @property
    def final_metrics(self) -> Record:
        """The summary's metrics, or those of the last evaluation."""
        final = (self.summary or {}).get("final") or {}
        if final.get("metrics"):
            return final["metrics"]
        return (self.evals[-1].get("metrics") or {}) if self.evals else {}

    @property
    def final_loss(self) -> float | None:
        """The summary's loss, or the last one on record; NaN if that was not a number."""
        final = (self.summary or {}).get("final") or {}
        if "loss" in final:
            return loss_of(final)
        return loss_of(self.train[-1]) if self.train else None

    def time_shares(self) -> tuple[dict[str, float], bool]:
        """Seconds by kind (step, data_wait, compile, eval, checkpoint, other), and whether measured.

        Without a summary they are added up from the records, which leaves the rest in ``other``.
        """
        time = (self.summary or {}).get("time") or {}
        measured = {k: n for k, v in time.items() if (n := figures.number(v)) is not None}
        if measured:
            return measured, True
        return self._time_from_records(), False

    def _time_from_records(self) -> dict[str, float]:
        spent = dict.fromkeys(("step", "data_wait", "compile", "eval", "checkpoint"), 0.0)
        for event in self.events:
            kind = {"recompile": "compile"}.get(str(event.get("name")), event.get("name"))
            if kind in ("compile", "checkpoint"):
                spent[kind] += figures.number(event.get("seconds")) or 0.0
        for record in self.evals:
            spent["eval"] += figures.number(record.get("seconds")) or 0.0
        before = figures.number(self.start.get("resumed_from")) or 0.0
        if self.num_sessions > 1:
            before = 0.0
        for record in self.train:
            step = figures.number(record.get("step")) or before
            seconds = (figures.number(record.get("step_seconds")) or 0.0) * max(step - before, 0)
            wait = min(max(figures.number(record.get("data_wait")) or 0.0, 0.0), 1.0)
            spent["data_wait"] += seconds * wait
            spent["step"] += seconds * (1 - wait)
            before = step
        spent["other"] = max(self.seconds - sum(spent.values()), 0.0)
        return spent


def loss_of(record: Record) -> float:
    """A record's loss; ``null``, which stands for NaN where JSON has none, is NaN."""
    loss = figures.number(record.get("loss"))
    return math.nan if loss is None else loss


def load_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        NotFoundError: there is no such directory, or it holds neither job.json nor metrics.jsonl.
        RunError: job.json, environment.json or summary.json is damaged.
    """
    if not any((path / name).is_file() for name in ("job.json", "metrics.jsonl")):
        raise NotFoundError(
            f"{path} is not a run (no job.json, no metrics.jsonl); give a directory that systolic train made"
        )
    summary = _read_object(path / "summary.json")
    ledger = _Ledger()
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        with metrics.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                ledger.add(line)
    return Run(
        path=path,
        job=_read_object(path / "job.json") or {},
        environment=_read_object(path / "environment.json") or {},
        summary=summary or ledger.end,
        began=ledger.began,
        start=ledger.start,
        train=tuple(ledger.train),
        evals=tuple(ledger.evals),
        events=tuple(ledger.events),
        samples=tuple(ledger.samples),
        seconds=ledger.elapsed,
        num_sessions=ledger.num_sessions,
        resumes=tuple(ledger.resumes),
        num_superseded=ledger.num_superseded,
        num_damaged=ledger.num_damaged,
        last_session_events=tuple(ledger.session_events),
    )


def _read_object(path: Path) -> Record | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path} is damaged ({error}); move it away to read the rest of the run") from error
    return value if isinstance(value, dict) else None


@dataclass(slots=True)
class _Ledger:
    """Collects records in file order, session by session."""

    start: Record = field(default_factory=dict)
    end: Record | None = None
    train: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    session_events: list[Record] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    num_sessions: int = 0
    num_superseded: int = 0
    num_damaged: int = 0
    began: float | None = None
    _origin: float | None = None

    def add(self, line: str) -> None:
        """One line of metrics.jsonl."""
        if not line.strip():
            return
        try:
            record = json.loads(line)
        except ValueError:
            self.num_damaged += 1
            return
        if not isinstance(record, dict) or "kind" not in record:
            self.num_damaged += 1
            return
        kind = record["kind"]
        if kind == "start" or not self.num_sessions:
            self._new_session(record)
        self._date(record)
        if kind == "event":
            self.session_events.append(record)
        if kind == "end":
            self.end = {k: v for k, v in record.items() if k not in ("kind", "elapsed")}
        lists = {"train": self.train, "eval": self.evals, "event": self.events, "sample": self.samples}
        if kind in lists:
            lists[kind].append(record)

    def _new_session(self, record: Record) -> None:
        if self.num_sessions:
            self.resumes.append(self.elapsed)
            back_to = figures.number(record.get("resumed_from")) or 0.0
            self.num_superseded += self._go_back(self.train, back_to)
            self._go_back(self.evals, back_to)
        self.num_sessions += 1
        self.session_events = []
        self.end = None
        self._origin = None
        if record["kind"] == "start":
            self.start = record

    def _date(self, record: Record) -> None:
        time = figures.number(record.get("time"))
        if time is not None:
            if self.began is None:
                self.began = time
            if self._origin is None:
                self._origin = time - self.elapsed
            self.elapsed = max(self.elapsed, time - self._origin)
        record["elapsed"] = self.elapsed

    @staticmethod
    def _go_back(records: list[Record], step: float) -> int:
        kept = [r for r in records if (figures.number(r.get("step")) or 0.0) <= step]
        num_dropped = len(records) - len(kept)
        records[:] = kept
        return num_dropped

"""What a run's records say, read once: the losses, the evaluations, the looks at its layers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.artifact.run import METRICS, SUMMARY, Run
from systolic.core.errors import NotFoundError, RunError
from systolic.explaining.settings import Settings

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The records of a run by kind, oldest first."""

    path: str
    job: Record
    """``job.json``."""
    start: Record
    """Of the last session; {} where none began."""
    train: Sequence[Record]
    evals: Sequence[Record]
    events: Sequence[Record]
    summary: Record | None
    """Of the last session; ``None`` for a run that has not ended."""
    looks: Sequence[Record]
    """Looks at gradients by layer, recorded or made afterwards."""
    notes: Sequence[str] = ()
    """Files of the run that are damaged, and what was read instead."""

    @property
    def resumed_from(self) -> int:
        """Steps done before the last session."""
        return self.start.get("resumed_from") or 0

    @property
    def settings(self) -> Settings:
        """The recipe's options, as they are typed."""
        return Settings(self.job.get("options") or {})

    @property
    def steps(self) -> Sequence[int]:
        """The step of each train record."""
        return [record["step"] for record in self.train]

    @property
    def losses(self) -> Sequence[float]:
        """Their losses, NaN among them."""
        return [record["loss"] for record in self.train]

    @property
    def peak_rate(self) -> float:
        """The highest learning rate on record; 0 where there is none."""
        return max((record["learning_rate"] for record in self.train), default=0.0)

    @property
    def is_text(self) -> bool:
        """Whether examples are rows of tokens."""
        return any("tokens_per_second" in record for record in self.train)

    @property
    def unit(self) -> str:
        """What a batch counts."""
        return "rows" if self.is_text else "examples"

    @property
    def is_finished(self) -> bool:
        """Whether it came to the job's last step."""
        summary = self.summary
        if summary is None or summary.get("interrupted") or summary.get("stopped"):
            return False
        return summary["steps"] >= self.start.get("steps", math.inf)

    @property
    def epochs(self) -> float | None:
        """Passes over the training data; ``None`` where that is not known."""
        known = [record.get("epochs") for record in (*self.looks, *filter(None, [self.summary]))]
        passes = [value for value in known if value is not None]
        if passes:
            return passes[-1]
        examples, batch = self.start.get("examples"), self.start.get("batch")
        if not examples or not batch or not self.train:
            return None
        return self.train[-1]["step"] * batch / examples

    def loss_near(self, step: int) -> float | None:
        """The median training loss of the records at or before a step; ``None`` where there are none."""
        before = [r["loss"] for r in self.train if r["step"] <= step and math.isfinite(r["loss"])]
        window = max(3, len(self.train) // 20)
        return statistics.median(before[-window:]) if before else None


def read(run: Run, looks: Sequence[Record] = ()) -> History:
    """The history of a run; ``looks`` take the place of recorded ones where it has none.

    Raises:
        RunError: a line of its records is damaged.
    """
    return _history(run, list(run.records()), list(run.diagnoses()) or looks)


def read_session(run: Run) -> History:
    """As :func:`read`, of the last session only: what its summary's times are about.

    Raises:
        RunError: a line of its records is damaged.
    """
    records = list(run.records())
    begun = max((n for n, record in enumerate(records) if record["kind"] == "start"), default=0)
    session = records[begun:]
    before = (session[0].get("resumed_from") or 0) if session else 0
    return _history(run, session, [look for look in run.diagnoses() if look["step"] > before])


def _history(run: Run, records: Sequence[Record], looks: Sequence[Record]) -> History:
    starts = [record for record in records if record["kind"] == "start"]
    summary, notes = _summary(run, records)
    return History(
        path=str(run.path),
        job=run.read_job(),
        start=starts[-1] if starts else {},
        train=[record for record in records if record["kind"] == "train"],
        evals=[record for record in records if record["kind"] == "eval"],
        events=[record for record in records if record["kind"] == "event"],
        summary=summary,
        looks=list(looks),
        notes=notes,
    )


def _summary(run: Run, records: Sequence[Record]) -> tuple[Record | None, list[str]]:
    """The summary, or what the records say in its place where the file is damaged, with a note."""
    try:
        summary = run.read_summary()
        if {"steps", "time"} <= set(summary):
            return summary, []
    except NotFoundError:
        return None, []
    except RunError:
        pass
    # The trainer writes the same values there, and removes them where the run goes on.
    ended = [record for record in records if record["kind"] == "end"]
    what = "the figures of the run's end" if ended else "its records"
    return (
        ended[-1] if ended else None,
        [f"{run.path / SUMMARY} is damaged; {what} in {METRICS} count instead"],
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Running medians over the last ``window`` finite values; NaN where there are none."""
    found = []
    for end in range(1, len(values) + 1):
        part = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
        found.append(statistics.median(part) if part else math.nan)
    return found

"""Figures about a whole run that the summary and the page both show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from systolic.report import figures
from systolic.runs import record as records
from systolic.runs.metrics import SummaryRecord, TrainRecord
from systolic.runs.record import RunRecord

_ORDER = (
    "step",
    "data_wait",
    "start",
    "compile",
    "eval",
    "checkpoint",
    "diagnose",
    "sample",
    "other",
)


OVERFLOW = 700.0
"""A loss above which exp overflows float64."""

LEAST = 0.0005
"""Shares below this round to nothing and are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """A part of the wall time."""

    kind: str
    name: str
    percent: float
    share_text: str
    seconds_text: str


def shares(run: RunRecord) -> list[TimeShare]:
    """Shares of the wall time, from useful to wasted."""
    spent = seconds_by_kind(run)
    total = sum(spent.values())
    return [
        TimeShare(
            kind=kind,
            name=figures.label("training steps" if kind == "step" else kind),
            percent=round(spent[kind] / total * 100, 3),
            share_text=figures.percent(spent[kind] / total),
            seconds_text=figures.seconds(spent[kind]),
        )
        for kind in _ORDER
        if spent.get(kind, 0.0) >= LEAST * total > 0
    ]


def seconds_by_kind(run: RunRecord) -> dict[str, float]:
    """The summary's ``time``, or without a summary the sum of the records."""
    if run.summary is not None:
        return run.summary.time
    spent = dict.fromkeys(_ORDER, 0.0) | records.spent(run.train, run.evals, run.events)
    spent["other"] = max(run.seconds - sum(spent.values()), 0.0)
    return spent


def goodput(run: RunRecord) -> str:
    """Share of the wall time in productive steps."""
    spent = seconds_by_kind(run)
    total = sum(spent.values())
    return figures.percent(spent["step"] / total) if total else figures.MISSING


def wall(run: RunRecord) -> str:
    """The wall time: measured, or else from the first record to the last without pauses."""
    seconds = run.seconds if run.summary is None else run.summary.seconds
    return figures.seconds(seconds) if seconds > 0 else figures.MISSING


def scope(run: RunRecord) -> str:
    """Scope of a summary's times if that is not the whole run: ``last of 2 sessions``."""
    if run.summary is None or run.num_sessions == 1:
        return ""
    return f"last of {run.num_sessions} sessions"


def speed(run: RunRecord) -> list[tuple[str, str]]:
    """Throughput and MFU as (name, text): of the session, or of the last record; unknown ones are left out."""
    latest = run.train[-1] if run.train else None
    record = latest if run.summary is None else run.summary
    if record is None:
        return []
    figures_by_name = [
        ("throughput", figures.throughput_text(record)),
        ("MFU", figures.percent(record.mfu)),
        ("forecast", _forecast(record)),
    ]
    return [(name, text) for name, text in figures_by_name if text != figures.MISSING]


def _forecast(record: TrainRecord | SummaryRecord) -> str:
    """Forecast and measured step time, of a summary or a train record."""
    if isinstance(record, TrainRecord):
        forecast, measured = record.forecast_step_seconds, record.step_seconds
    else:
        forecast, measured = record.forecast.step_seconds, record.forecast.measured_step_seconds
    if forecast is None:
        return figures.MISSING
    text = f"{figures.seconds(forecast)} a step"
    if measured is None:
        return text
    return f"{text}, measured {figures.seconds(measured)}: × {measured / forecast:.2f}"


def metrics(run: RunRecord) -> dict[str, str]:
    """The final metrics as text, the most informative first.

    Of a language model that is bits per byte, or perplexity, which follows from the loss.
    """
    final = dict(run.final_metrics)
    if run.reads_text:
        for split in ("test", "validation"):
            if (value := perplexity(final, split)) is not None:
                final = {f"{split}_perplexity": value, **final}
    first = sorted(final, key=_rank)
    return {
        figures.label(name): figures.metric(name, final[name], run.start.shares) for name in first
    }


def perplexity(metrics: Mapping[str, Any], split: str) -> float | None:
    """exp(loss) of a split whose tokens are not bytes; ``None`` where it has no finite loss."""
    loss = figures.number(metrics.get(f"{split}_loss"))
    if loss is None or f"{split}_bits_per_byte" in metrics or not loss < OVERFLOW:
        return None
    return math.exp(loss)


def _rank(name: str) -> int:
    """Rank of a metric: the most informative first, with its baseline beside it."""
    ends = ("bits_per_byte", "perplexity", "accuracy", "loss")
    return next((place for place, end in enumerate(ends) if name.endswith(end)), len(ends))

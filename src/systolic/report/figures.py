"""Numbers, names and verdicts as text, the same in the terminal and on pages."""

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from systolic.core.units import duration, gibibytes, si
from systolic.core.units import plural as plural
from systolic.runs.metrics import SummaryRecord, TrainRecord, number

MISSING = "–"
"""Text for an unknown number; never a zero."""

_LABELS = {
    "mfu": "MFU",
    "grad_norm": "gradient norm",
    "eval": "evaluation",
    "diagnose": "diagnosis",
    "start": "start-up",
}
_SPLITS = ("validation_", "test_")


def figure(value: Any) -> str:
    """A loss or another plain number with enough digits to see it move."""
    plain = number(value)
    if plain is None:
        return MISSING
    if math.isnan(plain):
        return "NaN"
    if math.isinf(plain):
        return "∞" if plain > 0 else "−∞"
    size = abs(plain)
    if plain == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        return f"{plain:.2e}"
    return f"{plain:.4f}" if size < 100 else f"{plain:.5g}"


def rate(value: Any) -> str:
    """A learning rate: three significant digits, small ones as ``2.95e-04``."""
    plain = number(value)
    if plain is None or not math.isfinite(plain):
        return figure(value)
    return "0" if plain == 0 else f"{plain:.2e}" if abs(plain) < 0.01 else f"{plain:.3g}"


def percent(share: Any) -> str:
    """A share (0 to 1) as per cent."""
    plain = number(share)
    return MISSING if plain is None or not math.isfinite(plain) else f"{plain * 100:.1f} %"


def seconds(value: Any) -> str:
    """Seconds as a duration."""
    plain = number(value)
    return MISSING if plain is None or not math.isfinite(plain) else duration(max(plain, 0.0))


def memory(value: Any) -> str:
    """Bytes in MiB or GiB."""
    plain = number(value)
    return MISSING if plain is None or not math.isfinite(plain) else gibibytes(plain)


def throughput(record: TrainRecord | SummaryRecord) -> tuple[float, str] | None:
    """Value and unit (``tokens/s`` or ``examples/s``) of a train record or a summary, if it has one."""
    if record.tokens_per_second is not None:
        return record.tokens_per_second, "tokens/s"
    return (
        None if record.examples_per_second is None else (record.examples_per_second, "examples/s")
    )


def throughput_text(record: TrainRecord | SummaryRecord) -> str:
    """:func:`throughput` as ``123 k tokens/s``."""
    value_and_unit = throughput(record)
    if value_and_unit is None or not math.isfinite(value_and_unit[0]):
        return MISSING
    return f"{si(value_and_unit[0])} {value_and_unit[1]}"


def forecast_text(record: TrainRecord) -> str:
    """Forecast step time and the ratio of the measured one: ``311 ms, × 1.04``; ``""`` without a forecast."""
    forecast, ratio = record.forecast_step_seconds, record.forecast_ratio
    if forecast is None:
        return ""
    return seconds(forecast) if ratio is None else f"{seconds(forecast)}, × {ratio:.2f}"


def label(name: str) -> str:
    """A record's key as words."""
    return _LABELS.get(name, name.replace("_", " "))


def is_share(name: str, shares: Collection[str]) -> bool:
    """Whether a metric is among the shares of its task (:attr:`systolic.job.Task.shares`), of any split."""
    term = next((name.removeprefix(split) for split in _SPLITS if name.startswith(split)), name)
    return any(fnmatchcase(term, pattern) for pattern in shares)


def metric(name: str, value: Any, shares: Collection[str]) -> str:
    """A metric: a share of its task as per cent, any other as a plain number."""
    return percent(value) if is_share(name, shares) else figure(value)


def metrics_text(metrics: Mapping[str, Any], shares: Collection[str]) -> str:
    """Metrics as ``loss 1.90, bits per byte 2.74``."""
    return ", ".join(
        f"{label(name)} {metric(name, value, shares)}" for name, value in metrics.items()
    )


def count(value: Any) -> str:
    """A whole number with thin separators; other values as text."""
    plain = number(value)
    if plain is None:
        return MISSING
    return f"{plain:,.0f}" if math.isfinite(plain) else figure(plain)


class Tone(enum.Enum):
    """How a verdict is coloured."""

    good = "good"
    fair = "fair"
    bad = "bad"
    neutral = "neutral"


TONE_COLOURS = {Tone.good: "green", Tone.fair: "yellow", Tone.bad: "red", Tone.neutral: "cyan"}
"""Colour of each tone in a terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Judgement of a run, a forecast or a plan."""

    word: str
    sentence: str
    tone: Tone

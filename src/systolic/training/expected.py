"""Forecast of the train step, shown next to the measurement."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Forecast of a train step; times in seconds."""

    slice: str
    step_seconds: float
    low: float | None = None
    high: float | None = None
    mfu: float | None = None

    def beside(self, measured: float) -> dict[str, float]:
        """Fields of a train record: the forecast, and the ratio of the measured step to it."""
        return {
            "forecast_step_seconds": self.step_seconds,
            "forecast_ratio": measured / self.step_seconds,
        }

    def against(self, measured: float | None) -> dict[str, Any]:
        """Fields of the summary; ``measured`` is None for a session without steps."""
        low, high = self.low, self.high
        within = None
        if measured is not None and low is not None and high is not None:
            within = low <= measured <= high
        return {
            "slice": self.slice,
            "step_seconds": self.step_seconds,
            "step_seconds_low": low,
            "step_seconds_high": high,
            "mfu": self.mfu,
            "measured_step_seconds": measured,
            "ratio": None if measured is None else measured / self.step_seconds,
            "within_interval": within,
        }

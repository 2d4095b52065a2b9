"""What forecasts look like on a screen of 80 columns; ``tests.golden`` keeps it."""

from collections.abc import Callable

from systolic.forecasting import Forecast
from systolic.forecasting.comparison import ForecastChanges
from systolic.forecasting.display import comparison, text
from systolic.report import terminal
from tests.forecasting.display import recorded


def screen(forecast: Forecast) -> str:
    """The screen without colour."""
    return "\n".join(terminal.plain(text.lines(forecast, 80))) + "\n"


def changes() -> str:
    """What changed from the recorded forecast to a small one."""
    sides = [made.to_json() for made in (recorded.fitting(), recorded.small())]
    figures = ForecastChanges.of(*sides).figures
    return "\n".join(comparison.figure_lines(figures, "lm on v5e-4", "small on v5e-4")) + "\n"


TEXTS: dict[str, Callable[[], str]] = {
    "forecast": lambda: screen(recorded.fitting()),
    "forecast-dump": lambda: screen(recorded.dumped()),
    "forecast-refused": lambda: screen(recorded.refused()),
    "forecast-against": changes,
}

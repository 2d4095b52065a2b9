"""Forecasts of a program on a slice: compiled, simulated, priced.

:mod:`.command` has the public functions, which are ``systolic forecast``. Importing the package imports no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systolic.forecasting.forecast import Forecast
    from systolic.forecasting.function import Spread, forecast_function
    from systolic.forecasting.run import forecast_job, forecast_program
    from systolic.forecasting.text import compare_texts, forecast_text

_HOME = {
    "Forecast": "forecast",
    "Spread": "function",
    "compare_texts": "text",
    "forecast_function": "function",
    "forecast_job": "run",
    "forecast_program": "run",
    "forecast_text": "text",
}

__all__ = [
    "Forecast",
    "Spread",
    "compare_texts",
    "forecast_function",
    "forecast_job",
    "forecast_program",
    "forecast_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

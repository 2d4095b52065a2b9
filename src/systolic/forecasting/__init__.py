"""Forecasts of a program on a slice: compiled, simulated, priced."""

from systolic.forecasting.forecast import Forecast
from systolic.forecasting.function import Spread, forecast_function
from systolic.forecasting.run import forecast_job, forecast_program
from systolic.forecasting.text import compare_texts, forecast_text

__all__ = [
    "Forecast",
    "Spread",
    "compare_texts",
    "forecast_function",
    "forecast_job",
    "forecast_program",
    "forecast_text",
]

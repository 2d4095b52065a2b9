"""What a program will do on a slice: compiled, simulated, priced."""

from systolic.forecast.forecast import Forecast
from systolic.forecast.function import Spread, forecast_function
from systolic.forecast.run import forecast_job, forecast_program
from systolic.forecast.text import forecast_text

__all__ = [
    "Forecast",
    "Spread",
    "forecast_function",
    "forecast_job",
    "forecast_program",
    "forecast_text",
]

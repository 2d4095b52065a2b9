"""Screens and files of ``systolic forecast``."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from systolic.core.arguments import WRITTEN, explained_by
from systolic.forecasting.command import check_no_table, is_table
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.forecasting.forecast import Forecast
    from systolic.forecasting.serving.forecast import ServingForecast
    from systolic.forecasting.table import ForecastTable

OF_ONE = ("save", "html", "perfetto", "xprof", "against")
"""Options of one forecast, which a table does not have."""


def check(values: SimpleNamespace) -> None:
    """Refuses options of one forecast beside those of a table.

    Raises:
        OptionError: there is one.
    """
    options = vars(values)
    if is_table(values.on, options.get("vary"), values.csv):
        check_no_table(**{name: options.get(name) for name in OF_ONE})


def show(
    result: "Forecast | ForecastTable",
    *,
    csv: Path | None = None,
    html: Annotated[Path | None, WRITTEN] = None,
    perfetto: Annotated[Path | None, WRITTEN] = None,
    xprof: Path | None = None,
    json: bool = False,
) -> int:
    """Prints and writes a forecast or a table of several; returns the exit code, 1 where nothing fits.

    Args:
        result: The answer.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        json: Print one JSON object on stdout.
    """
    from systolic.forecasting.table import ForecastTable

    if isinstance(result, ForecastTable):
        return _show_table(result, csv, json=json)
    return show_step(result, html=html, perfetto=perfetto, xprof=xprof, json=json)


@explained_by(show)
def show_step(
    result: "Forecast",
    *,
    html: Annotated[Path | None, WRITTEN] = None,
    perfetto: Annotated[Path | None, WRITTEN] = None,
    xprof: Path | None = None,
    json: bool = False,
) -> int:
    """Prints and writes a forecast; returns the exit code, 1 where the step does not fit.

    Args:
        result: The forecast.
    """
    written = _write(result, html, perfetto, xprof)
    if json:
        print_json({**result.to_json(), "written": written})
        return 0 if result.fits else 1
    from systolic.forecasting.display.text import print_forecast

    print_forecast(result)
    if result.against is not None:
        from systolic.forecasting.display.comparison import print_changes

        print()
        print_changes(result.against)
    for kind, path in written.items():
        print(f"{kind:<9}{path}")
    print_next(result)
    return 0 if result.fits else 1


def print_next(forecast: "Forecast") -> None:
    """Prints a line for each way to make a step fit that does not."""
    for remedy in () if forecast.rejected is None else forecast.rejected.remedies:
        print(f"{'next':<9}{remedy}")


@explained_by(show)
def show_server(result: "ServingForecast", *, json: bool = False) -> int:
    """Prints the forecast of a server; returns the exit code, 1 where no request fits.

    Args:
        result: The forecast.
    """
    if json:
        print_json(result.to_json())
    else:
        from systolic.forecasting.display.serving import print_serving

        print_serving(result)
    return 0 if result.fits else 1


def _show_table(table: "ForecastTable", csv: Path | None, *, json: bool) -> int:
    written = {} if csv is None else {"csv": str(csv)}
    if json:
        print_json({**table.to_json(), "written": written})
    else:
        from systolic.forecasting.display.table import print_table

        print_table(table)
        for kind, path in written.items():
            print(f"{kind:<9}{path}")
    return 0 if any(row.fits for row in table) else 1


def _write(
    result: "Forecast", html: Path | None, perfetto: Path | None, xprof: Path | None
) -> dict[str, str]:
    """Writes the files that were asked for; returns kind to path."""
    written: dict[str, str] = {}
    if result.saved is not None:
        written["saved"] = str(result.saved)
    if html is not None:
        from systolic.forecasting.display.page import write_page

        write_page(result, html)
        written["report"] = str(html)
    if result.timeline is None:
        return written
    if perfetto is not None:
        from systolic.forecasting.display.trace import write_trace

        write_trace(result, perfetto)
        written["perfetto"] = str(perfetto)
    if xprof is not None:
        from systolic.forecasting.display.xprof import write_xprof

        write_xprof(result, xprof)
        written["xprof"] = str(xprof)
    return written

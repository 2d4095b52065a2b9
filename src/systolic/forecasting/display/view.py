"""Screens and files of ``systolic forecast``."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from systolic.core.arguments import WRITTEN
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
    made: "Forecast | ForecastTable",
    *,
    csv: Path | None = None,
    html: Annotated[Path | None, WRITTEN] = None,
    perfetto: Annotated[Path | None, WRITTEN] = None,
    xprof: Path | None = None,
    json: bool = False,
) -> int:
    """Prints and writes a forecast or a table of several; returns the exit code, 1 where nothing fits.

    Args:
        made: The answer.
        csv: Where the table was written.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        json: Print one JSON object on stdout.
    """
    from systolic.forecasting.table import ForecastTable

    if isinstance(made, ForecastTable):
        return _show_table(made, csv, json=json)
    return show_step(made, html=html, perfetto=perfetto, xprof=xprof, json=json)


def show_step(
    made: "Forecast",
    *,
    html: Annotated[Path | None, WRITTEN] = None,
    perfetto: Annotated[Path | None, WRITTEN] = None,
    xprof: Path | None = None,
    json: bool = False,
) -> int:
    """Prints and writes a forecast; returns the exit code, 1 where the step does not fit.

    Args:
        made: The forecast.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        json: Print one JSON object on stdout.
    """
    written = _write(made, html, perfetto, xprof)
    if json:
        print_json({**made.to_json(), "written": written})
        return 0 if made.fits else 1
    from systolic.forecasting.display.text import print_forecast

    print_forecast(made)
    if made.against is not None:
        _print_changes(made)
    for kind, path in written.items():
        print(f"{kind:<9}{path}")
    for remedy in (made.rejected or {}).get("remedies", ()):
        print(f"{'next':<9}{remedy}")
    return 0 if made.fits else 1


def show_server(made: "ServingForecast", *, json: bool = False) -> int:
    """Prints the forecast of a server; returns the exit code, 1 where no request fits.

    Args:
        made: The forecast.
        json: Print one JSON object on stdout.
    """
    if json:
        print_json(made.to_json())
    else:
        from systolic.forecasting.display.serving import print_serving

        print_serving(made)
    return 0 if made.fits else 1


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


def _print_changes(made: "Forecast") -> None:
    """The figures and ops that changed since the earlier forecast."""
    from systolic.forecasting.display import comparison, op_table

    against = made.against
    assert against is not None
    now = f"{made.recipe} on {made.on.name}"
    print("\n" + "\n".join(comparison.lines(against.figures, against.name, now)))
    if against.ops:
        print("\n".join(op_table.lines(against.ops, against.step_seconds)))
    if text := comparison.depths(against.before, made.request):
        print(text)


def _write(
    made: "Forecast", html: Path | None, perfetto: Path | None, xprof: Path | None
) -> dict[str, str]:
    """Writes the files that were asked for; returns kind to path."""
    written: dict[str, str] = {}
    if made.saved is not None:
        written["saved"] = str(made.saved)
    if html is not None:
        from systolic.forecasting.display.page import write_page

        write_page(made, html)
        written["report"] = str(html)
    if made.timeline is None:
        return written
    if perfetto is not None:
        from systolic.forecasting.display.trace import write_trace

        write_trace(made, perfetto)
        written["perfetto"] = str(perfetto)
    if xprof is not None:
        from systolic.forecasting.display.xprof import write_xprof

        write_xprof(made, xprof)
        written["xprof"] = str(xprof)
    return written

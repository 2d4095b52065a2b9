"""Views of forecasts, plans and explanations in notebooks: the terminal's screens as HTML."""

import io
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from systolic.forecasting import Forecast
from systolic.forecasting.table import ForecastTable
from systolic.planning.plan import Plan
from systolic.planning.serving import ServingPlan
from systolic.report.forecast import table
from systolic.report.forecast import text as forecast_text
from systolic.report.plan import serving as serving_text
from systolic.report.plan import text as plan_text
from systolic.report.tune import text as tune_text
from systolic.tuning.results import StudyResult

WIDTH = 100
"""Columns, about what a cell's output has room for."""
_PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;'
    "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"
)
_COLOURS = [
    *((136, 136, 136), (215, 72, 72), (46, 148, 84), (176, 128, 20)),
    *((66, 122, 220), (168, 84, 196), (24, 146, 158), (136, 136, 136)),
]
_THEME = TerminalTheme((255, 255, 255), (0, 0, 0), _COLOURS, _COLOURS)
"""Tones that are legible on the light and on the dark pages of notebooks."""


def html(value: object) -> str:
    """The screen of a value.

    Raises:
        TypeError: it is of a class that has none.
    """
    match value:
        case Forecast():
            return screen(forecast_text.lines(value, WIDTH, every_note=True))
        case ForecastTable():
            return screen(table.lines(value, WIDTH))
        case Plan():
            return screen(plan_text.lines(value, None, WIDTH))
        case ServingPlan():
            return screen(serving_text.lines(value, WIDTH))
        case StudyResult():
            return screen(tune_text.lines(value))
    raise TypeError(f"{type(value).__name__} has no view for notebooks")


def screen(lines: Sequence[Text], told: Sequence[str] = ()) -> str:
    """Lines as preformatted HTML with inline colours, then paragraphs of text; plain text takes the notebook's own colour."""
    wrapped = [part for text in told for part in ("", *textwrap.wrap(text, WIDTH))]
    lines = [*lines, *(Text(part) for part in wrapped)]
    console = Console(record=True, file=io.StringIO(), width=10_000, force_jupyter=False)
    console.print(Text("\n").join(lines), soft_wrap=True)
    return console.export_html(theme=_THEME, inline_styles=True, code_format=_PRE)

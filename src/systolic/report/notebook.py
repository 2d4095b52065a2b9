"""Views of forecasts, plans and explanations in notebooks: the terminal's screens as HTML, drawn with rich when a notebook asks."""

import html
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

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
"""Tones that are legible on the light and on the dark pages of notebooks."""
VIEWS: Mapping[str, tuple[str, Callable[[Any, Any], Sequence["Text"]]]] = {
    "Forecast": (
        "systolic.forecasting.display.text",
        lambda view, value: view.lines(value, WIDTH, every_note=True),
    ),
    "ForecastTable": (
        "systolic.forecasting.display.table",
        lambda view, value: view.lines(value, WIDTH),
    ),
    "Plan": ("systolic.planning.display.text", lambda view, value: view.lines(value, None, WIDTH)),
    "ServingPlan": (
        "systolic.planning.display.serving",
        lambda view, value: view.lines(value, WIDTH),
    ),
    "StudyResult": ("systolic.tuning.display.view", lambda view, value: view.lines(value)),
}
"""Name of a class to the module with its screen, and the screen's lines."""


def notebook_html(value: object) -> str:
    """The screen of a value.

    Raises:
        TypeError: it is of a class that has none.
    """
    name = type(value).__name__
    if name not in VIEWS:
        raise TypeError(f"{name} has no view for notebooks")
    module, lines = VIEWS[name]
    return screen(lines(import_module(module), value))


def screen(lines: "Sequence[Text]", paragraphs: Sequence[str] = ()) -> str:
    """Lines as preformatted HTML with inline colours, then paragraphs of text; plain text takes the notebook's own colour."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    theme = TerminalTheme((255, 255, 255), (0, 0, 0), _COLOURS, _COLOURS)
    wrapped = [part for text in paragraphs for part in ("", *textwrap.wrap(text, WIDTH))]
    lines = [*lines, *(Text(part) for part in wrapped)]
    console = Console(record=True, file=io.StringIO(), width=10_000, force_jupyter=False)
    console.print(Text("\n").join(lines), soft_wrap=True)
    return console.export_html(theme=theme, inline_styles=True, code_format=_PRE)


def frame(page: str) -> str:
    """A whole HTML page inside of a cell's output."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900" '
        'style="border:0" title="report"></iframe>'
    )

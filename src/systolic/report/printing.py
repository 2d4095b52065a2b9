"""Printing a screen of lines: in colour on a terminal, as plain text elsewhere."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from systolic.report import terminal


def print_lines(
    lines: Callable[[int], Sequence[Text]],
    most: int,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
    usual: int = 80,
) -> None:
    """Prints a screen.

    Args:
        lines: The screen by its number of columns.
        most: Columns of the widest screen.
        stream: Where to print; by default stdout.
        environ: Variables that describe the terminal; by default those of this process.
        width: Columns of the terminal; by default measured.
        usual: Columns where there is no terminal to measure.
    """
    stream = sys.stdout if stream is None else stream
    columns = width or shutil.get_terminal_size((usual, 24)).columns
    shown = lines(min(columns, most))
    if terminal.can_redraw(stream, os.environ if environ is None else environ, columns):
        console = Console(file=stream, force_terminal=True, width=columns, highlight=False)
        for line in shown:
            console.print(line, soft_wrap=True)
        return
    for line in plain(shown):
        terminal.say(stream, line)


def plain(shown: Sequence[Text]) -> list[str]:
    """Lines without colour."""
    return [line.plain.rstrip() for line in shown]

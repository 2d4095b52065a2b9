"""A part of the terminal that is redrawn in place while a command works."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from systolic.report import terminal


class LiveArea:
    """A context manager; outside of a terminal that can be redrawn it draws nothing.

    Args:
        stream: Where to.
        environ: Of the terminal; by default the process's.
        width: Columns; by default the terminal's.
    """

    def __init__(
        self, stream: TextIO, *, environ: Mapping[str, str] | None = None, width: int | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        columns = width or shutil.get_terminal_size((100, 24)).columns
        self._live: Live | None = None
        if terminal.can_redraw(stream, environ, columns):
            console = Console(file=stream, force_terminal=True, width=width, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    @property
    def drawn(self) -> bool:
        """Whether the stream can be redrawn."""
        return self._live is not None

    def draw(self, what: RenderableType) -> None:
        """Shows ``what`` in place of what was shown before; a closed terminal does not end the work."""
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.update(what, refresh=True)

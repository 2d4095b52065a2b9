"""The view of a run in the terminal while it trains, always on stderr.

:class:`Live` chooses: a screen that redraws itself where the terminal can, plain lines elsewhere.
"""

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from systolic.report import terminal
from systolic.training.display.plain import Plain

if TYPE_CHECKING:
    from systolic.training.display.screen import Screen


class Live:
    """A watcher that draws the run on a terminal, or prints plain lines where it cannot draw.

    ``see`` only notes the record (microseconds); a thread redraws every ``redraw_seconds``.
    Lines appear when ``stream`` is no terminal, TERM is dumb, it is narrower than 60 columns or
    not Unicode, and in notebooks that don't move the cursor.
    """

    _view: "Screen | Plain"

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
        redraw_seconds: float = 0.25,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        environ = os.environ if environ is None else environ
        columns = shutil.get_terminal_size().columns if width is None else width
        self._ticker: _Ticker | None = None
        self._closed = False
        if terminal.can_redraw(stream, environ, columns):
            from systolic.training.display.screen import Screen

            self._view = Screen(stream=stream, clock=clock, width=width)
            self._ticker = _Ticker(self._view, redraw_seconds)
        else:
            self._view = Plain(stream=stream, clock=clock)

    def see(self, record: dict[str, Any]) -> None:
        """Notes a record; ignored after ``close``."""
        if self._closed:
            return
        self._view.see(record)
        if self._ticker is not None:
            self._ticker.start()

    def close(self) -> None:
        """Prints the remaining lines, restores the terminal and stops the timer; may be called twice."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.stop()
        self._view.close()


class _Ticker:
    """Calls ``screen.draw`` from its own thread, from the first record until stopped."""

    def __init__(self, screen: "Screen", seconds: float) -> None:
        self._screen = screen
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._loop, name="systolic-live", daemon=True)
        self._thread.start()
        # A run that dies without close() must not leave the terminal without a cursor.
        atexit.register(self._screen.close)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self._screen.close)

    def _loop(self) -> None:
        self._screen.draw()
        idle = 0
        while not self._stop.wait(self._seconds):
            idle += 1
            # Without a new record only the clocks on the screen change: once a second is enough.
            if self._screen.has_news or idle * self._seconds >= 1:
                self._screen.draw()
                idle = 0

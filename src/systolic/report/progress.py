"""Progress of a command on stderr: one line that ticks on a terminal, one line for each stage elsewhere."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from systolic.core.units import duration
from systolic.report import terminal

TICK_SECONDS = 0.2
EVERY_SECONDS = 60.0
"""Time between lines of a stage that counts, where no line can be drawn again."""
COUNT = re.compile(r"\d[\d.,]*")
"""A number in a stage's text, which changes while the stage goes on."""


class ProgressLine:
    """A context manager; :meth:`say` shows a stage."""

    def __init__(
        self,
        stream: TextIO,
        title: str,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._title, self._clock = stream, title, clock
        self._live = terminal.can_redraw(
            stream, os.environ if environ is None else environ, terminal.MIN_WIDTH
        )
        self._began = clock()
        self._stage = ""
        self._said = ("", self._began)
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._ticker is not None:
            self._ticker.join()
            self._write("\r\x1b[K")

    def say(self, stage: str) -> None:
        """Shows the present stage."""
        if not stage or stage == self._stage:
            return
        self._stage = stage
        if not self._live:
            # In a log a stage that counts has a line when it begins, and one a minute.
            words, now = COUNT.sub("", stage), self._clock()
            if words != self._said[0] or now - self._said[1] >= EVERY_SECONDS:
                self._said = (words, now)
                terminal.say(self._stream, self._line())
        elif self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def told(self, text: str, stream: TextIO, stage: str) -> None:
        """Prints a line that stays, on any stream, above the ticking line; then shows ``stage``.

        Without a ticking line the stage is not shown: the printed lines are progress enough.
        """
        if self._live:
            self._write("\r\x1b[K")
        print(text, file=stream, flush=True)
        if self._live:
            self.say(stage)

    def _tick(self) -> None:
        while not self._over.is_set():
            self._write(f"\r\x1b[K{self._line()}")
            self._over.wait(TICK_SECONDS)

    def _line(self) -> str:
        return f"{self._title}: {self._stage}, {duration(self._clock() - self._began)}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._over.set()

"""Progress on stderr: one line that ticks on a terminal; elsewhere one line for each stage, and one now and then in a long one."""

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
HEARTBEAT_SECONDS = 60.0
"""Seconds between lines of one stage where a line can't be redrawn."""
COUNT = re.compile(r"\d[\d.,]*")
"""A number in a stage's text, which changes while the stage goes on."""
PATIENCE_SECONDS = 10.0
"""Seconds before a call from Python shows its progress."""


class ProgressLine:
    """A context manager; :meth:`say` shows a stage.

    Args:
        stream: Where lines go.
        title: What every line begins with.
        environ: Environment variables that say what the terminal can do.
        clock: Seconds of a clock.
        quiet_seconds: Seconds before anything is shown.
        beat_seconds: Seconds between lines of one stage where a line can't be redrawn.
    """

    def __init__(
        self,
        stream: TextIO,
        title: str,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet_seconds: float = 0.0,
        beat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._stream, self._title, self._clock = stream, title, clock
        self._quiet_seconds, self._beat_seconds = quiet_seconds, beat_seconds
        self._live = terminal.can_redraw(
            stream, os.environ if environ is None else environ, terminal.MIN_WIDTH
        )
        self._began = clock()
        self._logged = ("", self._began)
        self._stage = ""
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
            if self._live and self._shows:
                self._write("\r\x1b[K")

    def say(self, stage: str) -> None:
        """Shows the present stage."""
        if not stage or stage == self._stage:
            return
        self._stage = stage
        if not self._live and self._shows:
            self._log()
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def _log(self) -> None:
        """In a log a stage that counts has a line when it begins, and one a minute."""
        words, now = COUNT.sub("", self._stage), self._clock()
        if words != self._logged[0] or now - self._logged[1] >= self._beat_seconds:
            self._logged = (words, now)
            terminal.say(self._stream, self._line(now))

    @property
    def _shows(self) -> bool:
        quiet = self._quiet_seconds
        return not quiet or self._clock() - self._began >= quiet

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
        if self._quiet_seconds:
            self._over.wait(max(0.0, self._quiet_seconds - (self._clock() - self._began)))
        while not self._over.is_set() and self._live:
            self._write(f"\r\x1b[K{self._line()}")
            self._over.wait(TICK_SECONDS)
        if self._quiet_seconds and not self._over.is_set():
            terminal.say(self._stream, self._line())
        while not self._over.wait(self._beat_seconds):
            terminal.say(self._stream, self._line())

    def _line(self, now: float | None = None) -> str:
        now = self._clock() if now is None else now
        return f"{self._title}: {self._stage}, {duration(now - self._began)}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._over.set()

"""Progress of an offline batch on stderr: a bar on a terminal, otherwise a line now and then."""

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.text import Text

from systolic.core.units import duration, plural
from systolic.report import terminal
from systolic.report.progress import LiveArea, bar
from systolic.serving.offline.files import BatchProgress

LINE_SECONDS = 30.0
"""Seconds between lines where there is no terminal."""


class BatchDisplay(LiveArea):
    """Context that shows a batch.

    Args:
        stream: Where to.
        environ: Of the terminal.
        width: Columns; by default the terminal's.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, environ=environ, width=width)
        self._stream, self._clock = stream, clock
        self._said = clock()

    def see(self, progress: BatchProgress) -> None:
        """Shows the progress; a closed terminal does not end the batch."""
        if self.drawn:
            self.draw(bar(progress.answered, progress.lines, Text(line(progress))))
        elif self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            terminal.say(self._stream, line(progress))


def line(progress: BatchProgress) -> str:
    """The progress as text: ``1,200 of 5,000 lines (3 failed), 865 generated tokens/s, 2,310 prompt tokens/s, 4 m 05 s left``."""
    failed = f" ({progress.failed:,} failed)" if progress.failed else ""
    parts = [f"{progress.answered:,} of {plural(progress.lines, 'line')}{failed}"]
    parts.append(_rates(progress))
    if progress.stopped:
        parts.append("ending with the lines in flight (Ctrl+C again ends at once)")
    elif progress.left_seconds is not None:
        parts.append(f"{duration(progress.left_seconds)} left")
    return ", ".join(parts)


def summary(progress: BatchProgress, out: str) -> str:
    """Totals of a batch that has ended."""
    failed = f", {progress.failed:,} of them failed" if progress.failed else ""
    text = f"{out}: {progress.answered:,} of {plural(progress.lines, 'line')} answered{failed}"
    if progress.answered > progress.earlier:
        tokens = f"{progress.prompt_tokens:,} prompt tokens"
        if progress.completion_tokens:
            tokens = f"{progress.completion_tokens:,} generated and {tokens}"
        text += f"; {tokens} in {duration(progress.seconds)} ({_rates(progress)})"
    return text


def _rates(progress: BatchProgress) -> str:
    """Generated tokens and prompt tokens apart; a model that writes no text generates none."""
    prompts = f"{progress.prompts_per_second:,.0f} prompt tokens/s"
    if not progress.completion_tokens:
        return prompts
    return f"{progress.generated_per_second:,.0f} generated tokens/s, {prompts}"

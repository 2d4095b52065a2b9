"""Output of ``systolic serve`` and ``systolic batch``."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.reporter import reporter
from systolic.report.output import StderrReporter, print_json
from systolic.serving.command import Listening, NewKey, ServerEnd

if TYPE_CHECKING:
    from systolic.serving.http.telemetry import OpeningLog
    from systolic.serving.offline.files import BatchProgress
    from systolic.serving.server import KeptPrograms


class ServeReporter(StderrReporter):
    """The reporter of a server: its address goes to stdout when it listens."""

    def update(self, state: Any) -> None:
        """Prints the address."""
        if not isinstance(state, Listening):
            return
        url = state.url
        if self._json:
            print_json({"url": url, "models": state.models})
        else:
            print(f"{url}  ready when {url}/health answers 200; Ctrl+C ends it", flush=True)


def show_server(result: "ServerEnd | NewKey | list[KeptPrograms]", *, json: bool = False) -> int:
    """Prints a new key, or the programs on the disk; after a server nothing. Returns the exit code.

    Args:
        result: What ``systolic serve`` was asked for.
        json: Print one JSON object with the address when the server listens, with the new key, or with the programs on the disk.
    """
    if isinstance(result, NewKey):
        print_json({"name": result.name, "key": result.key}) if json else print(result.key)
    elif isinstance(result, ServerEnd):
        if result.is_opening:
            sys.stdout.flush()
            sys.stderr.flush()
            # Python would end under the compiler's threads, which aborts the process.
            os._exit(0)
    elif json:
        print_json({"models": [kept.to_json() for kept in result]})
    else:
        print("\n".join(line for kept in result for line in kept.lines()))
    return 0


class BatchReporter(StderrReporter):
    """The reporter of a batch: a bar on a terminal; elsewhere lines of the model that is opened, and of the progress."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._display: Any = None
        self._log: OpeningLog | None = None

    def begin(self, title: str) -> None:
        """Draws the batch."""
        if self._quiet:
            super().begin(title)
            return
        from systolic.serving.http.telemetry import OpeningLog
        from systolic.serving.offline.files import BatchDisplay

        self._display = BatchDisplay(sys.stderr)
        self._open.append(self._closing(self._display))
        if not sys.stderr.isatty():  # a terminal shows a bar instead
            self._log = OpeningLog(self.warn)

    def update(self, state: Any) -> None:
        """Shows the progress, or an event of the model."""
        from systolic.serving.offline.batch import ModelEvent

        if self._display is None:
            return
        if not isinstance(state, ModelEvent):
            self._display.see(state)
        elif self._log is not None:
            self._log.write(state.event, **state.fields)


def show_batch(progress: "BatchProgress", *, source: Path, out: Path, json: bool = False) -> int:
    """Prints the totals of a batch; returns the exit code: 1 where a line has no answer, 130 after an interrupt.

    Args:
        progress: The lines that have results.
        source: Path of the requests.
        out: Path of the results.
        json: Print one JSON object.
    """
    from systolic.serving.offline.files import summary

    if json:
        print_json({"input": str(source), "output": str(out), **asdict(progress)})
    else:
        print(summary(progress, str(out)))
    if progress.answered < progress.lines:
        left = progress.lines - progress.answered
        reporter().warn(
            f"interrupted with {left:,} lines left; run the same command again to continue"
        )
        return 130
    if progress.failed:
        reporter().warn(
            f"{progress.failed:,} of {progress.lines:,} lines failed; their results say why"
        )
    return 1 if progress.failed else 0

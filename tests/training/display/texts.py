"""What a fabricated run looks like as text; ``tests.golden`` keeps it."""

import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from systolic.runs.metrics import summary_of
from systolic.runs.record import RunRecord, load_run
from systolic.training.display.live import Screen
from systolic.training.display.plain import Plain
from systolic.training.display.summary import plain_summary, print_panel
from tests.training.display import fabricate_run

PATH = Path("runs/bytes")
"""Named in the texts; nothing is there."""


def loaded(lines: list[dict], end: dict | None) -> RunRecord:
    """A run read from a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(fabricate_run.write_run(Path(folder), lines, end))
        return replace(run, path=PATH, summary=None if end is None else summary_of(end))


def log() -> str:
    """The plain lines of the run, with the records' own clock."""
    times = [fabricate_run.START]
    stream = io.StringIO()
    for record in fabricate_run.records():
        times.append(record["time"])
        if record["kind"] == "start":  # each session has a process of its own
            plain = Plain(stream=stream, clock=lambda: times[-1])
        plain.see(record)
    return stream.getvalue()


def summary() -> str:
    """The plain lines at its end."""
    run = loaded(fabricate_run.records(), fabricate_run.summary(PATH))
    return "\n".join(plain_summary(run)) + "\n"


def failed() -> str:
    """The same of a run that a bad step ended."""
    return "\n".join(plain_summary(loaded(fabricate_run.failed_records(), None))) + "\n"


def summary_panel() -> str:
    """The end on a terminal, without colour."""
    run = loaded(fabricate_run.records(), fabricate_run.summary(PATH))
    return _printed(lambda console: print_panel(run, console))


def live_panel() -> str:
    """The live view at step 2,000, ten seconds after that record."""
    now = fabricate_run.START
    screen = Screen(stream=io.StringIO(), clock=lambda: now, width=100)
    for record in fabricate_run.records():
        now = record["time"]
        screen.see(record)
        if record["kind"] == "train" and record["step"] == 2000:
            break
    now += 10.0
    return _printed(lambda console: console.print(screen.panel()))


def _printed(draw: Callable[[Console], None]) -> str:
    stream = io.StringIO()
    draw(Console(file=stream, width=100, highlight=False, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


TEXTS: dict[str, Callable[[], str]] = {
    "log": log,
    "summary": summary,
    "failed": failed,
    "summary-panel": summary_panel,
    "live-panel": live_panel,
}

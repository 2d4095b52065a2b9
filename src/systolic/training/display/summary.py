"""Summary at the end of a run: a panel on a terminal, plain lines in a pipe."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from systolic.report import figures, terminal
from systolic.report.figures import TONE_COLOURS
from systolic.runs.metrics import loss_of
from systolic.runs.record import RunRecord, load_run
from systolic.runs.remote.store import origin
from systolic.training.display import readings
from systolic.training.display.page import NAME
from systolic.training.display.verdict import judge

SAMPLE_LINES = 8
SAMPLE_CHARACTERS = 600
CURVE_WIDTH = 40
MAX_WIDTH = 100
"""Columns of the panel on a wide terminal."""


def print_summary(run_dir: Path) -> None:
    """Prints the end of a run from its directory, finished or not.

    Raises:
        NotFoundError: not a run directory.
        RunError: a damaged JSON file in it.
    """
    run = load_run(run_dir)
    if terminal.can_redraw(sys.stdout, os.environ, shutil.get_terminal_size().columns):
        print_panel(run, Console(force_terminal=True, highlight=False))
    else:
        for line in plain_summary(run):
            terminal.say(sys.stdout, line)


def plain_summary(run: RunRecord) -> list[str]:
    """The summary as lines without colour or frames."""
    verdict = judge(run)
    lines = [f"{run.name}: {verdict.word}"]
    if verdict.sentence:
        lines.append(f"  {verdict.sentence}")
    lines += [f"{name:<12}{text}" for name, text in rows(run)]
    text = _sample(run)
    if text:
        lines += ["sample", *(f"  | {line}" for line in text.splitlines())]
    return lines + [f"{name:<12}{text}" for name, text in pointers(run)]


def rows(run: RunRecord) -> list[tuple[str, str]]:
    """Figures as (name, text): progress, loss, metrics, speed and shares of time."""
    summary, loss = run.summary, run.final_loss
    trouble = (
        []
        if summary is None
        else [
            (summary.bad_steps, "bad step"),
            (summary.skipped_files, "skipped file"),
            (summary.recompiles, "recompile"),
        ]
    )
    texts = [
        ("steps", _progress(run)),
        ("loss", "" if loss is None else figures.figure(loss)),
        ("metrics", ", ".join(f"{name} {text}" for name, text in readings.metrics(run).items())),
        *readings.speed(run),
        ("goodput", readings.goodput(run)),
        ("time", ", ".join(f"{s.name} {s.share_text}" for s in readings.shares(run))),
        ("trouble", ", ".join(figures.plural(number, word) for number, word in trouble if number)),
    ]
    return [(name, text) for name, text in texts if text and text != figures.MISSING]


def _progress(run: RunRecord) -> str:
    text = f"{figures.count(run.step)} of {figures.count(run.steps)}"
    if readings.wall(run) != figures.MISSING:
        text += f" in {readings.wall(run)}"
    return f"{text} ({readings.scope(run)})" if readings.scope(run) else text


def pointers(run: RunRecord) -> list[tuple[str, str]]:
    """Paths of the results, and the next command."""
    page = run.path / NAME
    checkpoint, following = (
        (None, None) if run.summary is None else (run.summary.checkpoint, run.summary.next)
    )
    targets = [
        ("run", shown(run.path)),
        ("checkpoint", checkpoint and shown(Path(checkpoint))),
        ("report", shown(page) if page.is_file() else None),
        ("next", following or f"systolic train --resume {shlex.quote(str(run.path))}"),
    ]
    return [(name, terminal.printable(str(text))) for name, text in targets if text]


def shown(path: Path) -> str:
    """A path; of a copy of a bucket's folder where it is in the bucket."""
    folder = origin(path)
    return str(path) if folder is None else folder.url


def _sample(run: RunRecord) -> str:
    """The last sample, cut to a few lines and printable."""
    if not run.samples:
        return ""
    prompt, text = run.samples[-1].prompt, run.samples[-1].text
    text = terminal.printable(text if text.startswith(prompt) else prompt + text)
    lines = text[:SAMPLE_CHARACTERS].splitlines()
    cut = "…" if len(text) > SAMPLE_CHARACTERS or len(lines) > SAMPLE_LINES else ""
    return "\n".join(lines[:SAMPLE_LINES]) + cut


def print_panel(run: RunRecord, console: Console) -> None:
    """Prints the summary as a panel, with paths and commands to copy below it."""
    verdict = judge(run)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows(run):
        line = Text(text)
        if name == "loss":
            line.append("  ").append(_curve(run), style="cyan")
        table.add_row(name, line)
    parts: list[RenderableType] = [table]
    if verdict.sentence:
        parts = [Text(verdict.sentence, style="bold"), Text(""), table]
    sample = _sample(run)
    if sample:
        title = Text("sample", style="dim")
        parts += [
            Text(""),
            Panel(Text(sample), title=title, title_align="left", border_style="dim"),
        ]
    colour = TONE_COLOURS[verdict.tone]
    console.print(
        Panel(
            Group(*parts),
            title=Text(f"{run.name} ", style="bold").append(
                f" {verdict.word} ", f"reverse {colour}"
            ),
            title_align="left",
            border_style=colour,
            padding=(1, 2),
            width=min(console.width, MAX_WIDTH),
        )
    )
    # Outside the frame and unwrapped: paths and commands are there to be copied.
    for name, text in pointers(run):
        line = Text(f"{name:<12}", style="dim").append(
            text, style="bold cyan not dim" if name == "next" else "not dim"
        )
        console.print(line, soft_wrap=True)


def _curve(run: RunRecord) -> str:
    history = terminal.BoundedCurve()
    for record in run.train:
        history.add(loss_of(record))
    return terminal.sparkline(history.values, CURVE_WIDTH)

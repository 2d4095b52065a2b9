"""What is said once when a run is over: a panel on a terminal, plain lines in a pipe."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from systolic.report import charts, figures, terminal
from systolic.report.run import Run, load_run, loss_of
from systolic.report.run_html import NAME, goodput, time_shares, wall_text
from systolic.report.verdict import Tone, Verdict, judge

SAMPLE_LINES = 8
SAMPLE_CHARACTERS = 600
CURVE_WIDTH = 40

_COLOURS = {Tone.good: "green", Tone.fair: "yellow", Tone.bad: "red", Tone.neutral: "cyan"}


def print_summary(
    run_dir: Path,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
) -> None:
    """Prints the end of a run from its directory, finished or not, to ``stream`` (stdout).

    Raises:
        NotFoundError: not a run directory.
        RunError: a damaged JSON file in it.
    """
    run = load_run(run_dir)
    stream = sys.stdout if stream is None else stream
    environ = os.environ if environ is None else environ
    columns = shutil.get_terminal_size().columns if width is None else width
    if terminal.can_redraw(stream, environ, columns):
        _print_panel(run, stream, width)
    else:
        for line in plain_summary(run):
            terminal.say(stream, line)


def plain_summary(run: Run) -> list[str]:
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


def rows(run: Run) -> list[tuple[str, str]]:
    """The figures as (name, text): progress, loss, metrics, speed and where the time went."""
    summary = run.summary or {}
    latest = next((r for r in reversed(run.train) if figures.throughput(r)), {})
    speed = summary if figures.throughput(summary) else latest
    mfu = summary.get("mfu") if summary.get("mfu") is not None else latest.get("mfu")
    loss = run.final_loss
    metrics = {k: v for k, v in run.final_metrics.items() if k != "loss"}
    shares, _ = time_shares(run)
    bad, again = (figures.number(summary.get(k)) or 0 for k in ("bad_steps", "recompiles"))
    trouble = [figures.plural(int(n), w) for n, w in ((bad, "bad step"), (again, "recompile")) if n]
    found = [
        ("steps", f"{figures.count(run.step)} of {figures.count(run.steps)} in {wall_text(run)}"),
        ("loss", figures.MISSING if loss is None else figures.figure(loss)),
        ("metrics", figures.metrics_text(metrics)),
        ("throughput", figures.throughput_text(speed)),
        ("MFU", figures.percent(mfu)),
        ("goodput", goodput(run)),
        ("time", ", ".join(f"{share.name} {share.share_text}" for share in shares)),
        ("trouble", ", ".join(trouble)),
    ]
    return [(name, text) for name, text in found if text and text != figures.MISSING]


def pointers(run: Run) -> list[tuple[str, str]]:
    """Where things are and what to type next."""
    summary = run.summary or {}
    page = run.path / NAME
    found = [
        ("run", str(run.path)),
        ("checkpoint", summary.get("checkpoint")),
        ("report", str(page) if page.is_file() else None),
        ("next", summary.get("next")),
    ]
    return [(name, terminal.printable(str(text))) for name, text in found if text]


def _sample(run: Run) -> str:
    """The last sample, cut to a few lines and printable."""
    if not run.samples:
        return ""
    record = run.samples[-1]
    prompt, text = str(record.get("prompt") or ""), str(record.get("text") or "")
    text = terminal.printable(text if text.startswith(prompt) else prompt + text)
    lines = text[:SAMPLE_CHARACTERS].splitlines()
    cut = "…" if len(text) > SAMPLE_CHARACTERS or len(lines) > SAMPLE_LINES else ""
    return "\n".join(lines[:SAMPLE_LINES]) + cut


def _print_panel(run: Run, stream: TextIO, width: int | None) -> None:
    from rich import box
    from rich.console import Console, Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, force_terminal=True, width=width, highlight=False)
    verdict = judge(run)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows(run):
        line = Text(text)
        if name == "loss":
            curve = terminal.History()
            for _, value in charts.points_of(run, loss_of):
                curve.add(value)
            line.append("  ").append(terminal.sparkline(curve.values, CURVE_WIDTH), style="cyan")
        table.add_row(name, line)
    parts: list[RenderableType] = [table]
    if verdict.sentence:
        parts = [Text(verdict.sentence, style="bold"), Text(""), table]
    sample = _sample(run)
    if sample:
        parts += [Text(""), Panel(Text(sample), title="sample", title_align="left", border_style="dim")]
    console.print(
        Panel(
            Group(*parts),
            title=_title(run, verdict),
            title_align="left",
            border_style=_COLOURS[verdict.tone],
            box=box.ROUNDED,
            padding=(1, 2),
            width=min(console.width, 100),
        )
    )
    # Outside the frame and unwrapped: paths and commands are there to be copied.
    for name, text in pointers(run):
        line = Text(f"{name:<12}", style="dim").append(
            text, style="bold cyan not dim" if name == "next" else "not dim"
        )
        console.print(line, soft_wrap=True)


def _title(run: Run, verdict: Verdict) -> "object":
    from rich.text import Text

    title = Text(f"{run.name} ", style="bold")
    return title.append(f" {verdict.word} ", style=f"reverse {_COLOURS[verdict.tone]}")

"""Summary at the end of a run, a panel on a terminal and plain lines in a pipe; the verdict and the figures that the page shows too, and the commands to type next."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from systolic.report import figures, terminal
from systolic.report.figures import TONE_COLOURS, Tone, Verdict
from systolic.report.terminal import one_line
from systolic.runs import record as records
from systolic.runs.metrics import EventRecord, SummaryRecord, TrainRecord, loss_of
from systolic.runs.record import RunRecord, State, load_run
from systolic.runs.remote.store import origin
from systolic.runs.run import RECIPE

REPORT = "report.html"
"""The page of a run, in its directory."""

_ORDER = (
    "step",
    "data_wait",
    "start",
    "compile",
    "eval",
    "checkpoint",
    "diagnose",
    "sample",
    "other",
)


OVERFLOW = 700.0
"""A loss above which exp overflows float64."""

LEAST = 0.0005
"""Shares below this round to nothing and are left out."""
RERUN = "the same run again"
"""The purpose of the command that made a run."""
LEVEL = 0.02
"""Difference to gzip's compression that counts as equal."""
SAMPLE_LINES = 8
SAMPLE_CHARACTERS = 600
CURVE_WIDTH = 40
MAX_WIDTH = 100
"""Columns of the panel on a wide terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """A part of the wall time."""

    kind: str
    name: str
    percent: float
    share_text: str
    seconds_text: str


def shares(run: RunRecord) -> list[TimeShare]:
    """Shares of the wall time, from useful to wasted."""
    spent = seconds_by_kind(run)
    total = sum(spent.values())
    return [
        TimeShare(
            kind=kind,
            name=figures.label("training steps" if kind == "step" else kind),
            percent=round(spent[kind] / total * 100, 3),
            share_text=figures.percent(spent[kind] / total),
            seconds_text=figures.seconds(spent[kind]),
        )
        for kind in _ORDER
        if spent.get(kind, 0.0) >= LEAST * total > 0
    ]


def seconds_by_kind(run: RunRecord) -> dict[str, float]:
    """The summary's ``time``, or without a summary the sum of the records."""
    if run.summary is not None:
        return run.summary.time
    spent = dict.fromkeys(_ORDER, 0.0) | records.spent(run.train, run.evals, run.events)
    spent["other"] = max(run.seconds - sum(spent.values()), 0.0)
    return spent


def goodput(run: RunRecord) -> str:
    """Share of the wall time in productive steps."""
    spent = seconds_by_kind(run)
    total = sum(spent.values())
    return figures.percent(spent["step"] / total) if total else figures.MISSING


def wall(run: RunRecord) -> str:
    """The wall time: measured, or else from the first record to the last without pauses."""
    seconds = run.seconds if run.summary is None else run.summary.seconds
    return figures.seconds(seconds) if seconds > 0 else figures.MISSING


def scope(run: RunRecord) -> str:
    """Scope of a summary's times if that is not the whole run: ``last of 2 sessions``."""
    if run.summary is None or run.num_sessions == 1:
        return ""
    return f"last of {run.num_sessions} sessions"


def speed(run: RunRecord) -> list[tuple[str, str]]:
    """Throughput and MFU as (name, text): of the session, or of the last record; unknown ones are left out."""
    latest = run.train[-1] if run.train else None
    record = latest if run.summary is None else run.summary
    if record is None:
        return []
    figures_by_name = [
        ("throughput", figures.throughput_text(record)),
        ("MFU", figures.percent(record.mfu)),
        ("forecast", _forecast(record)),
    ]
    return [(name, text) for name, text in figures_by_name if text != figures.MISSING]


def _forecast(record: TrainRecord | SummaryRecord) -> str:
    """Forecast and measured step time, of a summary or a train record."""
    if isinstance(record, TrainRecord):
        forecast, measured = record.forecast_step_seconds, record.step_seconds
    else:
        forecast, measured = record.forecast.step_seconds, record.forecast.measured_step_seconds
    if forecast is None:
        return figures.MISSING
    text = f"{figures.seconds(forecast)} a step"
    if measured is None:
        return text
    return f"{text}, measured {figures.seconds(measured)}: × {measured / forecast:.2f}"


def metric_texts(run: RunRecord) -> dict[str, str]:
    """The final metrics as text, the most informative first.

    Of a language model that is bits per byte, or perplexity, which follows from the loss.
    """
    final = dict(run.final_metrics)
    if run.reads_text:
        for split in ("test", "validation"):
            if (value := perplexity(final, split)) is not None:
                final = {f"{split}_perplexity": value, **final}
    first = sorted(final, key=_rank)
    return {
        figures.label(name): figures.metric(name, final[name], run.start.shares) for name in first
    }


def perplexity(metrics: Mapping[str, Any], split: str) -> float | None:
    """exp(loss) of a split whose tokens are not bytes; ``None`` where it has no finite loss."""
    loss = figures.number(metrics.get(f"{split}_loss"))
    if loss is None or f"{split}_bits_per_byte" in metrics or not loss < OVERFLOW:
        return None
    return math.exp(loss)


def _rank(name: str) -> int:
    """Rank of a metric: the most informative first, with its baseline beside it."""
    ends = ("bits_per_byte", "perplexity", "accuracy", "loss")
    return next((place for place, end in enumerate(ends) if name.endswith(end)), len(ends))


def judge(run: RunRecord) -> Verdict:
    """Judges a run by how it ended, its last loss, and its metrics against their baseline."""
    place = f"step {figures.count(run.step)} of {figures.count(run.steps)}"
    if run.state is State.interrupted:
        return Verdict(
            word="interrupted",
            sentence=f"Interrupted at {place}{_reason(run.summary.interrupted if run.summary else None)}.",
            tone=Tone.fair,
        )
    if run.state is State.failed:
        detail = one_line(_bad_step(run).detail or "a bad step", 200)
        return Verdict(word="failed", sentence=f"Ended at {place}: {detail}.", tone=Tone.bad)
    if run.state is State.unfinished:
        what = "it is still training or was killed"
        where = f"the last record is of {place}" if run.train else "no step is on record yet"
        return Verdict(
            word="unfinished", sentence=f"No summary: {what}; {where}.", tone=Tone.neutral
        )
    if run.has_diverged:
        sentence = f"The loss of step {figures.count(run.train[-1].step)}, the last on record, is not a number."
        return Verdict(word="diverged", sentence=sentence, tone=Tone.bad)
    if run.state is State.stopped:
        return Verdict(
            word="stopped",
            sentence=f"Stopped at {place}{_reason(run.summary.stopped if run.summary else None)}.",
            tone=Tone.fair,
        )
    ranking = run.job.outline.evaluation.metric or "loss"
    return _judge_metrics(run, ranking)


def _judge_metrics(run: RunRecord, ranking: str) -> Verdict:
    """Judges a finished run by its metrics; ``ranking`` is that of its checkpoints."""
    metrics, loss, text = run.final_metrics, run.final_loss, run.reads_text
    own = figures.number(metrics.get("validation_bits_per_byte"))
    gzip = figures.number(metrics.get("gzip_bits_per_byte"))
    if own is not None and gzip is not None and gzip > 0 and math.isfinite(own):
        gain = 1 - own / gzip
        where = f"{own:.3f} bits per byte on held-out text, gzip needs {gzip:.3f}"
        if abs(gain) <= LEVEL:
            return Verdict(word="level with gzip", sentence=f"{where}.", tone=Tone.fair)
        if gain > 0:
            sentence = f"{where}: {gain * 100:.0f} % less."
            return Verdict(word="beats gzip", sentence=sentence, tone=Tone.good)
        sentence = f"{where}: {-gain * 100:.0f} % more. Train longer or take a larger model."
        return Verdict(word="behind gzip", sentence=sentence, tone=Tone.bad)
    # The metric that ranks the run's checkpoints, where it is not the loss, is the one that is wanted.
    chosen = () if ranking == "loss" else (f"test_{ranking}", f"validation_{ranking}")
    if text and not any(name in metrics for name in chosen) and (sentence := _of_text(metrics)):
        return Verdict(word="trained", sentence=sentence, tone=Tone.good)
    usual = ("test_accuracy", "validation_bits_per_byte", "validation_accuracy", "validation_loss")
    best = (*chosen, *usual)
    for name in best:
        if name in metrics:
            value = figures.metric(name, metrics[name], run.start.shares)
            sentence = f"{figures.label(name).capitalize()} {value}."
            return Verdict(word="trained", sentence=sentence, tone=Tone.good)
    sentence = "" if loss is None else f"Final loss {figures.figure(loss)}."
    return Verdict(word="trained", sentence=sentence, tone=Tone.good)


def _of_text(metrics: Mapping[str, Any]) -> str:
    """Result on held-out text of a language model; "" without an evaluation."""
    for split in ("test", "validation"):
        bits = figures.number(metrics.get(f"{split}_bits_per_byte"))
        if bits is not None and math.isfinite(bits):
            return f"{bits:.3f} bits per byte on held-out text."
        value = perplexity(metrics, split)
        if value is not None:
            loss = figures.figure(metrics[f"{split}_loss"])
            return f"Perplexity {value:.4g} on held-out text, a loss of {loss} per token."
    return ""


def _reason(reason: str | None) -> str:
    return f": {one_line(reason, 200)}" if reason else ""


def _bad_step(run: RunRecord) -> EventRecord:
    """The event that ended a failed run."""
    assert isinstance(run.last, EventRecord)
    return run.last


def commands(run: RunRecord) -> list[tuple[str, str]]:
    """Next commands: (purpose, command) pairs."""
    where = shlex.quote(str(run.path))
    argv = _started(run)
    pairs = [(RERUN, shlex.join(argv))] if argv else []
    copy = run.path / RECIPE
    if argv and copy.is_file():
        _, _, function = argv[2].rpartition(":")
        kept = ["systolic", "train", f"{copy}:{function}", *argv[3:]]
        pairs.append(("from the copy of the recipe kept with the run", shlex.join(kept)))
    if run.state is State.failed:
        batch = shlex.quote(str(run.path / "bad" / f"step-{_bad_step(run).step}.npz"))
        pairs.append(("replay the bad step", f"systolic train --replay {batch}"))
    if run.state is not State.finished:
        pairs.append(("continue from the last checkpoint", f"systolic train --resume {where}"))
    if run.summary is None:
        return pairs
    if run.summary.checkpoint:
        pairs.append(("evaluate it", f"systolic eval {where}"))
    following = run.summary.next
    if following and following not in [command for _, command in pairs]:
        pairs.append(("next", following))
    return pairs


def _started(run: RunRecord) -> list[str]:
    """Words of the command that started the run, without its directory; [] after a resume."""
    argv = [str(word) for word in run.environment.get("argv") or []]
    if len(argv) < 3 or argv[1] != "train" or argv[2].startswith("-"):
        return []
    words = ["systolic", *argv[1:]]
    if "--run" in words:
        at = words.index("--run")
        del words[at : at + 2]
    return [word for word in words if not word.startswith("--run=")]


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
        (
            "metrics",
            ", ".join(f"{name} {text}" for name, text in metric_texts(run).items()),
        ),
        *speed(run),
        ("goodput", goodput(run)),
        ("time", ", ".join(f"{s.name} {s.share_text}" for s in shares(run))),
        ("trouble", ", ".join(figures.plural(number, word) for number, word in trouble if number)),
    ]
    return [(name, text) for name, text in texts if text and text != figures.MISSING]


def _progress(run: RunRecord) -> str:
    text = f"{figures.count(run.step)} of {figures.count(run.steps)}"
    if wall(run) != figures.MISSING:
        text += f" in {wall(run)}"
    return f"{text} ({scope(run)})" if scope(run) else text


def pointers(run: RunRecord) -> list[tuple[str, str]]:
    """Paths of the results, and the next command."""
    page = run.path / REPORT
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

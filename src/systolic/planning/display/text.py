"""Plan on one screen: the answer with its command, the ranking, rejected layouts, notes."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from systolic.chips import chip
from systolic.chips.flags import described, unranked
from systolic.core.units import plural, si
from systolic.planning.display import readings
from systolic.planning.display.readings import RankingRow
from systolic.planning.goal import Objective, days
from systolic.planning.notes import (
    BaseFlags,
    BatchDiffers,
    ChipNotCompiled,
    CorrectedTimes,
    FirstFit,
    FullCompileRatio,
    GpuTimes,
    NoAnswer,
    NotCompiled,
    OwnWork,
    PlanNote,
    PricesUnknown,
    ScheduleOnly,
    WallAssumed,
    WallLate,
    WayToAnswer,
)
from systolic.planning.plan import Plan
from systolic.report import figures, terminal
from systolic.report.figures import TONE_COLOURS
from systolic.report.terminal import print_lines

NAMED = 4
"""Most slices without a price that are named."""
WAYS: Mapping[WayToAnswer, str] = {
    WayToAnswer.slices: "other slices (--on any, --max-chips)",
    WayToAnswer.batch: "another batch (--free batch)",
    WayToAnswer.deadline: "a later deadline",
    WayToAnswer.budget: "a larger budget",
}

BETTER: Mapping[Objective, str] = {
    Objective.time: "faster",
    Objective.cost: "cheaper",
    Objective.energy: "better in energy",
    Objective.pareto: "better in time x cost",
    Objective.fit: "faster",
}
"""Words for a better score."""
MAX_WIDTH = 120
ROWS = 8
INDENT = 10
_LEFT = ("slice", "compile")
_VARYING = ("slice", "batch", "compile")
"""Columns left out where all candidates have the same value."""


def notes(plan: Plan) -> list[str]:
    """A line each."""
    return [text(note) for note in plan.notes]


def text(note: PlanNote) -> str:
    """A note as one line, without a full stop."""
    match note:
        case OwnWork():
            return f"the goal of {si(note.units)} {note.unit} is the job's own {plural(note.steps, 'step')} of {plural(note.batch, 'example')}; --{note.unit} sets another"
        case CorrectedTimes(calibration=of):
            return f"step times of compiled layouts are corrected by the calibration {of.name} ({of.chip}, {plural(of.num_profiles, 'profile')}, {of.made}), {note.share:.0%} of the best one's; estimates before a compile are not"
        case BatchDiffers():
            return f"the job's batch is per device, so the global batch differs by slice ({note.smallest:,} to {plural(note.largest, 'example')} a step), which changes training; --batch sets one for all"
        case FirstFit():
            among = "the one" if note.fitting == 1 else f"the fastest of {note.fitting}"
            return f"the search ended once a layout fitted, and this is {among} found by then; --on {note.slice} --goal time goes on for speed"
        case ScheduleOnly():
            more = f"--finalists {note.full_compiles + 2} makes more full compiles"
            if note.more_requested:
                more = "its full compile did not end in time; --time-limit 2h gives it more time"
            return f"the best was compiled up to its schedule only: memory is exact, op times are estimates; {more}"
        case WallAssumed():
            return f"wall-clock: {'; '.join(note.assumptions)}"
        case WallLate():
            took = days(note.seconds) if math.isfinite(note.seconds) else "no finite time"
            return f"with start-up, checkpoints, data and preemptions the job takes {took}, and the deadline is {days(note.deadline_seconds)}"
        case NotCompiled():
            return _not_compiled(note)
        case FullCompileRatio():
            return f"steps of full compiles on {note.chip} take {note.ratio:.0%} of the time by their schedules; the others are ranked with the same ratio"
        case BaseFlags():
            more = f"; {line}" if (line := unranked(note.flags, chip(note.chip))) else ""
            return f"every program on {note.chip} is compiled with {described(note.flags)}; systolic chips {note.chip} gives the reasons, --flags changes them{more}"
        case ChipNotCompiled():
            why = note.reason or "the search ended before it came to one"
            return f"no slice of {note.chip} was compiled; {why}"
        case GpuTimes():
            if note.simulated:
                return "GPUs are compared by the schedules of XLA's GPU compiler: each time has its range, kernels are assumed"
            return "GPUs are compared by a roofline of their partitioned program: each time has its range, memory is estimated"
        case PricesUnknown():
            more = " …" if len(note.slices) > NAMED else ""
            return f"no {note.price.value} price is known for {', '.join(note.slices[:NAMED])}{more}; add prices in a file, see systolic chips --help"
        case NoAnswer():
            return f"to try: {', '.join(WAYS[way] for way in note.ways)}"


def _not_compiled(note: NotCompiled) -> str:
    margin = note.margin
    at = margin.nearest - 1.0
    beside = f"{at:.0%} above the best" if at >= 0 else f"{-at:.0%} below the best"
    word = BETTER[note.objective]
    worth = f"up to {margin.share:.0%} {word}" if margin.share >= 0.005 else f"no {word}"
    return (
        f"left out by estimates, not bounds: {plural(margin.layouts, 'layout')} that may fit ({margin.bounded:,} more by bounds); the best of them "
        f"is estimated {beside}; the {margin.compiled} compiled took {margin.low:.2f} to {margin.high:.2f} times such estimates, "
        f"so that one may be {worth} than the answer; --programs compiles more"
    )


def print_plan(plan: Plan, path: Path | None) -> None:
    """Prints the screen, in colour on a terminal; ``path`` of the plan's file is for the commands."""
    print_lines(lambda columns: lines(plan, path, columns), MAX_WIDTH, usual=100)


def lines(plan: Plan, path: Path | None, width: int) -> list[Text]:
    """Lines of the screen, ``width`` columns wide; commands are never cut."""
    verdict = readings.verdict(plan)
    colour = TONE_COLOURS[verdict.tone]
    head = Text(f"{plan.facts.job.name}: {readings.work(plan)}  ", style="bold")
    head.append(f" {verdict.word} ", f"bold reverse {colour}")
    shown = [head, *_wrapped(verdict.sentence, width, f"bold {colour}")]
    if plan.best is not None:
        shown.append(_row("run", readings.command(plan, path), "bold cyan"))
    if plan.wall is not None:
        first, *rest = textwrap.wrap(readings.wall(plan.wall), width - INDENT)
        shown += [_row("wall", first), *(_row("", line) for line in rest)]
    table = _table(plan, width)
    shown += [Text(""), *table] if table else []
    rejected = _rejected(plan, width)
    shown += [Text(""), *rejected] if rejected else []
    shown += [Text(""), _cut(_row("searched", readings.searched(plan)), width)]
    for number, note in enumerate(notes(plan)):
        first, *rest = textwrap.wrap(note, width - INDENT) or [""]
        shown.append(_row("notes" if not number else "", first, "dim"))
        shown += [_row("", line, "dim") for line in rest]
    return shown


def _table(plan: Plan, width: int) -> list[Text]:
    """Ranking with a line per candidate: figures, and differences from the best."""
    ranked = readings.rows(plan)
    if not ranked:
        return []
    rows = readings.shown(ranked, ROWS)
    cells = [_cells(row) for row in rows]
    hidden = {name for name in _VARYING if len({cell[name] for cell in cells}) == 1}
    if plan.goal.objective is not Objective.energy:
        hidden.add("kWh")
    columns = [name for name in cells[0] if name not in hidden]
    wide = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in columns}
    marks = max(len(str(row.rank)) for row in rows) + 1

    def line(mark: str, cell: Mapping[str, str], last: str) -> str:
        texts = [
            f"{cell[name]:<{wide[name]}}" if name in _LEFT else f"{cell[name]:>{wide[name]}}"
            for name in columns
        ]
        return "  ".join([f"{mark:>{marks}}", *texts, last])

    head = line("", {name: name for name in columns}, "differs from the best")
    shown = [_cut(Text(head, style="dim"), width)]
    for row, cell in zip(rows, cells, strict=True):
        mark = f"{row.rank}{'*' if row.pareto else ' '}"
        style = "bold" if row.rank == 1 else ""
        texts = _beside(line(mark, cell, ""), row.unlike, marks + 2, width)
        shown += [_cut(Text(text, style=style), width) for text in texts]
    front = "* no other is faster and cheaper" if any(row.pareto for row in rows) else ""
    more = len(ranked) - len(rows)
    parts = [front, f"{figures.plural(more, 'more candidate')} in the file" if more else ""]
    if text := "; ".join(part for part in parts if part):
        shown.append(Text(f"{'':<{marks + 2}}{text}", style="dim"))
    if tie := readings.tie(plan):
        shown.append(_cut(Text(f"{'':<{marks + 2}}{tie}"), width))
    return shown


def _beside(start: str, text: str, indent: int, width: int) -> list[str]:
    """Lines of ``start`` and ``text``: beside it where it fits, else below, indented, with nothing cut."""
    if len(start) + len(text) <= width:
        return [start + text]
    space = " " * indent
    below = textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )
    return [start.rstrip(), *below]


def _cells(row: RankingRow) -> dict[str, str]:
    return {
        "slice": row.slice,
        "step": row.step,
        "MFU": row.mfu,
        "GiB": row.memory,
        "time": row.time,
        "$": row.usd.removeprefix("$"),
        "kWh": row.kwh,
        "batch": row.batch,
        "compile": row.compile,
    }


def _rejected(plan: Plan, width: int) -> list[Text]:
    """Count and nearest miss for each rule."""
    shown = []
    for number, reason in enumerate(readings.reasons(plan)):
        amount = f"{reason.layouts:,}" if reason.layouts else "all"
        where = figures.plural(reason.slices, "slice")
        text = _row("rejected" if not number else "", f"{amount:>8}  {reason.words} ({where})")
        shown.append(_cut(text, width))
        for near in textwrap.wrap(reason.nearest, width - INDENT - 10):
            shown.append(_row("", f"{'':>10}{near}", "dim"))
    return shown


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    return [Text(line, style=style) for line in textwrap.wrap(text, width)]


def _row(name: str, text: str, style: str = "") -> Text:
    return Text(f"{name:<{INDENT}}", style="bold").append(
        terminal.printable(text), f"not bold {style}"
    )


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line

"""Causes on one screen: the verdict, then each cause with evidence and advice."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.text import Text

from systolic.chips.flags import described
from systolic.core.units import duration, plural
from systolic.explaining.cause import Cause
from systolic.forecasting import Forecast
from systolic.forecasting.display import readings
from systolic.profile.table import ProfileTable
from systolic.report import terminal
from systolic.report.terminal import print_lines

HEIGHT = 23
"""Lines of a screen, less one for the prompt."""

PROGRAMS = 3
"""Programs beside the step's that are named."""
LEAST_PROGRAM = 1e-3
"""Share of the step's program from which another one is named."""
LEAST_SHARE = 0.005
SPREAD = 1.05
"""Ratio of the slowest device's step to the fastest one's from which both are named."""
MAX_WIDTH = 100
COMMAND = re.compile(r"systolic (?:train --|explain )(?:'[^']*'|[^';])*")
"""A command to copy, up to the next semicolon."""
NO_BREAK = "\0"
"""Stands for a space of a command while its text is wrapped."""
LINES = (3, 2, 1)
"""Lines of evidence and of advice per cause; fewer where the screen can't hold all causes."""


QUICK = "from the compiler's schedule, the time of ops estimated: systolic forecast without --quick has the compiler's cycles"
"""Remark of every explanation of a step."""


def print_causes(
    title: str,
    causes: Sequence[Cause],
    *,
    remarks: Sequence[str] = (),
    notes: Sequence[str] = (),
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
) -> None:
    """Prints the screen to ``stream`` (stdout), in colour on a terminal.

    Args:
        title: Name of what was explained.
        causes: Worst first.
        remarks: Figures to show even without a problem.
        notes: Questions that could not be judged.
        stream: Output stream.
        environ: Environment variables that describe the terminal.
        width: Columns; by default those of the terminal.
    """
    print_lines(
        lambda columns: lines(title, causes, columns, remarks=remarks, notes=notes),
        MAX_WIDTH,
        stream=stream,
        environ=environ,
        width=width,
    )


def lines(
    title: str,
    causes: Sequence[Cause],
    width: int,
    *,
    remarks: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> list[Text]:
    """Lines of the screen: at most :data:`HEIGHT` where the causes allow it, ``width`` columns wide."""
    head = [verdict(title, causes), Text("")]
    tail = [_wrapped(remark, width, "  ", "dim") for remark in remarks]
    tail += [_wrapped(f"not judged: {note}", width, "  ", "dim") for note in notes]
    foot = [line for part in tail for line in part]
    for most in LINES:
        body = [line for i, cause in enumerate(causes) for line in _cause(i, cause, width, most)]
        if len(head) + len(body) + len(foot) <= HEIGHT:
            return [*head, *body, *foot]
    shown: list[Text] = []
    for index, cause in enumerate(causes):
        more = _cause(index, cause, width, 1)
        if index and len(head) + len(shown) + len(more) + 1 > HEIGHT - len(foot):
            rest = ", ".join(other.name for other in causes[index:])
            text = f"  and {len(causes) - index} more (--json): {rest}"
            shown.append(Text(terminal.one_line(text, width), "dim"))
            break
        shown += more
    return [*head, *shown, *foot]


def verdict(title: str, causes: Sequence[Cause]) -> Text:
    """The first line."""
    line = Text(title, style="bold")
    if not causes:
        return line.append(": no problem found", "green")
    count = f"{len(causes)} problem{'s' if len(causes) > 1 else ''}"
    return line.append(f": {count} found", "yellow")


def _cause(index: int, cause: Cause, width: int, most: int) -> list[Text]:
    cost = []
    if cause.share is not None:
        cost.append(f"{cause.share * 100:.1f} %")
    if cause.seconds is not None:
        cost.append(duration(cause.seconds))
    found = _wrapped(cause.title, width - (24 if cost else 0), f"{index + 1}. ", "bold")
    if cost:
        found[-1].append(f"  {', '.join(cost)}", "not bold yellow")
    if cause.work is not None and most > LINES[-1] and len(cause.evidence) > 1:
        found += _wrapped(cause.work.text, width, "    ", "")
    for text in cause.evidence[:most]:
        found += _wrapped(text, width, "    ", "")
    for number, text in enumerate(cause.advice[:most]):
        found += _wrapped(text, width, "    try " if not number else "     or ", "cyan")
    return found


def _wrapped(text: str, width: int, indent: str, style: str) -> list[Text]:
    """Text wrapped over several lines, never inside a command."""
    flat = " ".join(terminal.printable(text).split())
    whole = COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK), flat)
    found = textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [Text(line.replace(NO_BREAK, " "), style) for line in found]


def step_title(forecast: Forecast, name: str) -> str:
    """``lm on v5e-4: 4.59 ms a step, MFU 37.0 %`` of a step that fits."""
    assert forecast.step_seconds is not None
    title = f"{name} on {forecast.on.name}: {readings.least(forecast)}{duration(forecast.step_seconds)} a step"
    if forecast.mfu is not None and not forecast.is_lower_bound:
        title += f", MFU {forecast.mfu:.1%}"
    return title


def step_remarks(forecast: Forecast, flags: Sequence[str]) -> list[str]:
    """Remarks of a step's explanation beside its causes; ``flags`` are the compiler's."""
    words = described(flags)
    return [*forecast.cautions, QUICK, *([f"compiled with {words}"] if words else [])]


def run_remarks(figures: Mapping[str, Any], unit: str) -> list[str]:
    """The figures in a line."""
    texts = {
        "update_ratio": "updates {:.1e} of the weights",
        "noise_scale": f"gradient noise scale {{:.3g}} {unit}",
        "batch": "batch {}",
        "epochs": "data read {:.3g} times",
        "training_loss": "training loss {:.4g}",
        "validation_loss": "validation {:.4g}",
    }
    known = [text.format(figures[k]) for k, text in texts.items() if figures[k] is not None]
    return [", ".join(known)] if known else []


def profile_remark(found: Mapping[str, Any]) -> str:
    """The figures in a line."""
    parts = ", ".join(
        f"{name} {share:.0%}" for name, share in found["shares"].items() if share >= LEAST_SHARE
    )
    steps = f"median of {found['steps']}" if found["steps"] > 1 else "the only one"
    if by := found.get("simulated_by"):
        steps = f"simulated by {by}, no measurement"
    number = found["devices"]
    on = f"{number} x {found['device']}" if number > 1 else found["device"]
    slow, fast = found["slowest"], found["fastest"]
    if slow["step_seconds"] > SPREAD * fast["step_seconds"]:
        steps += f"; {slow['device']} {duration(slow['step_seconds'])}, {fast['device']} {duration(fast['step_seconds'])}"
    if len(found["hosts"]) > 1:
        steps += f"; hosts {', '.join(found['hosts'])}"
    return f"a step on {on} takes {duration(found['step_seconds'])} ({steps}): {parts}"


def overlap_remarks(found: Mapping[str, Any]) -> list[str]:
    """Transfers beside the device's work, in a line; none without any."""
    parts = [
        f"{kind} {duration(one['hidden_seconds'])}, {duration(one['exposed_seconds'])} more exposed"
        for kind, one in found["beside"].items()
        if one["hidden_seconds"] > LEAST_SHARE * found["step_seconds"]
    ]
    return [f"under way while the device works: {'; '.join(parts)}"] if parts else []


def program_remarks(table: ProfileTable) -> list[str]:
    """A line for each program beside the step's, with the op that takes most of it."""
    first, *others = table.programs
    lines = []
    for program in others[:PROGRAMS]:
        if program.seconds < LEAST_PROGRAM * first.seconds:
            break
        row = next((one for one in table.ops if one.program == program.name), None)
        text = f"beside the step: {program.name}, {plural(round(program.runs), 'run')} of {duration(program.median)}"
        if row is not None:
            work = row.rate.text(row.flight) if row.rate is not None else ""
            text += f"; {row.op.raw.name} {duration(row.median)}" + (f", {work}" if work else "")
        lines.append(text)
    return lines

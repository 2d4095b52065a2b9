"""A forecast beside its measurement, as a screen and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from systolic.core.units import duration
from systolic.forecasting.profiled import Beside, KindBeside, OpBeside
from systolic.report import terminal
from systolic.report.terminal import print_lines

MAX_WIDTH = 140
OPS = 12
"""Most ops on the screen; JSON has all."""


def print_beside(comparison: Beside) -> None:
    """Prints the screen."""
    print_lines(lambda width: lines(comparison, width), MAX_WIDTH, usual=120)


def lines(comparison: Beside, width: int) -> list[Text]:
    """Kinds of op, then the ops that differ most."""
    title = f"{comparison.program}: measured {duration(comparison.measured_step)} a run"
    title += f" (median of {comparison.runs:g})" if comparison.runs > 1 else ""
    if comparison.simulated_step:
        ratio = (
            comparison.simulated_step / comparison.measured_step
            if comparison.measured_step
            else 0.0
        )
        title += f", simulated {duration(comparison.simulated_step)}, {ratio:.2f} of it"
    shown = [
        Text(""),
        Text(title, "bold"),
        *(Text(f"  {note}", "dim") for note in comparison.notes),
    ]
    head = (
        f"{'simulated':>10}  {'measured':>10}  {'ratio: p10':>10}  {'median':>6}  {'p90':>6}  kind"
    )
    shown += [Text(head, "dim"), *(Text(_kind(row)) for row in comparison.kinds)]
    if comparison.measured_alone:
        shown.append(Text(f"{'':>10}  {duration(comparison.measured_alone):>10}  not simulated"))
    if comparison.simulated_alone:
        shown.append(
            Text(f"{duration(comparison.simulated_alone):>10}  {'':>10}  not in the profile")
        )
    groups = [of for of in comparison.alike[:OPS] if sum(op.difference for op in of)]
    shown += [
        Text(""),
        Text(f"{'difference':>11}  {'simulated':>10}  {'measured':>10}  ops", "dim"),
        *(Text(_ops(of, width)) for of in groups),
    ]
    if len(comparison.alike) > len(groups):
        shown.append(Text(f"  and {len(comparison.alike) - len(groups):,} more (--json)", "dim"))
    return shown


def _kind(row: KindBeside) -> str:
    ratios = [
        f"{ratio:.2f}" if ratio is not None else "" for ratio in (row.low, row.median, row.high)
    ]
    return f"{duration(row.simulated):>10}  {duration(row.measured):>10}  {ratios[0]:>10}  {ratios[1]:>6}  {ratios[2]:>6}  {row.kind}, {row.number:,}"


def _ops(of: Sequence[OpBeside], width: int) -> str:
    """Ops that are alike, by the one that differs most; the place is cut to the width."""
    first = of[0]
    lost = sum(op.difference for op in of)
    sign = "+" if lost >= 0 else "-"
    simulated, measured = (
        duration(sum(seconds))
        for seconds in zip(*((op.simulated, op.measured) for op in of), strict=True)
    )
    number = sum(op.times for op in of)
    times = f" x{number:g}" if number != 1 else ""
    figures = f"{sign + duration(abs(lost)):>11}  {simulated:>10}  {measured:>10}  "
    name = f"{first.name}{times}, {first.place or first.program}"
    return figures + terminal.one_line(name, max(width - len(figures), len(first.name)))


def beside_json(comparison: Beside) -> dict[str, Any]:
    """All of it, in seconds of a step."""
    return {
        "program": comparison.program,
        "simulated_step_seconds": comparison.simulated_step or None,
        "measured_step_seconds": comparison.measured_step,
        "measured_alone_seconds": comparison.measured_alone,
        "simulated_alone_seconds": comparison.simulated_alone,
        "kinds": [row.to_json() for row in comparison.kinds],
        "ops": [op.to_json() for op in comparison.ops],
        "notes": list(comparison.notes),
    }

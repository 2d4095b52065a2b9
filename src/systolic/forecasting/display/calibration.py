"""Calibrations as screens: one with what it rests on, and a list."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from rich.text import Text

from systolic.core.units import duration, plural, si
from systolic.forecasting.calibrations import CalibrationRecord, ProfileSource
from systolic.report.terminal import print_lines
from systolic.sim.calibration import CostKind, Factor

MAX_WIDTH = 140
KINDS = 4
"""Most programs, and kinds of op without a price, that are named."""
SHOWN = 1e-3
"""Share of the measured time from which such a kind is named."""


def print_calibration(record: CalibrationRecord) -> None:
    """Prints a calibration with what it rests on."""
    print_lines(lambda columns: _wrapped(lines(record), columns), MAX_WIDTH, usual=120)


def print_calibrations(records: Sequence[CalibrationRecord], folder: Path) -> None:
    """Prints a line for each calibration."""
    print_lines(lambda _: listed(records, folder), MAX_WIDTH, usual=120)


def _wrapped(shown: Sequence[Text], columns: int) -> list[Text]:
    """Lines of at most so many columns."""
    return [
        Text(part, line.style)
        for line in shown
        for part in wrap(
            line.plain,
            columns,
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        or [""]
    ]


def lines(record: CalibrationRecord) -> list[Text]:
    """Factors, what was left out, and the profiles."""
    of = record.calibration
    head = f"{of.name}: {of.chip}, {of.made}, {plural(of.num_profiles, 'profile')}"
    if record.compiler:
        head += f", {record.compiler}"
    columns = f"{'measured/simulated':>18}  {'p10':>10}  {'p90':>10}  {'ops':>6}  {'shapes':>6}  {'time':>10}  kind"
    shown = [Text(head, "bold"), Text(columns, "dim")]
    shown += [Text(_row(kind, factor)) for kind, factor in of.factors.items()]
    shown += [Text(f"left out: {text}") for text in record.left_out]
    for source in record.sources:
        shown += [Text(""), *(Text(text, "dim") for text in _source(source))]
    return shown


def listed(records: Sequence[CalibrationRecord], folder: Path) -> list[Text]:
    """A line for each, or how to make one."""
    if not records:
        return [
            Text(f"no calibration in {folder}; make one: systolic calibrate PROFILE --name my-v5e")
        ]
    longest = max(len(record.calibration.name) for record in records)
    shown = []
    for record in records:
        of = record.calibration
        factors = ", ".join(
            f"{kind.value} {_value(kind, f.value)}" for kind, f in of.factors.items()
        )
        text = f"{of.name:<{longest}}  {of.chip:<6}  {of.made}  {factors}"
        shown.append(Text(text))
    return [*shown, Text(f"in {folder}; systolic calibrations NAME shows one", "dim")]


def _row(kind: CostKind, factor: Factor) -> str:
    value, low, high = (_value(kind, number) for number in (factor.value, factor.low, factor.high))
    few = "" if factor.has_spread else ", too few for a range"
    return f"{value:>18}  {low:>10}  {high:>10}  {factor.ops:>6,}  {factor.works:>6,}  {duration(factor.seconds):>10}  {kind.value}{few}"


def _value(kind: CostKind, value: float) -> str:
    return si(value, "B/s") if kind is CostKind.host else f"{value:.3f}"


def _source(source: ProfileSource) -> list[str]:
    share = source.matched_seconds / source.total_seconds if source.total_seconds else 0.0
    runs = ", ".join(
        f"{name} x {number:g}" for name, number in list(source.programs.items())[:KINDS]
    )
    devices = plural(source.devices, "device")
    texts = [f"{Path(source.file).name}: {devices}, {runs}"]
    by = f", by {source.priced_by}" if source.priced_by else ""
    texts.append(
        f"  {share:.0%} of {duration(source.total_seconds)} of ops in a run of each program has a price{by}"
    )
    left = [
        f"{name} {duration(seconds)}"
        for name, seconds in source.not_matched.items()
        if seconds > SHOWN * source.total_seconds
    ]
    if left:
        texts.append(f"  without: {', '.join(left[:KINDS])}")
    return texts

"""Table of forecasts on one screen: a line a row, the fastest and the cheapest marked."""

import textwrap
from collections.abc import Sequence

from rich.text import Text

from systolic.core.units import GIB, duration, gibibytes, si
from systolic.forecasting.display import readings
from systolic.forecasting.table import ForecastRow, ForecastTable
from systolic.report import figures
from systolic.report.terminal import print_lines

MAX_WIDTH = 140
_MARK = "  cheapest"
_LEFT = frozenset(("slice", "bound by"))
"""Columns of words; those of numbers are aligned at the right."""
_LESS = ("range", "waiting", "chips", "$/h", "bound by", "MFU")
"""Columns that a narrow terminal goes without, the first of them first."""


def print_table(table: ForecastTable, *, notes: Sequence[str] = ()) -> None:
    """Prints the screen, in colour on a terminal, ``notes`` at its end."""
    print_lines(lambda width: lines(table, width, notes), MAX_WIDTH, usual=120)


def lines(table: ForecastTable, width: int, notes: Sequence[str] = ()) -> list[Text]:
    """The table in ``width`` columns, what differs in each row first; reasons of rows without a time below theirs."""
    cells = [_cells(row) for row in table.rows]
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    wide = {name: max(len(name), *(len(cell.get(name, "")) for cell in cells)) for name in names}
    for name in _LESS:
        if name in names and sum(wide[n] + 2 for n in names) + len(_MARK) > width:
            names.remove(name)

    def line(cell: dict[str, str]) -> str:
        texts = [
            f"{cell.get(n, ''):<{wide[n]}}" if n in _LEFT else f"{cell.get(n, ''):>{wide[n]}}"
            for n in names
        ]
        return "  ".join(texts).rstrip()

    shown = [Text(table.name, "bold"), Text(line({name: name for name in names}), "dim")]
    for row, cell in zip(table.rows, cells, strict=True):
        text = Text(line(cell), "" if row.fits else "red")
        for word, best in (("fastest", table.fastest), ("cheapest", table.cheapest)):
            if row is best:
                text.append(f"  {word}", "bold green")
        shown.append(text)
        shown += [Text(f"  {part}", "dim") for part in textwrap.wrap(_reason(row), width - 2)]
    foot = _foot(table.rows, "waiting" in names)
    for note in (foot, *notes):
        shown += [Text(text, "dim") for text in textwrap.wrap(note, width)]
    for text in shown:
        text.truncate(width, overflow="ellipsis")
    return shown


def _cells(row: ForecastRow) -> dict[str, str]:
    settings = {name: str(value) for name, value in row.settings.items()}
    first = {"slice": row.on.name, "chips": f"{row.on.num_chips:,}", **settings}
    forecast = row.forecast
    if forecast is None:
        return first
    need = forecast.need_bytes
    speed = dict(readings.speed(forecast))
    unit, scale = readings.SCALES.get(forecast.unit, ("million calls", 1e6))
    usd = None if row.usd_per_unit is None else row.usd_per_unit * scale
    bound, short = speed.get("bound by", ""), readings.GPU_NAMES if row.on.platform == "gpu" else {}
    cells = {
        "memory": _share(need, forecast.capacity_bytes),
        "step": speed.get("step", ""),
        "range": readings.interval(forecast),
        "MFU": speed.get("MFU", ""),
        f"{forecast.unit}/s": si(forecast.units_per_second or 0.0) if forecast.step_seconds else "",
        "$/h": "" if forecast.bill.usd_per_hour is None else f"{forecast.bill.usd_per_hour:,.2f}",
        f"$/{unit.split()[0]}": "" if usd is None else readings.figure(usd),
        "waiting": duration(forecast.exposed_collective_seconds) if forecast.step_seconds else "",
        "bound by": short.get(bound, bound),
    }
    return first | cells


def _share(need: int, have: int) -> str:
    """Memory of the peak and of the device: ``5.32 of 15.75 GiB``."""
    if not need:
        return figures.MISSING
    of = f" of {gibibytes(have)}" if have else ""
    same = of.endswith(" GiB") and need >= GIB
    return f"{gibibytes(need).removesuffix(' GiB') if same else gibibytes(need)}{of}"


def _reason(row: ForecastRow) -> str:
    if row.forecast is None:
        return row.problem
    if row.is_comparable:
        return ""
    text = readings.verdict(row.forecast).sentence
    return text if row.fits else f"does not fit: {text}"


def _foot(rows: Sequence[ForecastRow], waiting: bool) -> str:
    """Origins of the times, and what a column's name leaves open."""
    forecasts = [row.forecast for row in rows if row.forecast is not None]
    origins = sorted(
        {readings.time_origin(forecast) for forecast in forecasts if forecast.step_seconds}
    )
    parts = [f"times {' and '.join(origins)}"] if origins else []
    parts += {
        f"$ per {readings.SCALES.get(forecast.unit, ('million calls', 1e6))[0]}"
        for forecast in forecasts
    }
    if waiting:
        parts.append("waiting: time that a step only waits for other chips")
    return "; ".join(parts)

"""Tables and drawings of the pages on accuracy, made from the stored results before each build.

A page marks the place of each with a comment, such as ``<!-- truth: rows -->``, so that the page reads in a checkout too:

- ``front``: what ``python benchmarks/accuracy/front.py`` prints.
- ``kinds``: errors by kind of program, chip and half, and how many programs that ran are forecast to fit.
- ``ranges``: how many rows lie in ranges that were made without their family.
- ``large``: every forecast that is off by more than 15 %, with its cause.
- ``rows``: every published row, with both forecasts, their errors and what is known.
- ``plot``: forecast over measured step, by generation.
- ``blind``: mean errors of rows whose errors were computed only after their forecasts, by generation.
- ``expected``: mean errors of both kinds of forecast beside those of the blind rows, by generation.

Pictures ``images/*.svg`` are put into the page itself, so that they take the colour of its text, light and dark.
"""

import html
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from systolic.report.pages import PlotAxis, Scale

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REASONS = BENCHMARKS / "accuracy" / "causes.json"
"""Why a rebuilt row is off by more than 15 %, by the beginning of its name."""
MARK = re.compile(r"<!-- truth: (\w+) -->")
PICTURE = re.compile(r"^!\[([^\]]*)\]\((images/[\w-]+\.svg)\)$", re.MULTILINE)
STYLE = re.compile(r"\s*<style>.*?</style>", re.DOTALL)
PAGES = ("accuracy", "how-it-works", "start/choose-hardware")
GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")


class Forecast(NamedTuple):
    """One forecast of a row; without seconds, why there is none."""

    seconds: float | None
    error: float | None
    half: str
    known: str
    """Cause of its error, where the program differs, or why there is no forecast."""


class PublishedRow(NamedTuple):
    """A published step and its forecasts."""

    id: str
    generation: str
    slice: str
    measured: float | None
    own: Forecast | None
    """The trainer's own program; None where it was not tried."""
    rebuilt: Forecast


@cache
def modules() -> tuple[Any, Any, Any]:
    """``front``, ``report`` and ``rows`` of the benchmarks, which are no package."""
    sys.path[:0] = [str(BENCHMARKS / "accuracy")]
    import front
    import report
    import rows

    return front, report, rows


@cache
def published() -> tuple[PublishedRow, ...]:
    """Every published row, in the order of the generations and of their names."""
    front, report, rows = modules()
    causes = report.json.loads(report.CAUSES.read_text())
    records = {one["id"]: one for one in report.json.loads(rows.PUBLISHED.read_text())}
    reasons = report.json.loads(REASONS.read_text())
    own = _own(front, report, causes)
    made = []
    for row in front.lines(front.REBUILT, "id"):
        record = records[row["id"]]
        mine = own.pop(row["id"], None)
        made.append(
            PublishedRow(
                id=row["id"],
                generation=rows.row_of(record).family.split()[0],
                slice=row.get("slice") or "-",
                measured=record.get("step_time_best_s"),
                own=mine,
                rebuilt=Forecast(
                    row.get("forecast_seconds"),
                    row.get("error"),
                    report.half(row["id"], row["half"]),
                    row.get("reason") or row.get("problem") or _known(report, row, reasons),
                ),
            )
        )
    if own:
        raise ValueError(
            f"rows of benchmarks/reach that benchmarks/accuracy lacks: {', '.join(own)}"
        )
    return tuple(sorted(made, key=lambda row: (GENERATIONS.index(row.generation), row.id)))


def _own(front: Any, report: Any, causes: Mapping[str, str]) -> dict[str, Forecast]:
    return {
        row["id"]: Forecast(
            row.get("forecast_seconds"),
            row["error"],
            row["half"],
            _stale(row, report._cause(row["id"], causes)),
        )
        for row in front.intervals.own_rows()
    }


def _stale(row: Mapping[str, Any], known: str) -> str:
    """What is known of a row, and whether its prices are not today's."""
    return "; ".join(filter(None, (known, "at earlier prices" if row.get("stale") else "")))


def _known(report: Any, row: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    cause = _stale(row, report._cause(row["id"], reasons))
    departures = "; ".join(row.get("departures") or ())
    return "; ".join(filter(None, (cause, departures and f"differs: {departures}")))


def front_table() -> str:
    """What ``front.py`` prints."""
    return modules()[0].table()


def kinds_table() -> str:
    """What ``front.py`` prints of every kind of program."""
    front = modules()[0]
    return "\n\n".join(
        filter(None, (front.kinds(), front.memory(), front.stale(), front.left_out()))
    )


def ranges_table() -> str:
    """What ``intervals.py`` prints."""
    intervals = modules()[0].intervals
    return "\n".join(intervals.coverage(intervals.read()))


def blind() -> Mapping[str, Any]:
    """Date, number and errors of the blind rows, by generation and of all."""
    return modules()[0].blind()


def blind_table() -> str:
    """A line for each generation, the smallest error first."""
    errors = sorted(blind()["mean by generation"].items(), key=lambda pair: pair[1])
    lines = [f"| {_shown(name)} | {_percent(error)} |" for name, error in errors]
    return "\n".join(["| chip | mean absolute error |", "|---|---|", *lines])


def expected_table() -> str:
    """Mean errors by generation, then of all, then the largest."""
    front = modules()[0]
    kinds, unseen = (front.own_programs(), front.rebuilt()), blind()["mean by generation"]
    lines = ["| chip | own program | rebuilt as a recipe | blind rows |", "|---|---|---|---|"]
    for name in front.GENERATIONS:
        cells = [_mean(errors.get(name, ())) for errors in kinds]
        cells.append(_percent(unseen[name]) if name in unseen else "-")
        lines.append(f"| {_shown(name)} | {' | '.join(cells)} |")
    every = [[*itertools.chain(*errors.values())] for errors in kinds]
    means = " | ".join(map(_mean, every))
    lines.append(f"| all | {means} | {_percent(blind()['mean'])} of {blind()['rows']} |")
    worst = " | ".join(_percent(max(errors)) for errors in every)
    lines.append(f"| the worst row | {worst} | not kept |")
    return "\n".join(lines)


def _mean(errors: Sequence[float]) -> str:
    return f"{_percent(statistics.mean(errors))} of {len(errors)}" if errors else "-"


def _percent(error: float) -> str:
    return f"{error * 100:.1f} %"


def large_table() -> str:
    """Every forecast that is off by more than a cause is named for, own programs first."""
    _, report, _ = modules()
    lines = [
        "| chip | row | forecast | half | error | what is known |",
        "|---|---|---|---|---|---|",
    ]
    for kind, text in (("own", "own program"), ("rebuilt", "rebuilt")):
        for row in published():
            forecast = getattr(row, kind)
            if forecast and forecast.error is not None and abs(forecast.error) > report.LARGE:
                known = forecast.known.partition("; differs:")[0]
                lines.append(
                    f"| {_shown(row.generation)} | {row.id} | {text} | {forecast.half} | {forecast.error:+.1%} | {known} |"
                )
    return "\n".join(lines)


def rows_table() -> str:
    """A section and a table for each generation."""
    parts = []
    for name in GENERATIONS:
        of = [row for row in published() if row.generation == name]
        parts += [
            f"### {_shown(name)}",
            "",
            "| row | slice | half | published | own program | error | rebuilt | error | what is known |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(_line, of),
            "",
        ]
    return "\n".join(parts)


def _line(row: PublishedRow) -> str:
    own, rebuilt = row.own, row.rebuilt
    known = "; ".join(
        text
        for text in (
            own and own.known and f"own program: {own.known}",
            rebuilt.known and f"rebuilt: {rebuilt.known}",
        )
        if text
    )
    cells = [
        row.id,
        row.slice,
        rebuilt.half,
        _seconds(row.measured),
        _seconds(own and own.seconds),
        _error(own and own.error),
        _seconds(rebuilt.seconds),
        _error(rebuilt.error),
        known.replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _shown(name: str) -> str:
    return name.replace("tpu", "TPU")


WIDTH, HEIGHT, LEFT, TOP, FOOT, GAP = 760, 360, 46, 34, 46, 8
STEP = PlotAxis(
    low=0.004, high=100, ticks=((0.01, "10 ms"), (1, "1 s"), (100, "")), scale=Scale.log
)
RATIO = PlotAxis(low=0.6, high=1.4, ticks=tuple((v, f"{v:.1f}") for v in (0.6, 0.8, 1.0, 1.2, 1.4)))
OWN, REBUILT = "#3b82f6", "#e08a1e"
"""Both read on white and on black."""


def plot() -> str:
    """Forecast over measured step, a panel for each generation; the band is 15 % to either side."""
    width = (WIDTH - LEFT - GAP * (len(GENERATIONS) - 1)) / len(GENERATIONS)
    height = HEIGHT - TOP - FOOT
    parts = []
    for value, text in RATIO.ticks:
        y = _y(value, height)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for number, name in enumerate(GENERATIONS):
        left = LEFT + number * (width + GAP)
        of = [row for row in published() if row.generation == name]
        parts += _panel(_shown(name), left, width, height, of)
    legend = (
        f'<circle cx="{LEFT + 6}" cy="10" r="4" fill="{OWN}"/><text x="{LEFT + 16}" y="14">own program</text>'
        f'<circle cx="{LEFT + 126}" cy="10" r="3.5" fill="none" stroke="{REBUILT}" stroke-width="1.6"/><text x="{LEFT + 136}" y="14">rebuilt</text>'
        f'<text x="{WIDTH}" y="14" text-anchor="end">forecast / measured; across: measured step</text>'
    )
    return (
        f'<svg class="drawing" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Forecast over measured step time by generation" '
        f'style="width:100%;color:inherit" font-family="sans-serif" font-size="11" fill="currentColor">{legend}{"".join(parts)}</svg>'
    )


def _panel(
    name: str, left: float, width: float, height: float, rows: Sequence[PublishedRow]
) -> Iterator[str]:
    high, low, middle = (_y(value, height) for value in (1.15, 0.85, 1.0))
    yield f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{height}" fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
    yield f'<rect x="{left:.1f}" y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}" fill="currentColor" fill-opacity="0.08"/>'
    yield f'<path d="M{left:.1f} {middle:.1f}h{width:.1f}" stroke="currentColor" stroke-opacity="0.6"/>'
    yield f'<text x="{left + width / 2:.1f}" y="{TOP + height + 34}" text-anchor="middle" font-weight="bold">{name}</text>'
    for value, text in STEP.ticks:
        if text:
            yield f'<text x="{left + STEP.place(value) * width:.1f}" y="{TOP + height + 15}" text-anchor="middle" font-size="10">{text}</text>'
    for row in rows:
        for forecast, style in (
            (row.rebuilt, f'r="3.5" fill="none" stroke="{REBUILT}" stroke-width="1.6"'),
            (row.own, f'r="3.5" fill="{OWN}"'),
        ):
            if forecast is None or forecast.error is None or row.measured is None:
                continue
            x = left + STEP.place(row.measured) * width
            text = html.escape(
                f"{row.id}: {forecast.seconds:.4g} s, measured {row.measured:.4g} s ({forecast.error:+.1%})"
            )
            yield f'<circle cx="{x:.1f}" cy="{_y(1 + forecast.error, height):.1f}" {style}><title>{text}</title></circle>'


def _y(ratio: float, height: float) -> float:
    return TOP + (1 - RATIO.place(ratio)) * height


PARTS: Mapping[str, Callable[[], str]] = {
    "front": front_table,
    "kinds": kinds_table,
    "ranges": ranges_table,
    "large": large_table,
    "rows": rows_table,
    "plot": lambda: _raw(plot()),
    "blind": blind_table,
    "expected": expected_table,
}


def _raw(text: str) -> str:
    return f"```{{raw}} html\n{text}\n```"


def fill(app: Any, name: str, source: list[str]) -> None:
    """Puts the parts and the pictures into a page."""
    if name not in PAGES:
        return
    front, report, _ = modules()
    for path in (front.OWN, front.REBUILT, front.BLIND, report.CAUSES, REASONS):
        app.env.note_dependency(str(path), docname=name)
    source[0] = MARK.sub(lambda match: PARTS[match[1]](), source[0])

    def drawn(match: re.Match[str]) -> str:
        text = (Path(app.srcdir) / match[2]).read_text()
        app.env.note_dependency(str(Path(app.srcdir) / match[2]), docname=name)
        return _raw(
            STYLE.sub("", text)
            .strip()
            .replace("<svg ", f'<svg aria-label="{html.escape(match[1])}" ', 1)
        )

    source[0] = PICTURE.sub(drawn, source[0])


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

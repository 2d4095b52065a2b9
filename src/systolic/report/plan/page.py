"""HTML page of a plan: time against cost, the ranking, the mesh on the torus, rejected layouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from systolic.aot.outcome import REPORT
from systolic.core.errors import SystolicError
from systolic.core.files import write_atomically
from systolic.core.store import Store, cache_home, read_json
from systolic.planning.goal import HOUR, days
from systolic.planning.plan import Plan, Trial
from systolic.report import charts, figures
from systolic.report.charts import COLOURS, LegendKey, Limit, Plot, PlotAxis, PlotLine
from systolic.report.pages import Tile, fill
from systolic.report.plan import readings
from systolic.report.plan.notes import notes
from systolic.report.plan.progress import result
from systolic.report.plan.readings import RankingRow
from systolic.report.plan.torus import Torus, torus

ROWS = 40
PAD = 1.12
"""Margin of the axes beyond the outermost dots, as a share."""
LOG_PAD = 1.3
WIDE = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def write_page(plan: Plan, path: Path, plan_path: Path | None) -> None:
    """Writes the page.

    Raises:
        RunError: the file can't be written.
    """
    write_atomically(path, render(plan, plan_path))


def render(plan: Plan, plan_path: Path | None, root: Path | None = None) -> str:
    """The page as text.

    Args:
        plan: The plan.
        plan_path: Path of the plan's JSON, for the commands.
        root: Store of the compiled programs; by default the user's.
    """
    best = plan.best
    found = readings.rows(plan)
    colours = _colours(plan)
    verdict = readings.verdict(plan)
    drawn = chart(plan, colours)
    page = {
        "heading": f"{plan.facts.job.name}: {readings.work(plan)}",
        "verdict": verdict,
        "lead": verdict.sentence,
        "facts": _facts(plan),
        "tiles": tiles(plan),
        "notes": notes(plan),
        "commands": _commands(plan, plan_path, found),
        "chart": drawn,
        "legend": [] if drawn is None else _legend(plan, colours, drawn),
        "rows": found[:ROWS],
        "more": max(len(found) - ROWS, 0),
        "colours": colours,
        "percent": figures.percent,
        "plural": figures.plural,
        "interval": lambda one: _interval(one, best),
        "torus": None if best is None else _torus(best, root or cache_home()),
        "best": best,
        "reasons": readings.reasons(plan),
        "failed": [
            (one.candidate.on.name, one.candidate.text, readings.reason_of(one))
            for one in plan.failed
        ],
        "searched": readings.searched(plan),
    }
    return fill("plan.html", page)


def _interval(one: Trial, best: Trial | None) -> str:
    """Interval of a step time where it differs from the best's, which a tile shows."""
    text = readings.interval(one)
    return "" if best is not None and text == readings.interval(best) else text


def tiles(plan: Plan) -> list[Tile]:
    """The best candidate's figures."""
    best = plan.best
    if best is None or best.forecast is None or best.total is None:
        return []
    made, total = best.forecast, best.total
    price, kind = plan.goal.hourly(made.on), plan.goal.price_text
    found = [
        Tile(
            label="done in",
            value=days(total.seconds),
            small=figures.plural(round(total.steps), "step"),
        ),
        Tile(
            label="cost",
            value=readings.money(total.usd),
            small="" if price is None else f"${price:,.2f}/h {kind}",
        ),
        *_wall_tiles(plan),
        Tile(label="energy", value=f"{readings.energy(total.kwh)} kWh"),
        Tile(
            label="step",
            value=readings.step(made.step_seconds or 0.0),
            small=readings.interval(best),
        ),
        Tile(label="MFU", value=figures.percent(made.mfu)),
        Tile(label="memory", value=readings.memory(best), small="of each device"),
        Tile(label="chips", value=f"{made.on.num_chips:,}", small=made.on.chip.title),
    ]
    return [tile for tile in found if figures.MISSING not in tile.value]


def _wall_tiles(plan: Plan) -> list[Tile]:
    if plan.wall is None:
        return []
    found = [
        Tile(label="wall-clock", value=readings.wall_time(plan.wall), small="with all but steps")
    ]
    if plan.wall.kg_co2 is not None:
        kilograms = f"{readings.energy(plan.wall.kg_co2)} kg"
        found.append(Tile(label="CO2", value=kilograms, small="by the given grid"))
    return found


def _facts(plan: Plan) -> list[tuple[str, str]]:
    best = plan.best
    found = [
        ("parameters", figures.si(plan.facts.parameters)),
        ("searched", readings.searched(plan)),
    ]
    if best is not None:
        found.insert(0, ("layout", best.candidate.text))
        found.insert(0, ("slice", best.candidate.on.name))
        found.append(("flags", " ".join(best.candidate.compiler_flags)))
    if plan.wall is not None:
        found.append(("wall-clock", readings.wall(plan.wall)))
    return [(name, text) for name, text in found if text]


def _commands(plan: Plan, path: Path | None, found: Sequence[RankingRow]) -> list[tuple[str, str]]:
    """Commands that run the best candidate and the first of each other slice."""
    shown, seen = [], set()
    for row in found:
        if row.slice not in seen and len(shown) < 3:
            seen.add(row.slice)
            what = "the best" if row.rank == 1 else f"on {row.slice}"
            shown.append((what, readings.command(plan, path, row.rank)))
    return shown


def _colours(plan: Plan) -> dict[str, int]:
    """A colour for each slice, the best slices first."""
    names = dict.fromkeys(one.candidate.on.name for one in [*plan.ranking, *plan.tried])
    return {name: min(number, COLOURS) for number, name in enumerate(names)}


def chart(plan: Plan, colours: dict[str, int]) -> Plot | None:
    """Every compiled candidate with a step time; None where none has one.

    Without prices, kilowatt-hours or chip-hours take the place of dollars.
    """
    done = [one for one in plan.tried if one.total is not None]
    if not done:
        return None
    y_name, cost = _cost(done)
    points = [(one, one.total.seconds / HOUR, cost(one)) for one in done if one.total is not None]
    hours, costs = [x for _, x, _ in points], [y for *_, y in points]
    scale, x_name = (24.0, "days") if min(hours) >= 48 else (1.0, "hours")
    if max(hours) < 2:
        scale, x_name = 1 / 60, "minutes"
    x, y = _axis([h / scale for h in hours]), _axis(costs)
    front = {id(one) for one in plan.pareto}
    best = plan.best
    dots = [
        charts.dot(
            x,
            y,
            h / scale,
            c,
            _hover(one),
            hue=charts.hue(colours[one.candidate.on.name]),
            css=_css(one, best, front),
            label=one.candidate.on.name if id(one) in front else "",
        )
        for one, h, c in points
    ]
    joined = sorted((h / scale, c) for one, h, c in points if id(one) in front and not one.broken)
    return Plot(
        x=x,
        y=y,
        lines=[PlotLine(css="front", path=charts.path(joined, x, y) if len(joined) > 1 else "")],
        dots=dots,
        limits=_limits(plan, x, y, scale),
        x_name=x_name,
        y_name=y_name,
    )


def _css(one: Trial, best: Trial | None, front: set[int]) -> str:
    """Class of a candidate's dot."""
    if one.broken:
        return "broken"
    if one is best:
        return "best"
    return "front" if id(one) in front else "good"


def _legend(plan: Plan, colours: dict[str, int], drawn: Plot) -> list[LegendKey]:
    """Colours of the slices, and the marks of the best and of the front."""
    used = {one.candidate.on.name for one in plan.tried if one.total is not None}
    names: dict[int, list[str]] = {}
    for name, number in colours.items():
        if name in used:
            names.setdefault(number, []).append(name)
    keys = [
        LegendKey(text=group[0] if len(group) == 1 else "others", hue=charts.hue(number))
        for number, group in names.items()
    ]
    keys.append(LegendKey(text="the best", mark="ring"))
    if drawn.line:
        keys.append(LegendKey(text="no other is faster and cheaper", mark="front"))
    return keys


def _axis(values: Sequence[float]) -> PlotAxis:
    """Axis from zero, or logarithmic for a wide range of values."""
    low, high = min(values), max(values)
    if low > 0 and high / low > WIDE:
        return charts.log_axis(low / LOG_PAD, high * LOG_PAD)
    return charts.linear_axis(0.0, high * PAD, num_ticks=6)


def _cost(done: Sequence[Trial]) -> tuple[str, Any]:
    """Label and value of the chart's cost axis."""
    if all(one.total is not None and one.total.usd for one in done):
        return "dollars", lambda one: one.total.usd
    return "chip-hours", lambda one: one.total.seconds / HOUR * one.candidate.on.num_chips


def _limits(plan: Plan, x: PlotAxis, y: PlotAxis, scale: float) -> list[Limit]:
    found = []
    goal = plan.goal
    if goal.deadline_seconds is not None and (at := goal.deadline_seconds / HOUR / scale) <= x.high:
        found.append(Limit("x", x.percent(at), "deadline"))
    priced = goal.chip_usd != 0.0
    if goal.budget_usd is not None and priced and goal.budget_usd <= y.high:
        found.append(Limit("y", y.percent(goal.budget_usd), "budget"))
    return found


def _hover(one: Trial) -> str:
    return f"{one.candidate.name}\n{result(one)}"


def _torus(best: Trial, root: Path) -> Torus | None:
    return torus(best.candidate.on, best.candidate.layout, places(best, root))


def places(one: Trial, root: Path) -> Sequence[Sequence[int]]:
    """Place of each device of the mesh in the compile; empty where the store has none."""
    made = (one.forecast.compiler if one.forecast is not None else {}).get("program")
    if not made:
        return []
    folder = Store("programs", root).path(made)
    try:
        return read_json(folder / REPORT)["places"]
    except (SystolicError, OSError, KeyError):
        return []

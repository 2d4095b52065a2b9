"""HTML page of a plan: time against cost, the ranking, rejected layouts, and the groups of each mesh axis on the slice's torus."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.chips import Slice
from systolic.compiling.outcome import read_report
from systolic.core.errors import SystolicError
from systolic.core.files import Store, cache_home, write_atomically
from systolic.job import Axis, Layout
from systolic.planning.display import readings
from systolic.planning.display.progress import result
from systolic.planning.display.readings import RankingRow
from systolic.planning.display.text import notes
from systolic.planning.goal import HOUR, days
from systolic.planning.plan import Plan, Trial
from systolic.report import figures, pages
from systolic.report.pages import (
    COLOURS,
    Cell,
    LegendKey,
    Limit,
    Mesh,
    Plot,
    PlotAxis,
    PlotLine,
    Tile,
    fill,
)
from systolic.sim.network import default_places

FEW = 4
"""Groups with a colour where there are more than :data:`COLOURS`."""
SMALL = 256
"""Most chips drawn with their places; in larger slices neighbours of a group are one block."""
SLICES = 2
"""Most slices drawn; all look alike."""
WIDTH = 480.0
"""Width of a drawing in its units."""
LARGEST_CELL = 34.0
LEGIBLE = 17.0
"""Width of a device from which its index is written on it."""
PLANE_GAP = 0.7
"""Gap between the planes of a 3D torus, as a share of a cell."""

Place = Sequence[int]
ROWS = 40
PAD = 1.12
"""Margin of the axes beyond the outermost dots, as a share."""
LOG_PAD = 1.3
WIDE = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Drawing of one mesh axis: devices of a colour communicate along it."""

    axis: str
    size: int
    groups: int
    coloured: int
    """The groups that have a colour."""
    mesh: Mesh

    @property
    def cells(self) -> Sequence[Cell]:
        """Devices, or blocks of neighbours of one group, labelled with their index along the axis."""
        return self.mesh.cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus:
    """Drawings of all axes of a layout with a size above 1."""

    drawings: Sequence[Drawing]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    place: tuple[int, ...]
    """x, y, z, core, slice."""
    mesh: tuple[int, ...]
    """Its index along each mesh axis."""


def torus(on: Slice, layout: Layout, places: Sequence[Place]) -> Torus | None:
    """Drawings of a layout; None for a single device or a slice that is no torus.

    Args:
        on: The slice.
        layout: A definite layout.
        places: (x, y, z, core, slice) of each device in mesh order, from the compiler; empty where
            unknown, then the axes are laid out in order.
    """
    axes = [axis for axis in Axis if layout.size(axis) > 1]
    if on.platform != "tpu" or not axes:
        return None
    notes = []
    if len(places) != on.num_devices:
        places = default_places(on)
        notes.append(
            "the compiler's order of the devices is not known, so the axes are drawn in order"
        )
    if on.num_slices > SLICES:
        notes.append(f"{SLICES} of {on.num_slices} slices are drawn; the others are alike")
    sizes = tuple(layout.mesh_shape.values())
    devices = [
        _Device(place=tuple(place), mesh=_unravelled(index, sizes))
        for index, place in enumerate(places)
        if place[4] < SLICES
    ]
    if any(on.wrap):
        letters = [letter for letter, wraps in zip("xyz", on.wrap, strict=False) if wraps]
        notes.append(f"the links along {', '.join(letters)} wrap around")
    return Torus(
        drawings=[_drawing(on, axis, list(Axis).index(axis), sizes, devices) for axis in axes],
        notes=notes,
    )


def _drawing(
    on: Slice, axis: Axis, at: int, sizes: tuple[int, ...], devices: Sequence[_Device]
) -> Drawing:
    x, y, z = (*on.topology, 1, 1, 1)[:3]
    cores = on.chip.devices_per_chip or 1
    num_slices = min(on.num_slices, SLICES)
    planes = [(number, level) for number in range(num_slices) for level in range(z)]
    across = _columns(len(planes))
    cell = min(LARGEST_CELL, WIDTH / (across * x + (across - 1) * PLANE_GAP))
    step_x, step_y = (x + PLANE_GAP) * cell, y * cell + (0 if len(planes) == 1 else 20)
    names, corners = [], {}
    for index, (number, level) in enumerate(planes):
        row, column = divmod(index, across)
        top = row * step_y + (16 if len(planes) > 1 else 0)
        corners[number, level] = (column * step_x, top)
        parts = ([f"slice {number}"] if num_slices > 1 else []) + ([f"z {level}"] if z > 1 else [])
        if parts:
            names.append((column * step_x, top - 4, ", ".join(parts)))
    groups: dict[tuple[int, ...], int] = {}
    total = math.prod(sizes) // sizes[at]
    most = total if total <= COLOURS else FEW
    cells = []
    for device in devices:
        rest = (*device.mesh[:at], *device.mesh[at + 1 :])
        group = groups.setdefault(rest, len(groups))
        a, b, c, core, number = device.place
        left, top = corners[number, c]
        width = cell / cores
        spot = Cell(
            x=left + a * cell + core * width,
            y=top + b * cell,
            width=width,
            height=cell,
            colour=group if group < most else COLOURS,
            text=_text(device, sizes, cores),
            label=str(device.mesh[at]) if width >= LEGIBLE else "",
        )
        cells.append(spot)
    small = on.num_chips // on.num_slices <= SMALL
    rows = math.ceil(len(planes) / across)
    return Drawing(
        axis=axis.value,
        size=sizes[at],
        groups=total,
        coloured=most,
        mesh=Mesh(
            title=f"Groups of the axis {axis.value} on the chips",
            width=round(across * x * cell + (across - 1) * PLANE_GAP * cell, 2),
            height=round(rows * step_y, 2),
            cells=pages.separated(cells, cell) if small else pages.merged(cells),
            planes=names,
        ),
    )


def _columns(planes: int) -> int:
    """Planes per row, so that rows are full and the drawing is wider than high."""
    least = math.sqrt(1.3 * planes)
    return next(n for n in range(1, planes + 1) if planes % n == 0 and (n >= least or n == planes))


def _unravelled(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    indices = []
    for size in reversed(sizes):
        index, rest = divmod(index, size)
        indices.append(rest)
    return tuple(reversed(indices))


def _text(device: _Device, sizes: tuple[int, ...], cores: int) -> str:
    """``chip 1,2,0: data 0, fsdp 5``."""
    a, b, c, core, number = device.place
    where = f"chip {a},{b},{c}" + (f" core {core}" if cores > 1 else "")
    where += f" of slice {number}" if number else ""
    along = [
        f"{axis.value} {index}"
        for axis, index, size in zip(Axis, device.mesh, sizes, strict=True)
        if size > 1
    ]
    return f"{where}: {', '.join(along)}"


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
    ranking = readings.rows(plan)
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
        "commands": _commands(plan, plan_path, ranking),
        "chart": drawn,
        "legend": [] if drawn is None else _legend(plan, colours, drawn),
        "rows": ranking[:ROWS],
        "more": max(len(ranking) - ROWS, 0),
        "tie": readings.tie(plan),
        "colours": colours,
        "percent": figures.percent,
        "plural": figures.plural,
        "interval": lambda trial: _interval(trial, best),
        "torus": None if best is None else _torus(best, root or cache_home()),
        "best": best,
        "reasons": readings.reasons(plan),
        "failed": [
            (trial.candidate.on.name, trial.candidate.text, readings.reason_of(trial))
            for trial in plan.failed
        ],
        "searched": readings.searched(plan),
    }
    return fill("plan.html", page)


def _interval(trial: Trial, best: Trial | None) -> str:
    """Interval of a step time where it differs from the best's, which a tile shows."""
    text = readings.interval(trial)
    return "" if best is not None and text == readings.interval(best) else text


def tiles(plan: Plan) -> list[Tile]:
    """The best candidate's figures."""
    best = plan.best
    if best is None or best.forecast is None or best.total is None:
        return []
    forecast, total = best.forecast, best.total
    price, kind = plan.goal.hourly(forecast.on), plan.goal.price_text
    shown = [
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
            value=readings.step(forecast.step_seconds or 0.0),
            small=readings.interval(best),
        ),
        Tile(label="MFU", value=figures.percent(forecast.mfu)),
        Tile(label="memory", value=readings.memory(best), small="of each device"),
        Tile(label="chips", value=f"{forecast.on.num_chips:,}", small=forecast.on.chip.title),
    ]
    return [tile for tile in shown if figures.MISSING not in tile.value]


def _wall_tiles(plan: Plan) -> list[Tile]:
    if plan.wall is None:
        return []
    shown = [
        Tile(label="wall-clock", value=readings.wall_time(plan.wall), small="with all but steps")
    ]
    if plan.wall.kg_co2 is not None:
        kilograms = f"{readings.energy(plan.wall.kg_co2)} kg"
        shown.append(Tile(label="CO2", value=kilograms, small="by the given grid"))
    return shown


def _facts(plan: Plan) -> list[tuple[str, str]]:
    best = plan.best
    facts = [
        ("parameters", figures.si(plan.facts.parameters)),
        ("searched", readings.searched(plan)),
    ]
    if best is not None:
        facts.insert(0, ("layout", best.candidate.text))
        facts.insert(0, ("slice", best.candidate.on.name))
        facts.append(("flags", " ".join(best.candidate.compiler_flags)))
    if plan.wall is not None:
        facts.append(("wall-clock", readings.wall(plan.wall)))
    return [(name, text) for name, text in facts if text]


def _commands(
    plan: Plan, path: Path | None, ranking: Sequence[RankingRow]
) -> list[tuple[str, str]]:
    """Commands that run the best candidate and the first of each other slice."""
    shown, seen = [], set()
    for row in ranking:
        if row.slice not in seen and len(shown) < 3:
            seen.add(row.slice)
            what = "the best" if row.rank == 1 else f"on {row.slice}"
            shown.append((what, readings.command(plan, path, row.rank)))
    return shown


def _colours(plan: Plan) -> dict[str, int]:
    """A colour for each slice, the best slices first."""
    names = dict.fromkeys(trial.candidate.on.name for trial in [*plan.ranking, *plan.tried])
    return {name: min(number, COLOURS) for number, name in enumerate(names)}


def chart(plan: Plan, colours: dict[str, int]) -> Plot | None:
    """Every compiled candidate with a step time; None where none has one.

    Without prices, kilowatt-hours or chip-hours take the place of dollars.
    """
    done = [trial for trial in plan.tried if trial.total is not None]
    if not done:
        return None
    y_name, cost = _cost(done)
    points = [
        (trial, trial.total.seconds / HOUR, cost(trial))
        for trial in done
        if trial.total is not None
    ]
    hours, costs = [x for _, x, _ in points], [y for *_, y in points]
    scale, x_name = (24.0, "days") if min(hours) >= 48 else (1.0, "hours")
    if max(hours) < 2:
        scale, x_name = 1 / 60, "minutes"
    x, y = _axis([h / scale for h in hours]), _axis(costs)
    front = {id(trial) for trial in plan.pareto}
    best = plan.best
    dots = [
        pages.dot(
            x,
            y,
            h / scale,
            c,
            f"{trial.candidate.name}\n{result(trial)}",
            hue=pages.hue(colours[trial.candidate.on.name]),
            css=_css(trial, best, front),
            label=trial.candidate.on.name if id(trial) in front else "",
        )
        for trial, h, c in points
    ]
    joined = sorted(
        (h / scale, c) for trial, h, c in points if id(trial) in front and not trial.broken
    )
    return Plot(
        x=x,
        y=y,
        lines=[PlotLine(css="front", path=pages.path(joined, x, y) if len(joined) > 1 else "")],
        dots=dots,
        limits=_limits(plan, x, y, scale),
        x_name=x_name,
        y_name=y_name,
    )


def _css(trial: Trial, best: Trial | None, front: set[int]) -> str:
    """Class of a candidate's dot."""
    if trial.broken:
        return "broken"
    if trial is best:
        return "best"
    return "front" if id(trial) in front else "good"


def _legend(plan: Plan, colours: dict[str, int], drawn: Plot) -> list[LegendKey]:
    """Colours of the slices, and the marks of the best and of the front."""
    used = {trial.candidate.on.name for trial in plan.tried if trial.total is not None}
    names: dict[int, list[str]] = {}
    for name, number in colours.items():
        if name in used:
            names.setdefault(number, []).append(name)
    keys = [
        LegendKey(text=group[0] if len(group) == 1 else "others", hue=pages.hue(number))
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
        return pages.log_axis(low / LOG_PAD, high * LOG_PAD)
    return pages.linear_axis(0.0, high * PAD, num_ticks=6)


def _cost(done: Sequence[Trial]) -> tuple[str, Any]:
    """Label and value of the chart's cost axis."""
    if all(trial.total is not None and trial.total.usd for trial in done):
        return "dollars", lambda trial: trial.total.usd
    return "chip-hours", lambda trial: trial.total.seconds / HOUR * trial.candidate.on.num_chips


def _limits(plan: Plan, x: PlotAxis, y: PlotAxis, scale: float) -> list[Limit]:
    limits = []
    goal = plan.goal
    if goal.deadline_seconds is not None and (at := goal.deadline_seconds / HOUR / scale) <= x.high:
        limits.append(Limit("x", x.percent(at), "deadline"))
    priced = goal.chip_usd != 0.0
    if goal.budget_usd is not None and priced and goal.budget_usd <= y.high:
        limits.append(Limit("y", y.percent(goal.budget_usd), "budget"))
    return limits


def _torus(best: Trial, root: Path) -> Torus | None:
    return torus(best.candidate.on, best.candidate.layout, places(best, root))


def places(trial: Trial, root: Path) -> Sequence[Sequence[int]]:
    """Place of each device of the mesh in the compile; empty where the store has none."""
    program = None if trial.forecast is None else trial.forecast.compiler.program
    if not program:
        return []
    folder = Store("programs", root).path(program)
    try:
        return read_report(folder).places
    except SystolicError:
        return []

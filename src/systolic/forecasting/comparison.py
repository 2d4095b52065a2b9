"""Changes since an earlier forecast: of its figures, and of its ops."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.chips import Slice, slice
from systolic.chips.flags import unranked
from systolic.core.arguments import OptionWords, Required, Wording, command_of
from systolic.core.errors import OptionError
from systolic.core.files import read_given
from systolic.forecasting.costs import roll_up
from systolic.forecasting.op_changes import OpChange, OpFate, changes_of, groups_in
from systolic.report import figures

if TYPE_CHECKING:
    from systolic.sim.incomplete import Given

ROWS = 12
"""Most rows of a group in a comparison, the largest changes first."""
SAME = 0.0005
"""Changes below this share of the step are left out."""
UNITS = ("tokens", "examples", "calls")
"""Units of which a forecast counts one."""
ORDER = ("first", "second")
LEAST = 0.0002
"""Changes of an op's time below this share of the step have no row of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureChange:
    """One figure before and after; None where a side has none."""

    group: str
    name: str
    before: float | None
    after: float | None
    unit: str
    """``s``, ``B``, ``share``, ``$`` or the unit of a throughput."""

    @property
    def ratio(self) -> float | None:
        """After over before, less 1."""
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1

    def to_json(self) -> dict[str, Any]:
        """The values as JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ForecastChanges:
    """A forecast beside an earlier one."""

    before: Mapping[str, Any]
    """JSON of the earlier one."""
    after: Mapping[str, Any]
    """JSON of the later one."""
    figures: Sequence[FigureChange]
    """Step, memory, money, resources and places."""
    ops: Sequence[OpChange] = ()
    """Ops of both, where both keep them."""
    notes: Sequence[str] = ()
    """Differences beside the programs, a line each."""

    @classmethod
    def of(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> "ForecastChanges":
        """Compares the JSON of two forecasts.

        Raises:
            DataError: the ops of one are damaged.
        """
        old, new = groups_in(before), groups_in(after)
        return cls(
            before=before,
            after=after,
            figures=compare(before, after),
            ops=changes_of(old, new) if old and new else (),
            notes=unlike(before, after),
        )

    @property
    def name(self) -> str:
        """The earlier forecast: ``lm on v5e-4``."""
        return name_of(self.before)

    @property
    def step_seconds(self) -> float:
        """Seconds of the later one's step; 0 where it does not fit."""
        return self.after["step_seconds"] or 0.0

    def to_json(self) -> dict[str, Any]:
        """Figures as ``against``; ops that changed as ``against_ops``, where both keep their ops; ``against_notes``."""
        record: dict[str, Any] = {
            "against": [figure.to_json() for figure in self.figures],
            "against_notes": list(self.notes),
        }
        if self.ops:
            rows = changed_ops(self.ops, self.step_seconds)
            record["against_ops"] = [row.to_json() for row in rows]
        return record


@command_of
def compare_forecasts(
    path: Annotated[Path | str, Wording("the path of a forecast's JSON")],
    *,
    against: Annotated[
        Path | str | Mapping[str, Any],
        OptionWords(Path),
        Required("an earlier forecast; add --against EARLIER.json, or a dump of its program"),
    ],
    on: str = "",
) -> ForecastChanges:
    """Compares a saved forecast with an earlier one: its figures, and the ops that changed.

    Args:
        path: The later one, as systolic forecast … --json wrote it.
        against: The earlier one's JSON, or a dump of its program, which is forecast for the later one's slice.
        on: The slice, which the file knows: no other.

    Raises:
        NotFoundError: a file can't be read.
        OptionError: a file is no forecast, or ``on`` is another slice.
        DataError: a file is damaged.
    """
    after = read(Path(path))
    if on not in ("", after["slice"]):
        raise OptionError(
            f"{path} is a forecast on {after['slice']} and --on {on} is given; leave --on out, or forecast its program on {on}"
        )
    return ForecastChanges.of(earlier(against, slice(after["slice"])), after)


def earlier(
    against: Path | str | Mapping[str, Any], on: Slice, known: "Given | None" = None
) -> Mapping[str, Any]:
    """JSON of the forecast that another on a slice is compared with; a dump is forecast for that slice.

    Raises:
        NotFoundError: there is no such file.
        OptionError: it is no forecast and no dump.
        DataError: it is damaged, or a dump for another chip or number of devices.
    """
    if isinstance(against, Mapping):
        return against
    if _is_hlo(Path(against)):
        from systolic.forecasting.text import forecast_text
        from systolic.sim.incomplete import NOTHING

        return forecast_text(Path(against), on, known or NOTHING).to_json()
    return read(Path(against))


def _is_hlo(path: Path) -> bool:
    """Whether a file is HLO and not the JSON of a forecast."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"HloModule")
    except OSError:
        return False


def name_of(forecast: Mapping[str, Any]) -> str:
    """``lm on v5e-4``."""
    return f"{forecast['recipe']} on {forecast['slice']}"


def changed_ops(rows: Sequence[OpChange], step_seconds: float) -> list[OpChange]:
    """Rows that a table has: what changed by more than :data:`LEAST` of the step, the largest first."""
    least = LEAST * step_seconds
    return [row for row in rows if row.change is not OpFate.same and abs(row.seconds) > least]


def read(path: Path) -> dict[str, Any]:
    """Reads the JSON of another forecast.

    Raises:
        NotFoundError: the file cannot be read.
        OptionError: it holds something else.
        DataError: it is cut short.
    """
    again = "write one with systolic forecast … --json > forecast.json"
    record = read_given(path, again)
    if not is_forecast(record):
        raise OptionError(f"{path} is JSON but not a forecast; {again}")
    return record


def is_forecast(record: Any) -> bool:
    """Whether the value of a JSON file is a forecast of a step."""
    names = {"recipe", "slice", "fits", "hbm", "step_seconds", "time_by_resource"}
    return isinstance(record, dict) and names <= set(record)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Compares the JSON of two forecasts: step, memory, money, resources, places."""
    rows = (
        ("step", ("step_seconds",), "s"),
        ("MFU", ("mfu",), "share"),
        *((f"{unit}/s", (f"{unit}_per_second",), "") for unit in UNITS),
        ("peak memory", ("hbm", "peak_bytes"), "B"),
        ("per billion tokens", ("usd_per_billion_tokens",), "$"),
        ("per million examples", ("usd_per_million_examples",), "$"),
        ("per million calls", ("usd_per_million_calls",), "$"),
    )
    changes = [
        FigureChange(
            group="", name=name, before=_at(before, path), after=_at(after, path), unit=unit
        )
        for name, path, unit in rows
    ]
    changes = [change for change in changes if (change.before, change.after) != (None, None)]
    old, new = before["hbm"].get("by_kind") or {}, after["hbm"].get("by_kind") or {}
    changes += _table("memory", old, new, "B", 0.0)
    steps = [record.get("step_seconds") or 0.0 for record in (before, after)]
    least = SAME * max(steps)
    changes += _table(
        "time by resource", before["time_by_resource"], after["time_by_resource"], "s", least
    )
    old, new = before.get("time_by_layer") or {}, after.get("time_by_layer") or {}
    if old and new:
        names = roll_up(
            {name: old.get(name, 0.0) + new.get(name, 0.0) for name in {**old, **new}}, ROWS
        )
        changes += _table("time by layer", _summed(old, names), _summed(new, names), "s", least)
    return changes


def unlike(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Differences between two forecasts beside the programs, a line each: what their figures can't be compared for, or differ for as well."""
    sides = (before, after)
    lines = []
    slices = [side["slice"] for side in sides]
    if slices[0] != slices[1]:
        lines.append(
            f"the slices differ: seconds and bytes are of a device of {slices[0]} and of {slices[1]}, dollars of the whole slice"
        )
    units = [next((unit for unit in UNITS if f"{unit}_per_second" in side), "") for side in sides]
    if units[0] != units[1]:
        lines.append(
            f"the first counts {units[0]}, the second {units[1]}: what they do in a second and what that costs are not compared"
        )
    quick = [side.get("quick") for side in sides]
    if None not in quick and quick[0] != quick[1]:
        words = ["--quick, with op times estimated", "of a full compile"]
        first, second = words if quick[0] else reversed(words)
        lines.append(
            f"the first is {first}, the second {second}: part of the difference in time comes from that; forecast both the same way to compare"
        )
    flags = [set((side.get("compiler") or {}).get("flags", ())) for side in sides]
    if line := unranked(flags[0] ^ flags[1]):
        lines.append(line)
    calibrations = [(side.get("calibration") or {}).get("name") for side in sides]
    if calibrations[0] != calibrations[1]:
        first, second = (f"by {name}" if name else "by none" for name in calibrations)
        lines.append(
            f"the first is corrected {first}, the second {second}: part of the difference in time comes from the calibration"
        )
    compilers = [_versions(side) for side in sides]
    if all(compilers) and compilers[0] != compilers[1]:
        lines.append(f"compiled by {compilers[0]}, then by {compilers[1]}")
    fits = [side["fits"] for side in sides]
    if not all(fits):
        which = "both do" if not any(fits) else f"the {'second' if fits[0] else 'first'} does"
        lines.append(f"{which} not fit, and {'have' if not any(fits) else 'has'} no time")
    elif without := [name for name, side in zip(ORDER, sides, strict=True) if not side.get("ops")]:
        lines.append(
            f"ops are not compared: the {' and the '.join(without)} of the forecasts keeps none; write it again with this version"
        )
    return lines


def _versions(forecast: Mapping[str, Any]) -> str:
    """``libtpu 0.0.42.1, jax 0.10.2``, as far as they are known."""
    compiler = forecast.get("compiler") or {}
    return ", ".join(f"{name} {compiler[name]}" for name in ("libtpu", "jax") if name in compiler)


def _at(record: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return figures.number(value)


def _table(
    group: str, old: Mapping[str, float], new: Mapping[str, float], unit: str, least: float
) -> list[FigureChange]:
    """Rows of both sides that matter, the largest change first; a side that is empty has no figures, as one that does not fit has no times."""
    absent = [0.0 if side else None for side in (old, new)]
    rows = [
        FigureChange(
            group=group,
            name=name,
            before=old.get(name, absent[0]),
            after=new.get(name, absent[1]),
            unit=unit,
        )
        for name in {**old, **new}
    ]
    moved = [row for row in rows if abs((row.after or 0.0) - (row.before or 0.0)) > least]
    moved.sort(key=lambda row: -abs((row.after or 0.0) - (row.before or 0.0)))
    return moved[:ROWS]


def _summed(seconds: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for path, spent in seconds.items():
        sums[names[path]] = sums.get(names[path], 0.0) + spent
    return sums

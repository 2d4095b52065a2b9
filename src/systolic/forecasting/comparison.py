"""Changes since an earlier forecast: of its figures, and of its ops."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from systolic.chips import Slice, slice
from systolic.chips.flags import unranked
from systolic.core.arguments import OptionWords, Required, Wording, command_of
from systolic.core.errors import DataError, OptionError
from systolic.core.files import read_given
from systolic.forecasting.costs import roll_up
from systolic.forecasting.op_changes import OpChange, OpFate, changes_of, groups_in

if TYPE_CHECKING:
    from systolic.sim.incomplete import Given

ROWS = 12
"""Most rows of a group in a comparison, the largest changes first."""
FIGURE_SHARE = 0.0005
"""Changes below this share of the step are left out."""
ORDER = ("first", "second")
OP_SHARE = 0.0002
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


class _Memory(msgspec.Struct, frozen=True):
    peak_bytes: float | None = None
    by_kind: dict[str, float] | None = None


class _CalibrationName(msgspec.Struct, frozen=True):
    name: str | None = None


class _Versions(msgspec.Struct, frozen=True, omit_defaults=True):
    libtpu: str | None = None
    jax: str | None = None
    flags: tuple[str, ...] = ()


class ComparedForecast(msgspec.Struct, frozen=True):
    """The JSON of a forecast, as far as two are compared by it; null for what a version did not write, or what has no time."""

    recipe: str
    slice: str
    fits: bool
    hbm: _Memory
    step_seconds: float | None
    time_by_resource: dict[str, float]
    time_by_layer: dict[str, float] | None = None
    mfu: float | None = None
    tokens_per_second: float | msgspec.UnsetType | None = msgspec.UNSET
    examples_per_second: float | msgspec.UnsetType | None = msgspec.UNSET
    calls_per_second: float | msgspec.UnsetType | None = msgspec.UNSET
    """A forecast has that of its own unit alone."""
    usd_per_billion_tokens: float | None = None
    usd_per_million_examples: float | None = None
    usd_per_million_calls: float | None = None
    quick: bool | None = None
    calibration: _CalibrationName | None = None
    compiler: _Versions | None = None
    ops: Any = None
    """Table of :func:`~systolic.forecasting.op_changes.table_of`."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "ComparedForecast":
        """The forecast of a JSON.

        Raises:
            DataError: it is damaged.
        """
        try:
            return msgspec.convert(record, cls)
        except msgspec.ValidationError as error:
            raise DataError(
                f"the saved forecast of {record.get('recipe')} is damaged ({error}); write it again with systolic forecast … --json"
            ) from error

    @property
    def name(self) -> str:
        """``lm on v5e-4``."""
        return f"{self.recipe} on {self.slice}"

    @property
    def unit(self) -> str:
        """``tokens``, ``examples`` or ``calls``; empty where it counts none."""
        rates = (self.tokens_per_second, self.examples_per_second, self.calls_per_second)
        units = zip(("tokens", "examples", "calls"), rates, strict=True)
        return next((unit for unit, rate in units if rate is not msgspec.UNSET), "")


@dataclass(frozen=True, kw_only=True)
class ForecastChanges:
    """A forecast beside an earlier one."""

    before: ComparedForecast
    after: ComparedForecast
    record: Mapping[str, Any]
    """JSON of the later one."""
    figures: Sequence[FigureChange]
    """Step, memory, money, resources and places."""
    ops: Sequence[OpChange] = ()
    """Ops of both, where both keep them."""
    notes: Sequence[str] = ()
    """Differences beside the programs, a line each."""

    @classmethod
    def of(cls, earlier: Mapping[str, Any], later: Mapping[str, Any]) -> "ForecastChanges":
        """Compares the JSON of two forecasts.

        Raises:
            DataError: one is damaged.
        """
        before, after = ComparedForecast.of(earlier), ComparedForecast.of(later)
        old, new = (groups_in(side.ops, side.recipe) for side in (before, after))
        return cls(
            before=before,
            after=after,
            record=later,
            figures=compare(before, after),
            ops=changes_of(old, new) if old and new else (),
            notes=unlike(before, after),
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of the later one's step; 0 where it does not fit."""
        return self.after.step_seconds or 0.0

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


def changed_ops(rows: Sequence[OpChange], step_seconds: float) -> list[OpChange]:
    """Rows that a table has: what changed by more than :data:`OP_SHARE` of the step, the largest first."""
    least = OP_SHARE * step_seconds
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


def compare(before: ComparedForecast, after: ComparedForecast) -> list[FigureChange]:
    """Compares two forecasts: step, memory, money, resources, places."""
    old, new = _figures(before), _figures(after)
    changes = [
        FigureChange(group="", name=name, before=figure, after=new[name][0], unit=unit)
        for name, (figure, unit) in old.items()
        if (figure, new[name][0]) != (None, None)
    ]
    changes += _table("memory", before.hbm.by_kind or {}, after.hbm.by_kind or {}, "B", 0.0)
    least = FIGURE_SHARE * max(before.step_seconds or 0.0, after.step_seconds or 0.0)
    changes += _table(
        "time by resource", before.time_by_resource, after.time_by_resource, "s", least
    )
    if before.time_by_layer and after.time_by_layer:
        layers = {**before.time_by_layer, **after.time_by_layer}
        names = roll_up(
            {
                name: before.time_by_layer.get(name, 0.0) + after.time_by_layer.get(name, 0.0)
                for name in layers
            },
            ROWS,
        )
        changes += _table(
            "time by layer",
            _summed(before.time_by_layer, names),
            _summed(after.time_by_layer, names),
            "s",
            least,
        )
    return changes


def _figures(side: ComparedForecast) -> dict[str, tuple[float | None, str]]:
    """Figures of a forecast with their units, by name."""
    return {
        "step": (side.step_seconds, "s"),
        "MFU": (side.mfu, "share"),
        "tokens/s": (side.tokens_per_second or None, ""),
        "examples/s": (side.examples_per_second or None, ""),
        "calls/s": (side.calls_per_second or None, ""),
        "peak memory": (side.hbm.peak_bytes, "B"),
        "per billion tokens": (side.usd_per_billion_tokens, "$"),
        "per million examples": (side.usd_per_million_examples, "$"),
        "per million calls": (side.usd_per_million_calls, "$"),
    }


def unlike(before: ComparedForecast, after: ComparedForecast) -> list[str]:
    """Differences between two forecasts beside the programs, a line each: what their figures can't be compared for, or differ for as well."""
    sides = (before, after)
    lines = []
    if before.slice != after.slice:
        lines.append(
            f"the slices differ: seconds and bytes are of a device of {before.slice} and of {after.slice}, dollars of the whole slice"
        )
    if before.unit != after.unit:
        lines.append(
            f"the first counts {before.unit}, the second {after.unit}: what they do in a second and what that costs are not compared"
        )
    if None not in (before.quick, after.quick) and before.quick != after.quick:
        words = ["--quick, with op times estimated", "of a full compile"]
        first, second = words if before.quick else reversed(words)
        lines.append(
            f"the first is {first}, the second {second}: part of the difference in time comes from that; forecast both the same way to compare"
        )
    flags = [set() if side.compiler is None else set(side.compiler.flags) for side in sides]
    if line := unranked(flags[0] ^ flags[1]):
        lines.append(line)
    calibrations = [None if side.calibration is None else side.calibration.name for side in sides]
    if calibrations[0] != calibrations[1]:
        first, second = (f"by {name}" if name else "by none" for name in calibrations)
        lines.append(
            f"the first is corrected {first}, the second {second}: part of the difference in time comes from the calibration"
        )
    compilers = [_versions(side) for side in sides]
    if all(compilers) and compilers[0] != compilers[1]:
        lines.append(f"compiled by {compilers[0]}, then by {compilers[1]}")
    fits = [side.fits for side in sides]
    if not all(fits):
        which = "both do" if not any(fits) else f"the {'second' if fits[0] else 'first'} does"
        lines.append(f"{which} not fit, and {'have' if not any(fits) else 'has'} no time")
    elif without := [name for name, side in zip(ORDER, sides, strict=True) if not side.ops]:
        lines.append(
            f"ops are not compared: the {' and the '.join(without)} of the forecasts keeps none; write it again with this version"
        )
    return lines


def _versions(forecast: ComparedForecast) -> str:
    """``libtpu 0.0.42.1, jax 0.10.2``, as far as they are known."""
    if forecast.compiler is None:
        return ""
    versions = {"libtpu": forecast.compiler.libtpu, "jax": forecast.compiler.jax}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


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

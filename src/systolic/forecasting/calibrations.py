"""Calibrations as files: one readable JSON each under the user's configuration, whole or absent.

``~/.config/systolic/calibrations/NAME.json``, or under ``$XDG_CONFIG_HOME`` where that is set. A path to such a file
stands for a name, so that a file of a colleague can be used where it lies.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.chips import Slice
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.core.files import read_given, write_json
from systolic.core.units import duration, plural
from systolic.sim.calibration import (
    BOUNDS,
    Calibration,
    CostKind,
    Factor,
    factors_json,
    value_name,
)
from systolic.sim.cost_kinds import check_chip, corrected_seconds
from systolic.sim.incomplete import Costs, Given, Trips, given
from systolic.sim.timeline import Timeline

FORMAT, VERSION = "systolic calibration", 2
FIRST = 1
"""Version whose kinds do not tell memories apart."""
MIXED = (CostKind.elementwise, CostKind.formatting)
"""Kinds that had ops of vector memory among those of device memory in version :data:`FIRST`."""
SUFFIX = ".json"
AGAIN = "make it again: systolic calibrate PROFILE --name NAME"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSource:
    """A profile that a calibration was made of."""

    file: str
    devices: int
    programs: Mapping[str, float]
    """Program to its runs on one device."""
    priced_by: str
    """How its ops were priced: by the programs, by their lines, or both."""
    matched_seconds: float
    """Measured seconds of ops with a price, in one run of each program."""
    total_seconds: float
    """Measured seconds of all ops."""
    not_matched: Mapping[str, float]
    """Measured seconds of the others by kind of op, as ``systolic explain`` names it."""

    def to_json(self) -> dict[str, Any]:
        """The source as JSON has it."""
        return {
            "file": self.file,
            "devices": self.devices,
            "programs": dict(self.programs),
            "priced_by": self.priced_by,
            "matched_seconds": self.matched_seconds,
            "total_seconds": self.total_seconds,
            "not_matched_seconds": dict(self.not_matched),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """A calibration with what it was made of."""

    calibration: Calibration
    sources: Sequence[ProfileSource]
    compiler: str = ""
    """Version of the compiler that made the programs; empty where no source says it."""
    systolic: str = ""
    left_out: Sequence[str] = ()
    """Kinds of op whose factor is out of bounds, and programs that could not be used."""
    file: Path | None = field(default=None, compare=False)
    """The file that it was read from."""

    def to_json(self) -> dict[str, Any]:
        """The file."""
        of = self.calibration
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": of.name,
            "chip": of.chip,
            "made": of.made,
            "systolic": self.systolic,
            "compiler": self.compiler or None,
            "kinds": factors_json(of),
            "left_out": list(self.left_out),
            "sources": [source.to_json() for source in self.sources],
        }


def folder() -> Path:
    """Folder of the user's calibrations, which need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "systolic" / "calibrations"


def names() -> list[str]:
    """Names of the user's calibrations, in order."""
    directory = folder()
    return sorted(path.stem for path in directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []


def check_name(name: str) -> None:
    """Refuses what is no name of a file.

    Raises:
        OptionError: it has other characters than letters, digits, ``.``, ``_`` and ``-``, or is too long.
    """
    if not _NAME.fullmatch(name) or name.endswith(SUFFIX):
        raise OptionError(
            f"--name is {name!r}; it takes up to 100 letters, digits, '.', '_' and '-', without {SUFFIX}: --name my-v5e"
        )


def path_of(name: str) -> Path:
    """File of a calibration: of a name in the user's folder, or the path itself."""
    if os.sep in name or name.endswith(SUFFIX):
        return Path(name)
    return folder() / f"{name}{SUFFIX}"


def save(record: CalibrationRecord) -> Path:
    """Writes a calibration into the user's folder, in place of one of that name; returns the file.

    Raises:
        OptionError: the name is none of a file.
        RunError: it can't be written; an earlier one of that name is untouched.
    """
    check_name(record.calibration.name)
    path = path_of(record.calibration.name)
    write_json(path, record.to_json())
    return path


def load(name: str | Path) -> CalibrationRecord:
    """A calibration by its name, or by the path of its file.

    Raises:
        NotFoundError: there is none; the message lists those that there are.
        DataError: the file is damaged, of another kind, or of a later version.
    """
    path = path_of(str(name))
    if not path.is_file():
        raise NotFoundError(_missing(str(name), path))
    value = read_given(path, AGAIN)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"{path} is no calibration; {AGAIN}")
    if value.get("version") not in (FIRST, VERSION):
        raise DataError(
            f"{path} is of version {value.get('version')} and this Systolic reads {FIRST} and {VERSION}; {AGAIN}"
        )
    try:
        return replace(_record(value), file=path)
    except (msgspec.ValidationError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); {AGAIN}") from error


def calibration_for(
    named: "Calibration | str | Path | None", on: Sequence[Slice]
) -> Calibration | None:
    """The calibration that a user names, for slices of its generation.

    Raises:
        NotFoundError: there is none of that name.
        DataError: its file is damaged.
        OptionError: it is of another generation than a slice.
    """
    if named is None or named == "":
        return None
    calibration = named if isinstance(named, Calibration) else load(named).calibration
    for place in on:
        check_chip(calibration, place)
    return calibration


def given_with(
    trips: Trips, costs: Costs, calibration: "Calibration | str | Path | None", on: Slice
) -> Given:
    """The user's statements about a program and about the chips of a slice.

    Raises:
        As :func:`~systolic.sim.incomplete.given` and :func:`calibration_for`.
    """
    return replace(given(trips, costs), calibration=calibration_for(calibration, [on]))


def told_of_step(timeline: Timeline, low: float, high: float | None) -> list[str]:
    """A line on a step's calibration: of which chip and date, what it corrects, and the range that this gives; none without one.

    Args:
        timeline: Of the step.
        low: Least seconds of the step.
        high: Most; None without a bound.
    """
    of = timeline.calibration
    if of is None:
        return []
    seconds, step = corrected_seconds(timeline), timeline.seconds
    parts = [
        _factor_text(kind, of.factors[kind])
        for kind in sorted(seconds, key=lambda kind: -seconds[kind])
        if seconds[kind] >= 5e-4 * step
    ]
    name = _name(of)
    if not parts:
        return [f"{name} has no kind of op that this step spends time in: nothing is corrected"]
    share = sum(seconds.values()) / step if step else 0.0
    most = "no upper end" if high is None else duration(high)
    return [
        f"{share:.0%} of the step is corrected by {name}: {', '.join(parts)}; the step takes {duration(low)} to {most}"
    ]


def told_of_steps(timelines: Sequence[Timeline]) -> list[str]:
    """A line on the calibration of several steps, in place of :func:`told_of_step` of each; none without one."""
    shares = [
        sum(corrected_seconds(timeline).values()) / timeline.seconds
        for timeline in timelines
        if timeline.calibration is not None and timeline.seconds
    ]
    of = next(
        (timeline.calibration for timeline in timelines if timeline.calibration is not None), None
    )
    if of is None or not shares:
        return []
    if max(shares) < 5e-4:
        return [f"{_name(of)} has no kind of op that the steps spend time in: nothing is corrected"]
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    share = most if least == most else f"{least} to {most}"
    return [f"{share} of the steps' time is corrected by {_name(of)}"]


def _name(of: Calibration) -> str:
    return f"the calibration {of.name} ({of.chip}, {plural(of.num_profiles, 'profile')}, {of.made})"


def _factor_text(kind: CostKind, factor: Factor) -> str:
    if kind is CostKind.host:
        low, value, high = (f"{rate / 1e9:.3g}" for rate in (factor.low, factor.value, factor.high))
        return f"{kind.value} at {value} GB/s ({low} to {high})"
    spread = f" ({factor.low:.2f} to {factor.high:.2f})" if factor.has_spread else ""
    few = "" if factor.has_spread else f" by {plural(factor.works, 'shape')} only"
    return f"{kind.value} x {factor.value:.2f}{spread}{few}"


def _missing(name: str, path: Path) -> str:
    make = "make one: systolic calibrate PROFILE --name NAME"
    if path.parent != folder():
        return f"{path} is no file; give a calibration's file or name, or {make}"
    known = names()
    if not known:
        return f"there is no calibration {name}, and none yet in {folder()}; {make}"
    return f"there is no calibration {name}{nearest(name, known)}; {folder()} has {', '.join(known)}; {make}"


class _SavedFactor(msgspec.Struct):
    """A factor in a calibration's file."""

    p10: float
    p90: float
    ops: int
    shapes: int
    seconds: float
    factor: float | None = None
    bytes_per_second: float | None = None
    """In place of the factor, of host copies."""


class _SavedSource(msgspec.Struct):
    """A profile in a calibration's file."""

    file: str
    devices: int
    programs: dict[str, float]
    priced_by: str
    matched_seconds: float
    total_seconds: float
    not_matched_seconds: dict[str, float]


class _SavedCalibration(msgspec.Struct):
    """A calibration's file."""

    version: int
    name: str
    chip: str
    made: str
    systolic: str
    compiler: str | None
    kinds: dict[CostKind, _SavedFactor]
    left_out: list[str]
    sources: list[_SavedSource]


def _record(plain: Mapping[str, Any]) -> CalibrationRecord:
    """The calibration of a file.

    Raises:
        msgspec.ValidationError: a field is absent or of another type.
        ValueError: a factor is out of bounds.
    """
    saved = msgspec.convert(plain, _SavedCalibration)
    factors = {kind: _factor(kind, entry) for kind, entry in saved.kinds.items()}
    left_out = list(saved.left_out)
    if saved.version == FIRST:
        for kind in MIXED:
            if factors.pop(kind, None) is not None:
                left_out.append(
                    f"{kind.value}: the file is of version {FIRST}, which does not say whether its ops were of device or of vector memory; {AGAIN}"
                )
    calibration = Calibration(
        name=saved.name,
        chip=saved.chip,
        factors=factors,
        made=saved.made,
        num_profiles=len(saved.sources),
    )
    return CalibrationRecord(
        calibration=calibration,
        sources=tuple(
            ProfileSource(
                file=source.file,
                devices=source.devices,
                programs=source.programs,
                priced_by=source.priced_by,
                matched_seconds=source.matched_seconds,
                total_seconds=source.total_seconds,
                not_matched=source.not_matched_seconds,
            )
            for source in saved.sources
        ),
        compiler=saved.compiler or "",
        systolic=saved.systolic,
        left_out=tuple(left_out),
    )


def _factor(kind: CostKind, saved: _SavedFactor) -> Factor:
    value = saved.bytes_per_second if kind is CostKind.host else saved.factor
    if value is None:
        raise ValueError(f"{kind.value} has no {value_name(kind)}")
    factor = Factor(
        value=value,
        low=saved.p10,
        high=saved.p90,
        ops=saved.ops,
        works=saved.shapes,
        seconds=saved.seconds,
    )
    numbers = (factor.value, factor.low, factor.high)
    if (
        not all(math.isfinite(number) and number > 0 for number in numbers)
        or factor.low > factor.high
    ):
        raise ValueError(
            f"{kind.value} is {value:g}, p10 {saved.p10:g}, p90 {saved.p90:g}; its numbers are above 0, p10 below p90"
        )
    least, most = BOUNDS
    if kind is not CostKind.host and not least <= factor.value <= most:
        raise ValueError(f"{kind.value} is {factor.value:g}, outside of {least:g} to {most:g}")
    return factor

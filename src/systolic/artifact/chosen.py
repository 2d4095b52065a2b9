"""One candidate of a plan as a run takes it: from plan.json, and kept in the run's job.json."""

import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.job import Batch, Job, Layout, Precision

FORMAT = 1
"""Of plan.json."""
FORECAST = ("step_seconds", "step_seconds_low", "step_seconds_high", "mfu")
"""What of a candidate's forecast goes with a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a plan says of one candidate, and the job that it was planned for."""

    path: str
    """Of the plan."""
    recipe: str
    options: Mapping[str, Any]
    """The recipe's options, as they were planned with."""
    slice: str
    settings: Mapping[str, Any]
    """``layout.fsdp``, ``batch``, ``precision``: what the plan decides of the job."""
    steps: int
    """Optimizer steps that make up the plan's tokens or examples."""
    flags: Sequence[str] = ()
    """Of libtpu."""
    forecast: Mapping[str, float | None]
    """Seconds a step with their interval, and MFU."""

    def applied(self, job: Job) -> Job:
        """The job with the plan's settings.

        Raises:
            DataError: a setting that this version does not know.
        """
        return apply(job, self.settings)

    def to_json(self) -> dict[str, Any]:
        """For job.json; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Chosen":
        """Inverse of :meth:`to_json`."""
        return cls(**plain)


def read(path: Path, number: int = 1) -> Chosen:
    """A candidate of plan.json, by its rank from 1.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is no plan, or nothing in it fits.
        OptionError: it has fewer candidates.
    """
    try:
        plain = json.loads(path.read_text())
    except OSError as error:
        raise NotFoundError(
            f"{path} cannot be read ({error.strerror}); systolic plan RECIPE --on SLICES writes a plan"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); systolic plan writes a plan") from error
    if not isinstance(plain, dict) or not {"candidates", "best", "goal"} <= set(plain):
        raise DataError(
            f"{path} is JSON but not a plan; systolic plan RECIPE --on SLICES writes one"
        )
    if plain["format"] != FORMAT:
        raise DataError(
            f"{path} is of format {plain['format']} and this version reads {FORMAT}; plan again"
        )
    found = plain["candidates"]
    if not found:
        raise DataError(f"nothing in {path} fits and keeps its goal; plan again with other slices")
    if not 1 <= number <= len(found):
        raise OptionError(
            f"candidate is {number} and {path} has {len(found)}; give 1 to {len(found)}"
        )
    one = found[number - 1]
    return Chosen(
        path=str(path),
        recipe=plain["recipe"],
        options=plain["options"],
        slice=one["slice"],
        settings=one["settings"],
        steps=max(1, math.ceil(one["total"]["steps"] - 1e-6)),
        flags=tuple(one["flags"]),
        forecast={name: one[name] for name in FORECAST},
    )


def apply(job: Job, settings: Mapping[str, Any]) -> Job:
    """A job with settings by option: ``layout.*``, ``batch`` (examples a step) and ``precision``.

    Raises:
        DataError: another option, or a value that it can't have.
    """
    kinds = typing.get_type_hints(Layout)
    layout: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    try:
        for name, value in settings.items():
            part, _, field = name.partition(".")
            if part == "layout" and field in kinds:
                layout[field] = msgspec.convert(value, kinds[field])
            elif name == "batch":
                changed["batch"] = Batch(total=msgspec.convert(value, int))
            elif name == "precision":
                changed["precision"] = msgspec.convert(value, Precision)
            else:
                raise DataError(f"this version has no setting {name}; plan again with it")
    except msgspec.ValidationError as error:
        raise DataError(f"the plan's {name} is {value!r} ({error}); plan again") from error
    return replace(job, layout=replace(job.layout, **layout), **changed)

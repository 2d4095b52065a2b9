"""One candidate of a plan as a run takes it: from plan.json, and kept in the run's job.json."""

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, OptionError
from systolic.core.files import read_given
from systolic.job import Batch, Job, Layout, Precision
from systolic.job.layout import RENAMED

FORMAT = 1
"""Version of plan.json."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Time of a step by a plan; empty where what is trained is another step."""

    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A candidate of a plan, with the job that was planned."""

    path: str
    """Path of the plan."""
    recipe: str
    options: Mapping[str, Any]
    """The recipe's options in the plan."""
    slice: str
    settings: Mapping[str, Any]
    """Settings that the plan decides: ``layout.fsdp``, ``batch``, ``precision`` …"""
    steps: int
    """Optimizer steps for the plan's tokens or examples."""
    flags: Sequence[str] = ()
    """Compiler flags of libtpu."""
    forecast: StepTime

    def applied(self, job: Job) -> Job:
        """The job with the plan's settings.

        Raises:
            DataError: a setting is unknown to this version.
        """
        return apply(job, self.settings)

    def to_json(self) -> dict[str, Any]:
        """For job.json; :meth:`from_json` reads it."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Chosen":
        """Inverse of :meth:`to_json`."""
        return msgspec.convert(plain, cls)


class _RunTotals(msgspec.Struct):
    steps: float


class Planned(msgspec.Struct):
    """A candidate in plan.json: the fields that verbs read."""

    slice: str
    settings: dict[str, Any]
    total: _RunTotals
    flags: list[str]
    step_seconds: float
    step_seconds_low: float | None
    step_seconds_high: float | None
    mfu: float | None


class SavedPlan(msgspec.Struct):
    """A plan.json: the fields that verbs read."""

    format: int
    recipe: str | None
    """None in the plan of a Job, which is not in the file."""
    options: dict[str, Any]
    goal: dict[str, Any]
    best: dict[str, Any] | None
    candidates: list[Planned]
    """Ranked; the first is the best."""
    arguments: list[str] | None = None
    """Arguments of the recipe as typed; absent in plans of earlier versions."""
    job: str | None = None
    """Name of the Job, where there is no recipe."""


def is_plan(plain: Any) -> bool:
    """Whether JSON is a plan, damaged or not."""
    return isinstance(plain, dict) and {"candidates", "best", "goal"} <= set(plain)


def load(path: Path, *, of_job: bool = False) -> SavedPlan:
    """A plan.json with at least one candidate.

    Args:
        path: The file.
        of_job: Whether the caller has the Job, so that the plan of a Job will do.

    Raises:
        NotFoundError: there is no such file.
        OptionError: it is not a plan, or is the plan of a Job and the caller has none.
        DataError: it is damaged (names the field), or nothing in it fits.
    """
    plain = read_given(path, "systolic plan RECIPE --on SLICES writes a plan")
    if not is_plan(plain):
        raise OptionError(
            f"{path} is JSON but not a plan; systolic plan RECIPE --on SLICES writes one"
        )
    if plain.get("format") != FORMAT:
        raise DataError(
            f"{path} is of format {plain.get('format')} and this version reads {FORMAT}; plan again"
        )
    try:
        saved = msgspec.convert(plain, SavedPlan)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is a damaged plan ({error}); plan again") from error
    if saved.recipe is None and saved.job is None:
        raise DataError(f"{path} is a damaged plan (it names neither recipe nor Job); plan again")
    if saved.recipe is None and not of_job:
        raise OptionError(
            f"{path} is a plan of the Job {saved.job}, made in Python, and a file cannot hold the Job; give both in Python: systolic.train(job, plan=plan), or plan a recipe: systolic plan RECIPE --on {_slices(saved)}"
        )
    for number, choice in enumerate(saved.candidates):
        figures = (choice.step_seconds, choice.total.steps)
        if not all(0 < figure < math.inf for figure in figures):
            raise DataError(
                f"{path} is a damaged plan (candidate {number + 1} has {figures[1]} steps of {figures[0]} s); plan again"
            )
    if not saved.candidates:
        raise DataError(f"nothing in {path} fits and keeps its goal; plan again with other slices")
    return saved


def _slices(saved: SavedPlan) -> str:
    return ",".join(dict.fromkeys(choice.slice for choice in saved.candidates)) or "SLICES"


def read(path: Path, number: int = 1, *, of_job: bool = False) -> Chosen:
    """A candidate of plan.json, by its rank from 1; ``of_job`` as for :func:`load`.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is damaged, or nothing in it fits.
        OptionError: it is no plan or one of a Job, or has fewer candidates.
    """
    return candidate(load(path, of_job=of_job), str(path), number)


def candidate(saved: SavedPlan, path: str, number: int) -> Chosen:
    """A candidate of a plan, by its rank from 1; ``path`` names the plan in messages.

    Raises:
        OptionError: the plan has fewer candidates.
    """
    candidates = saved.candidates
    if not 1 <= number <= len(candidates):
        raise OptionError(
            f"candidate is {number} and {path} has {len(candidates)}; give 1 to {len(candidates)}"
        )
    chosen = candidates[number - 1]
    return Chosen(
        path=path,
        recipe=saved.recipe or saved.job or "",
        options=saved.options,
        slice=chosen.slice,
        settings=chosen.settings,
        steps=max(1, math.ceil(chosen.total.steps - 1e-6)),
        flags=tuple(chosen.flags),
        forecast=msgspec.convert(chosen, StepTime, from_attributes=True),
    )


def apply(job: Job, settings: Mapping[str, Any]) -> Job:
    """A job with settings by option: ``layout.*``, ``batch`` (examples a step) and ``precision``.

    Raises:
        DataError: an unknown setting, or an invalid value.
    """
    kinds = typing.get_type_hints(Layout)
    layout: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    try:
        for name, value in settings.items():
            part, _, field = name.partition(".")
            field = RENAMED.get(field, field)
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

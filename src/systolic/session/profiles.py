"""Why a measured step takes its time; of a run on TPUs also what changes of its settings gain."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.explaining.cause import Cause
from systolic.explaining.display.text import lines, profile_remark
from systolic.forecasting import Forecast
from systolic.job import Layout
from systolic.planning.remedies import Remedy
from systolic.profile import open_profile
from systolic.profile.files import SUFFIXES, is_profile_file
from systolic.profile.profile import Profile
from systolic.profile.table import ProfileTable
from systolic.report.notebook import WIDTH, screen
from systolic.runs.job_record import JobRecord
from systolic.runs.record import load_run
from systolic.runs.run import JOB, Run
from systolic.session.explaining import (
    ExplainProgress,
    ExplainStage,
    ExplainWatch,
    StepExplainer,
    StepExplanation,
)
from systolic.session.run_files import rebuild
from systolic.session.run_flags import compiled_with
from systolic.session.saved import RecipeStep

REMEDIES = 4
"""Changes that are tried, unless another number is asked for."""


@dataclass(frozen=True, kw_only=True)
class ProfileExplanation:
    """Where the time of traced steps goes."""

    causes: Sequence[Cause]
    """Largest share first."""
    figures: Mapping[str, Any]
    """``device``, ``steps``, ``step_seconds`` of their median, and ``shares`` of it."""
    notes: Sequence[str]
    """What could not be judged, and why."""
    profile: Profile
    """The devices with their ops."""
    table: ProfileTable
    """Ops and programs of the whole profile."""
    of: RecipeStep | None = None
    """The step of the run that the profile lies in."""
    simulated: StepExplanation | None = None
    """Forecast of the run's step on its slice, with changes of its settings: gains are of forecasts."""
    problem: str = ""
    """Why no changes were tried."""

    def __repr__(self) -> str:
        """The step's time and the causes' names on one line."""
        names = ", ".join(cause.name for cause in self.causes) or "no problem found"
        return f"<ProfileExplanation: {profile_remark(self.figures)}; {names}>"

    def _repr_html_(self) -> str:
        shown = lines(
            "profile",
            self.causes,
            WIDTH,
            remarks=[profile_remark(self.figures)],
            notes=self.notes,
        )
        best = self.best
        told = (
            []
            if best is None
            else [f"the best that keeps training the same: {best.text}, {best.verdict}"]
        )
        return screen(shown, told)

    @property
    def forecast(self) -> Forecast | None:
        """Of the run's step on its slice."""
        return None if self.simulated is None else self.simulated.forecast

    @property
    def remedies(self) -> Sequence[Remedy]:
        """Changes of the run's settings, the largest gain first."""
        return () if self.simulated is None else self.simulated.remedies

    @property
    def best(self) -> Remedy | None:
        """The change that gains most and trains the same."""
        return None if self.simulated is None else self.simulated.best


def explain_profile(
    path: Path,
    *,
    remedies: int = REMEDIES,
    workers: int = 0,
    trust: bool = False,
    chip: str = "",
    watch: ExplainWatch = lambda _: None,
) -> ProfileExplanation:
    """Explains the median step of a profile.

    Args:
        path: An ``xplane.pb``, a ``trace.json.gz`` or a directory with some.
        remedies: Changes to try where the profile lies in a run on TPUs; 0 finds causes only.
        workers: Compiles at once; 0 as many as cores and memory allow.
        trust: Execute the run's recipe although it is another user's.
        chip: The devices' chip by its name in the catalogue, for a file that does not name it.
        watch: Is given the progress.

    Raises:
        OptionError: ``chip`` is another than the one that the profile names.
        DataError: the profile is damaged, or has no steps.
    """
    from systolic.explaining.causes import causes_of_profile
    from systolic.explaining.profile_stats import figures, unjudged

    profile = open_profile(path, chip)
    folder = run_of(path)
    result = ProfileExplanation(
        causes=causes_of_profile(profile, mesh_of(folder) if folder else None),
        figures=figures(profile),
        notes=unjudged(profile),
        profile=profile,
        table=ProfileTable(profile),
    )
    watch(ExplainProgress(stage=ExplainStage.explained, explanation=result))
    if folder is None or remedies < 1:
        return result
    try:
        of = _step_of(folder, trust=trust)
        explainer = replace(of.explainer(), remedies=remedies, workers=workers, watch=watch)
        simulated = _forecast(explainer, of)
        result = replace(result, of=of, simulated=simulated)
        watch(ExplainProgress(stage=ExplainStage.explained, explanation=result))
        tried = explainer.try_changes(simulated.forecast)
        return replace(result, simulated=replace(simulated, remedies=tried))
    except SystolicError as error:
        return replace(result, problem=str(error))


def _step_of(folder: Path, *, trust: bool) -> RecipeStep:
    with Run.open(folder) as run:
        on, (recipe, job, options) = slice_of(run), rebuild(run, trust_code=trust)
        if on.platform != "tpu":
            # On a CPU a forecast promised 46 % for a change that gained 2 to 11 %.
            raise OptionError(
                f"forecasts for a {on.platform} do not rank settings well enough; try the advice above and measure"
            )
        record = JobRecord.from_json(run.read_job())
    return RecipeStep(
        recipe=recipe,
        options=options,
        settings={} if record.plan is None else record.plan.settings,
        on=on,
        flags=compiled_with(record),
        kept=job,
    )


def _forecast(explainer: StepExplainer, of: RecipeStep) -> StepExplanation:
    made, _ = explainer.forecast()
    if made.step_seconds is None:
        raise RunError(
            f"its step does not fit {of.on.name} by forecast; systolic explain {of.recipe.target} --on {of.on.name} with its options finds one that does"
        )
    return StepExplanation(job=explainer.job, on=of.on, step=of.step, flags=of.flags, forecast=made)


def is_profile(path: Path) -> bool:
    """Whether it is a profile's file or a directory with one; a directory of runs has theirs, none of its own."""
    if not path.is_dir():
        return is_profile_file(path)
    found = next((one for one in path.rglob("*") if one.name.endswith(SUFFIXES)), None)
    if found is None or (path / JOB).is_file():
        return False
    below = [folder for folder in found.parents if path in folder.parents]
    return not any((folder / JOB).is_file() for folder in below)


def slice_of(run: Run) -> Slice:
    """The devices that a run was last trained on.

    Raises:
        NotFoundError: the catalogue has no such chip, or no slice of so many.
    """
    start = load_run(run.path).start
    if not start:
        raise NotFoundError(f"{run.path} has no session on record; train it first")
    number, kind = _devices(start)
    chip = by_device_kind(kind)
    name = "cpu" if kind == "cpu" else chip.name if chip else ""
    if not name:
        raise NotFoundError(
            f"the catalogue has no {kind}; forecast on another: systolic explain RECIPE --on v5e-16"
        )
    return slice_with(number, name, kind)


def slice_with(number: int, name: str, kind: str) -> Slice:
    """The slice of so many devices of a chip.

    Args:
        number: Devices.
        name: The chip's in the catalogue.
        kind: The chip's for people.

    Raises:
        NotFoundError: there is none of so many.
    """
    # Slices of some generations are named by cores, of which a chip has two.
    for text in (f"{number}x{name}", f"{name}-{number}", f"{name}-{2 * number}"):
        with contextlib.suppress(SystolicError):
            on = slice(text)
            if on.num_devices == number:
                return on
    raise NotFoundError(
        f"the catalogue has no slice of {number} x {kind}; systolic chips {name} lists those that it has"
    )


def _devices(start: Mapping[str, Any]) -> tuple[int, str]:
    """Number and kind of the devices of a session."""
    if "num_devices" in start:
        return start["num_devices"], start["device_kind"]
    count, _, kind = start["devices"].partition(" x ")  # of an earlier version
    return int(count), kind


def run_of(path: Path) -> Path | None:
    """The run that a profile lies in; None where it lies in none."""
    parents = path.resolve().parents
    return next((folder for folder in parents if (folder / JOB).is_file()), None)


def mesh_of(folder: Path) -> Mapping[str, int]:
    """Axes of a run's mesh and, of a pipeline, its microbatches."""
    with Run.open(folder) as run:
        record = JobRecord.from_json(run.read_job())
    mesh, job = dict(record.layout), record.job
    if mesh.get("pipeline", 1) > 1 and job["batch"]["total"]:
        accumulate, micro = (job["layout"][name] for name in ("accumulate", "microbatches"))
        layout = replace(Layout(), **mesh, accumulate=accumulate, microbatches=micro)
        mesh["microbatches"] = layout.num_microbatches(job["batch"]["total"] // accumulate)
    return mesh

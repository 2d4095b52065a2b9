"""Explanation of a measured step; of a run on TPUs also what changes of its settings gain. Questions that a profile has too little data for are named."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.chips import ChipKind, Slice
from systolic.chips import chip as chip_named
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.core.reporter import reporter
from systolic.core.units import plural
from systolic.explaining.alone import devices_of, priced_alone
from systolic.explaining.display.text import lines, profile_remark
from systolic.explaining.explainer import (
    ExplainProgress,
    ExplainStage,
    RecipeStep,
    StepExplainer,
    StepExplanation,
)
from systolic.explaining.step import Cause
from systolic.forecasting import Forecast
from systolic.forecasting.profiled import Beside, Key, beside, by_name, ops_beyond, programs_of
from systolic.forecasting.text import forecast_text
from systolic.hlo import Module, parse
from systolic.job import Layout
from systolic.planning.remedies import Remedy
from systolic.profile import open_profile
from systolic.profile.files import SUFFIXES, is_profile_file
from systolic.profile.ops import Activity
from systolic.profile.profile import Profile, name_of
from systolic.profile.table import ProfileTable
from systolic.profile.trace import Backend, common, missing, total, union
from systolic.recipes.jobs.run import rebuild
from systolic.report.notebook import WIDTH, screen
from systolic.runs.job_record import compiled_with, read_record
from systolic.runs.record import slice_of, slice_with
from systolic.runs.run import JOB, Run
from systolic.sim.simulate import simulate

REMEDIES = 4
"""Changes that are tried, unless another number is asked for."""
LINES = "lines"
"""In place of a dump: each op from its own line in the profile."""
PROGRAM = "program"
"""In place of a dump: the programs that the profile holds."""
MOVING = (Activity.collective, Activity.slices, Activity.host, Activity.memory)
"""Kinds of op that can run beside the device's work."""
BEYOND, LONG = 1.1, 5e-6
"""Share of a peak that no op reaches, and seconds of an op from which it counts: a trace's clock rounds shorter ones."""


@dataclass(frozen=True, kw_only=True)
class ProfileExplanation:
    """Causes of the time of traced steps."""

    causes: Sequence[Cause]
    """Largest share first."""
    figures: Mapping[str, Any]
    """``device``, ``steps``, ``step_seconds`` of their median, and ``shares`` of it."""
    notes: Sequence[str]
    """Figures that could not be judged, and why."""
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
    target: str = ""
    """The file or directory, as it was named."""
    against: Beside | None = None
    """The forecast of its program, op by op."""

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
        texts = (
            []
            if best is None
            else [f"the best that keeps training the same: {best.text}, {best.verdict}"]
        )
        return screen(shown, texts)

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the run's step on its slice."""
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
    against: str = "",
) -> ProfileExplanation:
    """Explains the median step of a profile.

    Args:
        path: An ``xplane.pb``, a ``trace.json.gz`` or a directory with some.
        remedies: Changes to try where the profile lies in a run on TPUs; 0 finds causes only.
        workers: Compiles at once; 0 as many as cores and memory allow.
        trust: Execute the run's recipe although it is another user's.
        chip: The devices' chip by its name in the catalogue, for a file that does not name it.
        against: What :func:`explain_beside` sets beside the profile, before anything compiles; empty for nothing.

    Raises:
        OptionError: ``chip`` is another than the one that the profile names, or ``against`` can't be set beside it.
        DataError: the profile is damaged, or has no steps.
    """
    from systolic.explaining.causes import causes_of_profile

    profile = open_profile(path, chip)
    backend = profile.trace.backend
    if chip and chip_named(chip).kind.value != backend.value.lower():
        raise OptionError(
            f"--chip is {chip}, and the profile is of a {backend.value}, whose times say nothing about that chip; leave --chip out, or profile the program on a {chip}"
        )
    folder = run_of(path)
    result = ProfileExplanation(
        causes=causes_of_profile(profile, mesh_of(folder) if folder else None),
        figures=figures(profile),
        notes=unjudged(profile),
        profile=profile,
        table=ProfileTable(profile),
    )
    if against:
        result = replace(result, against=explain_beside(result, against))
    reporter().update(ExplainProgress(stage=ExplainStage.explained, explanation=result))
    if folder is None or remedies < 1:
        return result
    try:
        of = _step_of(folder, trust=trust)
        explainer = replace(of.explainer(), remedies=remedies, workers=workers)
        simulated = _forecast(explainer, of)
        result = replace(result, of=of, simulated=simulated)
        reporter().update(ExplainProgress(stage=ExplainStage.explained, explanation=result))
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
        record = read_record(run)
    return RecipeStep(
        recipe=recipe,
        options=options,
        settings={} if record.plan is None else record.plan.settings,
        on=on,
        flags=compiled_with(record),
        kept=job,
    )


def _forecast(explainer: StepExplainer, of: RecipeStep) -> StepExplanation:
    forecast, _ = explainer.forecast()
    if forecast.step_seconds is None:
        raise RunError(
            f"its step does not fit {of.on.name} by forecast; systolic explain {of.recipe.target} --on {of.on.name} with its options finds one that does"
        )
    return StepExplanation(
        job=explainer.job,
        on=of.on,
        step=of.step,
        flags=of.flags,
        target=of.recipe.target,
        of=of,
        forecast=forecast,
    )


def explain_beside(explanation: ProfileExplanation, against: str) -> Beside:
    """Ops of a profile beside the simulation of its program.

    Args:
        explanation: The profile, explained.
        against: Path of the program's scheduled HLO; ``program``, for those that the profile holds; or ``lines``: then each
            op is priced alone, from its line.

    Raises:
        NotFoundError: there is no such file, or the catalogue has no such slice.
        OptionError: the chip is not known, or no TPU; or the program is not in the profile.
        DataError: the file is no scheduled HLO, or damaged.
    """
    table = explanation.table
    if against == LINES:
        on = _slice(explanation, devices_of(table))
        seconds, left = priced_alone(table, on)
        if not seconds:
            # A file of XProf's trace viewer holds no program.
            own = (
                f"--against {PROGRAM}"
                if programs_of(table)
                else "the program's dump, --against DUMP.txt"
            )
            raise OptionError(
                f"no op of the profile is priced by its line alone: kernels, and fusions without a matmul, need their program; give {own}"
            )
        note = f"each op alone, from its line in the profile, on {on.name}: {plural(left, 'op')} that are kernels or fusions without a matmul, or were never waited for, are not priced"
        return replace(beside(table, seconds, whole=False), notes=[note])
    if against == PROGRAM:
        return _beside_own(explanation)
    check(against)
    path = Path(against)
    module = parse(path.read_text(errors="replace"))
    program = _program(table, module, against)
    on = _slice(explanation, max(module.num_partitions, 1))
    forecast = forecast_text(path, on)
    if forecast.timeline is None:
        raise OptionError(
            f"{against} has no simulated schedule on {on.name}: {forecast.rejected or 'it does not fit'}"
        )
    compared = beside(table, by_name(forecast.timeline, program), forecast.timeline.seconds)
    return replace(compared, notes=[f"simulated on {on.name}", *forecast.cautions])


def _beside_own(explanation: ProfileExplanation) -> Beside:
    """Ops beside the simulation of the programs that the profile holds."""
    table, programs = explanation.table, programs_of(explanation.table)
    if not programs:
        raise OptionError(
            f"the profile does not hold its programs; give the program's dump, --against DUMP.txt, or --against {LINES}"
        )
    on = _slice(
        explanation,
        max(devices_of(table), *(module.num_partitions for module in programs.values())),
    )
    timelines = {name: simulate(module, on) for name, module in programs.items()}
    seconds: dict[Key, float] = {}
    for name, timeline in timelines.items():
        seconds |= by_name(timeline, name)
    main = next(row.name for row in table.programs if row.name in timelines)
    note = f"the programs that the profile holds, simulated on {on.name}: {', '.join(timelines)}"
    return replace(beside(table, seconds, timelines[main].seconds), notes=[note])


def check(against: str) -> None:
    """Refuses what can't be set beside a profile, before the profile is read.

    Raises:
        NotFoundError: there is no such file.
    """
    if against not in (LINES, PROGRAM) and not Path(against).is_file():
        raise NotFoundError(
            f"{against} is no file; give the scheduled HLO that --xla_dump_to wrote, --against {PROGRAM} or --against {LINES}"
        )


def _program(table: ProfileTable, module: Module, path: str) -> str:
    """The program of the profile that a dump is of, by its name; of several versions the one whose results it has."""
    names = [row.name for row in table.programs]
    versions = [name for name in names if name_of(name) == module.name]
    if not versions:
        raise OptionError(
            f"{path} is {module.name}, and the profile ran {', '.join(names[:4])}; give the dump of one of these"
        )
    return min(versions, key=lambda name: len(ops_beyond(module, name, [table])))


def _slice(explanation: ProfileExplanation, number: int) -> Slice:
    chip = explanation.profile.ceilings.chip
    if chip is None:
        raise OptionError(
            f"the simulator needs the chip, and the profile does not name it (it says {explanation.figures['device']}); add --chip tpu7x"
        )
    if chip.kind is not ChipKind.tpu:
        raise OptionError(
            f"only TPUs are simulated, and the profile is of {chip.name}; give a TPU's profile"
        )
    return slice_with(number, chip.name, chip.device_kind or chip.name)


def is_profile(path: Path) -> bool:
    """Whether it is a profile's file or a directory with one; a directory of runs has theirs, none of its own."""
    if not path.is_dir():
        return is_profile_file(path)
    file = next((file for file in path.rglob("*") if file.name.endswith(SUFFIXES)), None)
    if file is None or (path / JOB).is_file():
        return False
    below = [folder for folder in file.parents if path in folder.parents]
    return not any((folder / JOB).is_file() for folder in below)


def run_of(path: Path) -> Path | None:
    """The run that a profile lies in; None where it lies in none."""
    parents = path.resolve().parents
    return next((folder for folder in parents if (folder / JOB).is_file()), None)


def mesh_of(folder: Path) -> Mapping[str, int]:
    """Axes of a run's mesh and, of a pipeline, its microbatches."""
    with Run.open(folder) as run:
        record = read_record(run)
    mesh, job = dict(record.layout), record.job
    if mesh.get("pipeline", 1) > 1 and job["batch"]["total"]:
        accumulate, micro = (job["layout"][name] for name in ("accumulate", "microbatches"))
        layout = replace(Layout(), **mesh, accumulate=accumulate, microbatches=micro)
        mesh["microbatches"] = layout.num_microbatches(job["batch"]["total"] // accumulate)
    return mesh


def figures(profile: Profile) -> dict[str, Any]:
    """``step_seconds`` of the median of ``steps``, and ``shares`` of it by kinds of op; of several devices the mean.

    ``simulated_by`` names the program that wrote a schedule as a profile; it is empty for a measurement.
    ``device`` is their kind, ``devices`` how many there are, ``hosts`` their names, ``slowest`` and ``fastest`` the
    device with the longest and the shortest step with its seconds. ``beside`` is :func:`overlap`.
    """
    devices = profile.devices
    by: dict[Activity, float] = defaultdict(float)
    for device in devices:
        for op in device.ops:
            by[op.kind] += op.seconds / device.seconds / len(devices)
    steps = sorted(((device.seconds, device.trace.device) for device in devices), reverse=True)
    return {
        "device": profile.trace.kind
        or (profile.trace.device if len(devices) == 1 else profile.trace.backend.value),
        "devices": len(devices),
        "hosts": list(dict.fromkeys(device.trace.host for device in devices)),
        "steps": len(profile.steps),
        "simulated_by": profile.trace.simulated_by,
        "step_seconds": sum(device.seconds for device in devices) / len(devices),
        "slowest": {"device": steps[0][1], "step_seconds": steps[0][0]},
        "fastest": {"device": steps[-1][1], "step_seconds": steps[-1][0]},
        "beside": overlap(profile),
        "shares": {kind.value: by[kind] for kind in Activity if kind in by}
        | {"idle": max(1 - sum(by.values()), 0.0)},
    }


def overlap(profile: Profile) -> dict[str, dict[str, float]]:
    """Seconds of a step in which collectives and copies are exposed, and hidden: under way while the device works.

    By kind of op, of those that have some; of several devices the mean.
    """
    by_kind: dict[str, dict[str, float]] = {}
    devices = profile.devices
    for kind in MOVING:
        exposed = hidden = 0.0
        for device in devices:
            exposed += sum(op.seconds for op in device.ops if op.kind is kind)
            waits = union((op.raw.start, op.raw.end) for op in device.ops if op.kind is kind)
            flights = union(
                (begun.start, done.end)
                for begun, done in device.pairs
                if device.describe(done).kind is kind
            )
            hidden += total(common(flights, missing(waits, device.step)))
        if exposed or hidden:
            by_kind[kind.value] = {
                "exposed_seconds": exposed / len(devices),
                "hidden_seconds": hidden / len(devices),
            }
    return by_kind


def _beyond(profile: Profile) -> list[str]:
    """Sentence on ops faster than a chip that the file does not name itself; none where all keep within its peaks."""
    if profile.trace.peak_bytes is not None:  # the file has the peaks of its own chip
        return []
    most: tuple[float, str, str] | None = None
    for device in profile.devices:
        for raw in device.trace.ops:
            op = replace(device.describe(raw), raw=raw, flight=device.flight(raw))
            rate = device.rate(op) if op.flight >= LONG else None
            share = None if rate is None else rate.share(op.flight)
            if (
                rate is not None
                and share is not None
                and share > max(BEYOND, most[0] if most else 0)
            ):
                most = share, rate.unit, raw.name
    if most is None:
        return []
    share, unit, name = most
    return [
        f"rates against the peaks of {profile.trace.kind}: {name} reaches {share:.0%} of its {unit}, more than that chip can, so that the profile is of another one; name it with --chip"
    ]


def unjudged(profile: Profile) -> list[str]:
    """Questions that the profile has too little data for, a sentence each."""
    trace = profile.trace
    questions = list(trace.notes)
    if profile.trace.peak("bf16") is None:
        questions.append(
            f"matmuls against the peak: the profile has no peak of {trace.device}"
            + ("; name its chip: --chip tpu7x" if trace.backend is Backend.tpu else "")
        )
    questions += _beyond(profile)
    if not trace.loop:
        questions.append(
            "what the host does while the device idles: no thread of it runs a program"
        )
    if not trace.modules and trace.backend is not Backend.tpu:
        questions.append("layers and source lines: the profile was made without modules")
    return questions

"""``systolic explain PROFILE``: why a measured step takes its time."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from systolic.artifact.run import ENVIRONMENT, JOB, Run
from systolic.chips import Slice, by_device_kind, slice
from systolic.cli.output import print_json
from systolic.cli.parse import arguments
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.core.ranges import NOT_NEGATIVE
from systolic.core.units import duration
from systolic.job import Layout
from systolic.session.command_line import without


def is_profile(path: Path) -> bool:
    """Whether it is an ``xplane.pb`` or a directory with one; a directory of runs has theirs, none of its own."""
    from systolic.profile.xplane import SUFFIX

    if not path.is_dir():
        return path.name.endswith(SUFFIX) and path.is_file()
    found = next(path.rglob(f"*{SUFFIX}"), None)
    if found is None or (path / JOB).is_file():
        return False
    below = [folder for folder in found.parents if path in folder.parents]
    return not any((folder / JOB).is_file() for folder in below)


def options(
    remedies: Annotated[int, NOT_NEGATIVE] = 4,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    trust: bool = False,
    json: bool = False,
) -> None:
    """Why a measured step takes its time, and what changes that.

    Args:
        remedies: Of the profile of a run on TPUs: changes of settings to compile and forecast for its slice; 0 names causes only.
        workers: Compiles at once; 0 takes what cores and memory allow.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """


def explain_profile(target: str, args: Sequence[str]) -> int:
    """Causes of the median step of a profile, and what changes of its run's settings gain."""
    from systolic.explaining.causes import causes_of_profile
    from systolic.explaining.figures import figures, unjudged
    from systolic.profile import open_profile

    verb = arguments(options, args, "systolic explain PROFILE")
    path = Path(target)
    profile = open_profile(path)
    folder = run_of(path)
    causes = causes_of_profile(profile, mesh_of(folder) if folder else {})
    found, notes = figures(profile), unjudged(profile)
    if not verb["json"]:
        from systolic.report.explain.text import print_causes

        print_causes(target, causes, remarks=[remark(found)], notes=notes)
    more = {}
    if folder is not None and verb["remedies"] > 0:
        more = remedies(folder, found["step_seconds"], verb)
    if verb["json"]:
        plain = [asdict(cause) for cause in causes]
        told = {"target": target, "kind": "profile", "causes": plain, "figures": found}
        print_json({**told, "notes": notes, **more})
    return 0


def remedies(folder: Path, measured: float, verb: Mapping[str, Any]) -> dict[str, Any]:
    """The run's step forecast for its devices as it is and with some settings changed.

    Gains are of forecasts: what was measured is shown beside the first, so that one sees how far to trust them.
    """
    from systolic.aot import JobProgram
    from systolic.aot import compile as compile_program
    from systolic.cli.explain_job import Explanation
    from systolic.forecasting.run import of_outcome
    from systolic.report.progress import ProgressLine
    from systolic.session.planned import plan_of
    from systolic.session.run_files import rebuild
    from systolic.session.run_flags import recorded

    stream = sys.stderr if verb["json"] else sys.stdout
    try:
        with Run.open(folder) as run:
            on, job = slice_of(run), rebuild(run, trust_code=verb["trust"])[1]
            if on.platform != "tpu":
                # On a CPU a forecast promised 46 % for a change that gained 2 to 11 %.
                raise OptionError(
                    f"forecasts for a {on.platform} do not rank settings well enough; try the advice above and measure"
                )
            record = run.read_job()
            recipe, words = record["recipe"], words_of(run)
            flags = recorded(record, plan_of(record), on)
        how = {**verb, "flags": flags}
        explanation = Explanation(job, on, recipe, words, how, "train")
        with ProgressLine(sys.stderr, f"{job.name} for {on.name}") as progress:
            outcome = compile_program(
                JobProgram(job=job), on, explanation.compiler.quick(), progress.say
            )
        made = of_outcome(outcome, job.name, on, 0.0)
        if made.step_seconds is None:
            raise RunError(
                f"its step does not fit {on.name} by forecast; systolic explain {recipe} --on {on.name} with its options finds one that does"
            )
        ratio = measured / made.step_seconds
        print(
            f"\nforecast for {on.name}: {duration(made.step_seconds)} a step, measured {ratio:.2f} times that",
            file=stream,
        )
        found = explanation.remedies(made)
    except SystolicError as error:
        print(f"\nno changes were tried: {error}", file=stream)
        return {"remedies": [], "command": None, "problem": str(error)}
    return {"slice": on.name, "forecast_step_seconds": made.step_seconds, **found}


def slice_of(run: Run) -> Slice:
    """The devices that a run was last trained on.

    Raises:
        NotFoundError: the catalogue has no such chip, or no slice of so many.
    """
    starts = list(run.records("start"))
    if not starts:
        raise NotFoundError(f"{run.path} has no session on record; train it first")
    count, _, kind = starts[-1]["devices"].partition(" x ")
    chip = by_device_kind(kind)
    name = "cpu" if kind == "cpu" else chip.name if chip else ""
    if not name:
        raise NotFoundError(
            f"the catalogue has no {kind}; forecast on another: systolic explain RECIPE --on v5e-16"
        )
    number = int(count)
    # Slices of some generations are named by cores, of which a chip has two.
    for text in (f"{number}x{name}", f"{name}-{number}", f"{name}-{2 * number}"):
        with contextlib.suppress(SystolicError):
            on = slice(text)
            if on.num_devices == number:
                return on
    raise NotFoundError(
        f"the catalogue has no slice of {number} x {kind}; systolic chips {name} lists those that there are"
    )


def words_of(run: Run) -> list[str]:
    """What was typed after the recipe, less what is the trainer's own."""
    import json

    argv = json.loads((run.path / ENVIRONMENT).read_text()).get("argv") or []
    own = {"run", "profile", "diagnose", "workers", "json", "resume", "plan", "candidate", "flags"}
    if len(argv) < 3 or argv[1] != "train" or argv[2].startswith("-"):
        return []
    return without(argv[3:], own)


def run_of(path: Path) -> Path | None:
    """The run that a profile lies in; None where it lies in none."""
    parents = path.resolve().parents
    return next((folder for folder in parents if (folder / JOB).is_file()), None)


def mesh_of(folder: Path) -> Mapping[str, int]:
    """Axes of a run's mesh and, of a pipeline, its microbatches."""
    with Run.open(folder) as run:
        record = run.read_job()
    mesh: dict[str, int] = dict(record["layout"])
    job = record["job"]
    if mesh.get("pipeline", 1) > 1 and job["batch"]["total"]:
        accumulate, micro = (job["layout"][name] for name in ("accumulate", "microbatches"))
        layout = replace(Layout(), **mesh, accumulate=accumulate, microbatches=micro)
        mesh["microbatches"] = layout.num_microbatches(job["batch"]["total"] // accumulate)
    return mesh


def remark(found: Mapping[str, Any]) -> str:
    """The figures in a line."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in found["shares"].items() if share)
    steps = f"median of {found['steps']}" if found["steps"] > 1 else "the only one"
    return f"a step on {found['device']} takes {duration(found['step_seconds'])} ({steps}): {parts}"

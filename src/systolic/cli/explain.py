"""``systolic explain RUN``: what holds a run back, with evidence, and what to change."""

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.artifact.record import load_run
from systolic.artifact.run import JOB, Run
from systolic.cli.explain_job import explain_recipe, is_recipe
from systolic.cli.explain_profile import explain_profile, is_profile
from systolic.cli.explain_saved import explain_saved, saved_forecast
from systolic.cli.output import print_json
from systolic.cli.parse import arguments
from systolic.cli.target import first
from systolic.core.errors import NotFoundError, SystolicError, nearest
from systolic.explaining.cause import Cause
from systolic.explaining.settings import settings_of

USAGE = """usage: systolic explain RUN [options]
       systolic explain RECIPE --on SLICE [options]
       systolic explain FORECAST.json [--against OTHER.json]
       systolic explain PROFILE [--remedies N] [--json]

RECIPE is forecast on the slice: where its step's time goes, and what changes of settings gain, each
compiled and forecast again; a step that does not fit is taken to a layout or a slice where it does.
FORECAST.json is what systolic forecast --json or systolic plan wrote; --against says what makes one slower.

RUN is a directory that systolic train made, of a run that has ended or still trains. Says what keeps
it from learning (spikes, dead gradients, learning rate, batch, rounding, overfitting) and what took
its time besides the steps (input, recompilation, evaluation, checkpoints), worst first.

PROFILE is an XProf xplane.pb of a TPU, GPU or CPU or a directory with one: RUN/profile after systolic
train --profile N, or what jax.profiler.trace wrote. Says where the median step's time goes: waiting for
input, for the host and for other devices, recompilation, and the ops that are slow; of a run on
TPUs also what changes of its settings gain, each forecast for its slice.

  --on SLICE       explain a recipe there: v5e-16, v5p-128, 2xv5e-256
  --step STEP      of a recipe: train (default), eval, prefill or decode, the last three without changes to try
  --remedies N     changes to try (default 10, of a run's profile 4); 0 names causes only
  --quick          of a run: judge by what the run has recorded only. Otherwise a run whose layers were never
                   looked at is looked at now, at its newest checkpoint, where this machine can
  --trust          execute the run's recipe.py although it is not yours; remembered by its digest
  --json           print one JSON object"""


class TargetKind(enum.Enum):
    """What a target is."""

    run = "run"
    recipe = "recipe"
    forecast = "forecast"
    """Saved, of its own or in a plan."""
    profile = "profile"


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    target, rest = first(args, "explain", "a run")
    return EXPLAINERS[kind(target)](target, rest)


def kind(target: str) -> TargetKind:
    """What a target is, by its content.

    Raises:
        NotFoundError: nothing that can be explained; names the nearest run.
    """
    if (Path(target) / JOB).is_file():
        return TargetKind.run
    if is_profile(Path(target)):
        return TargetKind.profile
    if saved_forecast(Path(target)) is not None:
        return TargetKind.forecast
    if is_recipe(target):
        return TargetKind.recipe
    if not Path(target).exists():
        runs = {str(found.parent) for found in Path(target).parent.glob(f"*/{JOB}")}
        runs |= {str(found.parent) for found in Path("runs").glob(f"*/{JOB}")}
        raise NotFoundError(
            f"{target} is no recipe, and no run, profile or forecast is there{nearest(target, [*recipes.shipped(), *runs])}; systolic recipes lists recipes"
        )
    raise NotFoundError(
        f"{target} is no run, profile, recipe or forecast; give a directory that systolic train made, an xplane.pb, a recipe with --on SLICE, or what systolic forecast --json or systolic plan wrote"
    )


def run_options(quick: bool = False, trust: bool = False, json: bool = False) -> None:
    """Says what holds a run back.

    Args:
        quick: Judge by what is on record only.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """


def explain_run(target: str, args: Sequence[str]) -> int:
    """Causes of poor learning, then of lost time."""
    from systolic.explaining import learning, speed

    verb = arguments(run_options, args, "systolic explain RUN")
    path = Path(target)
    with Run.open(path) as directory:
        notes: list[str] = []
        history = load_run(path)
        if not verb["quick"] and not history.diagnoses:
            looks, why = look(directory, trust_code=verb["trust"])
            history = replace(history, diagnoses=looks)
            notes += [why] if why else []
    session = load_run(path, last_session=True)
    causes = settings_of(history).named([*learning.learning(history), *speed.speed(session)])
    figures, notes = learning.vitals(history), [*notes, *learning.unknown(history)]
    if verb["json"]:
        notes = [*history.damage, *notes]
        show_json(target, TargetKind.run, causes, figures=figures, notes=notes)
        return 0
    from systolic.report.explain.text import print_causes

    lines = [*remarks(figures, history.unit), *history.damage]
    if is_profile(path / "profile"):
        lines.append(f"its steps were traced: systolic explain {path / 'profile'}")
    print_causes(target, causes, remarks=lines, notes=notes)
    return 0


def look(directory: Run, *, trust_code: bool = False) -> tuple[list[dict[str, Any]], str]:
    """Looks at the newest checkpoint, or why there are none."""
    from systolic.session.run_files import rebuild
    from systolic.session.trained import set_up_here
    from systolic.training.probe import examine, too_large

    if not any(directory.checkpoints.glob("[0-9]*")):
        return [], "there is no checkpoint to look at"
    try:
        setup = set_up_here(rebuild(directory, trust_code=trust_code)[1], directory)
        reason = too_large(setup)
        if reason:
            return [], reason
        print("systolic: looking at the newest checkpoint, layer by layer", file=sys.stderr)
        return list(examine(setup, directory)), ""
    except SystolicError as error:
        return [], f"its checkpoint could not be looked at: {error}"


def remarks(figures: Mapping[str, Any], unit: str) -> list[str]:
    """The figures in a line."""
    texts = {
        "update_ratio": "updates {:.1e} of the weights",
        "noise_scale": f"gradient noise scale {{:.3g}} {unit}",
        "batch": "batch {}",
        "epochs": "data read {:.3g} times",
        "training_loss": "training loss {:.4g}",
        "validation_loss": "validation {:.4g}",
    }
    known = [text.format(figures[k]) for k, text in texts.items() if figures[k] is not None]
    return [", ".join(known)] if known else []


def show_json(target: str, kind: TargetKind, causes: Sequence[Cause], **more: Any) -> None:
    """One object on stdout."""
    plain = [asdict(cause) for cause in causes]
    print_json({"target": target, "kind": kind.value, "causes": plain, **more})


EXPLAINERS: Mapping[TargetKind, Callable[[str, Sequence[str]], int]] = {
    TargetKind.run: explain_run,
    TargetKind.recipe: explain_recipe,
    TargetKind.forecast: explain_saved,
    TargetKind.profile: explain_profile,
}
"""How each kind of target is explained: target and the arguments after it to the exit code."""

"""``systolic explain``: what holds a step or a run back, with evidence, and what to change."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.cli.explain_program import (
    END,
    ExplainDumpOptions,
    ExplainProgramOptions,
    explain_dump,
    explain_program,
)
from systolic.cli.parse import Repeated, parse, print_verb_help
from systolic.cli.target import Request, first, renamed, request, request_for
from systolic.compiling import StepKind
from systolic.core.arguments import Required
from systolic.core.errors import NotFoundError, OptionError, nearest
from systolic.core.machine import bounded_workers
from systolic.core.ranges import NOT_NEGATIVE

if TYPE_CHECKING:
    from systolic.session.saved import RecipeStep
    from systolic.sim.incomplete import Given

FORMS = """usage: systolic explain RECIPE --on SLICE [options]
       systolic explain FORECAST.json [--against OTHER.json] [options]
       systolic explain RUN [--quick] [--trust] [--json]
       systolic explain PROFILE [--against DUMP.txt] [--html PAGE] [options]
       systolic explain DUMP.txt --on SLICE [options]
       systolic explain --on SLICE [options] -- python train.py [its options]

RECIPE (or a model: llama-3.1-70b, a config.json) is forecast on the slice: where its step's time goes, and what changes of settings gain, each compiled
and forecast again, then combined until none gains; for a step that does not fit, the fastest layout where it does. FORECAST.json is what
systolic forecast --json or systolic plan wrote; it takes the options of a recipe too, and --against says
what makes one slower. Both are forecast from the compiler's schedule, whichever way the files were made.

RUN is a directory that systolic train made, of a run that has ended or still trains: what keeps it from
learning (spikes, dead gradients, learning rate, batch, rounding, overfitting) and what took its time besides
the steps (input, recompilation, evaluation, checkpoints), worst first.

PROFILE is an XProf xplane.pb or trace.json.gz of a TPU, GPU or CPU or a directory with some (those of several
hosts are read together, of several runs the newest): RUN/profile after systolic train --profile N, or what jax.profiler.trace wrote. Where
the median step's time goes: waiting for input, for the host, for copies from and to its memory and for other
devices, recompilation, and the ops that are slow, each with its bytes and rate; of a run on TPUs also what
changes of its settings gain, each forecast for its slice.

DUMP.txt is scheduled HLO that another program wrote (compiled.as_text(), or XLA's dump after optimizations), and what
follows -- is a JAX program of your own, which runs unchanged until its step is known, as for systolic forecast: where
the step's time goes, by the same causes. No settings are tried: systolic knows no options of it.

Exits with 1 when a step does not fit and nothing that was tried does. Changes are tried for train steps
only; systolic plan searches further."""

SLICE = Required("a slice; add --on v5e-16, systolic chips lists them")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Explains why a step is slow or does not fit, and what changes that.

    Args:
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256.
        step: Which of the job's steps: train, eval, prefill or decode; changes of settings are tried for train steps only.
        flags: Compiler flags on top of the set that all jobs on the chip share (systolic chips v5e lists it); none leaves that set out.
        remedies: Changes of settings to compile and forecast again, one at a time, where the step fits; up to twice as many follow, combined from the best until none gains, and changes of precision and batch. 0 names causes only.
        workers: Compiles at once; 0 takes as many as cores and memory allow.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    step: StepKind = StepKind.train
    flags: str = ""
    remedies: Annotated[int, NOT_NEGATIVE] = 10
    workers: Annotated[int, NOT_NEGATIVE] = 0
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ExplainSavedOptions:
    """Options of a saved forecast or plan.

    Args:
        against: Another saved forecast or plan: print what makes one slower.
        on: Another slice than the file's.
        step: Another of the job's steps than the file's.
        flags: Compiler flags on top of those of the file; none leaves these out.
        remedies: Changes of settings to compile and forecast again, one at a time, where the step fits; up to twice as many follow, combined from the best until none gains, and changes of precision and batch. 0 names causes only.
        workers: Compiles at once; 0 takes as many as cores and memory allow.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    against: Path | None = None
    on: str | None = None
    step: StepKind | None = None
    flags: str = ""
    remedies: Annotated[int, NOT_NEGATIVE] = 10
    workers: Annotated[int, NOT_NEGATIVE] = 0
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ExplainRunOptions:
    """Options of a run.

    Args:
        quick: Judge by its records only. Otherwise a run without gradient probes is probed now, at its newest checkpoint, where this machine can.
        trust: Execute the run's recipe.py although it is another user's, now and later: its digest is remembered.
        json: Print one JSON object on stdout.
    """

    quick: bool = False
    trust: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ExplainProfileOptions:
    """Options of a profile.

    Args:
        remedies: Changes of settings to compile and forecast, one at a time, of the profile of a run on TPUs; up to twice as many follow, combined from the best. 0 names causes only.
        workers: Compiles at once; 0 takes as many as cores and memory allow.
        trust: Execute the run's recipe.py although it is another user's, now and later: its digest is remembered.
        chip: The devices' chip, such as tpu7x: a trace.json.gz does not name it, and rates need its peaks.
        against: Also print the forecast of the program beside the measurement, op by op: its scheduled HLO text; program, for what an xplane.pb holds of it; or lines, which prices each op alone from its line in the profile.
        html: Write a page to this file: the timeline of the median step by core and unit, and a table of all ops.
        json: Print one JSON object on stdout.
    """

    remedies: Annotated[int, NOT_NEGATIVE] = 4
    workers: Annotated[int, NOT_NEGATIVE] = 0
    trust: bool = False
    chip: str = ""
    against: str = ""
    html: Path | None = None
    json: bool = False


OPTIONS = (
    ExplainOptions,
    ExplainSavedOptions,
    ExplainRunOptions,
    ExplainProfileOptions,
    ExplainProgramOptions,
    ExplainDumpOptions,
)


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, *OPTIONS)
    if END in args:
        return explain_program(args)
    target, rest = first(
        args, "explain", "a run, a recipe, a profile, a saved forecast, or -- and a command"
    )
    if not Path(target).exists():
        # A mistake in it is refused before the session is imported.
        if not is_recipe(target):
            raise unknown(target)
        return explain_recipe(target, rest)
    from systolic.session.explaining import ExplainedKind, kind_of

    explainers: Mapping[ExplainedKind, Callable[[str, Sequence[str]], int]] = {
        ExplainedKind.run: explain_run,
        ExplainedKind.forecast: explain_saved,
        ExplainedKind.profile: explain_profile,
    }
    kind = kind_of(Path(target))
    if kind is not None:
        return explainers[kind](target, rest)
    if is_recipe(target):
        return explain_recipe(target, rest)
    if is_hlo(Path(target)):
        return explain_dump(Path(target), rest)
    raise unknown(target)


def is_hlo(path: Path) -> bool:
    """Whether a path is a file of HLO text."""
    from systolic.profile.files import beginning

    return path.is_file() and beginning(path).lstrip().startswith(b"HloModule")


def is_recipe(target: str) -> bool:
    """Whether a target names a recipe, or a function in a file."""
    from systolic import recipes

    return ".py:" in target or target.endswith(".py") or recipes.is_named(target)


def unknown(target: str) -> NotFoundError:
    """What a target is not; names the nearest run or recipe."""
    from systolic import recipes
    from systolic.runs.run import JOB

    if Path(target).exists():
        from systolic.profile.files import other

        if Path(target).is_file() and (what := other(Path(target))):
            return NotFoundError(f"{target} is {what}")
        return NotFoundError(
            f"{target} is no run, profile, recipe or forecast; give a directory that systolic train made, an xplane.pb or trace.json.gz, a recipe with --on SLICE, or what systolic forecast --json or systolic plan wrote"
        )
    from systolic.recipes.models.named import names

    runs = {str(found.parent) for found in Path(target).parent.glob(f"*/{JOB}")}
    runs |= {str(found.parent) for found in Path("runs").glob(f"*/{JOB}")}
    return NotFoundError(
        f"{target} is no recipe, run, profile or forecast{nearest(target, [*recipes.shipped(), *names(), *runs])}; systolic recipes lists recipes and models"
    )


# Steps


def explain_recipe(target: str, args: Sequence[str]) -> int:
    """Causes of a recipe's step time with remedies, or how to make it fit."""
    options = request(target, args, "explain", ExplainOptions)
    return explain_step(target, recipe_step(options), options.verb)


def recipe_step(asked: Request[ExplainOptions]) -> "RecipeStep":
    """The step that was asked for."""
    from systolic.chips import slice
    from systolic.chips.flags import resolved
    from systolic.session.saved import RecipeStep

    on = slice(asked.verb.on)
    return RecipeStep(
        recipe=asked.recipe,
        options=asked.options,
        on=on,
        flags=resolved(asked.verb.flags, on.chip),
        step=asked.verb.step,
    )


def from_words(target: str, words: Sequence[str]) -> "RecipeStep":
    """What a forecast of an earlier version was made of."""
    return recipe_step(request(target, renamed(words, typed=False), "explain", ExplainOptions))


def explain_saved(target: str, args: Sequence[str]) -> int:
    """A forecast's JSON or a plan: its step explained, or what makes it differ ``--against`` another."""
    from systolic.session.saved import is_saved, saved_step

    of, options = saved_request(target, args)
    if options.against is None:
        return explain_step(of.recipe.target, of, options)
    if not options.against.is_file():
        raise NotFoundError(
            f"{options.against} is no file; write one with systolic forecast … --json"
        )
    if not is_saved(options.against):
        raise OptionError(
            f"{options.against} is not a forecast; write one with systolic forecast … --json"
        )
    other = saved_step(options.against, from_words)
    from systolic.forecasting.calibrations import calibration_for
    from systolic.sim.incomplete import given

    known = replace(
        given(options.trips, options.cost),
        calibration=calibration_for(options.calibration, [of.on, other.on]),
    )
    return compare_steps((target, of), (str(options.against), other), options.json, known)


def saved_request(target: str, args: Sequence[str]) -> "tuple[RecipeStep, ExplainSavedOptions]":
    """The step that a file names, with what was given on top, and the verb's own options."""
    from systolic.session.saved import saved_step

    of = saved_step(Path(target), from_words).as_options
    asked = request_for(of.recipe, args, "explain", ExplainSavedOptions, of.options)
    return changed(of, asked), asked.verb


def changed(of: "RecipeStep", asked: Request[ExplainSavedOptions]) -> "RecipeStep":
    """A saved step with what was given on top."""
    from systolic.chips import slice

    options = asked.verb
    of = replace(of, options=asked.options, step=options.step or of.step)
    if options.on is not None:
        of = of.at(slice(options.on))
    return of.with_flags(options.flags)


def explain_step(
    target: str, of: "RecipeStep", options: ExplainOptions | ExplainSavedOptions
) -> int:
    """Explains with progress, prints; returns the exit code."""
    from systolic.cli.explain_view import ExplainView, show_step
    from systolic.forecasting.calibrations import given_with

    known = given_with(options.trips, options.cost, options.calibration, of.on)
    with ExplainView(f"{of.recipe.target} for {of.on.name}", as_json=options.json) as view:
        explainer = replace(
            of.explainer(),
            remedies=options.remedies,
            workers=bounded_workers(options.workers),
            watch=view.see,
            given=known,
        )
        made = explainer.explain()
    return show_step(target, of, made, as_json=options.json)


def compare_steps(
    one: "tuple[str, RecipeStep]",
    two: "tuple[str, RecipeStep]",
    as_json: bool,
    given: "Given",
) -> int:
    """What makes the first slower or faster than the second; returns the exit code."""
    from systolic.cli.explain_view import show_comparison
    from systolic.session.saved import compare

    return show_comparison(one[0], two[0], compare(one[1], two[1], given), as_json=as_json)


# Runs and profiles


def explain_run(target: str, args: Sequence[str]) -> int:
    """Causes of poor learning, then of lost time."""
    from systolic.cli.explain_view import ExplainView, show_run
    from systolic.session.runs import explain_run as explain

    options = parse(ExplainRunOptions, args, shlex.join(["systolic", "explain", target]))
    with ExplainView(target, as_json=options.json) as view:
        made = explain(Path(target), quick=options.quick, trust=options.trust, watch=view.see)
    return show_run(target, made, as_json=options.json)


def explain_profile(target: str, args: Sequence[str]) -> int:
    """Causes of the median step's time and, of a run on TPUs, changes of settings with what forecasts say they gain."""
    from systolic.cli.explain_view import ExplainView, show_profile
    from systolic.session.profiles import explain_profile as explain

    options = parse(ExplainProfileOptions, args, shlex.join(["systolic", "explain", target]))
    if options.against:
        from systolic.session.beside import check

        check(options.against)
    with ExplainView(target, as_json=options.json) as view:
        made = explain(
            Path(target),
            remedies=options.remedies,
            workers=bounded_workers(options.workers),
            trust=options.trust,
            chip=options.chip,
            watch=view.see,
        )
    compared = None
    if options.against:
        from systolic.session.beside import explain_beside

        compared = explain_beside(made, options.against)
    if options.html is not None:
        from systolic.explaining.display.page import write_page

        write_page(target, made.profile, made.table, made.causes, options.html, made.notes)
    return show_profile(target, made, as_json=options.json, page=options.html, compared=compared)

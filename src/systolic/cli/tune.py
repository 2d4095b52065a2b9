"""``systolic tune RECIPE --search OPTION=RANGE``: finds the settings that train a recipe best."""

import inspect
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from systolic.cli.output import bounded_workers, print_json
from systolic.cli.parse import (
    Required,
    nearest_option,
    option_hints,
    option_names,
    print_verb_help,
    read_value,
)
from systolic.cli.target import Request, first, request
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, dashed
from systolic.planning.objective import PriceTerm
from systolic.tuning.sampling import Pruner, Sampler

if TYPE_CHECKING:
    from systolic.session.tuning import Tuning
    from systolic.tuning.search import Typed
    from systolic.tuning.study import SharedStudy

FORMS = """usage: systolic tune RECIPE --search OPTION=VALUES [--search ...] [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function; its options apply to every trial.
VALUES are a range such as 1..8, 128..512:64 or log:1e-4..1e-2, or choices such as 4,6,8, of the option's type.
Every trial is a run that systolic train --resume, eval and explain take. Rerun to continue after Ctrl-C or a
kill; a larger --trials extends the study. To share a study, run the same command on several machines, with one
--storage.

Exits with 1 when no trial has a result. systolic tune RECIPE --help shows the recipe's options."""

SEARCH = Required("an option to search; add --search optimizer.learning-rate=log:1e-4..1e-2")
TRIALS = 20
STALE = Range(least=4)
SEEDS = Range(least=2, only=(0,))


def _shown(metavar: str, default: str) -> Any:
    """How the help shows an option whose default is derived: not as None."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


REPEATS_OF = "--repeats-of"
"""First argument of a worker that repeats a trial; the trial's number follows."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of a search.

    Args:
        search: Option of the recipe and its values: optimizer.learning-rate=log:1e-4..1e-2, model.layers=4,6,8. Repeat it for more options.
        trials: Total trials of the study. At most the number of distinct settings, since none is trained twice.
        sampler: How the next trial is chosen: tpe, random, grid or cmaes.
        pruner: How trials are stopped early by their evaluations: hyperband, median or none.
        objective: Validation metric, such as accuracy or max:top5, or seconds, dollars or parameters. Repeat it for a Pareto front, whose best trial is the best by the first metric.
        trial_steps: Optimizer steps of each trial; the final command trains the recipe's own number.
        study: Folder of the study, new or continued. NAME is derived from the recipe, its options and the search.
        storage: Database shared by several machines, such as postgresql://user@host/tuning.
        workers: Worker processes on this machine.
        repeats: Seeds to train the best and the default settings with after the search, to test whether the gain is real; not included in --budget.
        stale_after: Seconds without a heartbeat after which another machine's trial is taken over.
        sampler_seed: Seed of the sampler.
        on: Slice to forecast each trial on, before it runs: trials that do not fit are refused, and costs are known.
        quick: Forecast from the compiler's schedule: memory is exact, the time of ops estimated.
        budget: Upper bound in dollars on the forecast cost of all trials' steps on --on; start-up, evaluations, checkpoints and --repeats are not included.
        price: Which price of the catalogue: on-demand, spot or committed.
        json: Print the study as one JSON object on stdout.
    """

    search: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, SEARCH] = ()
    trials: Annotated[int | None, COUNT, _shown("INT", "20, or all combinations of a grid")] = None
    sampler: Sampler = Sampler.tpe
    pruner: Annotated[
        Pruner | None,
        _shown(
            "{hyperband,median,none}",
            "median if the recipe evaluates during training, for one objective",
        ),
    ] = None
    objective: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        _shown("STR", "the recipe's metric; repeatable"),
    ] = ()
    trial_steps: Annotated[int | None, COUNT, _shown("INT", "the recipe's steps")] = None
    study: Annotated[Path | None, _shown("PATH", "studies/NAME")] = None
    storage: Annotated[str | None, _shown("STR", "an SQLite file in the study's folder")] = None
    workers: Annotated[int, COUNT] = 1
    repeats: Annotated[int, SEEDS] = 0
    stale_after: Annotated[int, STALE] = 120
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0
    on: Annotated[str | None, _shown("STR", "no forecast")] = None
    quick: bool = False
    budget: Annotated[float | None, POSITIVE, _shown("FLOAT", "no limit")] = None
    price: PriceTerm = PriceTerm.on_demand
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, TuneOptions)
    tuning, asked = tuning_of(args)
    return tune(tuning, asked, args)


def tuning_of(args: Sequence[str]) -> "tuple[Tuning, Request[TuneOptions]]":
    """Parses and checks a search; writes nothing.

    Raises:
        OptionError: an option is unknown, of another type, or without effect.
        MissingExtraError: Optuna is not installed.
    """
    from systolic.session.tuning import Tuning
    from systolic.tuning import objective, sampling
    from systolic.tuning.search import parse

    target, rest = first(args, "tune", "a recipe")
    asked = request(target, rest, "tune", TuneOptions)
    options = asked.verb
    _check_together(options)
    if not options.search:
        raise OptionError(f"systolic tune {target} needs {SEARCH.text}")
    searched = parse(options.search, _typed(asked))
    _check_given(asked, [one.name for one in searched])
    aims = objective.parse(options.objective, asked.job.evaluation, priced=options.on is not None)
    size = sampling.check(options.sampler, searched, len(aims))
    usual = TRIALS if options.sampler is not Sampler.grid or size is None else size
    made = Tuning(
        recipe=asked.recipe,
        options=asked.options,
        searched=searched,
        aims=aims,
        folder=options.study or Path(),
        storage=options.storage,
        trials=min(options.trials or usual, size or sys.maxsize),
        sampler=options.sampler,
        seed=options.sampler_seed,
        steps=options.trial_steps,
        on=options.on,
        quick=options.quick,
        price=options.price,
        budget_usd=options.budget,
        stale_seconds=options.stale_after,
    )
    return made.settled(options.pruner, named=options.study is not None), asked


def tune(tuning: "Tuning", asked: Request[TuneOptions], args: Sequence[str]) -> int:
    """Runs the search, prints its results, and returns the exit code."""
    from systolic.report.tune.progress import StudyDisplay
    from systolic.report.tune.text import NAMES, print_study
    from systolic.session.tuned import TrialsEnded, TunedSearch, wall_time
    from systolic.session.tuning_processes import INTERRUPTED, Processes, worker_command

    options = asked.verb
    again = "repeats" if options.repeats else ""
    with StudyDisplay(sys.stderr, then=again) as view:
        if options.trials is not None and options.trials > tuning.trials:
            view.tell(
                f"--trials is {options.trials}, and the search has {tuning.trials} distinct settings; each is trained once"
            )

        if line := wall_time(tuning, options.workers):
            view.tell(line)

        def run(of: "Tuning", shared: "SharedStudy") -> TrialsEnded:
            words = [] if of.repeats is None else [REPEATS_OF, str(of.repeats.of)]
            processes = Processes(
                tuning=of,
                shared=shared,
                command=worker_command([*words, *args], "systolic.cli.tune_worker"),
                count=bounded_workers(options.workers),
                see=view.see,
                tell=view.tell,
            )
            return TrialsEnded(result=processes.run(), interrupted=processes.interrupted)

        answer = TunedSearch(
            tuning=tuning,
            words=asked.typed,
            seeds=options.repeats,
            run=run,
            tell=view.tell,
            begin=lambda: view.begin(again),
        ).answer()
    if options.json:
        print_json({**answer.result.to_json(), "report": str(answer.page)})
    else:
        print_study(answer.result)
        print(f"{'report':<{NAMES}}{shlex.quote(str(answer.page))}")
    if answer.interrupted:
        print("systolic: interrupted; rerun to continue", file=sys.stderr)
        return INTERRUPTED
    return 0 if answer.result.best is not None else 1


def _typed(asked: Request[TuneOptions]) -> "Typed":
    """A parser of values of the recipe's options."""
    function, target = asked.recipe.function, asked.recipe.target
    hints = option_hints(function)

    def typed(name: str, word: str) -> Any:
        option = f"--{name}"
        if option not in hints:
            known = [each.removeprefix("--") for each in option_names(function)]
            raise OptionError(
                f"--search names {name}, which is no option of {target}{nearest_option(name, known)}; systolic recipes {target} lists its options"
            )
        return read_value(hints[option], word, f"--search {name}")

    return typed


def _check_given(asked: Request[TuneOptions], names: Sequence[str]) -> None:
    for name in names:
        if asked.gives(name):
            raise OptionError(f"--{name} is both given and searched; leave one out")
    if asked.verb.repeats and "seed" not in asked.options:
        raise OptionError(
            f"--repeats needs an option seed, which {asked.recipe.target} does not have; add it to the recipe, or leave --repeats out"
        )
    if asked.verb.repeats and "seed" in names:
        raise OptionError("--repeats sets the seed, which is also searched; leave one out")
    if "steps" in names and asked.verb.trial_steps is not None:
        raise OptionError("--trial-steps is given and steps is searched; leave one out")
    if asked.verb.trial_steps is not None and "steps" not in {
        dashed(name) for name in inspect.signature(asked.recipe.function).parameters
    }:
        raise OptionError(
            f"--trial-steps needs an option steps, which {asked.recipe.target} does not have; leave --trial-steps out"
        )


def _check_together(options: TuneOptions) -> None:
    """Refuses forecast options without a slice."""
    given = {
        "--quick": options.quick,
        "--budget": options.budget is not None,
        "--price": options.price is not PriceTerm.on_demand,
    }
    for name, is_given in given.items():
        if is_given and options.on is None:
            raise OptionError(f"{name} needs a forecast, and no slice is given; add --on v5e-4")
    if options.on is not None:
        from systolic.chips import slice

        slice(options.on)

"""``systolic tune RECIPE --search OPTION=RANGE``: finds the settings that train a recipe best."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from systolic.cli.parse import print_verb_help
from systolic.cli.target import Request, first, request
from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.machine import bounded_workers
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range
from systolic.planning.objective import PriceTerm
from systolic.report.output import print_json
from systolic.tuning.sampling import Pruner, Sampler

if TYPE_CHECKING:
    from systolic.tuning.definition import Tuning
    from systolic.tuning.request import TuningRequest
    from systolic.tuning.study import SharedStudy

FORMS = """usage: systolic tune RECIPE --search OPTION=VALUES [--search ...] [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function; its options apply to every trial.
VALUES are a range such as 1..8, 128..512:64 or log:1e-4..1e-2, or choices such as 4,6,8, of the option's type.
Every trial is a run that systolic train --resume, eval and explain take. Rerun to continue after Ctrl-C or a
kill; a larger --trials extends the study. To share a study, run the same command on several machines, with one
--storage.

Exits with 1 when no trial has a result. systolic tune RECIPE --help shows the recipe's options."""

SEARCH = Required("an option to search; add --search optimizer.learning-rate=log:1e-4..1e-2")
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
    target, rest = first(args, "tune", "a recipe")
    asked = request(target, rest, "tune", TuneOptions)
    options = asked.verb
    if not options.search:
        raise OptionError(f"systolic tune {target} needs {SEARCH.text}")
    return wanted(options).tuning(asked.recipe, asked.options, asked.names), asked


def wanted(options: TuneOptions) -> "TuningRequest":
    """The settings of the search among the options."""
    from systolic.tuning.request import TuningRequest

    own = [each.name for each in fields(TuningRequest)]
    return TuningRequest(**{name: vars(options)[name] for name in own})


def tune(tuning: "Tuning", asked: Request[TuneOptions], args: Sequence[str]) -> int:
    """Runs the search, prints its results, and returns the exit code."""
    from systolic.tuning.answer import TrialsEnded, TunedSearch, wall_time
    from systolic.tuning.display.progress import StudyDisplay
    from systolic.tuning.display.text import NAMES, print_study
    from systolic.tuning.processes import INTERRUPTED, Processes, worker_command

    options = asked.verb
    again = "repeats" if options.repeats else ""
    with StudyDisplay(sys.stderr, then=again) as view:
        for line in (wanted(options).limit(tuning), wall_time(tuning, options.workers)):
            if line:
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

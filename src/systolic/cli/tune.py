"""``systolic tune RECIPE --search OPTION=RANGE``: finds the settings that train a recipe best."""

import inspect
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from systolic.core.files import write_json
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, dashed
from systolic.planning.objective import PriceTerm
from systolic.tuning.sampling import Pruner, Sampler

if TYPE_CHECKING:
    from systolic.session.tuning import Tuning
    from systolic.tuning.results import StudyResult
    from systolic.tuning.search import Typed

FORMS = """usage: systolic tune RECIPE --search OPTION=VALUES [--search ...] [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function; its options that follow hold for
every trial. VALUES are a range as 1..8, 128..512:64 or log:1e-4..1e-2, or choices as 4,6,8, of the option's type.
Every trial is a run that systolic train --resume, eval and explain take. Rerun to continue where Ctrl-C or a
kill ended the study; with a larger --trials it goes on. The same command on other machines, with one
--storage, shares the work.

Exits with 1 when no trial has a result. systolic tune RECIPE --help shows the recipe's options."""

SEARCH = Required("what to search; add --search optimizer.learning-rate=log:1e-4..1e-2")
TRIALS = 20
STALE = Range(least=4)
SEEDS = Range(least=2, only=(0,))
REPEATS_OF = "--repeats-of"
"""Word before a worker's others: it repeats the trial of the number that follows."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of a search.

    Args:
        search: An option of the recipe with its values: optimizer.learning-rate=log:1e-4..1e-2, model.layers=4,6,8. Once for each option.
        trials: Trials of the whole study; by default 20, of a grid every combination. No more than there are different settings: none is trained twice.
        sampler: How the next trial is chosen: tpe, random, grid or cmaes.
        pruner: What stops trials early by their evaluations: hyperband, median or none. By default median where the recipe evaluates during training and there is one objective.
        objective: A metric of the validation, or seconds, dollars or parameters, as accuracy or max:top5; by default the recipe's own metric. Several, once for each, make a Pareto front; the first metric decides the best trial.
        trial_steps: Optimizer steps of each trial, in place of the recipe's; the command at the end trains the recipe's own.
        study: The study's folder; by default studies/NAME, where NAME stands for recipe, options and search.
        storage: Database that several machines share, as postgresql://user@host/tuning; by default an SQLite file in the study's folder.
        workers: Processes that run trials on this machine.
        repeats: Seeds to train the best settings and the default ones with afterwards, to tell gain from luck; beyond the budget.
        stale_after: Seconds without a sign of life after which another machine's trial is taken over.
        sampler_seed: Seed of the sampler.
        on: Slice to forecast each trial on: one that does not fit is refused, and its cost is known before it runs.
        quick: Forecast from the compiler's schedule: memory is exact, the time of ops estimated.
        budget: Dollars for the steps of all trials on the slice of --on, as forecast; start-up, evaluations, checkpoints and --repeats are not counted.
        price: Which price of the catalogue: on-demand, spot or committed.
        json: Print the study as one JSON object on stdout.
    """

    search: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, SEARCH] = ()
    trials: Annotated[int | None, COUNT] = None
    sampler: Sampler = Sampler.tpe
    pruner: Pruner | None = None
    objective: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    trial_steps: Annotated[int | None, COUNT] = None
    study: Path | None = None
    storage: str | None = None
    workers: Annotated[int, COUNT] = 1
    repeats: Annotated[int, SEEDS] = 0
    stale_after: Annotated[int, STALE] = 120
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0
    on: str | None = None
    quick: bool = False
    budget: Annotated[float | None, POSITIVE] = None
    price: PriceTerm = PriceTerm.on_demand
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, TuneOptions)
    tuning, asked = tuning_of(args)
    return tune(tuning, asked, args)


def tuning_of(args: Sequence[str]) -> "tuple[Tuning, Request[TuneOptions]]":
    """The search that a command's words name, checked; nothing is written.

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
    """Runs the search, shows it, and returns the exit code."""
    from systolic.report.tune.progress import StudyDisplay
    from systolic.report.tune.text import print_study
    from systolic.session.tuning_processes import (
        INTERRUPTED,
        Processes,
        repeated,
        worker_command,
    )

    options = asked.verb
    again = "repeats" if options.repeats else ""
    with StudyDisplay(sys.stderr, then=again) as view:
        if options.trials is not None and options.trials > tuning.trials:
            view.tell(
                f"the search has {tuning.trials} different settings, fewer than --trials {options.trials}; each is trained once"
            )

        def processes(of: "Tuning", *words: str) -> Processes:
            return Processes(
                tuning=of,
                shared=of.open(),
                command=worker_command([*words, *args], "systolic.cli.tune_worker"),
                count=bounded_workers(options.workers),
                see=view.see,
                tell=view.tell,
            )

        search = processes(tuning)
        result = tuning.with_command(search.run(), asked.typed)
        if result.best is not None and len(tuning.aims) == 1:
            result = replace(result, examples=tuning.examples)
        interrupted, best = search.interrupted, result.best
        # Before the repeats, which may fail.
        page = _written(tuning, result)
        if options.repeats and best is not None and result.finished == result.total:
            repeating = tuning.repeating(search.shared, best.number, options.repeats)
            repeats = processes(repeating, REPEATS_OF, str(best.number))
            view.begin(again)
            told = repeated(result, repeats.run())
            interrupted = interrupted or repeats.interrupted
            result = replace(result, repeats=told.to_json())
            page = _written(tuning, result)
        elif options.repeats and best is not None and not interrupted:
            view.tell(
                f"--repeats is left out, since the search ended after {result.finished} of {result.total} trials; give --budget more to go on"
            )
    if options.json:
        print_json({**result.to_json(), "report": str(page)})
    else:
        print_study(result)
        print(f"report    {shlex.quote(str(page))}")
    if interrupted:
        print("systolic: interrupted; rerun to continue", file=sys.stderr)
        return INTERRUPTED
    return 0 if result.best is not None else 1


def _written(tuning: "Tuning", result: "StudyResult") -> Path:
    """Writes the answer into the study's folder; returns its page."""
    from systolic.report.tune.page import write_page

    write_json(tuning.folder / "study.json", result.to_json())
    return write_page(result, tuning.folder)


def _typed(asked: Request[TuneOptions]) -> "Typed":
    """Reads a word as an option of the recipe takes it."""
    function, target = asked.recipe.function, asked.recipe.target
    hints = option_hints(function)

    def typed(name: str, word: str) -> Any:
        option = f"--{name}"
        if option not in hints:
            known = [each.removeprefix("--") for each in option_names(function)]
            raise OptionError(
                f"--search names {name}, and {target} has no such option{nearest_option(name, known)}; systolic recipes {target} lists them"
            )
        return read_value(hints[option], word, f"--search {name}")

    return typed


def _check_given(asked: Request[TuneOptions], names: Sequence[str]) -> None:
    for name in names:
        if asked.gives(name):
            raise OptionError(f"--{name} is given and searched; leave one of them out")
    if asked.verb.repeats and "seed" not in asked.options:
        raise OptionError(
            f"--repeats needs an option seed, which {asked.recipe.target} does not have; add one to the recipe, or leave it out"
        )
    if asked.verb.repeats and "seed" in names:
        raise OptionError("--repeats needs the seed, which is searched; leave one of them out")
    if "steps" in names and asked.verb.trial_steps is not None:
        raise OptionError("--trial-steps is given and steps are searched; leave one of them out")
    if asked.verb.trial_steps is not None and "steps" not in {
        dashed(name) for name in inspect.signature(asked.recipe.function).parameters
    }:
        raise OptionError(
            f"--trial-steps needs an option steps, which {asked.recipe.target} does not have; leave it out"
        )


def _check_together(options: TuneOptions) -> None:
    """Refuses options of the forecast without a slice."""
    given = {
        "--quick": options.quick,
        "--budget": options.budget is not None,
        "--price": options.price is not PriceTerm.on_demand,
    }
    for name, is_given in given.items():
        if is_given and options.on is None:
            raise OptionError(f"{name} is of the forecast, and no slice is given; add --on v5e-4")
    if options.on is not None:
        from systolic.chips import slice

        slice(options.on)

"""``systolic tune`` and :func:`systolic.tune`: the settings that train a recipe best."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic import recipes
from systolic.core.arguments import OptionWords, Required, Wording, command_of, member
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range
from systolic.core.reporter import reporter, working
from systolic.planning.goal import PriceTerm
from systolic.recipes.jobs import JobSource, source_of
from systolic.tuning.sampling import Pruner, Sampler

if TYPE_CHECKING:
    from systolic.tuning.results import StudyResult

USAGE = """usage: systolic tune RECIPE --search OPTION=VALUES [--search ...] [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function; its options apply to every trial.
VALUES are a range such as 1..8, 128..512:64 or log:1e-4..1e-2, or choices such as 4,6,8, of the option's type.
Every trial is a run that systolic train --resume, eval and explain take. Rerun to continue after Ctrl-C or a
kill; a larger --trials extends the study. To share a study, run the same command on several machines, with one
--storage.

Exits with 1 when no trial has a result. systolic tune RECIPE --help shows the recipe's options."""

RECIPE = Wording("the name of a recipe or 'path/to/file.py:function'")
SEARCH = Required("an option to search; add --search optimizer.learning-rate=log:1e-4..1e-2")
STALE = Range(least=4)
SEEDS = Range(least=2, only=(0,))
TRIALS = 20
"""Trials of a study by default."""


@command_of
def tune(  # noqa: PLR0913  the options of systolic tune
    recipe: Annotated[JobSource | str, RECIPE],
    *,
    search: Annotated[
        Mapping[str, str | Sequence[Any]] | Sequence[str],
        OptionWords(tuple[str, ...], default=(), repeated=True),
        SEARCH,
    ],
    trials: Annotated[
        int | None,
        COUNT,
        OptionWords(int | None, metavar="INT", default_text="20, or all combinations of a grid"),
    ] = None,
    sampler: Sampler | str = Sampler.tpe,
    pruner: Annotated[
        Pruner | str | None,
        OptionWords(
            Pruner | None,
            metavar="{hyperband,median,none}",
            default_text="median if the recipe evaluates during training, for one objective",
        ),
    ] = None,
    objective: Annotated[
        Sequence[str],
        OptionWords(
            tuple[str, ...],
            repeated=True,
            metavar="STR",
            default_text="the recipe's metric; repeatable",
        ),
    ] = (),
    trial_steps: Annotated[
        int | None,
        COUNT,
        OptionWords(int | None, metavar="INT", default_text="the recipe's steps"),
    ] = None,
    study: Annotated[
        Path | str | None,
        OptionWords(Path | None, metavar="PATH", default_text="studies/NAME"),
    ] = None,
    storage: Annotated[
        str | None,
        OptionWords(str | None, metavar="STR", default_text="an SQLite file in the study's folder"),
    ] = None,
    workers: Annotated[int, NOT_NEGATIVE, OptionWords(int, default=1)] = 0,
    repeats: Annotated[int, SEEDS] = 0,
    stale_after: Annotated[int, STALE] = 120,
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0,
    on: Annotated[
        str | None, OptionWords(str | None, metavar="STR", default_text="no forecast")
    ] = None,
    quick: bool = False,
    budget: Annotated[
        float | None,
        POSITIVE,
        OptionWords(float | None, metavar="FLOAT", default_text="no limit"),
    ] = None,
    price: PriceTerm | str = PriceTerm.on_demand,
    **options: Any,
) -> "StudyResult":
    """Searches the settings that train a recipe best.

    The folder gets ``study.json`` and ``report.html``. Ctrl-C and SIGTERM end the search with its results so far and
    ``stopped`` set; the same call continues it. The command and other processes may run trials of the study at the same
    time. A :class:`~systolic.core.reporter.Reporter` gets the results so far before the first trial and after each, and
    those of the repeats likewise.

    Args:
        recipe: Name of a recipe, or ``path/to/file.py:function``.
        search: Option of the recipe and its values: optimizer.learning-rate=log:1e-4..1e-2, model.layers=4,6,8. Repeat it for more options.
        trials: Total trials of the study. At most the number of distinct settings, since none is trained twice.
        sampler: How the next trial is chosen: tpe, random, grid or cmaes.
        pruner: How trials are stopped early by their evaluations: hyperband, median or none.
        objective: Validation metric, such as accuracy or max:top5, or seconds, dollars or parameters. Repeat it for a Pareto front, whose best trial is the best by the first metric.
        trial_steps: Optimizer steps of each trial; the final command trains the recipe's own number.
        study: Folder of the study, new or continued. NAME is derived from the recipe, its options and the search.
        storage: Database shared by several machines, such as postgresql://user@host/tuning.
        workers: Worker processes on this machine; 0 runs the trials in this process.
        repeats: Seeds to train the best and the default settings with after the search, to test whether the gain is real; not included in --budget.
        stale_after: Seconds without a heartbeat after which another machine's trial is taken over.
        sampler_seed: Seed of the sampler.
        on: Slice to forecast each trial on, before it runs: trials that do not fit are refused, and costs are known.
        quick: Forecast from the compiler's schedule: memory is exact, the time of ops estimated.
        budget: Upper bound in dollars on the forecast cost of all trials' steps on --on; start-up, evaluations, checkpoints and --repeats are not included.
        price: Which price of the catalogue: on-demand, spot or committed.
        options: Options of the recipe, for every trial.

    Raises:
        OptionError: an option is unknown, out of its range or without effect, or the study belongs to another search.
        NotFoundError: there is no such recipe.
        TakenError: the folder has other files.
        RunError: several trials in a row had no result, or the storage can't be reached.
        MissingExtraError: Optuna is not installed.
    """
    from systolic.tuning import objective as objectives
    from systolic.tuning import sampling
    from systolic.tuning.answer import answer, warn_before
    from systolic.tuning.definition import Tuning, check_forecast, check_options
    from systolic.tuning.search import parse, reader

    source = source_of(recipe, options)
    if isinstance(recipe, str):
        for line in recipes.notes(recipe, trains=False):
            reporter().warn(line)
    sampler = member(Sampler, sampler, "--sampler")
    pruner = None if pruner is None else member(Pruner, pruner, "--pruner")
    price = member(PriceTerm, price, "--price")
    words = _search_words(search, source.recipe.target)
    check_forecast(on, quick=quick, budget=budget, price=price)
    searched = parse(words, reader(source.recipe))
    check_options(
        source, [option.name for option in searched], seeds=repeats, trial_steps=trial_steps
    )
    aims = objectives.parse(objective, source.job.evaluation, priced=on is not None)
    size = sampling.check(sampler, searched, len(aims))
    usual = TRIALS if sampler is not Sampler.grid or size is None else size
    tuning = Tuning(
        recipe=source.recipe,
        options=source.options if source.relative is None else source.relative,
        given=source.given,
        searched=searched,
        aims=aims,
        folder=Path() if study is None else Path(study),
        storage=storage,
        trials=min(trials or usual, size or sys.maxsize),
        sampler=sampler,
        seed=sampler_seed,
        steps=trial_steps,
        on=on,
        quick=quick,
        price=price,
        budget_usd=budget,
        stale_seconds=stale_after,
        seeds=repeats,
    ).settled(pruner, named=study is not None)
    with working(source.recipe.target):
        warn_before(tuning, trials, workers)
        return answer(tuning, workers)


def _choice(value: Any) -> str:
    """A value as it is typed; a float keeps its point, by which the study of the command is the same."""
    from systolic.core.option_words import plain_words

    return str(value) if isinstance(value, float) else plain_words(value)


def _search_words(
    search: Mapping[str, str | Sequence[Any]] | Sequence[str], target: str
) -> list[str]:
    """Searched options with their values as words: ``model.layers=4,6,8``.

    Raises:
        OptionError: there are none.
    """
    if isinstance(search, Mapping):
        if not search:
            raise OptionError(
                f"search is {search!r}; it takes options with their values, such as {{'optimizer.learning-rate': 'log:1e-4..1e-2'}}"
            )
        return [
            f"{name}={values if isinstance(values, str) else ','.join(map(_choice, values if isinstance(values, Iterable) else [values]))}"
            for name, values in search.items()
        ]
    if not search:
        raise OptionError(f"systolic tune {target} needs {SEARCH.text}")
    return list(search)

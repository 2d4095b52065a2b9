"""``systolic.tune``: the search of ``systolic tune`` from Python, with its trials in this process."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from systolic import recipes
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import OptionError, nearest
from systolic.core.option_words import option_words, plain_words
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, check_arguments, dashed
from systolic.planning.objective import PriceTerm
from systolic.recipes.jobs.source import arguments_of
from systolic.tuning.answer import TrialsEnded, TunedSearch, beyond, study_result, wall_time
from systolic.tuning.definition import Tuning
from systolic.tuning.request import TuningRequest
from systolic.tuning.results import StudyResult
from systolic.tuning.sampling import Pruner, Sampler
from systolic.tuning.study import SharedStudy
from systolic.tuning.trials import TrialWorker

INTERRUPTED = "interrupted"


@with_types
def tune(  # noqa: PLR0913
    recipe: Annotated[str, Wording("the name of a recipe or 'path/to/file.py:function'")],
    *,
    search: Mapping[str, str | Sequence[Any]],
    trials: Annotated[int | None, COUNT] = None,
    study: Path | str | None = None,
    objective: Sequence[str] = (),
    sampler: Sampler | str = Sampler.tpe,
    pruner: Pruner | str | None = None,
    trial_steps: Annotated[int | None, COUNT] = None,
    storage: str | None = None,
    repeats: Annotated[int, Range(least=2, only=(0,))] = 0,
    stale_after: Annotated[int, Range(least=4)] = 120,
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0,
    on: str | None = None,
    quick: bool = False,
    budget: Annotated[float | None, POSITIVE] = None,
    price: PriceTerm | str = PriceTerm.on_demand,
    see: Callable[[StudyResult], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> StudyResult:
    """Searches the settings that train a recipe best; the same study as ``systolic tune`` with these options.

    The folder gets ``study.json`` and ``report.html``. Ctrl-C and SIGTERM end the search with its results so far and
    ``stopped`` set; the same call continues it. The command and other processes may run trials of the study at the same time.

    Args:
        recipe: Name of a recipe, or ``path/to/file.py:function``.
        search: Option to its values: a range (``log:1e-4..1e-2``, ``1..8``) or a list of choices.
        trials: Total trials of the study; 20 by default, or every combination of a grid.
        study: Folder of the study; by default ``studies/NAME``.
        objective: Metrics or costs, as ``accuracy``, ``max:top5`` or ``seconds``; by default the recipe's metric.
        sampler: ``tpe``, ``random``, ``grid`` or ``cmaes``.
        pruner: ``hyperband``, ``median`` or ``none``; by default the median where it can judge.
        trial_steps: Steps of each trial, in place of the recipe's.
        storage: URL of a database that several machines share.
        repeats: Seeds to train the best and the default settings with after the search.
        stale_after: Seconds without a heartbeat after which another machine's trial is taken over.
        sampler_seed: Seed of the sampler.
        on: Slice to forecast each trial on.
        quick: Forecast from the compiler's schedule.
        budget: Upper bound in dollars on the forecast cost of all trials' steps on ``on``.
        price: ``on-demand``, ``spot`` or ``committed``.
        see: Called with the results so far after each trial, and after each of the repeats with theirs.
        warn: Called with each warning.
        options: Of the recipe, for every trial.

    Raises:
        OptionError: an option is unknown, out of its range or without effect, or the study is another search's.
        NotFoundError: there is no such recipe.
        TakenError: the folder has files and is no study.
        RunError: several trials in a row had no result, or the storage can't be reached.
        MissingExtraError: Optuna is not installed.
    """
    numbers = {
        "trials": trials,
        "trial_steps": trial_steps,
        "repeats": repeats,
        "stale_after": stale_after,
        "sampler_seed": sampler_seed,
        "budget": budget,
    }
    check_arguments(tune, numbers, lambda name: f"--{dashed(name)}")
    wanted = TuningRequest(
        search=_search(search),
        study=None if study is None else Path(study),
        objective=(objective,) if isinstance(objective, str) else tuple(objective),
        sampler=_member(Sampler, sampler, "--sampler"),
        pruner=None if pruner is None else _member(Pruner, pruner, "--pruner"),
        storage=storage,
        on=on,
        quick=quick,
        price=_member(PriceTerm, price, "--price"),
        **numbers,
    )
    return _tuned(recipe, wanted, options, see, warn)


def _tuned(
    target: str,
    wanted: TuningRequest,
    options: Mapping[str, Any],
    see: Callable[[StudyResult], None],
    warn: Callable[[str], None],
) -> StudyResult:
    recipe = recipes.find(target)
    arguments = arguments_of(recipe, options)
    recipe(arguments).check_effects()
    tuning = wanted.tuning(recipe, arguments, {dashed(name) for name in options})
    notes = (*recipes.notes(target, trains=False), wanted.limit(tuning), wall_time(tuning, 1))
    for line in filter(None, notes):
        warn(line)

    def run(of: Tuning, shared: SharedStudy) -> TrialsEnded:
        if line := beyond(of, study_result(of, shared, weighed=False)):
            warn(line)

        def ended() -> None:
            see(study_result(of, shared, weighed=False))

        worker = TrialWorker(tuning=of, shared=shared, tell=warn, ended=ended)
        with shared.reported():
            worker.work()
        result = study_result(of, shared, stopped=worker.stopped)
        return TrialsEnded(result=result, interrupted=worker.stopped == INTERRUPTED)

    # Searched options follow with their best values.
    searched = {one.name for one in tuning.searched}
    typed = {dashed(name) for name in options}
    words = option_words(recipe.function, arguments, typed=typed, without=searched)
    search = TunedSearch(tuning=tuning, words=words, seeds=wanted.repeats, run=run, tell=warn)
    return search.answer().result


def _search(given: Mapping[str, str | Sequence[Any]]) -> list[str]:
    """Words of ``--search``."""
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            f"search is {given!r}; it takes options with their values, such as {{'optimizer.learning-rate': 'log:1e-4..1e-2'}}"
        )
    return [
        f"{name}={values if isinstance(values, str) else ','.join(map(plain_words, _several(values)))}"
        for name, values in given.items()
    ]


def _several(values: Any) -> Iterable[Any]:
    """Choices of an option, of which one may be given alone."""
    return values if isinstance(values, Iterable) else [values]


Member = TypeVar("Member", bound=enum.Enum)


def _member(kind: type[Member], value: Member | str, option: str) -> Member:
    names = [one.value for one in kind]
    if not isinstance(value, kind) and value not in names:
        near = nearest(value, names) if isinstance(value, str) else ""
        raise OptionError(f"{option} is {value!r}{near}; it takes {', '.join(names)}")
    return kind(value)

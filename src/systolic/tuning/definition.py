"""A search over a recipe's options: its definition, and the job of each trial."""

import inspect
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from systolic import recipes
from systolic.chips import slice
from systolic.core.errors import OptionError, OutOfRangeError, RunError, SystolicError
from systolic.core.files import digest
from systolic.core.option_words import option_words, typed
from systolic.core.ranges import dashed
from systolic.data.fingerprint import contents_of
from systolic.job import Job, Split
from systolic.job.optimizer import Shortened
from systolic.planning.goal import PriceTerm
from systolic.recipes import Recipe
from systolic.recipes.jobs import JobSource
from systolic.runs import paths
from systolic.runs.run import JOB, job_fields
from systolic.training.resuming import flat
from systolic.tuning import objective, sampling
from systolic.tuning.objective import Aim, importance
from systolic.tuning.results import Edge, StudyResult, edge, rows_of
from systolic.tuning.sampling import Pruner, Sampler
from systolic.tuning.search import Searched, parse, reader
from systolic.tuning.study import SharedStudy, StudyAddress, address, check_free

WARMUP = "schedule.warmup"
STUDIES = Path("studies")
"""Default folder for studies."""
PLAIN = (
    "storage",
    "trials",
    "seed",
    "steps",
    "on",
    "quick",
    "budget_usd",
    "stale_seconds",
    "seeds",
)
"""Fields of a search that its record has as they are."""


class SearchRecord(Struct, frozen=True, kw_only=True):
    """A search as its workers read it; fields as those of :class:`Tuning`."""

    storage: str | None
    trials: int
    seed: int
    steps: int | None
    on: str | None
    quick: bool
    budget_usd: int | float | None
    stale_seconds: int
    seeds: int
    recipe: str
    """Name of the recipe."""
    options: Mapping[str, Any]
    """JSON values of its options."""
    given: Sequence[str]
    search: Sequence[str]
    """Searched options as they are typed."""
    objective: Sequence[str]
    """Objectives as they are typed."""
    folder: str
    sampler: Sampler
    pruner: Pruner
    price: PriceTerm
    repeats_of: int | None = None
    """Number of the trial that is repeated; None for the search itself."""


class _SavedJob(Struct):
    """``job.json``, as far as it has the recipe's options."""

    options: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Trials that alternate between the best and the default settings, with new seeds."""

    of: int
    """Number of the best trial."""
    values: Mapping[str, Any]
    """Its settings."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search over a recipe's options, and how its trials run."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Options of all trials, by parameter; paths as they were given."""
    given: frozenset[str] = frozenset()
    """Options that were given, as typed without the dashes before them; the others are defaults."""
    searched: Sequence[Searched]
    aims: Sequence[Aim]
    folder: Path
    storage: str | None
    """URL of a database; None for a file in the folder."""
    trials: int
    sampler: Sampler = Sampler.tpe
    pruner: Pruner = Pruner.none
    seed: int = 0
    steps: int | None = None
    """Steps of a trial, in place of the recipe's."""
    on: str | None = None
    """Slice that the trials are forecast on."""
    quick: bool = False
    price: PriceTerm = PriceTerm.on_demand
    budget_usd: float | None = None
    stale_seconds: int = 120
    seeds: int = 0
    """Seeds to repeat the best and the default settings with after the search; 0 for none."""
    repeats: Repeats | None = None

    def record(self, repeats_of: int | None = None) -> SearchRecord:
        """The search for its workers, or for those that repeat the settings of a trial."""
        return SearchRecord(
            **{name: getattr(self, name) for name in PLAIN},
            recipe=self.recipe.target,
            options=recipes.plain(self.options),
            given=sorted(self.given),
            search=[option.text for option in self.searched],
            objective=[aim.text for aim in self.aims],
            folder=str(self.folder),
            sampler=self.sampler,
            pruner=self.pruner,
            price=self.price,
            repeats_of=repeats_of,
        )

    def check_plain(self) -> None:
        """Checks that worker processes get the options of the recipe as they are.

        Raises:
            OptionError: an option has a value that no text gives.
        """
        for name, text in _texts(self.options).items():
            try:
                is_same = _texts(_options(self.recipe, {name: json.loads(text)}))[name] == text
            except (RunError, TypeError, ValueError):
                is_same = False
            if not is_same:
                raise OptionError(
                    f"{name} is {self.options[name]!r}, which worker processes can't be given; leave workers out to run the trials in this process"
                )

    @classmethod
    def from_record(cls, search: SearchRecord) -> "Tuning":
        """The search of :meth:`record`, without its repeats.

        Raises:
            NotFoundError: there is no such recipe any more.
            RunError: the recipe has changed and takes other options.
        """
        recipe = recipes.find(search.recipe)
        options = _options(recipe, search.options)
        is_priced = search.on is not None
        return cls(
            recipe=recipe,
            options=options,
            given=frozenset(search.given),
            searched=parse(search.search, reader(recipe)),
            aims=objective.parse(search.objective, recipe(options).evaluation, priced=is_priced),
            folder=Path(search.folder),
            sampler=search.sampler,
            pruner=search.pruner,
            price=search.price,
            **{name: getattr(search, name) for name in PLAIN},
        )

    @property
    def definition(self) -> dict[str, Any]:
        """Definition of the study; a study with another definition is not continued."""
        data = {
            split: f"{content.files} files of {content.bytes} bytes with digest {digest([content.names, content.digest], 8)}"
            for split, content in contents_of(self.job.data).items()
        }
        if encoding := self.job.data.encoding():
            data["encoding"] = " ".join(encoding)
        return {**self.named, "data": data}

    @property
    def named(self) -> dict[str, Any]:
        """The definition without the contents of the data, from which the folder's name is derived."""
        plain: dict[str, Any] = {
            "recipe": self.recipe.target,
            "recipe file": digest(self.recipe.source.decode(errors="replace")),
            "options": {name: str(value) for name, value in flat(recipes.plain(self.base)).items()},
            "search": [option.text for option in self.searched],
            "objective": [aim.text for aim in self.aims],
            "sampler": self.sampler.value,
            "pruner": self.pruner.value,
            "sampler seed": self.seed,
            "slice": self.on or "",
            "repeats of": "" if self.repeats is None else str(self.repeats),
        }
        if modules := self.recipe.modules:
            plain["modules"] = {
                name: digest(content.decode(errors="replace"), 8)
                for name, content in modules.items()
            }
        if self.on is not None:
            # Trials' dollars are compared and summed, so they need one price and one kind of forecast.
            plain |= {"price": self.price.value, "forecast": "quick" if self.quick else "full"}
        return json.loads(json.dumps(plain))

    @cached_property
    def base(self) -> dict[str, Any]:
        """Options of a trial, with the defaults of searched options."""
        steps = {} if self.steps is None else {"steps": self.steps}
        return with_values(self.options, steps)

    @cached_property
    def job(self) -> Job:
        """The job with the defaults of searched options."""
        return self.recipe(self.base)

    @property
    def examples(self) -> int | None:
        """Number of validation examples if the first objective is the share of correct ones; None otherwise."""
        job, rule = self.job, self.job.evaluation
        batches = rule.batches if rule.final_batches is None else rule.final_batches
        is_share = self.aims[0].name == "accuracy" and "label" in job.data.fields()
        return job.data.size(Split.validation) if is_share and not batches else None

    def source(self, values: Mapping[str, Any]) -> JobSource:
        """Source of a trial's job."""
        options = with_values(self.base, values)
        source = JobSource(recipe=self.recipe, options=paths.absolute(options))
        schedule = source.job.schedule
        if WARMUP in values and isinstance(schedule, Shortened):
            raise OptionError(
                f"{WARMUP} {schedule.own} is the recipe's default, which {source.job.steps} steps shorten to {schedule.warmup}; search another value near it"
            )
        return source

    def check_run(self, number: int, options: Mapping[str, Any]) -> None:
        """Checks that an existing run in a trial's folder is the trial's, not one from another database.

        Args:
            number: Number of the trial.
            options: Options of its job.

        Raises:
            OptionError: the run was trained with other options.
        """
        file = self.run(number) / JOB
        if not file.is_file():
            return
        try:
            saved = msgspec.convert(job_fields(file.read_bytes()), _SavedJob)
        except (OSError, ValueError):
            return  # resuming the run reports the damage
        before = _dotted(saved.options)
        now = _dotted(json.loads(json.dumps(recipes.plain(options))))
        kept = {dashed(name) for name, value in options.items() if _is_rewritten(name, value)}
        changed = [
            name
            for name, value in now.items()
            if name not in kept and str(value) != str(before.get(name))
        ]
        if changed:
            had, has = (
                ", ".join(f"{name} {settings.get(name)}" for name in changed)
                for settings in (before, now)
            )
            raise OptionError(
                f"{file.parent} was trained with {had}, and trial {number} of the study in {self.address.shown} has {has}: the run belongs to another study; give --study another folder, or --storage the run's own database"
            )

    def run(self, number: int) -> Path:
        """Folder of a trial's run."""
        return self.runs / f"{number:04d}"

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        if self.repeats is None:
            return self.folder / "trials"
        return self.folder / "repeats" / f"{self.repeats.of:04d}"

    def values(self, trial: Any) -> dict[str, Any]:
        """Settings of a trial: drawn, or repeated."""
        if self.repeats is None:
            return {option.name: option.suggest(trial) for option in self.searched}
        settings = self.repeats.values if trial.number % 2 == 0 else {}
        return {**settings, "seed": self.base["seed"] + 1 + trial.number // 2}

    def repeating(self, shared: SharedStudy, number: int) -> "Tuning":
        """The search whose trials repeat the best and the default settings with new seeds.

        Args:
            shared: The study.
            number: Number of its best trial.
        """
        kept = next(trial for trial in shared.trials(self.trials) if trial.number == number).params
        values = {option.name: option.typed(kept[option.name]) for option in self.searched}
        return replace(
            self,
            repeats=Repeats(of=number, values=values),
            searched=(),
            aims=self.aims[:1],
            trials=2 * self.seeds,
            sampler=Sampler.random,
            pruner=Pruner.none,
            on=None,
            budget_usd=None,
        )

    @property
    def address(self) -> StudyAddress:
        """Address of the study."""
        again = "" if self.repeats is None else f"-repeats-{self.repeats.of}"
        return address(self.storage, self.folder, f"{self.folder.name}{again}")

    def settled(self, pruner: Pruner | None, *, named: bool) -> "Tuning":
        """The search with its pruner and folder chosen and its options checked.

        Args:
            pruner: The requested pruner; None chooses the median if the recipe evaluates during training and there is one objective.
            named: Whether the folder is given; otherwise its name is derived from the definition.

        Raises:
            OptionError: there is no evaluation to prune by, or more than one objective; or another option is wrong.
            TakenError: the folder has other files.
        """
        rule, job = self.job.evaluation, self.job
        evaluates = 0 < rule.every < job.steps
        if pruner not in (None, Pruner.none) and len(self.aims) > 1:
            raise OptionError(
                f"--pruner {pruner.value} judges trials by one objective, and {len(self.aims)} are given; leave it out"
            )
        if pruner not in (None, Pruner.none) and not evaluates:
            raise OptionError(
                f"--pruner {pruner.value} judges trials by evaluations during training, and {self.recipe.target} has none before step {job.steps}; add --evaluation.every {max(job.steps // 10, 1)}"
            )
        usual = Pruner.median if evaluates and len(self.aims) == 1 else Pruner.none
        search = replace(self, pruner=pruner or usual)
        if not named:
            plain = self.recipe.target.rpartition("/")[2].replace(".py", "").replace(":", "-")
            search = replace(search, folder=STUDIES / f"{plain}-{digest(search.named, 8)}")
        search.check_bounds()
        check_free(search.folder)
        assert search.address  # refuses a wrong --storage before anything is written
        return search

    def check_bounds(self) -> None:
        """Checks that options accept the bounds of their ranges.

        Bounds that are refused only in combination with another option's default are left to the trials.

        Raises:
            OptionError: an option does not accept a bound of its range.
        """
        for option in self.searched:
            for end in (option.low, option.high) if option.is_range else ():
                try:
                    assert self.source({option.name: end}).job
                except OutOfRangeError as error:
                    raise OptionError(f"--search {option.text}: {error}") from error
                except SystolicError:
                    continue

    def with_command(self, result: StudyResult) -> StudyResult:
        """Adds the command that trains the best settings at full size, and the best values at an end of their range, to a result.

        Args:
            result: Result of this study.
        """
        best = result.best
        if best is None:
            return result
        options = [word for name, value in best.values.items() for word in self._words(name, value)]
        names = {option.name for option in self.searched}
        words = option_words(self.recipe.function, self.options, typed=self.given, without=names)
        line = ["systolic", "train", self.recipe.target, *words, *options]
        return replace(result, command=shlex.join(line), edges=self._edges(best.values))

    def _edges(self, best: Mapping[str, Any]) -> list[Edge]:
        """Best values at an end of their range, unless the recipe takes no value beyond it with the other best ones."""
        own = {option.name: option.typed(best[option.name]) for option in self.searched}

        def accepts(name: str, value: float) -> bool:
            try:
                self.source({**own, name: value}).job.check_effects()
            except (SystolicError, ValueError, TypeError, ArithmeticError):
                return False
            return True

        edges = [
            edge(option, best[option.name], lambda value, name=option.name: accepts(name, value))
            for option in self.searched
        ]
        return [end for end in edges if end is not None]

    def _words(self, name: str, value: Any) -> list[str]:
        """Words of ``train`` for a value that the study stores."""
        option = next(each for each in self.searched if each.name == name)
        return shlex.split(typed(name, option.typed(value)))

    def open(self) -> SharedStudy:
        """Opens or creates the study and its folder.

        Raises the errors of :class:`~systolic.tuning.study.SharedStudy`; OptionError if the folder can't be created.
        """
        definition, directions = self.definition, [aim.direction for aim in self.aims]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"{self.folder} could not be created ({error.strerror}); give --study another folder"
            ) from error
        return SharedStudy(self.address, definition, directions, self.stale_seconds, self.runs)

    def result(
        self, shared: SharedStudy, *, stopped: str = "", weighed: bool = True
    ) -> StudyResult:
        """Results of the study so far.

        Args:
            shared: The study.
            stopped: Why the search ended before all trials were done.
            weighed: Whether to add the importance of options, which takes a second.
        """
        region, as_of = "", ""
        if self.on is not None:
            _, region, as_of = slice(self.on).rate(self.price.name)
        rows = rows_of(shared, self.trials, self.searched, self.aims, self.runs)
        result = StudyResult(
            name=self.address.name,
            recipe=self.recipe.target,
            rows=rows,
            total=max(self.trials, len(rows)),
            searched=self.searched,
            aims=self.aims,
            shares=self.job.task.shares,
            importance=importance(shared.study, self.aims, self.searched) if weighed else {},
            stopped=stopped,
            price_region=region,
            price_as_of=as_of,
            first_seed=None if self.repeats is None else self.base["seed"] + 1,
            has_repeats=self.seeds > 0 and self.repeats is None,
        )
        # A trial that ended early may have left the budget for the last ones.
        return result if result.finished < result.total else replace(result, stopped="")

    def pruning(self) -> Any:
        """Optuna's pruner for the runs' evaluations."""
        job = self.job
        longest = self.longest if self.pruner is Pruner.hyperband else job.steps
        return sampling.pruner(self.pruner, job.evaluation.every or longest, longest)

    @cached_property
    def longest(self) -> int:
        """Steps of the longest trial, found by maximising over each option in turn."""
        steps, values = self.job.steps, {}
        for option in self.searched:
            for value in (option.choices or {"low": option.low, "high": option.high}).values():
                tried = {**values, option.name: int(value) if option.whole else value}
                try:
                    length = self.source(tried).job.steps
                except SystolicError:
                    continue
                if length > steps:
                    steps, values = length, tried
        return steps


def check_options(
    source: JobSource, searched: Collection[str], *, seeds: int, trial_steps: int | None
) -> None:
    """Checks the options of a recipe against those that are searched.

    Args:
        source: The recipe with its options.
        searched: Names of the searched options.
        seeds: Seeds of the repeats; 0 for none.
        trial_steps: Steps of a trial; None for the recipe's.

    Raises:
        OptionError: an option is both given and searched, or the recipe lacks one that the search sets.
    """
    target = source.recipe.target
    for name in searched:
        if name in source.given:
            raise OptionError(f"--{name} is both given and searched; leave one out")
    if seeds and "seed" not in source.options:
        raise OptionError(
            f"--repeats needs an option seed, which {target} does not have; add it to the recipe, or leave --repeats out"
        )
    if seeds and "seed" in searched:
        raise OptionError("--repeats sets the seed, which is also searched; leave one out")
    if "steps" in searched and trial_steps is not None:
        raise OptionError("--trial-steps is given and steps is searched; leave one out")
    if trial_steps is not None and "steps" not in {
        dashed(name) for name in inspect.signature(source.recipe.function).parameters
    }:
        raise OptionError(
            f"--trial-steps needs an option steps, which {target} does not have; leave --trial-steps out"
        )


def check_forecast(on: str | None, *, quick: bool, budget: float | None, price: PriceTerm) -> None:
    """Checks the slice of the forecasts, and that options of a forecast have one.

    Raises:
        OptionError: there is no slice.
        NotFoundError: there is no such slice.
    """
    chosen = {
        "--quick": quick,
        "--budget": budget is not None,
        "--price": price is not PriceTerm.on_demand,
    }
    for name, is_given in chosen.items():
        if is_given and on is None:
            raise OptionError(f"{name} needs a forecast, and no slice is given; add --on v5e-4")
    if on is not None:
        slice(on)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as JSON texts."""
    return {name: json.dumps(value) for name, value in recipes.plain(options).items()}


def _options(recipe: Recipe, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a recipe from JSON values, with the whole numbers that stand for a float as they were.

    A study's definition has their text, which tells ``1`` from ``1.0``.
    """
    options = recipes.typed(recipe, plain)
    return {name: _with_ints(value, plain[name]) for name, value in options.items()}


def _with_ints(value: Any, plain: Any) -> Any:
    if isinstance(value, float) and type(plain) is int:
        return plain
    if isinstance(value, tuple):
        return tuple(map(_with_ints, value, plain))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    inner = {each.name: getattr(value, each.name) for each in fields(value) if each.name in plain}
    read = {name: _with_ints(number, plain[name]) for name, number in inner.items()}
    changed = {name: number for name, number in read.items() if number is not inner[name]}
    return replace(value, **changed) if changed else value


def _dotted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted name as typed: ``optimizer.learning-rate``."""
    return {
        ".".join(map(dashed, name.split("."))): setting for name, setting in flat(options).items()
    }


def _is_rewritten(name: str, value: Any) -> bool:
    """Whether a run keeps an option in a form of its own: paths, and what data and text settle where it is None."""
    parts = value if isinstance(value, tuple | list) else (value,)
    settled = value is None and name in ("tokenizer", "classes")
    return settled or any(isinstance(part, Path) for part in parts)


def with_values(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces options by dotted name (``model.layers``, ``model.d-ff``); fields of one record change together.

    Raises:
        OptionError: an option does not exist, or a record refuses its values.
    """
    changes: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            changes.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    known = {dashed(name): name for name in options}
    replaced = dict(options)
    for head, change in changes.items():
        own = known.get(dashed(head))
        if own is None:
            raise OptionError(f"the recipe has no option {head}; leave it out")
        record = replaced[own]
        if not is_dataclass(record) or isinstance(record, type):
            replaced[own] = change
            continue
        inner = {each.name: getattr(record, each.name) for each in fields(record)}
        replacements = with_values(inner, change)
        replaced[own] = replace(
            record, **{n: v for n, v in replacements.items() if v is not inner[n]}
        )
    return replaced

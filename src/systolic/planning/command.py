"""``systolic plan`` and :func:`systolic.plan`: the slice and the layout that reach a goal best, of slices given by name, by chip or as ``any``."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic import recipes
from systolic.chips import SLICES, ChipKind, Slice, chips, named_slices, slice
from systolic.chips.flags import resolved
from systolic.core.arguments import (
    PYTHON,
    WRITTEN,
    OptionWords,
    Required,
    Wording,
    command_of,
    explained_by,
    member,
)
from systolic.core.errors import OptionError, nearest
from systolic.core.files import write_json
from systolic.core.machine import bounded_workers
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.core.reporter import reporter, working
from systolic.core.units import GB, plural
from systolic.forecasting.command import forecast_command
from systolic.job import Job
from systolic.planning.goal import MAX_CHIPS, Goal, Objective, PriceTerm, hourly
from systolic.recipes.jobs import JobSource, source_of
from systolic.sim.calibration import Calibration

if TYPE_CHECKING:
    from systolic.capture import Captured
    from systolic.forecasting.ranking import Ranking
    from systolic.planning.analytic import Facts
    from systolic.planning.plan import Plan
    from systolic.planning.search import OpenEvaluator, Search, SearchProgress
    from systolic.planning.space import Freedom
    from systolic.planning.wall import Conditions


JOB = Wording("a Job or the name of a recipe or a model")
SPAN = Wording("a time such as '90m', '36h' or '3d'")
ON = Required("slices; add --on v5e-16,v5p-8, --on v5e, or --on any")

USAGE = """usage: systolic plan RECIPE --on SLICES [options]
       systolic plan serve MODEL --on SLICES --requests-per-second N [options]
       systolic plan --on SLICES [options] -- python train.py [its options]

RECIPE is a name that systolic recipes lists, path/to/file.py:function, or a model: llama-3.1-70b, a config.json,
a Hugging Face folder or a Bundle; weights are not needed. Every layout of every slice is analysed, and the most
promising are compiled by the real compiler, best first, until the best one is settled. Compiles are kept: rerun to
continue after Ctrl-C or --time-limit.
SLICES is a list: v5e-16,v5p-8; v5e stands for all slices of that chip, any for all slices of TPUs with a
price. GPUs such as 8xh100 are compiled too with the extra gpu-forecast, else ranked by a roofline.
A recipe is planned for its train step; systolic forecast and systolic explain have --step for others. plan serve
plans a server of a model for a demand: systolic plan serve --help shows its options.
-- runs a JAX program of your own, unchanged, once for each slice until its step is known, and ranks the slices. The
program chooses its mesh and batch. A slice where it fails is listed with the reason.

Exits with 1 when nothing fits and meets the goal. systolic train RECIPE --plan plan.json runs the plan.
systolic plan RECIPE --help shows the recipe's options."""
FREE = ("batch", "precision")
FINALISTS = 2
"""Full compiles of a search where none are given."""
GOALS = (Objective.cost, Objective.time)
"""Goals that rank slices for a program."""
ANY = "any"


@command_of
def plan(  # noqa: PLR0913  the options of systolic plan
    job: Annotated[Job | JobSource | str, JOB],
    *,
    on: Annotated[str | Slice | Sequence[str | Slice], SLICES, ON],
    tokens: Annotated[float | None, POSITIVE] = None,
    examples: Annotated[float | None, POSITIVE] = None,
    goal: Objective | None = None,
    deadline: Annotated[str | None, SPAN] = None,
    budget: Annotated[float | None, POSITIVE] = None,
    price: PriceTerm | str | float = PriceTerm.on_demand,
    start_up: Annotated[str | None, SPAN] = None,
    storage_rate: Annotated[float | None, POSITIVE] = None,
    preemptions_per_day: Annotated[float | None, NOT_NEGATIVE] = None,
    grid_intensity: Annotated[float | None, NOT_NEGATIVE] = None,
    free: str = "",
    flags: str = "",
    max_chips: Annotated[int, COUNT] = MAX_CHIPS,
    programs: Annotated[int, COUNT] = 24,
    finalists: Annotated[int | None, NOT_NEGATIVE] = None,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    time_limit: Annotated[str | None, SPAN] = None,
    calibration: Annotated[Calibration | Path | str | None, OptionWords(str, default="")] = None,
    out: Annotated[Path | str | None, OptionWords(Path, default=Path("plan.json")), WRITTEN] = None,
    evaluator: Annotated["OpenEvaluator | None", PYTHON] = None,
    **options: Any,
) -> "Plan":
    """Finds the slice and the layout that reach a goal best, without the hardware.

    Ctrl-C ends the search with the best so far.

    Args:
        job: Job to train; its layout is searched. A name is that of a recipe or of a published
            model, or the path of a config.json, a Hugging Face folder or a Bundle.
        on: Slices, chips (all slices of them) or any, with commas: v5e-16,v5p.
        tokens: Tokens to train on; by default the job's own steps times its batch.
        examples: Examples to train on, instead of tokens.
        goal: What to minimize: time, cost, energy, pareto for time and cost, or fit for the fewest chips, with passes and rematerialisation free. By default cost under a deadline, time under a budget or on one slice, else pareto.
        deadline: Time limit for the training: 90m, 36h, 3d or 1w.
        budget: Dollar limit for the training.
        price: Which price of the catalogue: on-demand, spot or committed; or dollars per chip and hour, 0 for free chips.
        start_up: Start-up time of the job, compile included: 5m. By default the compile time on this machine plus 2 minutes, an assumption.
        storage_rate: GB/s that a host reads from and writes to storage, for checkpoints and data; by default 1, an assumption.
        preemptions_per_day: Preemptions of the slice; by default 0, and with spot prices 1, an assumption.
        grid_intensity: Grams of CO2 per kWh where the slice runs; the plan then states kilograms.
        free: What may change besides the layout: batch, precision or batch,precision.
        flags: Compiler flags on top of the set that all jobs on a chip share (systolic chips v5e lists it); none leaves that set out.
        max_chips: Largest slice, in chips, that any or the name of a chip stands for.
        programs: Limit of compiles up to the compiler's schedule, kept ones included.
        finalists: Number of the best that get a full compile: by default 2, and none for the goal fit, since memory is exact without one.
        workers: Parallel compiles; 0 takes as many as cores and memory allow.
        time_limit: Answer with the best plan after this time: 20m, 2h.
        calibration: Correct the simulator with profiles of the slices' chip: a name that systolic calibrations lists, or a calibration's file.
        out: File for the plan, written from the first answer on; without an answer an earlier file stays.
        evaluator: Tells what a candidate does; by default the compiler.
        options: Options of the recipe that ``job`` names.

    Raises:
        OptionError: options contradict each other or do not parse.
        NotFoundError: a name that is neither a slice nor a chip, or that is no calibration.
    """
    from systolic.forecasting.calibrations import calibration_for
    from systolic.planning.analytic import facts_of
    from systolic.planning.goal import span
    from systolic.planning.search import Limits, Search
    from systolic.planning.wall import Conditions

    source = source_of(job, options)
    if tokens is not None and examples is not None:
        raise OptionError("--tokens and --examples say the same in two ways; give one of them")
    resolved(flags, None)  # its words, before anything takes time
    conditions = Conditions(
        start_seconds=None if start_up is None else span(start_up),
        storage_bytes_per_second=None if storage_rate is None else storage_rate * GB,
        preemptions_per_day=preemptions_per_day,
        grid_g_per_kwh=grid_intensity,
    )
    seconds = None if time_limit is None else span(time_limit)
    freedom, (term, chip_usd) = freed(free), price_of(price)
    wanted = Wanted(
        tokens=tokens,
        examples=examples,
        objective=goal,
        deadline_seconds=None if deadline is None else span(deadline),
        budget_usd=budget,
        price=term,
        chip_usd=chip_usd,
    )
    slices = all_slices(on, max_chips, None if chip_usd is not None else term)
    evaluator = corrected(evaluator, calibration_for(calibration, slices))
    facts = facts_of(source.job)
    file = PlanFile(source, None if out is None else Path(out))
    search = Search(
        facts=facts,
        slices=slices,
        goal=goal_of(facts, slices, wanted),
        freedom=freedom,
        flags=lambda on: resolved(flags, on.chip),
        limits=Limits(
            programs=programs,
            finalists=full_compiles(wanted, finalists),
            workers=bounded_workers(workers),
            seconds=seconds,
        ),
        watch=file.see,
        evaluator=evaluator,
    )
    with working(source.job.name):
        return file.kept(searched(search, wanted, conditions))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A goal as it was asked for, before the job's own work and the slices fill in the rest."""

    tokens: float | None = None
    examples: float | None = None
    objective: Objective | None = None
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    price: PriceTerm = PriceTerm.on_demand
    chip_usd: float | None = None


def price_of(price: PriceTerm | str | float) -> tuple[PriceTerm, float | None]:
    """A kind of price of the catalogue, and dollars of a chip and hour where these are given instead.

    Raises:
        OptionError: neither a kind of price nor dollars from 0 on.
    """
    if isinstance(price, PriceTerm):
        return price, None
    try:
        usd = float(price)
    except ValueError:
        return member(PriceTerm, str(price), "--price"), None
    if not 0.0 <= usd < float("inf"):
        raise OptionError(
            f"--price is {price}; give dollars of a chip and hour from 0 on, or on-demand, spot or committed"
        )
    return PriceTerm.on_demand, usd


def goal_of(facts: "Facts", slices: Sequence[Slice], wanted: Wanted) -> Goal:
    """The goal, made definite.

    Raises:
        OptionError: tokens of a job that has none.
    """
    from systolic.planning.plan import default_objective
    from systolic.planning.space import global_batch

    job = facts.job
    if wanted.tokens is not None and facts.unit != "tokens":
        raise OptionError(f"{job.name} has no tokens; give --examples")
    if wanted.tokens is not None:
        units = wanted.tokens
    elif wanted.examples is not None:
        units = wanted.examples * facts.units_per_example
    else:
        # A batch per device makes more work on a larger slice: the smallest counts, whatever the order of slices.
        batch = min(global_batch(job, on) for on in slices)
        units = float(job.steps * batch * facts.units_per_example)
    objective = wanted.objective or default_objective(
        len(slices), wanted.deadline_seconds is not None, wanted.budget_usd is not None
    )
    return Goal(
        objective=objective,
        units=units,
        unit=facts.unit,
        deadline_seconds=wanted.deadline_seconds,
        budget_usd=wanted.budget_usd,
        price=wanted.price,
        chip_usd=wanted.chip_usd,
    )


def full_compiles(wanted: Wanted, finalists: int | None) -> int:
    """Full compiles of a search: those given, else two, and none where only the memory decides."""
    if finalists is not None:
        return finalists
    return 0 if wanted.objective is Objective.fit else FINALISTS


def freed(text: str) -> "Freedom":
    """``batch,precision`` as what the search may change.

    Raises:
        OptionError: another word.
    """
    from systolic.planning.space import Freedom

    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in FREE:
            raise OptionError(
                f"--free is {word!r}{nearest(word, FREE)}; it takes batch, precision or batch,precision"
            )
    return Freedom(batch="batch" in words, precision="precision" in words)


@dataclass
class PlanFile:
    """The plan's file, which has the best so far: a kill leaves it."""

    source: JobSource
    out: Path | None
    best: list[Any] = field(default_factory=list)

    def see(self, progress: "SearchProgress") -> None:
        """Reports the progress, and writes a best that is new."""
        reporter().update(progress)
        if self.out is None or progress.best is None or progress.best in self.best[-1:]:
            return
        self.best.append(progress.best)
        write_json(self.out, self._named(progress.answer()).to_json())

    def kept(self, plan: "Plan") -> "Plan":
        """The plan, written where it has an answer or no other plan is there."""
        named = self._named(plan)
        if self.out is None:
            return named
        if plan.best is None and not (plan.tried and not self.out.exists()):
            return named
        write_json(self.out, named.to_json())
        return replace(named, saved=self.out)

    def _named(self, plan: "Plan") -> "Plan":
        if self.source.recipe.of_job:
            return plan
        return replace(
            plan,
            target=self.source.recipe.target,
            options=recipes.plain(self.source.options),
            arguments=tuple(self.source.words),
        )


def corrected(
    evaluator: "OpenEvaluator | None", calibration: Calibration | None
) -> "OpenEvaluator":
    """The compiler's evaluator with corrections.

    Raises:
        OptionError: the evaluator is another, which tells times of its own.
    """
    from systolic.planning.search import CompilingEvaluator
    from systolic.sim.incomplete import Given

    if calibration is None:
        return evaluator or CompilingEvaluator
    if evaluator is not None:
        raise OptionError(
            f"calibration is {calibration.name}, and the evaluator is not the compiler's but another with times of its own; give one of them"
        )
    return partial(CompilingEvaluator, given=Given(calibration=calibration))


def searched(search: "Search", wanted: Wanted, conditions: "Conditions") -> "Plan":
    """The plan of a search, with the wall-clock of its best and with notes."""
    from systolic.planning.fit_ladder import smallest_fit
    from systolic.planning.wall import wall_of

    smallest = search.goal.objective is Objective.fit
    plan = smallest_fit(search) if smallest else search.run()
    if plan.best is not None:
        wall = wall_of(search.facts, plan.goal, plan.best, conditions)
        plan = replace(plan, wall=wall)
    from systolic.planning.notes import after_search, before_search

    own = wanted.tokens is None and wanted.examples is None
    before = before_search(search.facts, search.slices, search.freedom, own_work=own)
    after = after_search(plan, search.slices, search.freedom, search.limits.finalists)
    return replace(plan, notes=(*before, *after))


@command_of
@explained_by(plan, forecast_command)
def plan_program(  # noqa: PLR0913  the options of systolic plan -- COMMAND
    command: Annotated[
        Sequence[str], Wording("the words of a command, such as ['python', 'train.py']")
    ],
    *,
    on: Annotated[
        str | Slice | Sequence[str | Slice],
        SLICES,
        Required("slices; add --on v5e-8,v5e-16 before the --"),
    ],
    goal: Objective = Objective.cost,
    step: str = "",
    full: bool = False,
    minutes: Annotated[float, POSITIVE] = 20.0,
    max_chips: Annotated[int, COUNT] = MAX_CHIPS,
    trips: Annotated[
        Mapping[str, float | str] | Sequence[str], OptionWords(tuple[str, ...], repeated=True)
    ] = (),
    costs: Annotated[
        Mapping[str, float | str] | Sequence[str],
        OptionWords(tuple[str, ...], repeated=True, name="cost"),
    ] = (),
    calibration: Annotated[Calibration | Path | str | None, OptionWords(str, default="")] = None,
) -> "Ranking":
    """Ranks slices for a program of your own (-- python train.py).

    Args:
        command: The program with its options; it runs in its own environment, unchanged.
        on: Slices of TPUs or GPUs, chips (all slices of them) or any, with commas: v5e-8,v5e-16,v6e-8. The program is started once for each.
        goal: What ranks them: cost or time, for the same work.
        full: Compile in full, with the compiler's cycles, rather than up to its schedule.
        minutes: Limit in minutes for the program to reach its step on each slice.
        trips: Number of iterations of a loop whose length the program does not fix, NAME=NUMBER, such as while.5=100; may be repeated.
        costs: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.

    Raises:
        OptionError: an option that does not parse, or a goal that ranks no slices.
        NotFoundError: there is no such command, slice or chip.
    """
    from systolic.capture import capture, short_name
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.ranking import rank
    from systolic.sim.incomplete import given

    if goal not in GOALS:
        names = " or ".join(objective.value for objective in GOALS)
        raise OptionError(f"--goal is {goal.value}; slices of a program rank by {names}")
    slices = all_slices(on, max_chips, None)
    known = replace(given(trips, costs), calibration=calibration_for(calibration, slices))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="systolic-") as root:

        def captured_for(place: Slice) -> "Captured":
            folder = Path(root) / f"{slices.index(place)}"
            folder.mkdir()
            number = f"[{slices.index(place) + 1}/{len(slices)}]"
            with working(f"{number} {short_name(command)} for {place.name}") as progress:
                return capture(
                    command,
                    place,
                    folder,
                    step=step,
                    quick=not full,
                    limit_seconds=60 * minutes,
                    watch=progress.stage,
                )

        ranking = rank(
            " ".join(command),
            slices,
            captured_for,
            by_time=goal is Objective.time,
            given=known,
        )
    seconds = round(time.monotonic() - began, 1)
    ranking = replace(ranking, goal=goal.value, quick=not full, seconds=seconds)
    return replace(ranking, notes=[*_corrected(ranking), *ranking.notes])


def _corrected(ranking: "Ranking") -> list[str]:
    """A line on the calibration of the steps' times; none without one."""
    from systolic.forecasting.calibrations import told_of_steps

    forecasts = [row.forecast for row in ranking.table if row.forecast is not None]
    return told_of_steps(
        [forecast.timeline for forecast in forecasts if forecast.timeline is not None]
    )


def all_slices(
    on: str | Slice | Sequence[str | Slice], max_chips: int, price: PriceTerm | None
) -> list[Slice]:
    """Slices that are given, and those that names stand for, each once.

    Raises: as :func:`slices_of`.
    """
    slices: dict[str, Slice] = {}
    for part in [on] if isinstance(on, str | Slice) else on:
        meant = slices_of(part, max_chips, price) if isinstance(part, str) else [part]
        slices |= {place.name: place for place in meant}
    return list(slices.values()) or slices_of("", max_chips, price)


def slices_of(text: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices of a list of names, of chips and of ``any`` (those with a price, where ``price`` is given); each once, as given.

    Raises:
        NotFoundError: a name that is neither a slice nor a chip.
        OptionError: nothing is left below ``max_chips``.
    """
    slices: dict[str, Slice] = {}
    for word in (part.strip() for part in text.split(",")):
        if word:
            slices |= {on.name: on for on in _meant(word, max_chips, price)}
    if not slices:
        raise OptionError("--on names no slice; give v5e-16,v5p-8, a chip such as v5e, or any")
    return list(slices.values())


def _meant(word: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices that one word of the list stands for."""
    tpus = [chip for chip in chips() if chip.kind is ChipKind.tpu and chip.slice_rule is not None]
    if word.lower() == ANY:
        slices = [
            on
            for chip in tpus
            for on in named_slices(chip)
            if price is None or hourly(on, price) is not None
        ]
        what = "of TPUs" if price is None else f"with a price {price.value}"
    else:
        meant = [chip for chip in tpus if word.lower() in (chip.name, *chip.aliases)]
        if not meant:
            on = slice(word)
            if on.platform == "cpu":
                raise OptionError(
                    f"{on.name} is this machine: plan is for TPU and GPU slices; systolic forecast --on {on.name} shows one layout"
                )
            return [on]
        slices, what = named_slices(meant[0]), f"of {meant[0].name}"
    small = [on for on in slices if on.num_chips <= max_chips]
    if not small:
        raise OptionError(
            f"no slice {what} has {plural(max_chips, 'chip')} or fewer; raise --max-chips or name a slice"
        )
    return small

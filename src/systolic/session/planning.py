"""From a job and the slices it may run on to a plan: what ``systolic plan`` and :func:`systolic.plan` call."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from systolic import recipes
from systolic.chips import SLICES, ChipKind, Slice, chips, named_slices, slice
from systolic.chips.flags import resolved
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, check_arguments, dashed
from systolic.core.units import GB
from systolic.forecasting.calibrations import calibration_for
from systolic.job import Job
from systolic.planning.evaluator import CompilingEvaluator, OpenEvaluator
from systolic.planning.facts import Facts, facts_of
from systolic.planning.goal import Goal, hourly, span
from systolic.planning.ladder import smallest_fit
from systolic.planning.notes import after_search, before_search
from systolic.planning.objective import Objective, PriceTerm
from systolic.planning.plan import Plan, default_objective
from systolic.planning.search import Limits, Search, SearchProgress
from systolic.planning.space import Freedom, global_batch
from systolic.planning.wall import Conditions, wall_of
from systolic.session.job_source import source_of
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import Given

ANY = "any"
FREE = ("batch", "precision")
MAX_CHIPS = 256
SPAN = Wording("a time such as '90m', '36h' or '3d'")


@with_types
def plan(  # noqa: PLR0913  the options of systolic plan
    job: Annotated[Job | str, Wording("a Job or the name of a recipe or a model")],
    *,
    on: Annotated[str | Slice | Sequence[str | Slice], SLICES],
    tokens: Annotated[float | None, POSITIVE] = None,
    examples: Annotated[float | None, POSITIVE] = None,
    goal: Objective | str | None = None,
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
    limits: Limits | None = None,
    calibration: Calibration | Path | str | None = None,
    watch: Callable[[SearchProgress], None] = lambda _: None,
    evaluator: OpenEvaluator = CompilingEvaluator,
    **options: Any,
) -> Plan:
    """The slice and the layout that reach a goal best; nothing of the slices need be there.

    Args:
        job: What to train; its layout is what is searched. A name is that of a recipe or of a published
            model, or the path of a config.json, a Hugging Face folder or a Bundle.
        on: Slices, or names with commas: ``v5e-16,v5p-8``; ``v5e`` for all slices of a chip, ``any`` for all of TPUs.
        tokens: To train on; by default the job's own steps times its batch.
        examples: To train on, instead of tokens.
        goal: ``time``, ``cost``, ``energy``, ``pareto`` or ``fit``, the fewest chips; by default by the limits, as the command's.
        deadline: For all the training: ``90m``, ``36h``, ``3d``.
        budget: Dollars for all the training.
        price: ``on-demand``, ``spot`` or ``committed``; or dollars of a chip and hour, 0 for chips that cost nothing.
        start_up: Start of the job with its compile, ``5m``; for the wall-clock, as the next three.
        storage_rate: GB/s that a host reads from and writes to storage.
        preemptions_per_day: Preemptions of the slice.
        grid_intensity: Grams of CO2 per kWh.
        free: What may change beside the layout: ``batch``, ``precision`` or ``batch,precision``.
        flags: Of the compiler, beside those that all jobs on a chip share; ``none`` leaves these out.
        max_chips: Of a slice that ``any`` or the name of a chip stands for.
        limits: When the search ends.
        calibration: Name or file of corrections that ``systolic calibrate`` made of profiles of the slices' chip.
        watch: Is given the progress; Ctrl-C ends the search with the best so far.
        evaluator: Tells what a candidate does; by default the compiler.
        options: Of the recipe that ``job`` names.

    Raises:
        OptionError: options that contradict each other or do not parse.
        NotFoundError: a name that is neither a slice nor a chip, or that is no calibration.
    """
    source = source_of(job, options) if isinstance(job, str) else None
    if source is not None:
        job = source.job
    elif not isinstance(job, str) and options:
        job = source_of(job, options).job
    assert isinstance(job, Job)
    numbers = {"tokens": tokens, "examples": examples, "budget": budget, "max_chips": max_chips}
    numbers |= {"storage_rate": storage_rate, "preemptions_per_day": preemptions_per_day}
    numbers |= {"grid_intensity": grid_intensity}
    check_arguments(plan, numbers, lambda name: f"--{dashed(name)}")
    if tokens is not None and examples is not None:
        raise OptionError("--tokens and --examples say the same in two ways; give one of them")
    resolved(flags, None)  # its words, before anything takes time
    conditions = Conditions(
        start_seconds=None if start_up is None else span(start_up),
        storage_bytes_per_second=None if storage_rate is None else storage_rate * GB,
        preemptions_per_day=preemptions_per_day,
        grid_g_per_kwh=grid_intensity,
    )
    freedom, limits = freed(free), limits or Limits()
    term, chip_usd = price_of(price)
    wanted = Wanted(
        tokens=tokens,
        examples=examples,
        objective=None if goal is None else member(Objective, goal, "--goal"),
        deadline_seconds=None if deadline is None else span(deadline),
        budget_usd=budget,
        price=term,
        chip_usd=chip_usd,
    )
    slices = all_slices(on, max_chips, None if chip_usd is not None else term)
    evaluator = _corrected(evaluator, calibration_for(calibration, slices))
    facts = facts_of(job)
    search = Search(
        facts=facts,
        slices=slices,
        goal=goal_of(facts, slices, wanted),
        freedom=freedom,
        flags=lambda on: resolved(flags, on.chip),
        limits=limits,
        watch=watch,
        evaluator=evaluator,
    )
    made = _searched(search, wanted, conditions)
    if source is None:
        return made
    return replace(made, target=source.recipe.target, options=recipes.plain(source.options))


def _corrected(evaluator: OpenEvaluator, calibration: Calibration | None) -> OpenEvaluator:
    """The compiler's evaluator with corrections.

    Raises:
        OptionError: the evaluator is another, which tells times of its own.
    """
    if calibration is None:
        return evaluator
    if evaluator is not CompilingEvaluator:
        raise OptionError(
            f"calibration is {calibration.name}, and the evaluator is not the compiler's but another with times of its own; give one of them"
        )
    return partial(CompilingEvaluator, given=Given(calibration=calibration))


def _searched(search: Search, wanted: "Wanted", conditions: Conditions) -> Plan:
    """The plan of a search, with the wall-clock of its best and with notes."""
    smallest = search.goal.objective is Objective.fit
    found = smallest_fit(search) if smallest else search.run()
    if found.best is not None:
        wall = wall_of(search.facts, found.goal, found.best, conditions)
        found = replace(found, wall=wall)
    return _with_notes(found, search, wanted)


def _with_notes(made: Plan, search: Search, wanted: "Wanted") -> Plan:
    own = wanted.tokens is None and wanted.examples is None
    before = before_search(search.facts, search.slices, search.freedom, own_work=own)
    after = after_search(made, search.slices, search.freedom, search.limits.finalists)
    return replace(made, notes=(*before, *after))


Member = TypeVar("Member", bound=enum.Enum)


def member(kind: type[Member], value: Member | str, option: str) -> Member:
    """The member of an enum, or of its value.

    Raises:
        OptionError: a word that is none of its values.
    """
    names = [one.value for one in kind]
    if isinstance(value, str) and value not in names:
        raise OptionError(
            f"{option} is {value!r}{nearest(value, names)}; it takes {', '.join(names)}"
        )
    return kind(value)


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


def price_of(given: PriceTerm | str | float) -> tuple[PriceTerm, float | None]:
    """A kind of price of the catalogue, and dollars of a chip and hour where these are given instead.

    Raises:
        OptionError: neither a kind of price nor dollars from 0 on.
    """
    if isinstance(given, PriceTerm):
        return given, None
    try:
        usd = float(given)
    except ValueError:
        return member(PriceTerm, str(given), "--price"), None
    if not 0.0 <= usd < float("inf"):
        raise OptionError(
            f"--price is {given}; give dollars of a chip and hour from 0 on, or on-demand, spot or committed"
        )
    return PriceTerm.on_demand, usd


def goal_of(facts: Facts, slices: Sequence[Slice], wanted: Wanted) -> Goal:
    """The goal, made definite.

    Raises:
        OptionError: tokens of a job that has none.
    """
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


def freed(text: str) -> Freedom:
    """``batch,precision`` as what the search may change.

    Raises:
        OptionError: another word.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in FREE:
            raise OptionError(
                f"--free is {word!r}{nearest(word, FREE)}; it takes batch, precision or batch,precision"
            )
    return Freedom(batch="batch" in words, precision="precision" in words)


def all_slices(
    on: str | Slice | Sequence[str | Slice], max_chips: int, price: PriceTerm | None
) -> list[Slice]:
    """Slices that are given, and those that names stand for, each once.

    Raises: as :func:`slices_of`.
    """
    found: dict[str, Slice] = {}
    for part in [on] if isinstance(on, str | Slice) else on:
        meant = slices_of(part, max_chips, price) if isinstance(part, str) else [part]
        found |= {one.name: one for one in meant}
    return list(found.values()) or slices_of("", max_chips, price)


def slices_of(text: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices of a list of names, of chips and of ``any`` (those with a price, where ``price`` is given); each once, as given.

    Raises:
        NotFoundError: a name that is neither a slice nor a chip.
        OptionError: nothing is left below ``max_chips``.
    """
    found: dict[str, Slice] = {}
    for word in (part.strip() for part in text.split(",")):
        if word:
            found |= {on.name: on for on in _meant(word, max_chips, price)}
    if not found:
        raise OptionError("--on names no slice; give v5e-16,v5p-8, a chip such as v5e, or any")
    return list(found.values())


def _meant(word: str, max_chips: int, price: PriceTerm | None) -> list[Slice]:
    """The slices that one word of the list stands for."""
    tpus = [one for one in chips() if one.kind is ChipKind.tpu and one.slice_rule is not None]
    if word.lower() == ANY:
        found = [
            on
            for one in tpus
            for on in named_slices(one)
            if price is None or hourly(on, price) is not None
        ]
        what = "of TPUs" if price is None else f"with a price {price.value}"
    else:
        meant = [one for one in tpus if word.lower() in (one.name, *one.aliases)]
        if not meant:
            on = slice(word)
            if on.platform == "cpu":
                raise OptionError(
                    f"{on.name} is this machine: plan is for TPU and GPU slices; systolic forecast --on {on.name} shows one layout"
                )
            return [on]
        found, what = named_slices(meant[0]), f"of {meant[0].name}"
    small = [on for on in found if on.num_chips <= max_chips]
    if not small:
        raise OptionError(
            f"no slice {what} has {max_chips} chips or fewer; raise --max-chips or name a slice"
        )
    return small

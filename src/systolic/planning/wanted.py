"""A goal as it is asked for, and the one that a job and its slices make of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.core.arguments import member
from systolic.core.errors import OptionError, nearest
from systolic.planning.facts import Facts
from systolic.planning.goal import Goal
from systolic.planning.objective import Objective, PriceTerm
from systolic.planning.plan import default_objective
from systolic.planning.space import Freedom, global_batch

FREE = ("batch", "precision")


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

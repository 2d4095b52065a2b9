"""Goal of a plan (the shortest time, the lowest cost or energy, a deadline, a budget), its price, and limits of the search: compiles, time, workers."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.core.machine import bounded
from systolic.core.units import dollars, duration
from systolic.forecasting.cost import bill_of

MAX_CHIPS = 256
"""Chips of a slice that ``any`` or the name of a chip stands for, at most."""
HOUR = 3600.0
_SPANS = {"s": 1.0, "m": 60.0, "h": HOUR, "d": 24 * HOUR, "w": 7 * 24 * HOUR}
WORKER_BYTES = 4 * 2**30
"""Memory of one compile of a large program."""
FINALIST_SECONDS = 900.0
"""Longest wait for full compiles without a time limit; with flags that change the schedule they can take hours."""


class Objective(enum.Enum):
    """Figure that a plan minimises."""

    time = "time"
    cost = "cost"
    energy = "energy"
    pareto = "pareto"
    """Time and cost: the candidates that no other beats in both; the best has the least cost per speed."""
    fit = "fit"
    """Fewest chips that the job fits on; of as many chips the cheapest, and on these the fastest of the layouts that were compiled until one fit."""


class PriceTerm(enum.Enum):
    """Kind of price in the catalogue."""

    on_demand = "on-demand"
    spot = "spot"
    committed = "committed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Totals of the whole job on one candidate; None where the catalogue has no price or no power."""

    steps: float
    seconds: float
    usd: float | None
    kwh: float | None

    def times(self, factor: float) -> "Total":
        """The totals at ``factor`` times the step time."""
        return Total(
            steps=self.steps,
            seconds=self.seconds * factor,
            usd=None if self.usd is None else self.usd * factor,
            kwh=None if self.kwh is None else self.kwh * factor,
        )


class Tariff(NamedTuple):
    """Cost of a second of a whole slice; None where the catalogue has no price or no power."""

    usd: float | None
    joules: float | None
    """At the meter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Goal for the whole job."""

    objective: Objective = Objective.time
    units: float
    """Tokens, or examples, to train on."""
    unit: str = "tokens"
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    price: PriceTerm = PriceTerm.on_demand
    chip_usd: float | None = None
    """Dollars of a chip and hour, instead of the catalogue's price; 0 for chips that cost nothing."""

    def hourly(self, on: Slice) -> float | None:
        """Dollars an hour of a whole slice; None where the catalogue has no price."""
        return hourly(on, self.price) if self.chip_usd is None else self.chip_usd * on.num_chips

    def priced(self, on: Slice) -> dict[str, str]:
        """Region and date of the price: ``price_region`` and ``price_as_of``, empty where it has none or is the user's."""
        if self.chip_usd is None:
            return priced(on, self.price)
        return {"price_region": "", "price_as_of": ""}

    @property
    def price_text(self) -> str:
        """``on-demand``, or ``given`` for the user's own."""
        return self.price.value if self.chip_usd is None else "given"

    def tariff(self, on: Slice) -> Tariff:
        """Dollars and joules at the meter for a second of a whole slice."""
        price, bill = self.hourly(on), bill_of(on)
        return Tariff(
            usd=None if price is None else price / HOUR,
            joules=None if bill.watts is None else bill.watts * bill.pue,
        )

    def total(self, tariff: Tariff, units_per_step: float, step_seconds: float) -> Total:
        """Time, dollars and kilowatt-hours at a step time."""
        steps = max(self.units / units_per_step, 1.0)
        seconds = steps * step_seconds
        return Total(
            steps=steps,
            seconds=seconds,
            usd=None if tariff.usd is None else tariff.usd * seconds,
            kwh=None if tariff.joules is None else tariff.joules * seconds / 3.6e6,
        )

    def broken(self, total: Total) -> str | None:
        """Message about the limit that a total breaks; None where it breaks none."""
        if self.deadline_seconds is not None and total.seconds > self.deadline_seconds:
            return f"takes {days(total.seconds)}, the deadline is {days(self.deadline_seconds)}"
        if self.budget_usd is not None:
            if total.usd is None:
                return "has no price in the catalogue, so a budget can't be checked; give a price in your prices file"
            if total.usd > self.budget_usd:
                return f"costs {dollars(total.usd)}, the budget is {dollars(self.budget_usd)}"
        return None

    def excess(self, total: Total) -> float:
        """Largest ratio of a total to its limit; up to 1 no limit is broken."""
        shares = [0.0]
        if self.deadline_seconds is not None:
            shares.append(total.seconds / self.deadline_seconds)
        if self.budget_usd is not None:
            shares.append(float("inf") if total.usd is None else total.usd / self.budget_usd)
        return max(shares)

    def score(self, total: Total) -> float:
        """Score of a total; smaller is better, infinite where the figure is unknown.

        Among slices :attr:`Objective.fit` goes by their chips first (:func:`systolic.planning.plan.ranking`).
        """
        match self.objective:
            case Objective.time | Objective.fit:
                return total.seconds
            case Objective.cost | Objective.pareto if total.usd == 0.0:
                return total.seconds  # chips that cost nothing differ in time only
            case Objective.cost:
                return float("inf") if total.usd is None else total.usd
            case Objective.energy:
                return float("inf") if total.kwh is None else total.kwh
            case Objective.pareto:
                return float("inf") if total.usd is None else total.usd * total.seconds

    def to_json(self) -> dict[str, object]:
        """The goal as plain values."""
        return {
            "objective": self.objective.value,
            self.unit: self.units,
            "deadline_seconds": self.deadline_seconds,
            "budget_usd": self.budget_usd,
            "price": self.price.value,
            "usd_per_chip_hour": self.chip_usd,
        }


def hourly(on: Slice, price: PriceTerm) -> float | None:
    """Dollars an hour of a whole slice."""
    return on.rate(price.name)[0]


def priced(on: Slice, price: PriceTerm) -> dict[str, str]:
    """Region and date of a slice's price: ``price_region`` and ``price_as_of``, empty where it has none."""
    _, region, as_of = on.rate(price.name)
    return {"price_region": region, "price_as_of": as_of}


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates, ordered by the first."""
    kept, lowest = [], float("inf")
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if points[index][1] < lowest:
            lowest = points[index][1]
            kept.append(index)
    return kept


def days(seconds: float) -> str:
    """``3.2 days``, ``5.4 hours`` or ``12 minutes``."""
    for name, size in (("days", 24 * HOUR), ("hours", HOUR)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds / 60:.3g} minutes" if seconds >= 120 else duration(seconds)


def span(text: str) -> float:
    """Seconds of ``36h``, ``3d``, ``90m`` or ``1w``.

    Raises:
        OptionError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise OptionError(f"{text!r} is not a time; write it like 30s, 90m, 36h, 3d or 1w")
    return float(match[1]) * _SPANS[match[2]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search."""

    programs: int
    """Compiles up to the schedule."""
    finalists: int
    """Full compiles."""
    workers: int
    """Compiles at once; 0 for as many as cores and memory allow."""
    fruitless: int | None = None
    """Most compiles while none fits; None for no limit of its own."""
    seconds: float | None = None
    """Time limit of all; None for none."""
    finalist_seconds: float = FINALIST_SECONDS
    """Time limit of the full compiles where ``seconds`` is None."""

    @property
    def at_once(self) -> int:
        """Number of workers, with 0 resolved."""
        return compiles_at_once(self.workers)


def compiles_at_once(workers: int) -> int:
    """Compiles that run side by side, at most one a core; for 0 ``workers`` as many as cores and memory allow."""
    if workers:
        return bounded(workers)
    return max(1, bounded(int(psutil.virtual_memory().available // WORKER_BYTES)))

"""How to make a job fit: a search on the same slice, then on larger ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.chips.slices import named_slices
from systolic.core.units import dollars, plural
from systolic.job import Batch, Layout, OptimizerKind
from systolic.planning.analytic import Facts
from systolic.planning.candidate import Candidate, differences
from systolic.planning.goal import Goal, Objective
from systolic.planning.plan import Plan, SearchStop, Trial, reason_of, size
from systolic.planning.search import (
    CompilingEvaluator,
    Limits,
    OpenEvaluator,
    Search,
    SearchProgress,
    Watch,
)
from systolic.planning.space import RefusalRule, Refused, global_batch

FIRST = 8
"""Most programs on the slice itself while none fits."""
LARGER = 4
"""Most programs on each larger slice while none fits."""
FASTER = 16
"""Most further programs once one fits: the fastest that fits is wanted; fewer when no better one is likely."""
SLICES = 4
"""Number of larger slices tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Attempt to make the job fit: one search."""

    text: str
    on: Slice
    tried: tuple[Trial, ...]
    facts: Facts
    same_result: bool = True

    @property
    def best(self) -> Trial | None:
        """The fastest candidate that fits."""
        good = [trial for trial in self.tried if trial.total is not None]
        return min(
            good, key=lambda trial: trial.total.seconds if trial.total else 0.0, default=None
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the settings of each trial."""
        return {
            "text": self.text,
            "slice": self.on.name,
            "same_result": self.same_result,
            "tried": [
                {
                    "layout": trial.candidate.text,
                    "settings": trial.candidate.settings(self.facts.job),
                    "fits": trial.total is not None,
                    "step_seconds": trial.forecast.step_seconds if trial.forecast else None,
                    "reason": None if trial.total is not None else reason_of(trial),
                }
                for trial in self.tried
            ],
        }


def find_fit(
    facts: Facts,
    on: Slice,
    flags: Callable[[Slice], tuple[str, ...]],
    workers: int,
    watch: Watch = lambda _: None,
    evaluator: OpenEvaluator = CompilingEvaluator,
) -> list[Attempt]:
    """Attempts until one fits: other layouts, larger slices of the same chip, fewer optimizer moments.

    Args:
        facts: The job that does not fit.
        on: The slice that it does not fit.
        flags: Compiler flags of every program on a slice.
        workers: Compiles at once.
        watch: Called with the progress of each search.
        evaluator: Makes what forecasts the candidates.
    """
    attempts: list[Attempt] = []

    def attempt(text: str, of: Facts, at: Slice, programs: int, same: bool = True) -> bool:
        search = Search(
            facts=of,
            slices=[at],
            goal=Goal(objective=Objective.time, units=1.0, unit=of.unit),
            limits=Limits(
                programs=programs + FASTER, fruitless=programs, finalists=0, workers=workers
            ),
            flags=flags,
            watch=watch,
            evaluator=evaluator,
        )
        plan = search.run()
        if plan.stopped is SearchStop.interrupted:
            raise KeyboardInterrupt
        latest = Attempt(text=text, on=at, tried=tuple(plan.tried), facts=of, same_result=same)
        attempts.append(latest)
        return latest.best is not None

    if attempt(f"other layouts of {on.name}", facts, on, FIRST):
        return attempts
    batch = Batch(total=global_batch(facts.job, on))
    fixed = replace(facts, job=replace(facts.job, batch=batch))
    for larger in _larger(on)[:SLICES]:
        if attempt(f"a larger slice: {larger.name}", fixed, larger, LARGER):
            return attempts
    optimizer = facts.job.optimizer
    if optimizer.kind is not OptimizerKind.adafactor:
        leaner = replace(optimizer, kind=OptimizerKind.adafactor)
        other = replace(facts, job=replace(facts.job, optimizer=leaner))
        attempt("adafactor, which keeps no full moments", other, on, LARGER, same=False)
    return attempts


def smallest_fit(search: Search) -> Plan:
    """The smallest slice that the job fits on and that keeps the goal's limits, of as many chips the cheapest.

    Slices are searched one after another, fewest chips first; once a layout fits, the search ends with the fastest so far. Passes, rematerialisation, offload and loss chunks are free, as in every search.

    Args:
        search: The search as it would run over all its slices.
    """
    parts: list[Plan] = []
    refused: list[Refused] = []
    fits: Slice | None = None
    began = time.monotonic()

    def plan(*now: Plan) -> Plan:
        seconds = time.monotonic() - began
        return replace(_together(search, [*parts, *now], refused), seconds=seconds)

    for on in sorted(search.slices, key=lambda place: size(place, search.goal)):
        if fits is not None:
            why = _larger_than(fits, on, search.goal)
            refused.append(Refused(on=on, rule=RefusalRule.larger, reason=why))
            continue
        left = search.limits.seconds
        if left is not None:
            left = max(left - (time.monotonic() - began), 0.0)

        def watch(progress: SearchProgress) -> None:
            answer = progress.answer
            search.watch(replace(progress, answer=lambda: plan(answer())))

        limits = replace(search.limits, fruitless=FIRST, seconds=left)
        part = Search(
            facts=search.facts,
            slices=[on],
            goal=search.goal,
            freedom=search.freedom,
            limits=limits,
            evaluator=search.evaluator,
            flags=search.flags,
            watch=watch,
            only=search.only,
            first=True,
        ).run()
        parts.append(part)
        if part.best is not None:
            fits = on
        if part.stopped is not None:
            break
    return plan()


def _larger_than(fits: Slice, on: Slice, goal: Goal) -> str:
    """Why a slice is no answer beside one that fits: its chips, or its price."""
    reason = f"has {plural(on.num_chips, 'chip')}, and {fits.name} with {fits.num_chips} fits"
    prices = [goal.hourly(place) for place in (on, fits)]
    if on.num_chips > fits.num_chips or prices[0] == prices[1]:
        return reason
    dear, cheap = ("no price" if price is None else f"{dollars(price)} an hour" for price in prices)
    return f"{reason}; {on.name} has {dear}, {fits.name} {cheap}"


def _together(search: Search, parts: Sequence[Plan], refused: Sequence[Refused]) -> Plan:
    """Plans of single slices as one, the margin from that of the smallest."""
    best = min(
        (
            (size(part.best.candidate.on, search.goal), part)
            for part in parts
            if part.best is not None
        ),
        key=lambda pair: pair[0],
        default=None,
    )
    return Plan(
        facts=search.facts,
        goal=search.goal,
        tried=[trial for part in parts for trial in part.tried],
        refused=[*(each for part in parts for each in part.refused), *refused],
        searched=sum(part.searched for part in parts),
        seconds=0.0,
        stopped=next((part.stopped for part in parts if part.stopped is not None), None),
        margin=None if best is None else best[1].margin,
    )


def _larger(on: Slice) -> list[Slice]:
    """Named slices of the same chip with more chips, smallest first."""
    if on.num_slices > 1:
        return []
    return [place for place in named_slices(on.chip) if place.num_chips > on.num_chips]


def difference(before: Layout, after: Candidate) -> str:
    """Settings that changed, as text."""
    return ", ".join(differences(before, after)) or "the same layout"

"""``systolic.plan``: slices, goals and freedom from the words that people use, and the notes on an answer."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

import systolic
from systolic.chips import slice
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.reporter import Reporter, reporting
from systolic.core.units import duration
from systolic.forecasting import Forecast
from systolic.job import Batch, Job
from systolic.planning import command, fit_ladder
from systolic.planning.analytic import analyse
from systolic.planning.candidate import Candidate
from systolic.planning.display import readings
from systolic.planning.display.text import text
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.notes import (
    BaseFlags,
    BatchDiffers,
    NotCompiled,
    OwnWork,
    ScheduleOnly,
    WallAssumed,
    before_search,
)
from systolic.planning.search import SearchStage
from systolic.planning.space import Freedom, RefusalRule
from tests.planning import fabricated
from tests.planning.evaluators import AnsweringEvaluator

pytestmark = pytest.mark.own_programs


def named(text: str, max_chips: int = 256) -> list[str]:
    return [on.name for on in command.slices_of(text, max_chips, PriceTerm.on_demand)]


def test_slices_by_name_by_chip_and_all() -> None:
    assert named("v5p-8, v5e-4,v5e-4") == ["v5p-8", "v5e-4"]
    assert named("v5e", max_chips=8) == ["v5e-1", "v5e-4", "v5e-8"]
    assert named("2xv5e-256", max_chips=8) == ["2xv5e-256"]
    assert named("v5e-4,8xh100") == ["v5e-4", "8xh100"]
    everything = [slice(name) for name in named("any", max_chips=16)]
    assert {"v5e-16", "v5p-8", "v6e-4"} <= {on.name for on in everything}
    for on in everything:
        assert on.platform == "tpu"
        assert on.num_chips <= 16
        assert on.usd_per_hour.on_demand is not None


@pytest.mark.parametrize(
    ("text", "max_chips", "error", "said"),
    [
        ("v5e-17", 256, NotFoundError, "did you mean v5e-16"),
        (",", 256, OptionError, "--on names no slice"),
        ("8xcpu", 256, OptionError, "plan is for TPU and GPU slices"),
        ("v5p", 1, OptionError, "no slice of v5p has 1 chip or fewer"),
    ],
)
def test_slices_that_are_none(text: str, max_chips: int, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        named(text, max_chips)


SLICES = (slice("v5e-4"), slice("v5e-16"))


def goal(**given: Any) -> Goal:
    return command.goal_of(fabricated.facts(), SLICES, command.Wanted(**given))


def test_the_goal_is_the_jobs_own_work_unless_told() -> None:
    own = goal()
    assert own.units == 1000 * 256 * 2048
    assert own.objective is Objective.pareto
    told = goal(tokens=20e9, deadline_seconds=259200.0)
    assert (told.units, told.deadline_seconds) == (20e9, 259200)
    assert told.objective is Objective.cost
    assert goal(examples=10.0).units == 10 * 2048
    assert goal(budget_usd=1000.0).objective is Objective.time


def test_work_that_nobody_gave_is_a_note() -> None:
    (note,) = before_search(fabricated.facts(), SLICES, Freedom(), own_work=True)
    assert "the job's own 1,000 steps of 256 examples" in text(note)
    assert not before_search(fabricated.facts(), SLICES, Freedom(), own_work=False)


def test_a_batch_per_device_is_said_to_differ() -> None:
    job = replace(fabricated.facts().job, batch=Batch(per_device=8))
    facts = replace(fabricated.facts(), job=job)
    (note,) = before_search(facts, SLICES, Freedom(), own_work=False)
    assert note == BatchDiffers(smallest=32, largest=128)
    assert "differs by slice (32 to 128 examples a step)" in text(note)
    assert "--batch sets one for all" in text(note)
    assert not before_search(facts, SLICES, Freedom(batch=True), own_work=False)


def test_freedom() -> None:
    assert command.freed("") == Freedom()
    assert command.freed("batch, precision") == Freedom(batch=True, precision=True)


def estimate(job: Job, one: Candidate, full: bool) -> Forecast | None:
    found = analyse(fabricated.facts(), one)
    return fabricated.tried(
        one, found.seconds_estimate, found.bytes_estimate / 2**30, full=full
    ).forecast


def test_a_plan_from_python_is_a_value_and_tells_its_progress() -> None:
    stages = []

    class Watch(Reporter):
        def update(self, state: Any) -> None:
            stages.append(state.stage)
            assert len(state.answer().tried) == state.compiled

    with reporting(Watch()):
        made = systolic.plan(
            fabricated.facts().job,
            on="v6e-8",
            budget=1e9,
            programs=3,
            finalists=0,
            workers=1,
            evaluator=AnsweringEvaluator(estimate),
        )
    assert made.goal.objective is Objective.time
    assert made.best is not None
    assert made.best.candidate.on == slice("v6e-8")
    kinds = [type(note) for note in made.notes]
    assert kinds == [OwnWork, ScheduleOnly, WallAssumed, NotCompiled, BaseFlags]
    assert {SearchStage.analysing, SearchStage.compiling} == set(stages)
    shown = repr(made)
    assert shown.startswith(f"<Plan of {made.searched} candidates: best <Forecast of ")
    assert f"on v6e-8: fits, {duration(made.best.forecast.step_seconds)} a step" in shown
    assert len(shown) < 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"goal": "fast"}, "goal is 'fast'; it takes time, cost, energy, pareto"),
        ({"price": "sport"}, "price is 'sport'; did you mean spot?"),
        ({"tokens": 1.0, "examples": 1.0}, "give one of them"),
        ({"tokens": 0}, "tokens is 0.0; it must be above 0"),
        ({"tokens": -5.0}, "tokens is -5.0; it must be above 0"),
        ({"budget": math.nan}, "budget is nan, not a finite number"),
        ({"max_chips": 0}, "max_chips is 0; it must be at least 1"),
        ({"deadline": 3}, "deadline is 3; it takes a time such as '90m'"),
    ],
)
def test_words_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        systolic.plan(fabricated.facts().job, on="v6e-8", **options)


def test_what_is_neither_a_job_nor_a_name_is_refused() -> None:
    with pytest.raises(
        OptionError, match="job is 3; it takes a Job or the name of a recipe or a model"
    ):
        systolic.plan(3, on="v6e-8")  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match="forecast takes a Job, the name of a recipe or a model"):
        systolic.forecast(3, on="v6e-8")  # ty: ignore[no-matching-overload]
    with pytest.raises(
        OptionError, match="has no option 'sequence'; its options are steps, layout,"
    ):
        systolic.plan(fabricated.facts().job, on="v6e-8", sequence=128)


def test_the_smallest_slice_that_fits_is_the_answer() -> None:
    """The first that fits, with passes free; larger and dearer ones are left out unseen."""
    asked = AnsweringEvaluator(estimate)
    made = systolic.plan(
        fabricated.facts().job,
        on="v5e,v6e",
        goal="fit",
        programs=8,
        workers=1,
        evaluator=asked,
    )
    assert made.best is not None
    assert made.best.candidate.layout.accumulate > 1  # 256 rows of 2,048 tokens on one chip
    # Of as many chips the cheaper comes first. Nothing more is compiled once one fits.
    assert made.best.candidate.on.name == "v6e-1"
    assert list(dict.fromkeys(one.on.name for one in asked.asked)) == ["v5e-1", "v6e-1"]
    assert [one.total is not None for one in made.tried][-1:] == [True]
    assert sum(one.total is not None for one in made.tried) == 1
    assert not any(one.full for one in made.tried), "memory is exact without a full compile"
    assert not any("--programs" in one.reason for one in made.refused)
    assert not any("--programs" in text(note) for note in made.notes)
    ended = "the search ended once a layout fitted, and this is the one found by then; --on v6e-1 --goal time goes on for speed"
    assert ended in map(text, made.notes)
    larger = {one.on.name: one.reason for one in made.refused if one.rule is RefusalRule.larger}
    assert larger["v5e-4"] == "has 4 chips, and v6e-1 with 1 fits"
    assert len(larger) == len(command.slices_of("v5e,v6e", 256, None)) - 2
    dearer = fit_ladder._larger_than(slice("v5e-1"), slice("v6e-1"), made.goal)
    assert dearer.endswith("fits; v6e-1 has $2.70 an hour, v5e-1 $1.20 an hour")
    assert made.to_json()["goal"]["objective"] == "fit"
    assert "the smallest slice that fits" in readings.work(made)


def test_a_deadline_makes_the_smallest_slice_larger() -> None:
    def plan(**more: Any) -> Any:
        return systolic.plan(
            fabricated.facts().job,
            on="v6e",
            goal="fit",
            programs=8,
            finalists=0,
            workers=1,
            evaluator=AnsweringEvaluator(estimate),
            **more,
        )

    free = plan().best
    tight = plan(deadline=f"{free.total.seconds / 3:.0f}s").best
    assert tight.candidate.on.num_chips > free.candidate.on.num_chips
    assert tight.total.seconds <= free.total.seconds / 3

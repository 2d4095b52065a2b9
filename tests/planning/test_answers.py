"""Choices on recorded answers of the compiler: what a hand finds, an explanation, a fit and a plan find.

``tests/recorded/plan/answers.json`` and ``pruned.json`` are written by benchmarks/plan/answers.py and pruned.py. A
candidate that was not recorded does not compile here.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.core.errors import RunError
from systolic.core.units import Origin
from systolic.explaining.explainer import StepExplainer
from systolic.forecasting import Forecast
from systolic.forecasting.cost import bill_of
from systolic.forecasting.memory import MemoryMap, MemoryShortage
from systolic.job import Job, Layout, Placement, Precision, Remat, Residual
from systolic.planning.analytic import Facts, analyse, facts_of
from systolic.planning.candidate import DEFAULT, SETS, Candidate, FlagSet, joined
from systolic.planning.enumeration import Judge, Ranked, margin_of
from systolic.planning.fit_ladder import find_fit
from systolic.planning.goal import Goal, Limits
from systolic.planning.plan import Trial
from systolic.planning.remedies import base_of
from systolic.planning.search import Search
from systolic.recipes.jobs import source_of
from tests.planning import fabricated
from tests.planning.evaluators import AnsweringEvaluator

FOLDER = Path(__file__).parent.parent / "recorded" / "plan"
HAND_UNFIT = 14.2
"""Seconds of a step by hand: accumulate 1, loss in 16 chunks, offloaded layer inputs, attention block 1024."""
HAND_MIXTURE = 14.6
"""fsdp 256, offloaded layer inputs, loss in 4 chunks, attention block 1024."""
HAND_F32, HAND_BF16 = 0.254, 0.176
"""fsdp 16 instead of tensor 16."""


@cache
def cases() -> dict[str, Any]:
    return json.loads((FOLDER / "answers.json").read_text())


def job_of(case: dict[str, Any]) -> Job:
    if case["target"] != "lm":
        return source_of(case["target"], case["options"]).job
    recipe = recipes.find("lm")
    return recipe(recipes.typed(recipe, case["options"]))


def key(one: Candidate) -> str:
    return f"{one.text} batch {one.batch} {one.precision.value}"


def forecast(one: Candidate, facts: Facts, seconds: float | None, need: int) -> Forecast:
    return Forecast(
        recipe="lm",
        on=one.on,
        origin=Origin.simulated,
        fits=seconds is not None,
        capacity_bytes=one.on.program_bytes,
        memory=MemoryMap(peak_bytes=need, estimated_bytes=need, by_kind={}, buffers=())
        if seconds is not None
        else None,
        step_seconds=seconds,
        unit="tokens",
        units=one.batch * facts.units_per_example,
        bill=bill_of(one.on),
        rejected=None
        if seconds is not None
        else MemoryShortage(need_bytes=need, have_bytes=one.on.program_bytes),
    )


def recorded(name: str, facts: Facts) -> AnsweringEvaluator:
    rows = cases()[name]["rows"]

    def answer(job: Job, one: Candidate, full: bool) -> Forecast | RunError:
        if key(one) not in rows:
            return RunError("not recorded")
        return forecast(one, facts, *rows[key(one)])

    return AnsweringEvaluator(answer)


def test_an_explanation_follows_its_causes_to_the_end() -> None:
    job, on = job_of(cases()["slow"]), slice("v5e-16")
    facts = facts_of(job)
    flags = resolved("", on.chip)
    explainer = StepExplainer(
        job=job, on=on, flags=flags, workers=1, evaluator=recorded("slow", facts)
    )
    base = base_of(facts, on, flags)
    found = explainer.try_changes(forecast(base, facts, 0.6855, 14_000_000_000))
    same = [one.step_seconds for one in found if one.same_result and one.step_seconds]
    other = [
        one.step_seconds
        for one in found
        if one.candidate.precision is Precision.bf16 and one.step_seconds
    ]
    assert min(same) <= HAND_F32
    assert min(other) <= HAND_BF16
    assert all(
        one.same_result == (one.candidate.precision is Precision.f32 and one.candidate.batch == 16)
        for one in found
    )


def test_how_to_make_it_fit_is_no_slower_than_by_hand() -> None:
    facts, on = facts_of(job_of(cases()["unfit"])), slice("v5e-16")
    flags = resolved("", on.chip)
    made = find_fit(facts, on, lambda _: flags, 1, evaluator=recorded("unfit", facts))
    best = made[-1].best
    assert best is not None
    assert best.forecast is not None
    assert best.forecast.step_seconds is not None
    assert best.forecast.step_seconds <= HAND_UNFIT


def test_a_plan_of_a_mixture_is_no_slower_than_by_hand() -> None:
    facts, on = facts_of(job_of(cases()["mixture"])), slice("v5e-256")
    plan = Search(
        facts=facts,
        slices=[on],
        goal=Goal(units=1e11),
        limits=Limits(programs=24, finalists=0, workers=1),
        evaluator=recorded("mixture", facts),
    ).run()
    assert plan.best is not None
    assert plan.best.forecast is not None
    assert plan.best.forecast.step_seconds is not None
    assert plan.best.forecast.step_seconds <= HAND_MIXTURE * 1.003
    assert plan.margin is not None


def candidate(row: dict[str, Any]) -> Candidate:
    """What a row of pruned.py is of."""
    kinds = {
        "remat": Remat,
        "residual": Residual,
        "placement": Placement,
        "remat_names": tuple,
        "saved_names": tuple,
    }
    given = {
        name.removeprefix("layout."): value
        for name, value in row["settings"].items()
        if name.startswith("layout.")
    }
    layout = Layout(**{name: kinds.get(name, lambda x: x)(value) for name, value in given.items()})
    sets = [one for one in SETS if one.name in row["flags"].split(" + ")]
    flags: FlagSet = DEFAULT
    for one in sets:
        flags = joined(flags, one)
    return Candidate(
        on=slice("v5e-16"),
        layout=layout,
        batch=row["settings"]["batch"],
        precision=Precision.bf16,
        flags=flags,
    )


def test_no_layout_left_out_beats_the_answer_by_more_than_the_margin() -> None:
    """200 at random of those that the search left out, compiled."""
    read = json.loads((FOLDER / "pruned.json").read_text())
    facts = fabricated.facts()
    goal = Goal(units=1e9)
    judge = Judge(facts=facts, goal=goal)

    def trial(row: dict[str, Any]) -> Trial:
        one = candidate(row)
        assert one.text == row["layout"]
        made = forecast(one, facts, row["step_seconds"], row["peak_bytes"])
        units = one.batch * facts.units_per_example
        seconds = made.step_seconds
        total = goal.total(goal.tariff(one.on), units, seconds) if seconds else None
        return Trial(candidate=one, analysis=analyse(facts, one), forecast=made, total=total)

    for one in map(trial, read["compiled"]):
        judge.learn(Ranked(candidate=one.candidate, analysis=one.analysis), one)
    sampled = [trial(row) for row in read["sampled"]]
    assert len(sampled) == 200
    waiting = [Ranked(candidate=one.candidate, analysis=one.analysis) for one in sampled]
    answer = trial(read["best"])
    margin = margin_of(judge, answer, waiting)
    assert margin is not None
    best = judge.score(answer)
    gains = [1 - judge.score(one) / best for one in sampled if one.total is not None]
    assert len(gains) >= 20
    assert max(gains) <= margin.share + 1e-9
    # The margin says something: less than a fifth, and not all compiles are at their estimates.
    assert margin.share < 0.2
    assert margin.low < 1 < margin.high
    # Bounds are bounds: none of those that fit is below its own.
    for one in sampled:
        if one.forecast is not None and one.forecast.step_seconds is not None:
            assert one.analysis.seconds_bound <= one.forecast.step_seconds

"""The search on 60 recorded layouts, whose best is known: it finds it with a quarter of the compiles."""

import json
import random
from concurrent.futures import Future
from typing import Any

import pytest

from systolic.chips import slice
from systolic.core.errors import RunError
from systolic.core.units import Origin
from systolic.forecasting import Forecast
from systolic.forecasting.cost import bill_of
from systolic.forecasting.memory import MemoryMap, MemoryShortage
from systolic.job import Job
from systolic.planning import goal
from systolic.planning import search as search_module
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal
from systolic.planning.plan import PAIRED_ERROR, SearchStop
from systolic.planning.search import Limits, Search
from systolic.planning.space import RefusalRule
from tests.planning.evaluators import AnsweringEvaluator
from tests.planning.fabricated import facts
from tests.planning.recorded import ON, candidate, rows


def forecast(row: dict[str, Any]) -> Forecast:
    return Forecast(
        recipe="lm",
        on=ON,
        origin=Origin.simulated,
        fits=row["fits"],
        capacity_bytes=ON.program_bytes,
        memory=MemoryMap(
            peak_bytes=row["peak_bytes"],
            estimated_bytes=row["peak_bytes"],
            by_kind={},
            buffers=(),
        ),
        step_seconds=row["step_seconds"],
        unit="tokens",
        units=256 * 2048,
        bill=bill_of(ON),
        rejected=None
        if row["fits"]
        else MemoryShortage(need_bytes=row["peak_bytes"], have_bytes=ON.program_bytes),
    )


def recorded(job: Job, one: Candidate, full: bool) -> Forecast:
    return forecast(rows()[one.text])


def search(only: list[Candidate], **more: Any) -> Search:
    most = Limits(programs=more.pop("programs", 15), finalists=0, workers=more.pop("workers", 2))
    return Search(
        facts=facts(),
        slices=[ON],
        goal=more.pop("goal", Goal(units=20e9)),
        limits=most,
        only=only,
        **{"evaluator": AnsweringEvaluator(recorded), **more},
    )


def space() -> list[Candidate]:
    return [candidate(row) for row in rows().values()]


def fastest(of: list[Candidate]) -> float:
    return min(rows()[one.text]["step_seconds"] for one in of if rows()[one.text]["fits"])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_best_of_sixty_is_found_with_fifteen(workers: int) -> None:
    plan = search(space(), workers=workers).run()
    assert len(plan.tried) <= 15
    assert plan.best is not None
    assert plan.best.forecast is not None
    assert (plan.best.forecast.step_seconds or 0) <= 1.02 * fastest(space())


@pytest.mark.parametrize("missing", range(0, 60, 12))
def test_it_is_no_luck_with_one_space(missing: int) -> None:
    fewer = [one for n, one in enumerate(space()) if n % 12 != missing % 12]
    plan = search(fewer, workers=1).run()
    assert plan.best is not None
    assert plan.best.forecast is not None
    assert (plan.best.forecast.step_seconds or 0) <= 1.02 * fastest(fewer)


def test_what_was_not_compiled_is_accounted_for() -> None:
    plan = search(space(), programs=6).run()
    left = next(one for one in plan.refused if one.rule is RefusalRule.not_compiled)
    assert plan.searched == 60
    assert left.layouts == 60 - len(plan.tried)
    assert left.layout == f"{60 - len(plan.tried)} layouts"


def test_a_budget_that_nothing_keeps_is_refused_before_any_compile() -> None:
    plan = search(space(), goal=Goal(units=20e9, budget_usd=1.0)).run()
    assert plan.tried == ()
    assert plan.best is None
    assert {one.rule for one in plan.refused} == {RefusalRule.goal}
    assert "the budget is $1" in plan.refused[0].reason


def test_a_limit_of_the_goal_is_kept_among_what_was_compiled() -> None:
    slow = Goal(units=20e9, deadline_seconds=2.3 * 20e9 / (256 * 2048))
    plan = search(space(), goal=slow).run()
    assert all(
        (one.total.seconds if one.total else 0) <= slow.deadline_seconds for one in plan.ranking
    )
    assert any(one.broken and "deadline" in one.broken for one in plan.tried)


def test_ctrl_c_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goal, "bounded", lambda workers: workers)  # on any number of cores
    seen = []

    def watch(progress: Any) -> None:
        seen.append(progress.compiled)
        if progress.compiled == 4:
            raise KeyboardInterrupt

    evaluator = AnsweringEvaluator(recorded)
    plan = search(space(), watch=watch, workers=2, evaluator=evaluator).run()
    assert plan.stopped is SearchStop.interrupted
    # The fifth was ready too.
    assert [one.candidate for one in plan.tried] == evaluator.asked
    assert len(plan.tried) == 5
    assert plan.best is not None


def test_ctrl_c_keeps_all_that_is_ready_behind_a_slow_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goal, "bounded", lambda workers: workers)  # on any number of cores

    def watch(progress: Any) -> None:
        # The first does not answer; the others wait for their turn.
        if len(progress.running) == 4 and progress.latest is None:
            raise KeyboardInterrupt

    evaluator = AnsweringEvaluator(recorded, lambda number: 8 if number == 1 else 0)
    plan = search(space(), watch=watch, workers=4, evaluator=evaluator).run()
    assert plan.stopped is SearchStop.interrupted
    assert len(evaluator.asked) == 4
    assert [one.candidate for one in plan.tried] == evaluator.asked[1:]
    assert plan.best is not None


def test_a_compile_that_fails_is_said_and_the_search_goes_on() -> None:
    calls = []

    def sometimes(job: Job, one: Candidate, full: bool) -> Forecast | RunError:
        calls.append(one)
        if len(calls) == 1:
            return RunError("compiling lm for v5e-16 failed: a failed check")
        return recorded(job, one, full)

    plan = search(space(), evaluator=AnsweringEvaluator(sometimes)).run()
    assert plan.tried[0].problem is not None
    assert plan.best is not None


@pytest.mark.parametrize("seed", range(4))
def test_which_compile_ends_first_changes_nothing(seed: int) -> None:
    late = random.Random(seed)
    evaluator = AnsweringEvaluator(recorded, lambda _: late.randrange(6))
    at_once = search(space(), workers=4).run()
    plan = search(space(), workers=4, evaluator=evaluator).run()
    assert [one.candidate for one in plan.tried] == [one.candidate for one in at_once.tried]
    assert evaluator.asked == [one.candidate for one in plan.tried]


def test_the_json_has_the_published_names() -> None:
    plain = json.loads(json.dumps(search(space(), programs=8).run().to_json()))
    for name in ("goal", "best", "candidates", "rejected", "searched", "compiled", "seconds"):
        assert name in plain
    times = [one["total"]["seconds"] for one in plain["candidates"]]
    # The answer is the simplest of those that the forecast can't tell apart.
    assert times[1:] == sorted(times[1:])
    assert times[0] <= min(times) * (1 + PAIRED_ERROR)
    assert plain["best"] == plain["candidates"][0]
    for one in plain["candidates"]:
        usd, region, as_of = slice(one["slice"]).rate("on_demand")
        total = one["total"]
        assert (total["price_region"], total["price_as_of"]) == (region, as_of) != ("", "")
        assert total["usd"] == pytest.approx(usd * total["seconds"] / 3600)
    assert {"slice", "layout", "reason"} <= set(plain["rejected"][0])


def test_a_compiles_seconds_leave_out_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Future[Any]]] = []

    def submit(_: Any, program: Any, on: Any, compiler: Any, say: Any) -> Future[Any]:
        asked.append((say, Future()))
        return asked[-1][1]

    now = iter([100.0, 103.5])
    monkeypatch.setattr(search_module.Pool, "submit", submit)
    monkeypatch.setattr(search_module.time, "monotonic", lambda: next(now))
    compiling = search_module.CompilingEvaluator(1)
    made = [compiling.submit(facts().job, one, full=False) for one in space()[:2]]
    asked[0][0]("compiling")
    for _, future in asked:
        future.set_result(None)
    # The second was in the store: no stage was reported.
    assert [one.seconds for one in made] == [3.5, 0.0]  # ty: ignore[unresolved-attribute]

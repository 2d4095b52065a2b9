"""Wall-clock of a plan: every figure beside its hand calculation, every assumption named."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.core.errors import OptionError
from systolic.job import Checkpoints
from systolic.planning.command import price_of, slices_of
from systolic.planning.display import readings
from systolic.planning.display.page import render
from systolic.planning.display.text import lines, text
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.notes import WallAssumed, WallLate, after_search
from systolic.planning.plan import Plan, Trial
from systolic.planning.space import Freedom
from systolic.planning.wall import Conditions, Wall, wall_of
from systolic.report.terminal import plain
from tests.planning import fabricated

STEP = 2.0
"""Seconds of a step of 256 rows of 2,048 tokens on v5e-16, four hosts of four chips."""
STEPS = 10_000
HOSTS = 4


def job_facts(every: int = 250) -> Any:
    facts = fabricated.facts()
    return replace(facts, job=replace(facts.job, checkpoints=Checkpoints(every=every)))


def goal(**more: Any) -> Goal:
    return Goal(units=float(STEPS * 256 * 2048), objective=Objective.time, **more)


def trial(of: Goal, step: float = STEP) -> Trial:
    return fabricated.tried(fabricated.candidate("v5e-16", fsdp=16), step, 9.0, of)


def wall(of: Goal | None = None, every: int = 250, step: float = STEP, **given: Any) -> Wall:
    of = of or goal()
    found = wall_of(job_facts(every), of, trial(of, step), Conditions(**given))
    assert found is not None
    return found


def planned(of: Goal, **given: Any) -> Plan:
    one = trial(of)
    made = wall_of(job_facts(), of, one, Conditions(**given))
    return replace(fabricated.plan(of), tried=(one,), wall=made, notes=())


def test_each_part_is_what_a_hand_calculates() -> None:
    found = wall(start_seconds=300.0, storage_bytes_per_second=2e9)
    assert found.train_seconds == pytest.approx(STEPS * STEP)
    # f32 weights and two f32 moments, 12 bytes a parameter, written by four hosts at 2 GB/s.
    saved = 12 * fabricated.facts().parameters
    assert found.checkpoint_bytes == saved
    assert found.checkpoints == STEPS // 250
    assert found.checkpoint_seconds == pytest.approx(40 * saved / (HOSTS * 2e9))
    # Tokens, segments and positions of 2,048 int32 each, of 64 rows a host and 2 s.
    fields = job_facts().job.data.fields()
    example = sum(4 * math.prod(one.shape) for one in fields.values())
    assert found.data_bytes_per_second == pytest.approx(64 * example / STEP)
    assert found.data_seconds == 0.0
    assert found.preemptions == 0.0
    whole = STEPS * STEP + 300.0 + found.checkpoint_seconds
    assert found.seconds == pytest.approx(whole)
    # v5e is $1.20 a chip and hour on demand (us-central1).
    hourly = goal().hourly(fabricated.candidate("v5e-16").on)
    assert hourly is not None
    assert found.usd == pytest.approx(hourly * whole / 3600)
    assert found.kg_co2 is None
    assert found.assumptions == ()


def test_carbon_is_energy_times_the_grid() -> None:
    found = wall(start_seconds=0.0, grid_g_per_kwh=400.0)
    total = trial(goal()).total
    assert total is not None
    assert total.kwh is not None
    kwh = total.kwh * found.seconds / total.seconds
    assert found.kwh == pytest.approx(kwh)
    assert found.kg_co2 == pytest.approx(kwh * 0.4)


def test_preemptions_undo_half_the_steps_between_checkpoints() -> None:
    given = {"start_seconds": 100.0, "storage_bytes_per_second": 1e9}
    calm = wall(preemptions_per_day=0.0, **given)
    found = wall(preemptions_per_day=24.0, **given)
    each = 100.0 + 12 * fabricated.facts().parameters / (HOSTS * 1e9) + 250 * STEP / 2
    assert found.seconds == pytest.approx(calm.seconds / (1 - each / 3600))
    assert found.preemptions == pytest.approx(found.seconds / 3600)
    assert found.lost_seconds == pytest.approx(found.preemptions * each)


def test_a_job_without_checkpoints_that_is_preempted_hourly_never_ends() -> None:
    found = wall(every=0, preemptions_per_day=24.0)
    assert math.isinf(found.seconds)
    assert found.to_json()["seconds"] is None
    assert found.usd is None
    assert readings.wall(found).startswith("never ends: 5.56 hours of steps")
    assert found.checkpoints == 1


def test_a_host_that_reads_too_slowly_makes_steps_wait() -> None:
    found = wall(storage_bytes_per_second=1e4)
    needed = found.data_bytes_per_second * STEP
    assert found.data_seconds == pytest.approx((needed / 1e4 - STEP) * STEPS)
    assert "of waiting" in readings.wall(found)


def test_what_is_assumed_is_said_with_the_option_that_replaces_it() -> None:
    said = " ".join(wall(goal(price=PriceTerm.spot)).assumptions)
    for option in ("--start-up", "--storage-rate", "--preemptions-per-day"):
        assert option in said
    assert said.count("assumed") == 3
    assert "preemption" not in " ".join(wall().assumptions)
    note = WallAssumed(assumptions=wall().assumptions)
    assert text(note).startswith("wall-clock: start-up of 2 m 00 s besides compiling: assumed")


def test_a_deadline_that_only_the_steps_keep_is_a_note() -> None:
    made = planned(goal(deadline_seconds=STEPS * STEP + 60.0), start_seconds=600.0)
    assert made.best is not None
    (note,) = [one for one in after_search(made, [], Freedom(), 0) if isinstance(one, WallLate)]
    assert "the job takes 5." in text(note)


def test_wall_clock_is_on_screen_page_and_in_json() -> None:
    made = planned(goal(), grid_g_per_kwh=400.0)
    assert made.wall is not None
    shown = " ".join(" ".join(plain(lines(made, None, 100))).split())
    sentence = readings.wall(made.wall)
    assert f"wall {sentence}" in shown
    assert "kg CO2" in sentence
    page = render(made, None, root=Path("/nowhere"))
    assert sentence in page
    assert made.to_json()["wall"] == made.wall.to_json()


@pytest.mark.parametrize("objective", list(Objective))
def test_free_chips_cost_nothing_and_are_ranked_by_time(objective: Objective) -> None:
    free = replace(goal(chip_usd=0.0), objective=objective)
    slow, fast = (trial(free, seconds) for seconds in (3.0, 2.0))
    made = replace(fabricated.plan(free), tried=(slow, fast), notes=())
    assert made.best is fast
    assert fast.total is not None
    assert fast.total.usd == 0.0
    assert "$0" in readings.verdict(made).sentence
    assert render(made, None, root=Path("/nowhere"))
    assert made.to_json()["goal"]["usd_per_chip_hour"] == 0.0


def test_a_price_is_a_term_or_dollars() -> None:
    assert price_of("spot") == (PriceTerm.spot, None)
    assert price_of("0") == price_of(0) == (PriceTerm.on_demand, 0.0)
    assert price_of("1.5") == (PriceTerm.on_demand, 1.5)
    for bad in ("-1", "nan", "inf"):
        with pytest.raises(OptionError, match="give dollars of a chip and hour"):
            price_of(bad)
    with pytest.raises(OptionError, match="did you mean spot"):
        price_of("sport")
    on = fabricated.candidate("v5e-16").on
    assert goal(chip_usd=1.5).hourly(on) == 24.0
    # A chip without a price of the catalogue is among any where the user gives one.
    priced = {one.name for one in slices_of("any", 8, PriceTerm.on_demand)}
    assert priced < {one.name for one in slices_of("any", 8, None)}

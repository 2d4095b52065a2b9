"""Layouts that the forecast can't tell apart: the simplest is the answer, and the plan says so."""

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from systolic.chips import chip, slice
from systolic.chips.flags import UNRANKED, name_of, unranked
from systolic.forecasting.comparison import ComparedForecast, unlike
from systolic.job import Remat
from systolic.planning.candidate import SETS
from systolic.planning.display import readings
from systolic.planning.display.page import render
from systolic.planning.display.text import lines, text
from systolic.planning.goal import Goal, Objective
from systolic.planning.notes import BaseFlags
from systolic.planning.plan import PAIRED_ERROR, Plan, ranking
from systolic.report.terminal import plain
from tests.planning.fabricated import candidate, facts, tried

TIME = Goal(units=20e9, unit="tokens", objective=Objective.time)
INSIDE, OUTSIDE = 4.0 * (1 + 0.9 * PAIRED_ERROR), 4.0 * (1 + 1.1 * PAIRED_ERROR)


def plan(*trials) -> Plan:
    return Plan(facts=facts(), goal=TIME, tried=trials, refused=(), searched=9, seconds=1.0)


def test_of_a_tie_the_simplest_is_first() -> None:
    two_axes = tried(candidate("v5e-16", data=2, fsdp=8, remat=Remat.minimal), 4.0, 9.0, TIME)
    full = tried(candidate("v5e-16", fsdp=16, remat=Remat.full), 4.01, 9.0, TIME)
    minimal = tried(candidate("v5e-16", fsdp=16, remat=Remat.minimal), INSIDE, 9.0, TIME)
    slower = tried(candidate("v5e-16", fsdp=16, remat=Remat.none), OUTSIDE, 9.0, TIME)
    made = plan(slower, minimal, full, two_axes)
    assert ranking(made.tried, TIME) == [two_axes, full, minimal, slower]  # what a search climbs by
    assert made.ranking == [minimal, full, two_axes, slower]
    assert made.best is minimal
    assert made.tie == [1, 2, 3]
    said = made.to_json()
    assert said["tie"] == {"within": PAIRED_ERROR, "candidates": [1, 2, 3]}
    assert said["candidates"][0] == said["best"]
    shown = plain(lines(made, Path("plan.json"), 100))
    (line,) = [one for one in shown if "can't tell" in one]
    assert line.strip().startswith(f"1 to 3 lie within {PAIRED_ERROR:.1%} (1 sigma): ")
    assert len(line) <= 100
    assert f"{line.strip()}." in html.unescape(render(made, Path("plan.json")))


@pytest.mark.parametrize(
    ("simple", "involved"),
    [
        ({"fsdp": 16, "remat": Remat.full}, {"data": 2, "fsdp": 8}),
        ({"fsdp": 16, "remat": Remat.full}, {"fsdp": 16, "remat": Remat.offload}),
        ({"fsdp": 16, "remat": Remat.none}, {"fsdp": 16, "remat": Remat.minimal}),
        ({"fsdp": 16}, {"fsdp": 16, "accumulate": 2}),
        ({"fsdp": 16}, {"fsdp": 16, "loss_chunks": 4}),
    ],
)
def test_what_is_simpler(simple: dict, involved: dict) -> None:
    assert candidate("v5e-16", **simple).complexity < candidate("v5e-16", **involved).complexity


def test_fewer_flags_are_simpler() -> None:
    plain_one = candidate("v5e-16", fsdp=16)
    assert plain_one.complexity < replace(plain_one, flags=SETS[-1]).complexity


def test_only_layouts_of_one_slice_and_batch_tie() -> None:
    first = tried(candidate("v5e-16", data=2, fsdp=8), 4.0, 9.0, TIME)
    elsewhere = tried(candidate("v6e-16", fsdp=16), 4.01, 9.0, TIME)
    other_batch = tried(candidate("v5e-16", batch=128, fsdp=16), 2.01, 9.0, TIME)
    made = plan(first, elsewhere, other_batch)
    assert made.ranking == [first, elsewhere, other_batch]
    assert made.tie == []
    assert made.to_json()["tie"] is None
    assert readings.tie(made) == ""
    same = tried(candidate("v5e-16", fsdp=16), INSIDE, 9.0, TIME)
    among = plan(first, elsewhere, same)
    assert among.ranking == [same, elsewhere, first]  # each at a place that one of the tie had
    assert among.tie == [1, 3]
    assert readings.tie(among).startswith("1 and 1 other of its slice lie within")


def test_flags_that_only_the_compiler_guesses_are_not_ranked() -> None:
    vmem, *_ = UNRANKED
    assert not [flag for one in SETS for flag in one.flags if name_of(flag) in UNRANKED]
    line = "the forecast can't rank xla_tpu_scoped_vmem_limit_kib"
    assert unranked({f"{vmem}=65536", "--xla_enable_async_all_gather=true"}).startswith(line)
    assert unranked({"--xla_enable_async_all_gather=true"}) == ""
    # v6e's shared set has 98304.
    assert not re.search("can't rank", text(BaseFlags(chip="v6e", flags=(f"{vmem}=98304",))))
    assert line in text(BaseFlags(chip="v6e", flags=(f"{vmem}=65536",)))
    assert unranked([f"{vmem}=98304"], chip("v5e")).startswith(line)


def test_a_comparison_says_which_flag_it_cannot_rank() -> None:
    common = {
        "recipe": "lm",
        "slice": slice("v6e-1").name,
        "fits": True,
        "hbm": {},
        "step_seconds": 1.0,
        "time_by_resource": {},
        "ops": [1],
    }
    before, after = (
        ComparedForecast.of({**common, "compiler": {"flags": [f"{UNRANKED[0]}={kib}"]}})
        for kib in (65536, 69632)
    )
    (line,) = unlike(before, after)
    assert line.startswith("the forecast can't rank xla_tpu_scoped_vmem_limit_kib")
    assert unlike(before, before) == []

"""A study in the terminal and on its page: what chance may have chosen, and how long the rest takes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from systolic.job import Mode
from systolic.report.tune.page import history, render
from systolic.report.tune.progress import line, times
from systolic.report.tune.text import lines
from systolic.tuning.objective import Aim
from systolic.tuning.results import StudyResult, TrialRow
from systolic.tuning.search import Searched

RIGHT = (178, 160, 177, 177, 178, 176)
"""Of 179 examples, by trial; as a search over the recipe digits had."""


DRAWN = (179, 178, 176, 176, 176, 177, 176, 169, 177, 129, 177, 26)
"""The same of twelve trials at random."""


def study(counts: Sequence[int] = RIGHT) -> StudyResult:
    rows = [
        TrialRow(
            number=number,
            state="done",
            values={"batch": 16 + number},
            figures={"accuracy": right / 179},
            seconds=10.0,
            dollars=0.5,
        )
        for number, right in enumerate(counts)
    ]
    return StudyResult(
        name="s",
        recipe="digits",
        rows=rows,
        total=8,
        searched=[Searched(name="batch", spec="16..32", low=16, high=32, whole=True)],
        aims=[Aim(name="accuracy", mode=Mode.max)],
        importance={},
        examples=179,
    )


HINT = "within one example of 3 others, of 179 in the validation; --repeats 5 tells gain from luck"


def test_a_best_that_others_equal_is_told() -> None:
    found = study()
    assert found.best is found.rows[0]
    assert f"luck      {HINT}" in [one.plain for one in lines(found)]
    assert HINT in render(found, Path())
    repeats = {
        "trial": 0,
        "seeds": 5,
        "best": {"mean": 0.98, "deviation": 0.01},
        "default": {"mean": 0.97, "deviation": 0.01},
        "sentence": "a gain",
    }
    told = replace(found, repeats=repeats)
    assert "luck      a gain" in [one.plain for one in lines(told)]
    assert HINT not in render(told, Path())
    alone = replace(found, examples=1000)
    assert not any("luck" in one.plain for one in lines(replace(alone, rows=found.rows[:4])))


def test_lines_say_what_is_left() -> None:
    found = study()
    spent = times(found, 60.0, 3)
    assert spent == "1 m 00 s, about 40.0 s left"
    assert line(found, found.rows[0], spent).startswith("[6/8] trial 0: accuracy 99.4")
    assert line(found, found.rows[0], spent).endswith(f"batch 16; {spent}  <- best so far")
    assert times(replace(found, total=6), 60.0, 3) == "1 m 00 s"
    told = [one.plain for one in lines(found)]
    assert "time      1 m 00 s of all trials" in told
    cost = "$3.00 on the slice for steps alone, as forecast; start-up, evaluations and repeats"
    assert any(cost in each for each in told)


def test_bad_results_stretch_no_axis() -> None:
    found = study(DRAWN)
    chart = history(found)
    assert chart is not None
    # By hand: the quartiles are 174.25 and 177, the fence is at 170.1.
    worst = min(right for right in DRAWN if right > 170) / 179
    assert 170 / 179 < chart.y.low < worst
    assert chart.y.high > 1
    assert chart.beyond == 3
    assert [dot.bottom for dot in chart.dots if dot.bottom == 0] == [0, 0, 0]
    assert "3 results far from the others on the edge" in render(found, Path())
    losses = replace(found, aims=[Aim(name="accuracy", mode=Mode.min)])
    assert history(losses).beyond == 0  # the best is never cut

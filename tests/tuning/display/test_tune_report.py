"""A study in the terminal and on its page: near ties of the best trial, time left, Pareto front, costs."""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from systolic.job import Mode
from systolic.tuning.answer import Repeated
from systolic.tuning.display.page import history, ranked, render, slices
from systolic.tuning.display.progress import StudyDisplay, drawing, line, times
from systolic.tuning.display.view import lines
from systolic.tuning.objective import Aim
from systolic.tuning.results import StudyResult, TrialRow
from systolic.tuning.search import Searched

RIGHT = (178, 160, 177, 177, 178, 176)
"""Correct ones of 179 examples by trial, from a search over the recipe digits."""
DRAWN = (179, 178, 176, 176, 176, 177, 176, 169, 177, 129, 177, 26)
"""The same for twelve random trials."""


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


HINT = "3 other trials are within one validation example (of 179); run --repeats 5 to test whether the gain is real"


REPEATS = Repeated(
    trial=0,
    aim=Aim(name="accuracy", mode=Mode.max),
    seeds=3,
    best=(0.97, 0.98, 0.975),
    default=(0.91, 0.93),
    failure="default settings, seed 5: failed: the loss of step 3 is not a number",
).to_json()


def test_both_settings_of_repeats_are_told_without_a_verdict() -> None:
    """By hand: the best have mean 0.975 and deviation 0.005, the default ones 0.92 and 0.01414."""
    found = replace(study(), repeats=REPEATS)
    told = [one.plain for one in lines(found)]
    assert "best        mean accuracy 97.50 %, standard deviation 0.5 % over 3 seeds" in told
    assert "default     mean accuracy 92.00 %, standard deviation 1.4 % over 2 of 3 seeds" in told
    assert told[told.index(next(one for one in told if one.startswith("luck")))].startswith(
        "luck        no verdict: 0 of 3 seeds of the best settings and 1 of the default ones"
    )
    shown = html.unescape(re.sub("<[^>]+>", "", found._repr_html_()))
    assert [line.rstrip() for line in shown.strip().splitlines()] == [one.rstrip() for one in told]
    assert repr(found).startswith(f"<StudyResult of {found.recipe}: {found.finished} of ")
    page = render(found, Path())
    for each in ("97.50 %", "0.5 %", "92.00 %", "1.4 %", "3 seeds", "2 of 3 seeds"):
        assert f">{each}<" in page
    losses = replace(
        found,
        aims=[Aim(name="loss", mode=Mode.min)],
        rows=(),
        repeats={**REPEATS, "best": {"mean": 0.5, "deviation": None, "values": [0.5]}},
    )
    assert "best        mean loss 0.5000 over 1 of 3 seeds" in [one.plain for one in lines(losses)]


def test_repeats_are_named_by_what_they_train() -> None:
    found = replace(study((170, 160)), searched=(), first_seed=3, total=4)
    rows = [replace(row, values={}, number=row.number + 2) for row in found.rows]
    found = replace(found, rows=rows)
    assert line(found, rows[0], "1 s") == "[2/4] best settings, seed 4: accuracy 95.0 %; 1 s"
    assert line(found, rows[1], "1 s").startswith("[2/4] default settings, seed 4: accuracy 89.4 %")
    told = io.StringIO()
    running = replace(found, rows=[replace(rows[0], state="running", step=8), rows[1]])
    console = Console(file=told, width=120)
    console.print(drawing(running, "1 s"))
    assert "running  best settings, seed 4 (step 8: 95.0 %)" in told.getvalue()
    assert "best     accuracy" not in told.getvalue()
    console.print(drawing(study(), "1 s"))
    assert "best     accuracy" in told.getvalue()


def test_no_row_is_empty() -> None:
    nothing = replace(study(), rows=())
    assert [one.plain for one in lines(nothing)] == [
        "digits: no result",
        "no trial has ended",
    ]


def test_importances_are_whole_per_cents() -> None:
    found = replace(study(), importance={"batch": 0.7349, "model.width": 0.262, "seed": 0.003})
    told = [one.plain for one in lines(found)]
    assert "importance  batch 73 %, model.width 26 %, seed < 1 %" in told
    assert "</span>73 %</td>" in render(found, Path())


def test_a_best_that_others_equal_is_told() -> None:
    found = study()
    assert found.best is found.rows[0]
    assert f"luck        {HINT}" in [one.plain for one in lines(found)]
    assert HINT in re.sub(r"</?span[^>]*>", "", render(found, Path()))
    told = replace(found, repeats={**REPEATS, "sentence": "a gain"})
    assert "luck        a gain" in [one.plain for one in lines(told)]
    assert HINT not in re.sub(r"</?span[^>]*>", "", render(told, Path()))
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
    assert "time        1 m 00 s for all trials" in told
    cost = "$3.00 forecast for training steps on the slice; start-up, evaluations and repeats"
    assert any(cost in each for each in told)


def test_the_best_of_a_long_front_come_first_and_the_rest_are_counted() -> None:
    """Each trial is right on one more example than the one before and costs more; repeated settings count once."""
    found = study(range(160, 175))
    rows = [
        replace(row, figures={**row.figures, "dollars": float(row.number)}) for row in found.rows
    ]
    rows.append(replace(rows[-1], number=15))
    aims = [*found.aims, Aim(name="dollars", mode=Mode.min)]
    found = replace(found, rows=rows, aims=aims, total=16)
    assert [row.number for row in found.front] == list(range(14, -1, -1))
    told = [one.plain for one in lines(found)]
    assert "15 trials on the Pareto front" in told
    (first,) = [place for place, each in enumerate(told) if each.startswith("front")]
    assert told[first].startswith("front       trial 14: accuracy 97.2 %, dollars $14.00")
    assert told[first + 12].strip() == "and 3 more, on the page"


def test_the_same_settings_again_are_no_other_ones() -> None:
    found = study((178, 178, 177, 100))
    again = [replace(row, values={"batch": 16}) for row in found.rows[:2]]
    assert replace(found, rows=[*again, *found.rows[2:]]).near == 1


def test_what_is_left_is_of_the_search_alone() -> None:
    """The repeats that follow have their own clock."""
    told = io.StringIO()
    with StudyDisplay(told, environ={}) as view:
        found = study((160,))
        view.see(replace(found, rows=(), has_repeats=True))
        view.see(replace(found, has_repeats=True))
        assert told.getvalue().splitlines()[-1].endswith(" left before the repeats  <- best so far")
        view.begin("repeats")
        view.see(replace(found, rows=()))
        view.see(found)
        assert told.getvalue().splitlines()[-1].endswith(" left  <- best so far")


def test_dollars_of_a_search_without_a_slice_are_not_known() -> None:
    found = replace(study(), price_region="us-central1", price_as_of="2026")
    plain = found.to_json()
    assert [plain[name] for name in ("dollars", "price_region", "price_as_of")] == [
        3.0,
        "us-central1",
        "2026",
    ]
    (cost,) = [one.plain for one in lines(found) if one.plain.startswith("cost")]
    assert cost.startswith(
        "cost        $3.00 (us-central1, 2026) forecast for training steps on the slice"
    )
    unpriced = replace(found, rows=[replace(row, dollars=None) for row in found.rows])
    assert unpriced.to_json()["dollars"] is None
    assert not any("cost" in one.plain for one in lines(unpriced))


def test_the_line_of_the_best_begins_within_the_axis() -> None:
    """The first two of the results are outliers: dots on the edge, where the line does not begin."""
    late = study((26, 129, 169, 176, 177, 176, 178, 177, 177, 176))
    chart = history(replace(late, total=10))
    assert chart is not None
    assert [dot.bottom for dot in chart.dots[:2]] == [0, 0]
    assert all(dot.bottom > 0 for dot in chart.dots[2:])
    place = f"{chart.x.place(2) * 1000:.1f} {(1 - chart.y.place(169 / 179)) * 300:.1f}"
    assert chart.line.startswith(f"M{place}h0")
    # A first result that is little worse is in the axis, and the line begins at it.
    near = study((173, 176, 177, 176, 178, 177, 177, 176))
    chart = history(near)
    assert chart is not None
    assert chart.line.startswith("M0.0 ")
    assert chart.dots[0].bottom > 0


def test_ticks_of_trials_are_whole() -> None:
    for total in (1, 2, 3, 4, 5, 8, 60):
        chart = history(replace(study((170,) * total), total=total))
        assert chart is not None
        assert len(chart.x.ticks) > 1
        assert all(text == f"{at:.0f}" for at, text in chart.x.ticks)


def test_a_slice_has_the_whole_range_and_all_trials() -> None:
    searched = [
        Searched(name="rate", spec="log:1e-4..1e-2", low=1e-4, high=1e-2, log=True),
        Searched(name="layers", spec="1..3", low=1, high=3, whole=True),
        Searched(name="kind", spec="a,b", choices={"a": "a", "b": "b"}),
    ]
    settings = [(1e-4, 1, "a"), (1e-3, 2, "b"), (1e-2, 3, "b"), (1e-3, 1, "a")]
    base = study((170, 175, 172, 150))
    rows = [
        replace(row, values={"rate": a, "layers": b, "kind": c})
        for row, (a, b, c) in zip(base.rows, settings, strict=True)
    ]
    rows[3] = replace(rows[3], state="stopped early")
    found = replace(base, searched=searched, rows=rows)
    rate, layers, kind = slices(found)
    by_trial = {dot.text.partition(":")[0]: dot for dot in rate.dots}
    places = [by_trial[f"trial {number}"].left for number in range(4)]
    assert places[1] == places[3] == 50  # the middle of the logarithm
    assert places[0] == pytest.approx(100 - places[2])
    assert 0 < places[0] < 6
    assert rate.dots[0].css == "broken"
    assert rate.dots[-1].css == "best"
    assert [text for _, text in layers.x.ticks] == ["1", "2", "3"]
    assert kind.words == ["a", "b"]
    sides = {dot.text.partition(":")[0]: dot.left for dot in kind.dots}
    assert all((sides[f"trial {n}"] < 50) == (settings[n][2] == "a") for n in range(4))
    assert slices(replace(found, rows=rows[3:])) == []


def test_trials_are_ranked_by_their_result() -> None:
    found = study((170, 175, 172, 178, 150))
    rows = [*found.rows]
    rows[3] = replace(rows[3], state="stopped early")
    found = replace(found, rows=rows)
    assert [row.number for row in ranked(found)] == [1, 2, 0, 4, 3]
    losses = replace(found, aims=[Aim(name="accuracy", mode=Mode.min)])
    assert [row.number for row in ranked(losses)] == [4, 0, 2, 1, 3]


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
    assert "3 outliers drawn on the edge" in render(found, Path())
    losses = replace(found, aims=[Aim(name="accuracy", mode=Mode.min)])
    assert history(losses).beyond == 0  # the best is always within the axis

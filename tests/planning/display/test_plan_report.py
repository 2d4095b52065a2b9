"""A plan in words, as lines and as a page: true to the plan, on its own, and small."""

import html
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import slice
from systolic.core.files import write_json
from systolic.forecasting.cost import ForecastCompile
from systolic.job import Remat
from systolic.planning.candidate import SETS
from systolic.planning.display import readings
from systolic.planning.display.page import chart, places, render, torus
from systolic.planning.display.progress import SearchDisplay
from systolic.planning.display.text import lines
from systolic.planning.goal import Goal, Objective
from systolic.planning.plan import Plan, SearchStop, Trial
from systolic.planning.search import SearchProgress, SearchStage
from systolic.planning.space import RefusalRule
from systolic.report.figures import Tone
from systolic.report.pages import COLOURS
from systolic.report.terminal import plain
from tests.planning.fabricated import GOAL, candidate, plan, tried
from tests.recorded import hlo
from tests.training.display.test_page import Page

PATH = Path("plan.json")
LARGEST = 600_000


def screen(made: Plan, width: int = 100) -> str:
    return "\n".join(plain(lines(made, PATH, width)))


def with_more(*more: Trial, **goal: Any) -> Plan:
    made = plan()
    return replace(made, tried=(*more, *made.tried), goal=replace(GOAL, **goal))


def test_the_screen_has_the_answer_first() -> None:
    shown = screen(plan()).splitlines()
    assert "20 G tokens, time and cost   planned" in shown[0]
    assert shown[1].startswith(
        "v6e-16 fsdp 16 remat minimal attention block 1024: 13.9 hours, $600"
    )
    assert "step time within −8 to +12 %" in " ".join(shown[1:3])
    assert "systolic train lm --plan plan.json" in shown[3]
    assert len(shown) <= 30
    assert max(map(len, shown)) <= 100


def test_a_plan_shows_its_screen_in_notebooks() -> None:
    page = plan()._repr_html_()
    text = html.unescape(re.sub(r"<[^>]+>", "", page)).strip("\n")
    assert [line.rstrip() for line in text.splitlines()] == plain(lines(plan(), None, 100))


def test_the_ranking_marks_the_front() -> None:
    text = screen(plan())
    marked = re.findall(r"^\s*(\d+)\*\s+(\S+)", text, re.MULTILINE)
    assert marked == [("1", "v6e-16"), ("2", "v5e-64")]
    assert "batch" not in text.splitlines()[5]  # the same everywhere


def test_every_candidate_but_the_best_is_a_line_with_what_differs() -> None:
    shown = screen(plan(), 140).splitlines()
    start = next(n for n, line in enumerate(shown) if "differs from the best" in line) + 1
    ranking = plan().ranking
    table = shown[start : start + len(ranking)]
    assert [line.split()[1] for line in table] == [one.candidate.on.name for one in ranking]
    # The best is v6e-16 fsdp 16 remat minimal attention block 1024.
    assert table[0].rstrip().endswith("600  schedule")
    assert table[1].endswith("data 4, attention block 512")
    assert "kWh" not in shown[start - 1]
    assert "kWh" in screen(plan(replace(GOAL, objective=Objective.energy)))


@pytest.mark.parametrize("width", [70, 100])
def test_what_differs_is_never_cut(width: int) -> None:
    names = tuple(f"projection_{number}" for number in range(9))
    long = candidate("v6e-16", data=1, fsdp=16, remat=Remat.save_names, remat_names=names)
    flagged = replace(long, flags=SETS[0])
    made = with_more(tried(long, 1.4, 22.0), tried(flagged, 1.4, 22.0))
    shown = screen(made, width).splitlines()
    start = next(n for n, line in enumerate(shown) if re.match(r"1\*\s+v6e-16", line))
    end = next(n for n, line in enumerate(shown) if "no other is faster" in line)
    table = shown[start:end]
    assert not any("…" in line for line in table)
    assert max(map(len, shown)) <= width
    assert len([line for line in table if f"flags {SETS[0].name}" in line]) == 1
    text = "".join("".join(table).split())
    for row in readings.rows(made):
        assert "".join(row.unlike.split()) in text


def test_kept_names_and_flags_differ_by_what_is_more_or_less() -> None:
    best = candidate(
        "v6e-8", fsdp=8, remat=Remat.offload, remat_names=("a", "b"), saved_names=("c",)
    )
    names = {"remat": Remat.offload, "remat_names": ("a", "d"), "saved_names": ()}
    other = replace(candidate("v6e-8", fsdp=4, tensor=2, **names), flags=SETS[0])
    assert readings.unlike(best, best) == ""
    assert readings.unlike(best, other) == (
        f"fsdp 4, tensor 2, remat +d -b, keep -c, flags {SETS[0].name}"
    )
    assert readings.unlike(other, best) == (
        f"fsdp 8, tensor 1, remat +b -d, keep +c, no flags {SETS[0].name}"
    )
    full = candidate("v6e-8", fsdp=8, remat=Remat.full)
    assert readings.unlike(best, full) == "remat full"


def test_the_interval_of_the_step_is_told_once() -> None:
    page = render(plan(), PATH, root=Path("/nowhere"))
    assert page.count("−8 to +12 %") == 2  # in the sentence and on the tile, on no row
    assert screen(plan()).count("−8 to +12 %") == 1


def test_rejections_have_their_numbers() -> None:
    found = {reason.rule: reason for reason in readings.reasons(plan())}
    assert found[RefusalRule.compiler].layouts == 2
    assert "1 does not fit, 1 did not compile" in found[RefusalRule.compiler].words
    assert found[RefusalRule.compiler].nearest.endswith("which needs 20.30 GiB of 16.00 GiB")
    assert found[RefusalRule.memory_bound].layouts == 1204
    assert "18.20 GiB of 15.75 GiB" in found[RefusalRule.memory_bound].nearest


def test_a_search_that_was_stopped_says_so() -> None:
    made = plan(stopped=SearchStop.interrupted)
    assert readings.verdict(made).word == "best so far"
    assert readings.searched(made).endswith("; interrupted")


def test_without_an_answer_the_nearest_is_told() -> None:
    made = plan(Goal(units=20e9, objective=Objective.time, deadline_seconds=3600.0))
    told = readings.verdict(made)
    assert told.tone is Tone.bad
    assert told.sentence.startswith("nearest is v")
    assert told.sentence.endswith("the deadline is 60 minutes.")
    unfit = replace(plan(), tried=plan().tried[5:6], refused=())
    told = readings.verdict(unfit)
    assert told.word == "nothing fits"
    assert "which needs 20.30 GiB of 16.00 GiB" in told.sentence
    assert readings.verdict(replace(unfit, stopped=SearchStop.time_limit)).word == "no answer yet"
    paper = replace(plan(), tried=(), refused=plan().refused[:1])
    assert "18.20 GiB of 15.75 GiB" in readings.verdict(paper).sentence


def test_rows_that_are_shown_have_each_slice() -> None:
    many = [
        tried(candidate("v6e-16", fsdp=16, remat=Remat.full), 1.0 + n / 100, 20.0)
        for n in range(12)
    ]
    found = readings.rows(with_more(*many, objective=Objective.time))
    kept = readings.shown(found, 8)
    assert [row.rank for row in kept] == sorted(row.rank for row in kept)
    assert {row.slice for row in kept} == {"v5e-16", "v5e-64", "v5p-16", "v6e-16"}
    assert len(kept) == 8
    assert kept[0].rank == 1


def progress(one: Trial, best: Trial | None) -> SearchProgress:
    return SearchProgress(
        stage=SearchStage.compiling,
        compiled=3,
        of=24,
        running=["v5e-64 fsdp 64 remat full"] * 6,
        best=best,
        seconds=41.2,
        latest=one,
        answer=plan,
    )


def test_elsewhere_than_on_a_terminal_a_line_a_result() -> None:
    stream = io.StringIO()
    made = plan()
    with SearchDisplay(stream, environ={}, width=100) as view:
        for one in made.tried[:2]:
            view.see(progress(one, made.tried[0]))
        view.see(settling(progress(made.tried[0], None), "v5e-64"))
    shown = stream.getvalue().splitlines()
    assert shown == [
        "[ 3/24, 41.2 s] v5e-64 data 4 fsdp 16 remat minimal: 1.02 s, 27.9 % MFU, 13.10 of 16.00 GiB, 10.8 hours, $830  <- best so far",
        "[ 3/24, 41.2 s] v5e-64 fsdp 64 remat full: 1.21 s, 23.5 % MFU, 7.40 of 16.00 GiB, 12.8 hours, $985",
        "[ 3/24, 41.2 s] full compile of v5e-64",
    ]


def settling(told: SearchProgress, name: str) -> SearchProgress:
    return replace(told, latest=None, stage=SearchStage.settling, subject=name)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_few_lines_are_redrawn() -> None:
    stream = Terminal()
    made = plan()
    with SearchDisplay(stream, environ={"TERM": "xterm"}, width=100) as view:
        view.see(progress(made.tried[1], made.tried[0]))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for words in ("3 of 24 compiled", "compiling", "and 2 more", "best", "$830"):
        assert words in text, words


@pytest.mark.parametrize("stopped", [None, SearchStop.interrupted])
def test_the_page_needs_nothing_else(stopped: SearchStop | None) -> None:
    text = render(plan(stopped=stopped), PATH, root=Path("/nowhere"))
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert len(text) < LARGEST
    for words in (
        "v6e-16 fsdp 16 remat minimal attention block 1024: 13.9 hours, $600",
        "systolic train lm --plan plan.json --candidate 2",
        "Time against cost",
        "no other is faster and cheaper",
        "To try: other slices",
        "1 does not fit, 1 did not compile",
    ):
        assert words in page.text, words


def test_the_page_without_an_answer() -> None:
    made = plan(replace(GOAL, budget_usd=100.0))
    page = Page(render(made, PATH, root=Path("/nowhere")))
    assert "none meets the goal" in page.text
    assert "systolic train" not in page.text


def test_text_on_the_page_is_escaped() -> None:
    made = plan()
    bad = replace(made.tried[6], problem="<script>alert(1)</script>")
    text = render(replace(made, tried=(*made.tried[:6], bad)), PATH, root=Path("/nowhere"))
    assert "<script>alert" not in text


def test_the_chart_joins_the_front() -> None:
    made = plan()
    drawn = chart(made, {one.candidate.on.name: 0 for one in made.tried})
    assert drawn is not None
    assert len(drawn.dots) == 5
    assert [dot.css for dot in drawn.dots].count("best") == 1
    assert len(re.findall("[ML]", drawn.line)) == len(made.pareto) == 2
    assert drawn.y_name == "dollars"
    limited = chart(
        replace(made, goal=replace(GOAL, budget_usd=700.0)),
        {one.candidate.on.name: 0 for one in made.tried},
    )
    assert limited is not None
    assert [axis for axis, _, _ in limited.limits] == ["y"]


def test_places_come_from_the_compiled_program(tmp_path: Path) -> None:
    one = plan().tried[0]
    assert one.forecast is not None
    assert places(one, tmp_path) == []
    named = replace(one, forecast=replace(one.forecast, compiler=ForecastCompile(program="abcd")))
    assert places(named, tmp_path) == []
    report = hlo.report("lm-v5e-4")
    write_json(tmp_path / "programs" / "ab" / "abcd" / "report.json", report)
    assert places(named, tmp_path) == report["places"]
    write_json(tmp_path / "programs" / "ab" / "abcd" / "report.json", {"places": []})
    assert places(named, tmp_path) == []


def test_the_torus_colours_what_talks_along_an_axis() -> None:
    one = candidate("v5e-4", data=2, fsdp=2)
    # As libtpu has them: around the ring.
    ring = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (0, 1, 0, 0, 0)]
    drawn = torus(one.on, one.layout, ring)
    assert drawn is not None
    data, fsdp = drawn.drawings
    assert (data.axis, data.size, data.groups) == ("data", 2, 2)

    def at(drawing: Any, x: int, y: int) -> Any:
        near = sorted(drawing.cells, key=lambda cell: (round(cell.y), round(cell.x)))
        return near[2 * y + x]

    assert at(fsdp, 0, 0).colour == at(fsdp, 1, 0).colour != at(fsdp, 1, 1).colour
    assert at(data, 0, 0).colour == at(data, 1, 1).colour != at(data, 1, 0).colour
    assert at(data, 1, 1).text == "chip 1,1,0: data 1, fsdp 0"
    assert at(data, 1, 1).label == "1"


def test_many_groups_are_grey_but_a_few() -> None:
    one = candidate("v5e-64", data=4, fsdp=16)
    drawn = torus(one.on, one.layout, [])
    assert drawn is not None
    data = drawn.drawings[0]
    assert data.coloured == 4
    assert {cell.colour for cell in data.cells} == {0, 1, 2, 3, COLOURS}
    assert "drawn in order" in drawn.notes[0]


def test_large_slices_are_drawn_as_blocks() -> None:
    one = candidate("v5p-4096", fsdp=512, tensor=4)
    drawn = torus(one.on, one.layout, [])
    assert drawn is not None
    for drawing in drawn.drawings:
        assert len(drawing.cells) < one.on.num_chips
        area = sum(cell.width * cell.height for cell in drawing.cells)
        cells = one.on.num_devices
        side = min(min(cell.width, cell.height) for cell in drawing.cells)
        assert area == pytest.approx(cells * side * side, rel=0.01)


def test_several_slices_and_two_cores() -> None:
    one = candidate("4xv5e-16", data=4, fsdp=16)
    drawn = torus(one.on, one.layout, [])
    assert drawn is not None
    assert len(drawn.drawings[0].cells) == 32
    assert "2 of 4 slices are drawn" in " ".join(drawn.notes)
    halves = candidate("tpu7x-8", fsdp=slice("tpu7x-8").num_devices)
    drawn = torus(halves.on, halves.layout, [])
    assert drawn is not None
    assert len(drawn.drawings[0].cells) == halves.on.num_devices
    assert torus(slice("cpu"), one.layout, []) is None

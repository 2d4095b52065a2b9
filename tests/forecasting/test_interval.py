"""Ranges of forecasts: what they hold of the results that they were not made of."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from systolic.compiling.traced import ProgramFacts
from systolic.forecasting.platforms import LARGEST_ERROR, GpuModel
from systolic.forecasting.run import ScheduleDetail, detail_of, interval_of
from tests.recorded import operations

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "accuracy"


def _load() -> ModuleType:
    sys.path.insert(0, str(ACCURACY))  # the benchmarks' modules import each other by name
    found = importlib.util.spec_from_file_location(
        "benchmark_accuracy_intervals", ACCURACY / "intervals.py"
    )
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[found.name] = made
    found.loader.exec_module(made)
    return made


intervals = _load()
ROWS = intervals.read()


def row(number: int, error: float, **more: Any) -> dict[str, Any]:
    base = {"id": f"model{number}", "group": "rebuilt", "mode": "quick", "generation": "v6e"}
    return base | {"error": error, "half": "fit"} | more


def test_the_table_is_what_the_stored_results_make() -> None:
    text = intervals.TABLE.read_text()
    # After new results: python benchmarks/accuracy/intervals.py --write
    assert text == intervals.table(ROWS)
    assert set(intervals.KINDS) == set(tomllib.loads(text))
    assert intervals.PAGE.read_text().endswith("\n".join(intervals.coverage(ROWS)) + "\n")


@pytest.mark.parametrize("by", GpuModel)
def test_the_words_for_the_far_end_of_a_gpu_s_range_are_of_its_largest_error(by: GpuModel) -> None:
    errors = {
        row["id"]: row["error"] for row in ROWS if (row["group"], row["mode"]) == ("gpu", by.value)
    }
    largest = max(errors, key=lambda name: abs(errors[name]))
    assert errors[largest] < 0
    assert largest.startswith("rosetta")
    assert LARGEST_ERROR == "software of 2023 was the slowest beside it"


def test_ranges_hold_the_share_of_results_that_they_were_made_without() -> None:
    found = intervals.checks(ROWS)
    for (kind, mode), shares in found.items():
        for generation, (judged, every) in shares.items():
            for held, total in (judged, every):
                if total >= 10:
                    # 80 %, less 1.64 standard errors of a share of so many.
                    least = 0.8 - 1.64 * (0.8 * 0.2 / total) ** 0.5
                    assert held / total >= least, (kind, mode, generation)
    for key in (
        ("own", "quick"),
        ("rebuilt", "quick"),
        ("function", "quick"),
        ("function", "full"),
    ):
        held, total = found[key]["all"][1]
        assert 0.8 * total <= held < total, key  # one that holds everything says nothing


def test_one_of_ten_results_lies_beyond_each_end() -> None:
    nineteen = [row(n, n / 100) for n in range(-9, 10)]
    made = intervals.interval(nineteen)
    assert made.low == pytest.approx(-0.08)  # (19 + 1) / 10: the second from each end
    assert made.high == pytest.approx(0.08)
    few = intervals.interval(nineteen[:8])
    assert (few.low, few.high) == (pytest.approx(-0.09), intervals.LEAST)  # from end to end
    narrow = intervals.interval([row(n, 0.001) for n in range(9)])
    assert (narrow.low, narrow.high) == (-intervals.LEAST, intervals.LEAST)


def test_runs_of_one_model_count_once_and_each_where_that_is_wider() -> None:
    series = [
        row(0, 0.5, id=f"maxtext-v5e-16b-{slices}xv5e-256") for slices in (1, 2, 4, 8, 16, 32)
    ]
    others = [row(n, n / 100) for n in range(-9, 10)]
    # The second of 20 families, the first of which is the series.
    assert intervals.interval([*others, *series[:1]]).high == pytest.approx(0.09)
    # (25 + 1) / 10: the second of 25 rows is one of the series.
    assert intervals.interval([*others, *series]).high == pytest.approx(0.5)


def test_a_chip_with_few_results_takes_those_of_all_widened_by_its_own() -> None:
    many = [row(n, n / 100) for n in range(-9, 10)]
    wide = [row(40 + n, error, generation="v4") for n, error in enumerate((0.01, 0.3))]
    inside = [row(50, 0.01, generation="v5p")]
    made = intervals.intervals([*many, *wide, *inside])
    assert set(made) == {"all", "v6e", "v4"}
    assert made["v4"].high == pytest.approx(0.3)
    assert made["v4"].low == made["all"].low
    assert (made["v4"].rows, made["v4"].families) == (2, 2)


def test_a_rebuilt_range_is_no_narrower_than_an_own_program_s() -> None:
    own = [row(n, n / 50, group="own") for n in range(-9, 10)]
    made = intervals.ranges([*own, *(row(n, n / 100) for n in range(-9, 10))])
    rebuilt = made["rebuilt", "quick"]["v6e"]
    assert (rebuilt.low, rebuilt.high) == (pytest.approx(-0.16), pytest.approx(0.16))
    stored = intervals.ranges(ROWS)
    for name, narrow in stored["own", "quick"].items():
        wide = stored["rebuilt", "quick"].get(name, stored["rebuilt", "quick"]["all"])
        assert wide.low <= narrow.low, name
        assert narrow.high <= wide.high, name


def test_a_family_is_judged_by_the_others_of_every_kind() -> None:
    name = "wiki-maxtext-qwen3-8b-v6e8-s8192-bs1"
    lone = [row(0, 0.9, id=name, group=kind, half="judge") for kind in ("own", "rebuilt")]
    others = [row(n, n / 100, group=kind) for n in range(1, 20) for kind in ("own", "rebuilt")]
    found = intervals.checks([*lone, *others])
    for kind in ("own", "rebuilt"):
        judged, every = found[kind, "quick"]["v6e"]
        assert judged == (0, 1)
        assert every[1] == 20


@pytest.mark.parametrize(
    ("facts", "kind", "mode"),
    [
        (ProgramFacts(unit="tokens"), "rebuilt", "quick"),
        (ProgramFacts(verb="captured"), "own", "quick"),
        (ProgramFacts(verb="function"), "function", "full"),
        (ProgramFacts(verb="function", unit="tokens"), "function", "quick"),
        (ProgramFacts(), "function", "quick"),
        (ProgramFacts(verb="decode", unit="tokens"), "decode", "quick"),
    ],
)
def test_a_range_says_what_it_rests_on(facts: ProgramFacts, kind: str, mode: str) -> None:
    table = tomllib.loads(intervals.TABLE.read_text())[kind][mode]
    for generation in (*table, "no such chip"):
        if generation == "all":
            continue
        used = generation if generation in table else "all"
        expected = table[used]
        low, high, text = interval_of(generation, 2.0, facts, ScheduleDetail(mode))
        assert low == pytest.approx(2 / (1 + expected["high"]))
        assert high == pytest.approx(2 / (1 + expected["low"]))
        assert low < 2 < high
        assert text.startswith(f"{expected['held']} of {expected['rows']} ")
        elsewhere = "all generations" in text or "on v5e, none on" in text  # where decode was timed
        assert elsewhere == (used == "all")


def test_a_recipe_s_range_says_why_it_is_wider_than_a_captured_program_s() -> None:
    table = tomllib.loads(intervals.TABLE.read_text())
    job, captured = ProgramFacts(unit="tokens"), ProgramFacts(verb="captured")
    for chip in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        wide, narrow = (
            interval_of(chip, 2.0, facts, ScheduleDetail.quick) for facts in (job, captured)
        )
        assert wide[0] <= narrow[0] < narrow[1] <= wide[1]
        assert "trainers' programs differ from a recipe's" in wide[2]
        assert "differ" not in narrow[2]
        if wide[:2] != narrow[:2]:
            own = table["own"]["quick"].get(chip) or table["own"]["quick"]["all"]
            ends = f"({own['low']:+.0%} to {own['high']:+.0%})"
            assert f"wider than a captured program's {ends}" in wide[2]


def test_a_range_says_how_many_results_lie_in_it() -> None:
    made = tomllib.loads(intervals.TABLE.read_text())["rebuilt"]["quick"]["all"]
    errors = [each["error"] for each in ROWS if each["group"] == "rebuilt"]
    assert made["rows"] == len(errors)
    # Ends are rounded to a thousandth in the table.
    inside = sum(made["low"] - 5e-4 <= error <= made["high"] + 5e-4 for error in errors)
    assert made["held"] == inside


def test_a_range_says_where_its_results_are_of_another_kind() -> None:
    prefill, train = (ProgramFacts(unit="tokens", verb=verb) for verb in ("prefill", "train"))
    of_prefill = interval_of("v6e", 2.0, prefill, ScheduleDetail.quick)[2]
    assert of_prefill.endswith("; no prefill step among them")
    compiled = interval_of("v6e", 2.0, train, ScheduleDetail.full)[2]
    assert compiled.endswith(", forecast from schedules")


def test_a_table_is_not_made_of_errors_that_are_none() -> None:
    for error in (float("nan"), float("inf"), -1.0):
        with pytest.raises(SystemExit, match=f"one has an error of {error}"):
            intervals.read(own=[row(0, error, id="one")])


def test_a_schedule_is_told_from_a_full_compile_by_its_cycles() -> None:
    for detail in ScheduleDetail:
        assert detail_of(operations.module("gated-v5p", detail.value)) is detail

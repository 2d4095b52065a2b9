"""Ranges of forecasts: what they hold of the results that they were not made of."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from systolic.compiling.traced import ProgramFacts
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
ROWS = intervals.read(intervals.STEPS, intervals.OPERATIONS)


def row(number: int, error: float, **more: Any) -> dict[str, Any]:
    base = {"id": f"model{number}", "group": "step", "mode": "quick", "generation": "v6e"}
    return base | {"error": error, "half": "fit"} | more


def test_the_table_is_what_the_stored_results_make() -> None:
    text = intervals.TABLE.read_text()
    # After new results: python benchmarks/accuracy/intervals.py --write
    assert text == intervals.table(ROWS)
    assert {"step", "operation"} == set(tomllib.loads(text))


def test_intervals_hold_the_share_of_results_that_they_were_not_made_of() -> None:
    found = intervals.checks(ROWS)
    # Each half of steps, drawn by family, judges the other. Prices of operations are fitted on one half.
    judged = {
        "steps": [found["step", "quick", half]["all"] for half in ("fit", "judge")],
        "operations by schedule": [found["operation", "quick", "judge"]["all"]],
        "operations compiled": [found["operation", "full", "judge"]["all"]],
    }
    for name, parts in judged.items():
        held, total = (sum(part[at] for part in parts) for at in (0, 1))
        assert total > 40, name
        # 80 %, less 1.64 standard errors of a share of so many.
        assert held / total >= 0.8 - 1.64 * (0.8 * 0.2 / total) ** 0.5, name
        assert held < total, name  # one that holds everything says nothing


def test_one_of_ten_results_lies_beyond_each_end() -> None:
    nineteen = [row(n, n / 100) for n in range(-9, 10)]
    made = intervals.interval(nineteen)
    assert made.low == pytest.approx(-0.08)  # (19 + 1) / 10: the second from each end
    assert made.high == pytest.approx(0.08)
    assert intervals.interval(nineteen[:8]) is None
    narrow = intervals.interval([row(n, 0.001) for n in range(9)])
    assert (narrow.low, narrow.high) == (-intervals.LEAST, intervals.LEAST)


def test_runs_of_one_model_on_more_slices_count_once() -> None:
    series = [
        row(0, 0.5, id=f"maxtext-v5e-16b-{slices}xv5e-256") for slices in (1, 2, 4, 8, 16, 32)
    ]
    others = [row(n, n / 100) for n in range(-9, 10)]
    made = intervals.interval([*others, *series])
    assert made.families == 20
    assert made.high == pytest.approx(0.09)  # the second of 20 families; the first is the series


def test_a_range_says_what_it_rests_on() -> None:
    table = tomllib.loads(intervals.TABLE.read_text())
    job, function = ProgramFacts(unit="tokens"), ProgramFacts(unit="calls")
    for facts, kind, mode, generation, used in (
        (job, "step", "quick", "v6e", "v6e"),
        (job, "step", "quick", "v5e", "all"),
        (function, "operation", "full", "tpu7x", "tpu7x"),
        (function, "operation", "quick", "no such chip", "all"),
    ):
        expected = table[kind][mode][used]
        low, high, text = interval_of(generation, 2.0, facts, ScheduleDetail(mode))
        assert low == pytest.approx(2 / (1 + expected["high"]))
        assert high == pytest.approx(2 / (1 + expected["low"]))
        assert low < 2 < high
        assert text.startswith(f"{expected['held']} of {expected['rows']} measured")
        assert ("all generations" in text) == (used == "all")


def test_a_range_says_how_many_results_lie_in_it() -> None:
    made = tomllib.loads(intervals.TABLE.read_text())["step"]["quick"]["all"]
    errors = [each["error"] for each in ROWS if each["group"] == "step"]
    assert made["rows"] == len(errors)
    # Ends are rounded to a thousandth in the table.
    inside = sum(made["low"] - 5e-4 <= error <= made["high"] + 5e-4 for error in errors)
    assert made["held"] == inside


def test_a_range_says_where_its_results_are_of_another_kind() -> None:
    decode, train = (ProgramFacts(unit="tokens", verb=verb) for verb in ("decode", "train"))
    of_decode = interval_of("v6e", 2.0, decode, ScheduleDetail.quick)[2]
    assert of_decode.endswith("train steps on v6e; no decode step among them")
    compiled = interval_of("v6e", 2.0, train, ScheduleDetail.full)[2]
    assert compiled.endswith("v6e, forecast from schedules")


def test_a_table_is_not_written_from_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="is no file"):
        intervals.read(tmp_path / "none.jsonl", intervals.OPERATIONS)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        '{"id": "one", "mode": "quick", "generation": "v6e", "error": NaN, "half": "fit"}\n'
    )
    with pytest.raises(SystemExit, match="one has an error of nan"):
        intervals.read(bad, intervals.OPERATIONS)
    bad.write_text('{"id": "o\n{"id": "two", "error": null}\n')
    with pytest.raises(SystemExit, match="2"):
        intervals.read(bad, intervals.OPERATIONS)
    assert f"{bad}: line 1 is not JSON" in capsys.readouterr().err


def test_a_schedule_is_told_from_a_full_compile_by_its_cycles() -> None:
    for detail in ScheduleDetail:
        assert detail_of(operations.module("gated-v5p", detail.value)) is detail

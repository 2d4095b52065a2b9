"""Tables of forecasts: rows, the best among them, CSV, and the views of values in notebooks."""

import csv
import html
import io
import json
import re
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.cli.main import main
from systolic.core.errors import SystolicError
from systolic.forecasting import forecast_text
from systolic.forecasting.display import readings, text
from systolic.forecasting.display.table import lines
from systolic.forecasting.table import ForecastRow, ForecastTable
from tests.forecasting.display import recorded
from tests.recorded import hlo

TINY = str(Path(__file__).parents[1] / "cli" / "tiny.py")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text("lm-scoped-v5e-4"))
    return path


def table() -> ForecastTable:
    """A schedule that fits, one that is for a chip at another price, one that does not fit and one that can't run."""
    rows = [
        ForecastRow(on=recorded.ON, settings={"batch": 1}, forecast=recorded.fitting()),
        ForecastRow(on=recorded.ON, settings={"batch": 9}, forecast=recorded.refused()),
        ForecastRow(on=slice("v5e-8"), settings={"batch": 1}, problem="layout is for 4 devices"),
    ]
    return ForecastTable(name="lm", rows=rows)


def test_rows_that_do_not_fit_are_never_the_best() -> None:
    made = table()
    assert made.fastest is made[0]
    assert made.cheapest is made[0]
    plain = made.to_json()
    assert (plain["fastest"], plain["cheapest"]) == (0, 0)
    assert plain["forecasts"][2] == {
        "slice": "v5e-8",
        "settings": {"batch": 1},
        "problem": "layout is for 4 devices",
    }
    assert "1 of 3 fit, fastest v5e-4 batch 1" in repr(made)


def test_csv_has_the_numbers_of_the_json() -> None:
    made = table()
    rows = list(csv.DictReader(io.StringIO(made.to_csv())))
    plain = made.to_json()["forecasts"][0]
    assert float(rows[0]["step_seconds"]) == plain["step_seconds"]
    assert float(rows[0]["hbm.peak_bytes"]) == plain["hbm"]["peak_bytes"]
    assert float(rows[0]["usd_per_billion_tokens"]) == plain["usd_per_billion_tokens"]
    assert [row["fits"] for row in rows] == ["True", "False", ""]
    assert rows[2]["problem"] == "layout is for 4 devices"
    assert list(rows[0])[-1] == "problem"


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    shown = [line.plain for line in lines(table(), width)]
    assert max(map(len, shown)) <= width
    assert any("does not fit" in line for line in shown)
    assert any("layout is for 4 devices" in line for line in shown)


def test_a_dump_on_several_slices(capsys, dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    words = ["forecast", str(dump), "--on", "v5e-4,v5e-8,v5e-4", "--csv", str(path), "--json"]
    assert main(words) == 0
    made = json.loads(capsys.readouterr().out)
    one, other = made["forecasts"]
    alone = forecast_text(dump, slice("v5e-4"))
    assert one["step_seconds"] == alone.step_seconds
    assert "runs on 4 devices but v5e-8 has 8" in other["problem"]
    assert made["written"] == {"csv": str(path)}
    assert path.read_text().count("\n") == 3
    assert main(["forecast", str(dump), "--on", "v5e-8,v5e-16"]) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["lm", "--on", "v5e-4,v5e-17"], "did you mean v5e-16?"),
        (["lm", "--on", ","], "it takes slices"),
        (["lm", "--on", "v5e-4,v5e-8", "--html", "x.html"], "--html is of one forecast"),
        (["lm", "--on", "v5e-4,v5e-8", "--csv", f"{TINY}/below"], "is a file, so"),
        (["lm", "--on", "v5e-4", "--vary", "layout.fsdp"], "it takes an option with its values"),
        (["lm", "--on", "v5e-4", "--vary", "layout.fsp=2,4"], "did you mean --layout.fsdp"),
        (["lm", "--on", "v5e-4", "--vary", "layout.fsdp=2,x"], "it takes a whole number"),
        (
            ["lm", "--on", "v5e-4", "--vary", "sequence=64,128", "--sequence", "32"],
            "leave one of them out",
        ),
        (
            ["lm", "--on", "v5e-4", "--vary", "sequence=64", "--vary", "sequence=32"],
            "is given twice",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_compiled(
    capsys, monkeypatch, args: list[str], said: str
) -> None:
    import subprocess

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a compile began")

    monkeypatch.setattr(subprocess, "Popen", never)
    assert main(["forecast", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_each_combination_is_the_forecast_of_that_command(capsys) -> None:
    words = ["forecast", f"{TINY}:job", "--quick", "--json"]
    assert main([*words, "--on", "v5e-1,v5e-4", "--vary", "layout.fsdp=1,3"]) == 0
    made = json.loads(capsys.readouterr().out)
    shown = [(row["slice"], row["settings"], "problem" in row) for row in made["forecasts"]]
    assert shown == [
        ("v5e-1", {"layout.fsdp": "1"}, False),
        ("v5e-1", {"layout.fsdp": "3"}, True),
        ("v5e-4", {"layout.fsdp": "1"}, True),
        ("v5e-4", {"layout.fsdp": "3"}, True),
    ]
    row = made["forecasts"][0]
    assert main([*words, *row["arguments"]]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["step_seconds"] == row["step_seconds"]
    assert alone["arguments"] == row["arguments"]


@pytest.mark.slow
def test_python_makes_the_same_table(dump: Path) -> None:
    with pytest.raises(SystolicError, match="vary takes options of a recipe"):
        systolic.forecast(len, on="v5e-4", vary={"batch": [1]})
    made = systolic.forecast(f"{TINY}:job", on=["v5e-1", "v5e-4"], quick=True, vary={"batch": [16]})
    assert [row.on.name for row in made] == ["v5e-1", "v5e-4"]
    assert all(row.fits for row in made)
    rates = [row.forecast.units_per_second for row in made if row.forecast is not None]
    assert made.fastest is made[rates.index(max(rates))]


def test_values_show_themselves_in_notebooks() -> None:
    made = recorded.fitting()
    page = made._repr_html_()
    assert page.startswith("<pre")
    assert "lm on v5e-4" in page
    assert "color: #" in page
    assert "\x1b" not in page
    assert "v5e-8" in table()._repr_html_()
    # A notebook has no --json: every note is there.
    assert "more note" in "\n".join(line.plain for line in text.lines(made, 100))
    assert "more note" not in page
    shown = " ".join(html.unescape(re.sub("<[^>]+>", "", page)).split())
    assert all(" ".join(note.split()) in shown for note in readings.notes(made))
    assert "<script" not in page

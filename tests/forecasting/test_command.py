"""``systolic.forecast`` from Python: a dump, a recipe with its command, tables, and the words that a command is printed with."""

import json
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.cli.main import main
from systolic.compiling import StepKind
from systolic.core.errors import OptionError
from systolic.forecasting import Forecast
from systolic.forecasting.command import StepSettings, forecast_command, forecast_server
from systolic.forecasting.table import ForecastTable
from systolic.recipes.jobs import given_options, source_of, with_options
from tests.recorded import hlo

TINY = str(Path(__file__).parents[1] / "cli" / "tiny.py")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text("lm-scoped-v5e-4"))
    return path


def test_a_dump_is_forecast_as_the_command_does(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = systolic.forecast(str(dump), on="v5e-4")
    assert isinstance(made, Forecast)
    assert made.against is None
    assert capsys.readouterr() == ("", "")
    before = made.to_json()
    again = systolic.forecast(dump, on="v5e-4", against=before)
    assert again.against is not None
    assert main(["forecast", str(dump), "--on", "v5e-4", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line.pop("written") == {}
    for record in (before, line):
        record["compiler"].pop("seconds")
    assert line == json.loads(json.dumps(before))
    changes = again.to_json()["against"]
    assert {one["name"]: one["after"] for one in changes}["step"] == made.step_seconds
    assert all(one["before"] == one["after"] for one in changes)


def test_a_dump_on_several_slices_is_a_table(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = systolic.forecast(dump, on=["v5e-4", "v5e-8"], csv=path)
    assert isinstance(table, ForecastTable)
    assert [row.on.name for row in table] == ["v5e-4", "v5e-8"]
    assert "4 devices but v5e-8 has 8" in table[1].problem
    assert path.read_text() == table.to_csv()
    # A file of CSV makes a table of one slice, too.
    one = systolic.forecast(dump, on="v5e-4", csv=path)
    assert len(one) == 1
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True}, "is a dump, compiled already, and takes no quick"),
        ({"step": "eval"}, "takes no step"),
        ({"sequence": 8}, "takes no sequence"),
        ({"on": "v5e-4,v5e-8", "against": {}}, "against is of one forecast"),
    ],
)
def test_options_that_a_dump_does_not_have(dump: Path, options: dict, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        systolic.forecast(dump, **{"on": "v5e-4", **options})


def test_a_name_tells_the_command_that_makes_the_same_forecast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (row,) = systolic.forecast(f"{TINY}:job", on="v5e-1,", quick=True, vary={"batch": [8]})
    assert row.forecast is not None
    made = row.forecast.to_json()
    assert made["target"] == f"{TINY}:job"
    assert made["arguments"] == ["--batch", "8", "--on", "v5e-1"]
    assert (made["options"]["batch"], made["step"], made["quick"]) == (8, "train", True)
    assert main(["forecast", made["target"], *made["arguments"], "--quick", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["arguments"] == made["arguments"]
    assert line["step_seconds"] == made["step_seconds"]
    assert list(line)[-6:] == ["target", "arguments", "options", "step", "quick", "written"]


def test_words_of_a_command_by_hand() -> None:
    settings = StepSettings(
        step=StepKind.prefill,
        flags=["--xla_a=1", "--xla_b=2"],
        quick=True,
        trips={"while.5": 100},
        costs={"my_kernel": 1.2e-3, "other": "5us"},
        calibration=None,
    )
    assert settings.words(slice("v5e-4")) == [
        *("--on", "v5e-4", "--step", "prefill", "--flags=--xla_a=1 --xla_b=2"),
        *("--trips", "while.5=100", "--cost", "my_kernel=0.0012s", "--cost", "other=5us"),
    ]


def test_further_options_keep_those_that_were_given() -> None:
    source = source_of("lm", {"layout": {"fsdp": 2}, "sequence": 256})
    assert given_options(source)["layout.fsdp"] == 2
    more = with_options(source, {"layout.tensor": "4", "batch": 8})
    layout = more.options["layout"]
    assert (layout.fsdp, layout.tensor) == (2, 4)
    assert (more.options["sequence"], more.options["batch"]) == (256, 8)
    assert {"sequence", "batch", "layout.tensor"} <= more.given


def test_several_slices_for_a_program_are_refused() -> None:
    with pytest.raises(OptionError, match="systolic plan --on v5e-4,v5e-8 -- … compares them"):
        forecast_command(["python", "train.py"], on="v5e-4,v5e-8")


def test_a_server_refuses_a_request_longer_than_the_model_takes() -> None:
    with pytest.raises(OptionError, match="context of 900256"):
        forecast_server("llama-3.1-8b", on="v6e-8", prompt_tokens=900_000)
    with pytest.raises(OptionError, match="ttft is 'soon'"):
        forecast_server("llama-3.1-8b", on="v6e-8", ttft="soon")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "v5e-8", "--", "nowhere-to-be-found", "--serve"], "nowhere-to-be-found"),
        (["--on", "v5e-8", "--"], "has no program after --"),
        (["--serve"], "systolic forecast --serve needs a model or a recipe"),
        (["lm", "--serve"], "systolic forecast lm needs a slice; add --on v6e-8"),
        (["lm", "--serve", "--on", "v6e-8", "--html", "x"], "lm has no option --html"),
    ],
)
def test_words_choose_the_form(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", *words]) == 2
    assert said in capsys.readouterr().err

"""A saved plan or forecast is explained with the flags that it was compiled with, and with those that are given on top."""

import json
from pathlib import Path
from typing import Any

import pytest

from systolic.artifact.chosen import FORMAT
from systolic.chips import slice
from systolic.chips.flags import merged, resolved
from systolic.cli import explain_saved as module
from systolic.cli.main import main
from systolic.planning.flags import SETS

TINY = f"{Path(__file__).with_name('tiny.py')}:job"
ON = slice("v6e-8")
SHARED = resolved("", ON.chip)
TUNED = merged(SHARED, next(one.flags for one in SETS if one.name == "v6e-dense"))


def plan(path: Path, flags: tuple[str, ...]) -> Path:
    one = {
        "slice": ON.name,
        "settings": {"layout.fsdp": 8, "batch": 64},
        "flags": list(flags),
        "total": {"steps": 5.0},
        "step_seconds": 0.05,
        "step_seconds_low": None,
        "step_seconds_high": None,
        "mfu": None,
    }
    whole = {"format": FORMAT, "recipe": "lm", "options": {}, "arguments": [], "goal": {}}
    path.write_text(json.dumps({**whole, "best": one, "candidates": [one]}))
    return path


@pytest.mark.parametrize("flags", [(), SHARED, TUNED, ("--xla_tpu_x=1",)])
@pytest.mark.parametrize("given", ["", "--xla_tpu_y=1", "none", "none --xla_tpu_y=1"])
def test_flags_of_a_plan_are_kept_and_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], given: str
) -> None:
    asked: list[list[str]] = []

    def explain(target: str, args: list[str]) -> int:
        asked.append(args)
        return 0

    monkeypatch.setattr(module, "explain_recipe", explain)
    path = plan(tmp_path / "plan.json", flags)
    assert main(["explain", str(path), *([f"--flags={given}"] if given else [])]) == 0
    made = resolved(module.flags_in(asked[0]) or "", ON.chip)
    more = tuple(word for word in given.split() if word != "none")
    assert set(made) == set(more if "none" in given else merged(flags, more))
    assert asked[0][asked[0].index("--on") + 1] == ON.name


def test_flags_of_a_forecast_are_those_of_its_compile(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "target": "lm",
        "arguments": ["--on", ON.name, "--flags=--xla_tpu_y=1"],
        "slice": ON.name,
        "step_seconds": 0.05,
        "compiler": {"flags": ["--xla_tpu_y=1"]},  # of a version without a shared set
    }
    path = tmp_path / "forecast.json"
    path.write_text(json.dumps(record))
    found = module.saved_forecast(path)
    assert found is not None
    assert resolved(module.flags_in(found[1]) or "", ON.chip) == ("--xla_tpu_y=1",)


def test_a_forecast_of_another_step_is_explained_as_that_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [TINY, "--on", "v5e-4", "--step", "decode"]
    assert main(["forecast", *words, "--quick", "--json"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "decode.json"
    path.write_text(text)
    for target in (words, [str(path)]):
        assert main(["explain", *target, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["step_seconds"] == json.loads(text)["step_seconds"]
        assert told["remedies"] == []
    assert main(["explain", str(path), "--against", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_seconds"] == told["against_step_seconds"] == json.loads(text)["step_seconds"]

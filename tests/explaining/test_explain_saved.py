"""A saved plan or forecast is explained with the flags that it was compiled with, and with those that are given on top."""

import json
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.chips import slice
from systolic.chips.flags import merged, resolved
from systolic.cli.forms import run_forms
from systolic.cli.main import VERBS, main
from systolic.core.errors import DataError
from systolic.explaining.explainer import RecipeStep, StepExplainer
from systolic.planning.candidate import SETS
from systolic.runs.plan_choice import FORMAT

TINY = f"{Path(__file__).parents[1] / 'cli' / 'tiny.py'}:job"
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


def asked(path: str, words: list[str]) -> RecipeStep:
    """The step that a command line asks for, which is not compiled."""
    asked: list[RecipeStep] = []

    def explain(one: StepExplainer) -> None:
        assert one.of is not None
        asked.append(one.of)
        raise KeyboardInterrupt

    verb = VERBS["explain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepExplainer, "explain", explain)
        with pytest.raises(KeyboardInterrupt):
            run_forms("explain", verb.usage, verb.forms, [path, *words])
    (of,) = asked
    return of


@pytest.mark.parametrize("flags", [(), SHARED, TUNED, ("--xla_tpu_x=1",)])
@pytest.mark.parametrize("given", ["", "--xla_tpu_y=1", "none", "none --xla_tpu_y=1"])
def test_flags_of_a_plan_are_kept_and_added_to(
    tmp_path: Path, flags: tuple[str, ...], given: str
) -> None:
    path = plan(tmp_path / "plan.json", flags)
    of = asked(str(path), [f"--flags={given}"] if given else [])
    more = tuple(word for word in given.split() if word != "none")
    assert set(of.flags) == set(more if "none" in given else merged(flags, more))
    assert of.on == ON
    assert (of.job.layout.fsdp, of.job.batch.total) == (8, 64)


def test_options_on_top_of_a_plan_take_the_place_of_its_settings(tmp_path: Path) -> None:
    path = plan(tmp_path / "plan.json", TUNED)
    words = ["--layout.fsdp", "4", "--layout.tensor=2", "--on", "v6e-16", "--step", "eval"]
    of = asked(str(path), words)
    assert (of.job.layout.fsdp, of.job.layout.tensor, of.job.batch.total) == (4, 2, 64)
    assert (of.on.name, of.step.value) == ("v6e-16", "eval")
    assert set(of.flags) == set(TUNED)
    # On another chip the flags that its jobs share take the place of this one's.
    other = asked(str(plan(path, SHARED)), ["--on", "v5e-16"])
    assert other.flags == resolved("", slice("v5e-16").chip)


def test_flags_of_a_forecast_are_those_of_its_compile(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "target": "lm",
        "arguments": ["--on", ON.name, "--sequence", "256", "--flags=--xla_tpu_y=1"],
        "slice": ON.name,
        "step_seconds": 0.05,
        "compiler": {"flags": ["--xla_tpu_y=1"]},  # of a version without a shared set
    }
    path = tmp_path / "forecast.json"
    path.write_text(json.dumps(record))
    of = asked(str(path), [])
    assert of.flags == ("--xla_tpu_y=1",)
    assert of.options["sequence"] == 256
    # This version's files have the options themselves.
    path.write_text(json.dumps({**record, "options": {"sequence": 512}, "step": "decode"}))
    of = asked(str(path), [])
    assert (of.options["sequence"], of.step.value) == (512, "decode")
    path.write_text(json.dumps({**record, "options": []}))
    with pytest.raises(DataError, match="is a damaged forecast"):
        systolic.explain(path)


def test_an_option_of_the_version_before_in_a_file_is_read_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forecast.json"
    words = ["--on", ON.name, "--layout.loss-tiles", "4"]
    record = {"target": "lm", "arguments": words, "slice": ON.name, "step_seconds": 0.05}
    path.write_text(json.dumps({**record, "compiler": {"flags": []}}))
    of = asked(str(path), [])
    assert of.job.layout.loss_chunks == 4
    assert capsys.readouterr().err == ""


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
    for quick, said in ((True, False), (False, True)):
        path.write_text(json.dumps({**json.loads(text), "quick": quick}))
        assert main(["forecast", *words, "--quick", "--against", str(path)]) == 0
        told = capsys.readouterr().out
        line = "the first is of a full compile, the second --quick, with op times estimated"
        assert (line in told) == said

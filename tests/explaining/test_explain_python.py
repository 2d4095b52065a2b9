"""``systolic.explain``, ``systolic.calibrate`` and ``systolic.calibrations`` say from Python what the commands say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.reporter import Reporter, reporting
from systolic.explaining.command import ExplainedKind, target_kind
from systolic.explaining.explainer import ProgramExplanation, RecipeStep, StepExplainer
from systolic.explaining.profiles import ProfileExplanation
from systolic.explaining.saved import saved_step
from systolic.runs.run import JOB
from tests.profile.real import EXCERPTS, HOST_OFFLOAD
from tests.recorded import hlo as recorded

PROFILE = EXCERPTS / HOST_OFFLOAD
OLD = {"target": "lm", "slice": "v6e-8", "step_seconds": 0.05, "compiler": {"flags": ["--a=1"]}}
"""A forecast of a version whose files have the words of the command."""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text("upgrade_old-v6e-4"))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / JOB).write_text("{}")
    return path


def old_forecast(path: Path, *words: str) -> Path:
    path.write_text(json.dumps({**OLD, "arguments": ["--on", "v6e-8", *words]}))
    return path


def test_a_dump_has_the_causes_of_the_command(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = systolic.explain(dump, on="v6e-4")
    assert isinstance(made, ProgramExplanation)
    assert capsys.readouterr() == ("", "")
    assert main(["explain", str(dump), "--on", "v6e-4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["causes"]
    assert [one["title"] for one in told["causes"]] == [one.title for one in made.causes]
    assert told["step_seconds"] == made.forecast.step_seconds
    assert made.causes[0].title in repr(made)


def test_a_profile_is_set_beside_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    made = systolic.explain(PROFILE, against="lines")
    assert isinstance(made, ProfileExplanation)
    assert made.against is not None
    assert made.against.ops
    assert capsys.readouterr() == ("", "")
    assert main(["explain", str(PROFILE), "--against", "lines", "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["target"] == str(PROFILE) == made.target
    assert [one["title"] for one in told["causes"]] == [one.title for one in made.causes]


def test_quiet_leaves_the_result_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(PROFILE)]) == 0
    shown = capsys.readouterr().out
    assert main(["explain", str(PROFILE), "--quiet"]) == 0
    assert capsys.readouterr() == (shown, "")
    assert systolic.explain(PROFILE).causes[0].title in shown


def test_what_is_explained_is_known_by_its_content(dump: Path, run: Path, tmp_path: Path) -> None:
    forecast = old_forecast(tmp_path / "forecast.json")
    kinds = {
        "lm": ExplainedKind.recipe,
        "llama-3.1-8b": ExplainedKind.recipe,
        str(run): ExplainedKind.run,
        str(PROFILE): ExplainedKind.profile,
        str(forecast): ExplainedKind.forecast,
        str(dump): ExplainedKind.dump,
    }
    assert {name: target_kind(name) for name in kinds} == kinds
    (tmp_path / "runs").mkdir()
    with pytest.raises(NotFoundError, match=f"did you mean {re.escape(str(run))}"):
        target_kind(f"{run}n")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("run", {"on": "v5e-4"}, "on has no effect on a run, which "),
        ("run", {"remedies": 0}, "remedies has no effect on a run"),
        ("profile", {"quick": True}, "quick has no effect on a profile"),
        ("profile", {"steps": 3}, "holds what it was made with, and steps would change that"),
        ("dump", {"on": "v6e-4", "flags": "none"}, "flags has no effect on a dump"),
        ("lm", {"on": "v5e-4", "chip": "v5e"}, "chip has no effect on a recipe, which lm is"),
        ("words", {"on": "v5e-4", "workers": 2}, "workers has no effect on a program"),
        ("words", {"on": "v5e-4,v5e-8"}, "a step is explained for one; systolic plan --on v5e-4"),
        ("dump", {}, "explaining a dump needs a slice; give on="),
    ],
)
def test_an_option_that_has_no_effect_is_refused(
    dump: Path, run: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    targets = {"run": run, "profile": PROFILE, "dump": dump, "words": ["python", "train.py"]}
    with pytest.raises(OptionError, match=re.escape(said)):
        systolic.explain(targets.get(kind, kind), **options)


def test_words_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    words = ["--sequence=256", "--model.no-tie-embeddings", "--layout.loss-tiles", "4"]
    more = ["--layout.remat-names", "query", "key", "--flags=--b=2", "--step", "eval"]
    of = saved_step(old_forecast(tmp_path / "forecast.json", *words, *more))
    job = of.job
    assert of.options["sequence"] == 256
    assert (job.model.tie_embeddings, job.layout.loss_chunks) == (False, 4)
    assert job.layout.remat_names == ("query", "key")
    assert (of.step.value, of.on.name, of.flags) == ("eval", "v6e-8", ("--a=1",))
    with pytest.raises(OptionError, match="lm has no option 'sequenze'"):
        saved_step(old_forecast(tmp_path / "forecast.json", "--sequenze", "3"))
    with pytest.raises(OptionError, match="lm has no argument a"):
        saved_step(Path(_with_words(tmp_path, ["a"])))


def _with_words(folder: Path, words: list[str]) -> Path:
    path = folder / "words.json"
    path.write_text(json.dumps({**OLD, "arguments": words}))
    return path


def test_options_take_the_place_of_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StepExplainer] = []
    monkeypatch.setattr(StepExplainer, "explain", lambda one: asked.append(one))
    path = old_forecast(tmp_path / "forecast.json", "--sequence=256", "--model.d-ff", "512")
    systolic.explain(path, on="v5e-16", remedies=3, step="eval", **{"model.layers": 3})
    (one,) = asked
    assert isinstance(one.of, RecipeStep)
    assert (one.on.name, one.step.value, one.remedies) == ("v5e-16", "eval", 3)
    model = one.job.model
    assert (model.layers, model.d_ff, one.of.options["sequence"]) == (3, 512, 256)


def test_a_calibration_is_made_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert systolic.calibrations() == []
    made = systolic.calibrate([PROFILE], name="mine")
    assert not made.replaced
    assert made.file == tmp_path / "systolic" / "calibrations" / "mine.json"
    assert main(["calibrate", str(PROFILE), "--name", "mine", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {**made.record.to_json(), "file": str(made.file), "replaced": True}
    (one,) = systolic.calibrations()
    assert one == systolic.calibrations("mine") == systolic.calibrations(made.file)
    assert one.to_json() == made.record.to_json()
    assert systolic.calibrate(PROFILE, name="other").record.calibration.chip == "v6e"

    class Heard(Reporter):
        def __init__(self) -> None:
            self.warnings: list[str] = []

        def warn(self, text: str) -> None:
            self.warnings.append(text)

    made.file.write_text("{}")
    with reporting(Heard()) as heard:
        assert [one.calibration.name for one in systolic.calibrations()] == ["other"]
    (line,) = heard.warnings
    assert f"{made.file} is no calibration" in line

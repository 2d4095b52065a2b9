"""``systolic train --plan``: the planned job is what is trained, and the forecast stands beside what is measured."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import systolic
from systolic import recipes
from systolic.cli.forms import Request, planned_request
from systolic.cli.main import VERBS, main
from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.core.files import write_json
from systolic.core.reporter import reporter, reporting
from systolic.job import Axis, Layout, Precision, Remat
from systolic.planning.display.readings import command
from systolic.recipes.jobs import candidate_of, new_flags, resumed
from systolic.recipes.jobs.run import rebuild
from systolic.report.output import StderrReporter
from systolic.runs import Run
from systolic.runs.job_record import JobRecord
from systolic.runs.plan_choice import Chosen, StepTime, apply, read
from tests.planning import fabricated

TINY = f"{Path(__file__).parents[1] / 'cli' / 'tiny.py'}:job"
SORTER = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:job"
SETTINGS: Mapping[str, Any] = {
    **{f"layout.{axis.value}": 1 for axis in Axis},
    "layout.accumulate": 2,
    "layout.remat": "full",
    "batch": 8,
    "precision": "f32",
}


def requested(target: str, words: list[str]) -> Request[Any]:
    """What the command reads."""
    with reporting(StderrReporter()):
        return planned_request(
            target, words, "train", VERBS["train"].forms[0].options.read, reporter().warn
        )


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def one(on: str, settings: Mapping[str, Any], steps: float = 6.0) -> dict[str, Any]:
    return {
        "slice": on,
        "settings": dict(settings),
        "flags": [],
        "total": {"steps": steps, "seconds": 1.0, "usd": None, "kwh": None},
        "step_seconds": 0.05,
        "step_seconds_low": 0.0,
        "step_seconds_high": 1e6,
        "mfu": None,
    }


def write(path: Path, *candidates: dict[str, Any], recipe: str = TINY, **options: Any) -> Path:
    """A plan as ``systolic plan`` writes it, with these candidates."""
    plain = {"format": 1, "recipe": recipe, "options": options, "goal": {}}
    write_json(path, {**plain, "best": candidates[0], "candidates": list(candidates)})
    return path


def test_a_plan_is_trained_as_it_says_and_measured_beside_its_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write(
        tmp_path / "plan.json",
        one("cpu", {**SETTINGS, "layout.remat": "none"}),
        recipe=SORTER,
        width=24,
    )
    run = tmp_path / "run"
    assert main(["train", SORTER, "--plan", str(plan), "--run", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 6
    told = summary["forecast"]
    assert told["step_seconds"] == 0.05
    assert told["ratio"] == pytest.approx(told["measured_step_seconds"] / 0.05)
    assert told["within_interval"] is True
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert trained
    for record in trained:
        assert record["forecast_step_seconds"] == 0.05
        assert record["forecast_ratio"] == pytest.approx(record["step_seconds"] / 0.05)
    with Run.open(run) as directory:
        _, job, _ = rebuild(directory)
    assert (job.batch.total, job.steps, job.precision) == (8, 6, Precision.f32)
    assert (job.layout.accumulate, job.layout.remat) == (2, Remat.none)
    assert job.model.width == 24  # ty: ignore[unresolved-attribute]

    assert main(["train", "--resume", str(run), "--steps", "8"]) == 0
    out, err = capsys.readouterr()
    assert "steps       8 of 8" in out
    assert "forecast    50 ms a step, measured " in out
    assert " (forecast 50 ms, × " in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--batch", "32"], "the batch is what .* decides; leave its option out"),
        (["--layout.remat", "none"], "the layout is what"),
        (["--candidate", "2"], "candidate is 2 and .* has 1; give 1 to 1"),
        (["--candidate", "best"], "--candidate is 'best'; it takes a whole number"),
        (["--rehearse", "v5e-8"], "for v5e-4 and --rehearse asks for v5e-8"),
    ],
)
def test_what_contradicts_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    settings = {**SETTINGS, "layout.fsdp": 4}
    plan = write(tmp_path / "plan.json", one("v5e-4", settings), layout={"remat": "full"})
    assert main(["train", TINY, "--plan", str(plan), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)


def test_a_plan_for_another_machine_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write(tmp_path / "plan.json", one("v5e-4", {**SETTINGS, "layout.fsdp": 4}))
    assert main(["train", TINY, "--plan", str(plan), "--run", str(tmp_path / "run")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a plan for v5e-4 (4 x TPU v5 lite)" in line
    assert "this machine has" in line
    assert not (tmp_path / "run").exists()


def test_a_plan_for_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write(tmp_path / "plan.json", one("cpu", SETTINGS), recipe="lm")
    assert main(["train", TINY, "--plan", str(plan)]) == 2
    assert "is a plan for lm, not for" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_is_rehearsed_with_its_mesh(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "layout.fsdp": 2, "layout.tensor": 2}
    plan = write(tmp_path / "plan.json", one("v5e-4", settings))
    assert main(["train", TINY, "--plan", str(plan), "--rehearse", "v5e-4", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["layout"]["fsdp"], told["layout"]["tensor"]) == (2, 2)
    assert told["batch_size"] == 8


def test_another_program_has_no_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write(tmp_path / "plan.json", one("cpu", SETTINGS), sequence=16)
    same = requested(TINY, ["--plan", str(plan), "--steps", "3"])
    assert same.as_typed.chosen is not None
    assert same.as_typed.chosen.forecast == StepTime(
        step_seconds=0.05, step_seconds_low=0.0, step_seconds_high=1e6
    )
    assert same.job.steps == 3
    other = requested(TINY, [f"--plan={plan}", "--sequence", "64"])
    assert other.as_typed.chosen is not None
    assert other.as_typed.chosen.forecast == StepTime()
    assert "is not the one that" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_plan_where_nothing_contradicts_it() -> None:
    chosen = Chosen(
        path="plan.json",
        recipe="lm",
        options={},
        slice="v5e-4",
        settings=SETTINGS,
        steps=6,
        forecast=StepTime(step_seconds=1.0),
    )
    record = JobRecord.from_json({"plan": json.loads(json.dumps(chosen.to_json()))})
    assert record.plan == Chosen.from_json({**chosen.to_json(), "flags": []})
    assert JobRecord.from_json({}).plan is None
    other = JobRecord.from_json({"plan": {**chosen.to_json(), "forecast": {}}}).plan
    assert other == replace(chosen, forecast=StepTime(), flags=[])
    with pytest.raises(msgspec.ValidationError, match=r"plan\.forecast\.step_seconds"):
        JobRecord.from_json({"plan": {**chosen.to_json(), "forecast": {"step_seconds": "fast"}}})
    kept = resumed(chosen, {"seed"})
    assert kept == chosen
    spread = resumed(chosen, {"layout", "steps"})
    assert spread is not None
    assert set(spread.settings) == {"batch", "precision"}
    assert (spread.forecast, spread.steps) == (StepTime(), 0)
    batched = resumed(chosen, {"batch_per_device"})
    assert batched is not None
    assert "batch" not in batched.settings


def test_settings_are_those_of_the_candidate() -> None:
    base = fabricated.facts().job
    for tried in fabricated.plan().tried:
        settings = json.loads(json.dumps(tried.candidate.settings(base)))
        made, wanted = apply(base, settings), tried.candidate.job(base)
        platform = tried.candidate.on.platform
        assert made.precision.resolve(platform) is wanted.precision
        assert replace(made, precision=wanted.precision) == wanted


@pytest.mark.parametrize(
    "settings", [{"layout.fsdp": "four"}, {"layout.nothing": 1}, {"colour": "red"}]
)
def test_settings_that_this_version_does_not_know(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        apply(fabricated.facts().job, settings)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, NotFoundError),
        ("{", DataError),
        ("", DataError),
        ('{"slice": "v5e-4"}', OptionError),
        ("# a recipe", OptionError),
        ('{"format": 99, "best": null, "goal": {}, "candidates": []}', DataError),
        ('{"format": 1, "best": null, "goal": {}, "candidates": []}', DataError),
    ],
)
def test_what_is_no_plan(tmp_path: Path, content: str | None, error: type[SystolicError]) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error) as raised:
        read(path)
    assert "\n" not in str(raised.value)


DAMAGE: Mapping[str, Any] = {
    "candidates": [None, 3, "best", {}, [None], [3], [{}]],
    "best": [3, []],
    "goal": [3, None],
    "format": [None, "1", 2],
    "recipe": [None, 3, {}],
    "options": [None, 3, [], {"nonsense": 1}],
    "arguments": [3, [3], "--steps"],
    "candidates.0.slice": [None, 3, "v5e-17", "", ...],
    "candidates.0.settings": [None, 3, [], {"layout.fsdp": "four"}, {"colour": "red"}, ...],
    "candidates.0.settings.batch": ["x", None, 0, -8],
    "candidates.0.settings.layout.fsdp": [0, -3, 2.5],
    "candidates.0.flags": [None, "--xla_a=1", [3], ...],
    "candidates.0.total": [None, 3, {}, ...],
    "candidates.0.total.steps": [None, "many", -1, float("nan"), float("inf"), ...],
    "candidates.0.step_seconds": [None, "fast", -1.0, float("nan"), ...],
    "candidates.0.mfu": ["high", []],
}
"""Places in a plan with values that they can't have; ``...`` takes the field away."""


def damaged(whole: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy of a plan with one value replaced."""
    made = json.loads(json.dumps(whole))
    words = place.split(".", 3 if ".settings." in place else -1)
    at: Any = made
    for word in words[:-1]:
        at = at[int(word) if isinstance(at, list) else word]
    if value is ...:
        del at[words[-1]]
    else:
        at[words[-1]] = value
    return made


@pytest.mark.parametrize("verb", ["train", "explain", "against"])
@pytest.mark.parametrize("place", DAMAGE)
def test_a_damaged_plan_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, verb: str
) -> None:
    path, sound = tmp_path / "plan.json", tmp_path / "sound.json"
    write(sound, one("v5e-4", {**SETTINGS, "layout.fsdp": 4}), sequence=16)
    whole = {**json.loads(sound.read_text()), "arguments": ["--sequence", "16"]}
    sound.write_text(json.dumps(whole))
    words = {
        "train": ["train", TINY, "--plan", str(path), "--run", str(tmp_path / "run")],
        "explain": ["explain", str(path), "--remedies", "0"],
        "against": ["explain", str(sound), "--against", str(path)],
    }[verb]
    reads = {"train": ("arguments",), "explain": ("arguments",), "against": ("arguments",)}
    if place in reads[verb] or (verb == "against" and ".settings" in place):
        pytest.skip("not read by this verb before anything is compiled")
    # All verbs read a plan alike: one has all values, the others one of each place.
    for value in DAMAGE[place] if verb == "train" else DAMAGE[place][:1]:
        path.write_text(json.dumps(damaged(whole, place, value)))
        assert main(words) in (1, 2), value
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith("systolic: "), value
        assert captured.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_plan_that_is_cut_short_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    path = tmp_path / "plan.json"
    text = json.dumps(fabricated.plan().to_json())
    path.write_text(text[: int(share * len(text))])
    for words in (["train", TINY, "--plan", str(path)], ["explain", str(path)]):
        assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "it may be cut short" in line


def test_candidates_are_read_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, fabricated.plan().to_json())
    ranking = fabricated.plan().ranking
    for number, tried in enumerate(ranking, 1):
        chosen = read(path, number)
        assert chosen.slice == tried.candidate.on.name
        assert chosen.steps == 38147  # 20e9 tokens of 256 rows of 2,048, rounded up
    with pytest.raises(OptionError):
        read(path, len(ranking) + 1)


def test_a_plans_flags_are_those_of_the_run(tmp_path: Path) -> None:
    flagged = {**one("cpu", SETTINGS), "flags": ["--xla_tpu_x=1", "--xla_tpu_y=1"]}
    plan = write(tmp_path / "plan.json", flagged)
    before = dict(os.environ)
    chosen = requested(TINY, ["--plan", str(plan)]).as_typed.chosen
    assert dict(os.environ) == before
    model = recipes.find(TINY)({}).model
    assert new_flags("", chosen, model).compiler == ("--xla_tpu_x=1", "--xla_tpu_y=1")
    assert new_flags("--xla_tpu_y=2", chosen, model).compiler == ("--xla_tpu_x=1", "--xla_tpu_y=2")
    assert new_flags("none", chosen, model).compiler == ()


def test_the_defaults_of_a_layout_survive() -> None:
    recipe = recipes.find("lm")
    job = recipe({})
    applied = apply(job, {"layout.fsdp": 4, "layout.remat_names": ["query"]})
    assert applied.layout.remat_names == ("query",)
    assert applied.layout.attention_block == Layout().attention_block


@pytest.mark.parametrize(
    "words", [["train", "lm", "--plan"], ["explain"], ["explain", "SOUND", "--against"]]
)
def test_the_plan_of_a_job_is_refused_where_the_job_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path, sound = tmp_path / "pyplan.json", tmp_path / "sound.json"
    write(sound, one("v5e-4", {**SETTINGS, "layout.fsdp": 4}), sequence=16)
    made = replace(fabricated.plan(), target="", options={})
    write_json(path, made.to_json())
    assert json.loads(path.read_text())["recipe"] is None
    assert main([*(str(sound) if word == "SOUND" else word for word in words), str(path)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert f"{path} is a plan of the Job lm" in line
    assert "systolic.train(job, plan=plan)" in line
    assert captured.out == ""
    # With the Job, both the value and the file will do.
    assert replace(candidate_of(made, 1), path=str(path)) == read(path, of_job=True)
    assert command(made, path, 2) == "systolic.train(job, plan=plan, candidate=2)"
    with pytest.raises(SystolicError, match="and this machine has 1 x cpu"):
        systolic.train(made.facts.job, plan=path)


def test_the_forecast_of_a_job_is_refused_by_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = fabricated.plan().best
    assert best is not None
    assert best.forecast is not None
    path = tmp_path / "pyfc.json"
    write_json(path, best.forecast.to_json())
    assert main(["explain", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} is a forecast of a Job" in line
    assert "systolic.explain(job, on='v6e-16')" in line

"""What earlier versions wrote is opened by this one, and answers as it did."""

import json
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.runs import job_record
from tests.compat.reading import ADDED_STEPS, READINGS, environment, losses
from tests.compat.record import LM, MADE, STEPS, WORK

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob(f"*/{MADE}"))
CLOSE = 1e-3
"""Largest relative difference of a number that another processor or version of JAX computes."""
SAME_LOSS = 2e-4
"""The same of a loss; one that is continued with a fresh optimizer differs by a hundredth and more."""


@pytest.fixture(scope="module", params=VERSIONS)
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples of a version in a folder other than the one in which they were made."""
    folder, source = tmp_path_factory.mktemp("compat"), HERE / request.param
    for archive in source.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    for file in (source / "sources").iterdir():
        shutil.copy(file, folder)
    shutil.copy(source / MADE, folder)
    # The model that adapters stand beside, and the launches, are found by the paths that were recorded.
    for file in [folder / "lora" / "job.json", *(folder / "state").rglob("*.json")]:
        file.write_text(file.read_text().replace(str(WORK), str(folder)))
    return folder


@pytest.fixture
def here(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the samples."""
    monkeypatch.chdir(unpacked)
    for name, value in environment(unpacked).items():
        if name != "XDG_CACHE_HOME":
            monkeypatch.setenv(name, str(value))
    return unpacked


def made(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MADE).read_text())


def copied(here: Path, name: str, tmp_path: Path) -> Path:
    """A sample that may be changed."""
    return shutil.copytree(here / name, tmp_path / name)


@pytest.mark.parametrize("name", READINGS)
def test_answers_are_those_of_the_version_that_wrote_it(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = made(here)["read"].get(name)
    if expected is None:
        pytest.skip("that version had no such file")
    reading = READINGS[name]
    assert main(shlex.split(reading.command)) == 0
    answer = reading.read(capsys.readouterr().out)
    assert set(expected["fields"]) <= set(answer["fields"])
    agree(moved(expected["values"], here), answer["values"])


def moved(plain: Any, here: Path) -> Any:
    return json.loads(json.dumps(plain).replace(str(WORK), str(here)))


def agree(expected: Any, answer: Any, name: str = "") -> None:
    """Asserts that each recorded value is there, numbers as nearly as they are computed."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in answer, f"{name}.{key}"
            agree(value, answer[key], f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(answer), name
        for number, (old, new) in enumerate(zip(expected, answer, strict=True)):
            agree(old, new, f"{name}.{number}")
    elif isinstance(expected, float):
        assert answer == pytest.approx(expected, rel=CLOSE, abs=1e-6), name
    else:
        assert answer == expected, name


def test_other_values_and_missing_fields_are_seen() -> None:
    agree({"a": [1.0, {"b": "x"}]}, {"a": [1.0001, {"b": "x", "c": 2}], "d": 3})
    for other in ({}, {"a": [1.0]}, {"a": [1.1, {"b": "x"}]}, {"a": [1.0, {"b": "y"}]}):
        with pytest.raises(AssertionError):
            agree({"a": [1.0, {"b": "x"}]}, other)


@pytest.mark.parametrize("name", ["lm", "interrupted"])
def test_a_run_goes_on_as_the_uninterrupted_one_did(here: Path, tmp_path: Path, name: str) -> None:
    run, recorded = copied(here, name, tmp_path), made(here)
    last = recorded["interrupted_at"] if name == "interrupted" else STEPS
    assert max(losses(run)) == last
    words = ["train", "--resume", str(run), "--path", "text.txt", "--validation", "held.txt"]
    if name == "interrupted":
        words = [*shlex.split(LM), "--run", str(run), "--continue"]
    assert main([*words, "--steps", str(last + ADDED_STEPS), "--json"]) == 0
    uninterrupted = {int(step): loss for step, loss in recorded["losses"].items()}
    assert sorted(losses(run)) == list(range(1, last + ADDED_STEPS + 1))
    for step, loss in losses(run).items():
        assert loss == pytest.approx(uninterrupted[step], rel=SAME_LOSS), step


@pytest.mark.slow
def test_a_fresh_optimizer_would_be_seen(here: Path, tmp_path: Path) -> None:
    run, recorded = tmp_path / "fresh", made(here)
    words = [*shlex.split(LM), "--run", str(run), "--init-from", "lm/checkpoints/8"]
    assert main([*words, "--steps", "2", "--json"]) == 0
    step = STEPS + 2
    assert losses(run)[2] != pytest.approx(recorded["losses"][str(step)], rel=10 * SAME_LOSS)


@pytest.mark.parametrize("name", ["pictures", "tables"])
def test_a_run_of_a_file_goes_on(here: Path, tmp_path: Path, name: str) -> None:
    run = copied(here, name, tmp_path)
    before = losses(run)
    assert main(["train", "--resume", str(run), "--steps", "6", "--json"]) == 0
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert {step: losses(run)[step] for step in before} == before


def test_adapters_are_trained_further(here: Path, tmp_path: Path) -> None:
    run = copied(here, "lora", tmp_path)
    assert main(["train", "--resume", str(run), "--data", "chats.jsonl", "--steps", "5"]) == 0
    assert max(losses(run)) == 5
    assert main(["export", str(run), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()


def test_a_run_that_no_recipe_made_goes_on(here: Path, tmp_path: Path) -> None:
    run = copied(here, "typed", tmp_path)
    types = json.loads((run / "job.json").read_text())["types"]
    assert types["model"].endswith(".Encoder")
    # Its data is named by a path that is relative to no run.
    record = run / "job.json"
    record.write_text(record.read_text().replace(str(WORK), str(here)))
    systolic.resume(run, steps=3)
    assert max(losses(run)) == 3
    opened = systolic.open(run, checkpoint="last")
    assert opened.evaluate(path=here / "held.txt", batches=1)


def test_classes_of_a_module_that_moved_are_found(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(here, "typed", tmp_path)
    record = run / "job.json"
    text = record.read_text().replace("systolic.models.encoder.config", "systolic.once.here.config")
    record.write_text(text)
    with pytest.raises(systolic.SystolicError, match=r"systolic\.once\.here\.config\.Encoder"):
        systolic.open(run, checkpoint="last")
    moved_to = {
        "systolic.once": "systolic.nowhere",
        "systolic.once.here": "systolic.models.encoder",
    }
    monkeypatch.setattr(job_record, "MOVED", {**job_record.MOVED, **moved_to})
    assert systolic.open(run, checkpoint="last").job.model.layers == 1


@pytest.mark.parametrize("form", ["hf", "bundle"])
def test_a_run_is_exported(here: Path, tmp_path: Path, form: str) -> None:
    assert main(["export", "lm", "--to", form, "--out", str(tmp_path / form), "--json"]) == 0


def test_a_plan_is_for_its_slice(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lm", "--plan", "plan.json", "--candidate", "2"]) == 1
    assert "is a plan for v5e-4 (4 x TPU v5 lite)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_is_rehearsed(here: Path) -> None:
    assert main(["train", "lm", "--plan", "plan.json", "--rehearse", "v5e-1", "--json"]) == 0


@pytest.mark.slow
def test_the_plan_of_a_server_has_its_fields(here: Path, tmp_path: Path) -> None:
    recorded = json.loads((here / "server.json").read_text())
    (command,) = made(here)["commands"]["server.json"]
    words = [*shlex.split(command)[1:-1], str(tmp_path / "server.json")]
    assert main(words) == 0
    plan = json.loads((tmp_path / "server.json").read_text())
    assert set(recorded) <= set(plan)


def test_a_study_goes_on(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = copied(here, "study", tmp_path)
    search = "--search optimizer.learning-rate=0.001,0.01,0.1 --sampler random --trials 3"
    words = ["tune", "pictures.py:job", *search.split(), "--study", str(study), "--json"]
    assert main(words) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["state"] for trial in trials] == ["done"] * 3
    for number, trial in enumerate(trials[:2]):
        summary = here / "study" / "trials" / f"{number:04}" / "summary.json"
        recorded = json.loads(summary.read_text())["final"]["metrics"]["validation_accuracy"]
        assert trial["figures"]["accuracy"] == recorded


def test_logs_and_end_of_a_launch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "launches/done", "--lines", "3"]) == 0
    assert "systolic eval" in capsys.readouterr().out
    assert main(["stop", "launches/done"]) in (0, 1)
    assert "done" in "".join(capsys.readouterr())


def test_a_saved_step_is_loaded_or_refused_in_one_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs on the kind of processor and the versions that it was compiled with, alone."""
    words = ["train", "tables.py:job", "--executable", "step", "--run", str(tmp_path / "run")]
    code = main([*words, "--json"])
    err = capsys.readouterr().err.strip().splitlines()
    assert code == 0 or (err[-1].startswith("systolic: step ") and "Traceback" not in "".join(err))
